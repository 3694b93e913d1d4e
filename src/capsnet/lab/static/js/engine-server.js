/**
 * The engine of the served Lab: Python computes, and this module asks it over HTTP and detects a lost server.
 */

import { parseFrame } from "./frames.js";
import { Refusal } from "./requests.js";

const POLL_MILLISECONDS = 2000;

/**
 * The connection. `onStatus("ok" | "busy" | "gone")` receives every change; `onReturn(newBoot)` is called when a lost
 * server answers again, with newBoot true if it is another process than before.
 */
export class Engine {
  constructor({ onStatus = () => {}, onReturn = () => {} } = {}) {
    this.onStatus = onStatus;
    this.onReturn = onReturn;
    this.boot = null;
    this.gone = false;
    this.waiting = 0;
  }

  async json(path, init) {
    return (await this.#request(path, init)).json();
  }

  async frame(path, init) {
    return parseFrame(await (await this.#request(path, init)).arrayBuffer());
  }

  /** Send raw bytes or floats. */
  post(path, body) {
    return this.frame(path, { method: "POST", body, headers: { "Content-Type": "application/octet-stream" } });
  }

  models() {
    return this.json("api/models");
  }

  decoder(name) {
    return this.frame(`api/models/${encodeURIComponent(name)}/decoder`);
  }

  /** `routing`: options of the routing algorithm by name. */
  encode(pixels, { model, routing, focus }) {
    const query = new URLSearchParams({ model, routing: JSON.stringify(routing) });
    if (focus !== null && focus !== undefined) query.set("focus", focus);
    return this.post(`api/encode?${query}`, pixels);
  }

  /** Which test digit comes next. */
  digits(query) {
    return this.json(`api/digits?${new URLSearchParams(query)}`);
  }

  digit(index, model) {
    return this.frame(`api/digit?${new URLSearchParams({ index, model })}`);
  }

  photo(file, model) {
    return this.post(`api/photo?${new URLSearchParams({ model })}`, file);
  }

  routings() {
    return this.json("api/routings");
  }

  hand(votes, routing, options) {
    const body = JSON.stringify({ votes, routing, options });
    return this.json("api/hand", { method: "POST", body, headers: { "Content-Type": "application/json" } });
  }

  async #request(path, init = {}) {
    this.#count(1);
    try {
      const response = await fetch(path, { ...init, cache: init.method ? undefined : "no-cache" });
      if (!response.ok) throw new Refusal(await sentence(response), response.status);
      return response;
    } catch (error) {
      if (!(error instanceof Refusal)) this.#lose();
      throw error;
    } finally {
      this.#count(-1);
    }
  }

  #count(step) {
    this.waiting += step;
    if (!this.gone) this.onStatus(this.waiting ? "busy" : "ok");
  }

  /** fetch only fails without an answer if the server is not running. */
  #lose() {
    if (this.gone) return;
    this.gone = true;
    this.onStatus("gone");
    this.#poll();
  }

  /** Remember which process answers, to detect a restart. */
  async greet() {
    this.boot = (await this.json("api/health")).boot;
  }

  /** After an error: another process with other models may have taken the port. */
  async check() {
    const before = this.boot;
    try {
      await this.greet();
      if (this.boot !== before) this.onReturn(true);
    } catch {
      // gone or busy: handled elsewhere
    }
  }

  async #poll() {
    for (;;) {
      await new Promise((resolve) => setTimeout(resolve, POLL_MILLISECONDS));
      try {
        const response = await fetch("api/health", { cache: "no-store" });
        if (!response.ok) continue;
        const { boot } = await response.json();
        const newBoot = boot !== this.boot;
        this.boot = boot;
        this.gone = false;
        this.onStatus("ok");
        this.onReturn(newBoot);
        return;
      } catch {
        // still gone: try again
      }
    }
  }
}

async function sentence(response) {
  try {
    const { detail } = await response.json();
    if (typeof detail === "string") return detail;
  } catch {
    // not JSON: report the status
  }
  return `The server answered ${response.status}.`;
}
