/**
 * Communication with the server: JSON, binary frames, "the newest request wins", and detection of a lost server.
 *
 * A frame is uint32 LE header length, a JSON header {"arrays": [{"name", "shape"}], …}, then the float32 arrays in
 * order, each padded to 8 bytes. Arrays come out as Float32Array with a `.shape`.
 */

const POLL_MILLISECONDS = 2000;

/** An error message of the server (4xx, 5xx) with its status. */
export class Refusal extends Error {
  constructor(sentence, status) {
    super(sentence);
    this.status = status;
  }
}

/** ArrayBuffer → {header, name: Float32Array, …}. */
export function parseFrame(buffer) {
  const length = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  const frame = { header };
  let offset = 4 + length;
  for (const { name, shape } of header.arrays) {
    const count = shape.reduce((product, side) => product * side, 1);
    frame[name] = new Float32Array(buffer, offset, count);
    frame[name].shape = shape;
    offset += Math.ceil((count * 4) / 8) * 8;
  }
  return frame;
}

/**
 * The connection. `onStatus("ok" | "busy" | "gone")` receives every change; `onReturn(newBoot)` is called when a lost
 * server answers again, with newBoot true if it is another process than before.
 */
export class Api {
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
    return this.json("/api/models");
  }

  decoder(name) {
    return this.frame(`/api/models/${encodeURIComponent(name)}/decoder`);
  }

  /** `routing`: options of the routing algorithm by name. */
  encode(pixels, { model, routing, focus }) {
    const query = new URLSearchParams({ model, routing: JSON.stringify(routing) });
    if (focus !== null && focus !== undefined) query.set("focus", focus);
    return this.post(`/api/encode?${query}`, pixels);
  }

  /** Which test digit comes next. */
  digits(query) {
    return this.json(`/api/digits?${new URLSearchParams(query)}`);
  }

  digit(index, model) {
    return this.frame(`/api/digit?${new URLSearchParams({ index, model })}`);
  }

  photo(file, model) {
    return this.post(`/api/photo?${new URLSearchParams({ model })}`, file);
  }

  routings() {
    return this.json("/api/routings");
  }

  hand(votes, routing, options) {
    const body = JSON.stringify({ votes, routing, options });
    return this.json("/api/hand", { method: "POST", body, headers: { "Content-Type": "application/json" } });
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
    this.boot = (await this.json("/api/health")).boot;
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
        const response = await fetch("/api/health", { cache: "no-store" });
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

/**
 * One request in flight, the newest one next, those in between are dropped. `ask(question)` → promise;
 * `deliver(answer, question)` is called in the order of the requests.
 */
export class Newest {
  constructor(ask, deliver, fail) {
    Object.assign(this, { ask, deliver, fail });
    this.next = null;
    this.running = false;
  }

  request(question) {
    this.next = question;
    if (!this.running) this.#run();
  }

  async #run() {
    this.running = true;
    while (this.next) {
      const question = this.next;
      this.next = null;
      try {
        this.deliver(await this.ask(question), question);
      } catch (error) {
        this.fail(error, question);
      }
    }
    this.running = false;
  }
}
