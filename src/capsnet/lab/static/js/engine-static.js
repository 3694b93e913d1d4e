/**
 * The engine of the Lab without a server: a worker in the page computes (engine-worker.js), and this module loads what it
 * needs: the models when they are chosen, test images in parts. A service worker keeps everything that was loaded.
 *
 * Every binary file of the site is compressed by zlib, whatever the host does.
 */

import { parseFrame } from "./frames.js";
import { Refusal } from "./requests.js";

const ROOT = new URL("../../", import.meta.url);

export class Engine {
  constructor({ onStatus = () => {}, onReturn = () => {} } = {}) {
    this.onStatus = onStatus;
    this.waiting = 0;
    this.calls = new Map(); // id → {resolve, reject}
    this.opened = new Map(); // model → promise
    this.loaded = new Map(); // path of a binary file → promise; only of test images, which are used again
    this.used = new Set(); // paths, for the service worker
    this.worker = new Worker(new URL("engine-worker.js", import.meta.url), { type: "module" });
    this.worker.addEventListener("message", ({ data }) => this.#settle(data));
    this.worker.addEventListener("error", (event) => this.#fail(event.message));
    this.started = this.#start();
    this.site = this.#json("lab.json");
    this.site.then(({ default: name }) => this.#open(name)).catch(() => {}); // reported by the first request
    addEventListener("online", () => onReturn(false));
  }

  async greet() {
    await this.site;
  }

  async check() {}

  models() {
    return this.site;
  }

  async routings() {
    const { routings } = await this.site;
    return { routings };
  }

  decoder(name) {
    return this.#busy(async () => parseFrame(await this.#binary(`models/${name}/decoder.bin`)));
  }

  /** `routing`: options of the routing algorithm by name. */
  encode(pixels, { model, routing, focus }) {
    return this.#busy(async () => {
      const { image_shape: shape, routing: own } = await this.#find(model);
      await this.#open(model);
      const start = performance.now();
      const { header, arrays } = await this.#call("encode", model, pixels, shape, routing, focus ?? null);
      const frame = { header: { model, ...header, routing: { ...defaults(own), ...routing } } };
      for (const [name, [values, sides]] of Object.entries(arrays)) {
        frame[name] = Object.assign(values, { shape: sides });
      }
      frame.header.milliseconds = performance.now() - start;
      this.#keepSoon(model);
      return frame;
    });
  }

  /** Which test image comes next: random or the next one, of one class or any, all images or only mistakes. */
  digits({ model, label, only, random, after = null }) {
    return this.#busy(async () => {
      const { samples, no_samples: why, mistakes } = await this.#find(model);
      if (!samples) return { index: null, count: 0, state: "no data", progress: 0, why };
      const labels = await this.#labels(samples);
      const all = only === "mistakes" ? mistakes : [...labels.keys()];
      const matching = label === undefined ? all : all.filter((n) => labels[n] === Number(label));
      return { index: pick(matching, random, after), count: matching.length, state: "ready", progress: 1 };
    });
  }

  digit(index, model) {
    return this.#busy(async () => {
      const { samples, no_samples: why } = await this.#find(model);
      if (!samples) throw new Refusal(why);
      const { count, part, shape } = (await this.site).samples[samples];
      if (index >= count) throw new Refusal(`${samples} has ${count} test images here: indices range from 0 to ${count - 1}.`);
      const labels = await this.#labels(samples);
      const bytes = await this.#samples(`samples/${samples}/${Math.floor(index / part)}.bin`);
      const size = shape[0] * shape[1] * shape[2], start = (index % part) * size;
      const pixels = Float32Array.from(bytes.subarray(start, start + size), (byte) => byte / 255);
      pixels.shape = shape[0] === 1 ? shape.slice(1) : shape;
      return { header: { index, label: labels[index], data: samples }, pixels };
    });
  }

  photo(file, model) {
    return this.#busy(async () => {
      const { image_shape: wanted, digit } = await this.#find(model);
      const { note, pixels, shape } = await this.#call("photo", file, wanted, digit);
      return { header: { note }, pixels: Object.assign(pixels, { shape }) };
    });
  }

  hand(votes, routing, options) {
    return this.#busy(async () => {
      const { parameters } = (await this.site).routings.find(({ name }) => name === routing);
      const trace = await this.#call("hand", votes, routing, options, parameters[`${votes.length}×${votes[0].length}`]);
      if (!Object.values(trace).flat(4).every(Number.isFinite)) {
        throw new Refusal(`the routing '${routing}' overflows with these votes and options: use smaller numbers.`);
      }
      return trace;
    });
  }

  // -------------------------------------------------------------- models and files

  async #find(name) {
    const found = (await this.site).models.find((model) => model.name === name);
    if (!found) throw new Refusal(`There is no model ${name} here.`);
    return found;
  }

  async #start() {
    await this.#call("start", await this.#binary("static/ort/ort.wasm.bin"));
  }

  /** Load a model into the worker, once. */
  #open(name) {
    if (!this.opened.has(name)) {
      const opening = this.#load(name);
      opening.catch(() => this.opened.delete(name)); // the next request tries again
      this.opened.set(name, opening);
    }
    return this.opened.get(name);
  }

  async #load(name) {
    const { capsules } = await this.#find(name);
    const files = [`models/${name}/graph.bin`, ...(capsules ? [`models/${name}/layers.bin`] : [])];
    const [graph, layers = null] = await Promise.all(files.map((path) => this.#binary(path)));
    await this.started;
    await this.#call("open", name, graph, layers);
  }

  #labels(samples) {
    return this.#samples(`samples/${samples}/labels.bin`, Uint16Array);
  }

  /** A file of the test images, loaded once. */
  #samples(path, Values = Uint8Array) {
    if (!this.loaded.has(path)) {
      const loading = this.#binary(path).then((buffer) => new Values(buffer));
      loading.catch(() => this.loaded.delete(path));
      this.loaded.set(path, loading);
    }
    return this.loaded.get(path);
  }

  async #json(path) {
    return (await this.#fetch(path)).json();
  }

  async #binary(path) {
    const { body } = await this.#fetch(path);
    return new Response(body.pipeThrough(new DecompressionStream("deflate"))).arrayBuffer();
  }

  async #fetch(path) {
    this.used.add(path);
    const response = await fetch(new URL(path, ROOT)).catch(() => null);
    if (response?.ok) return response;
    const why = response ? `the host answered ${response.status}` : "there is no connection, and it was not loaded before";
    throw new Refusal(`${path} could not be loaded: ${why}.`);
  }

  // -------------------------------------------------------------- the worker

  #last = 0;

  /** Ask the worker. Whole files move there instead of being copied. */
  #call(call, ...args) {
    return new Promise((resolve, reject) => {
      const id = ++this.#last;
      this.calls.set(id, { resolve, reject });
      this.worker.postMessage({ id, call, args }, args.filter((arg) => arg instanceof ArrayBuffer));
    });
  }

  #settle({ id, result, refused }) {
    const { resolve, reject } = this.calls.get(id);
    this.calls.delete(id);
    if (refused) reject(new Refusal(refused));
    else resolve(result);
  }

  #fail(message) {
    for (const { reject } of this.calls.values()) reject(new Refusal(`The network could not be started in this browser (${message}).`));
    this.calls.clear();
  }

  async #busy(work) {
    this.waiting += 1;
    this.onStatus("busy");
    try {
      return await work();
    } finally {
      this.waiting -= 1;
      if (!this.waiting) this.onStatus("ok");
    }
  }

  // -------------------------------------------------------------- offline

  #keeping = false;

  /** After the first answer: keep the page, the model and the test images that go with it for a visit without a network. */
  async #keepSoon(model) {
    if (this.#keeping || !("serviceWorker" in navigator)) return;
    this.#keeping = true;
    try {
      await navigator.serviceWorker.register(new URL("service-worker.js", ROOT));
      await controlled(); // from here on files are kept when they are used; those before are listed
      const { samples } = await this.#find(model);
      navigator.serviceWorker.controller.postMessage({ keep: [...this.used, ...(samples ? await this.#partsOf(samples) : [])] });
    } catch (error) {
      console.info(`The Lab will not work offline: ${error.message}`); // a private window, or a host without HTTPS
    }
  }

  async #partsOf(samples) {
    const { count, part } = (await this.site).samples[samples];
    const parts = ["labels", ...Array(Math.ceil(count / part)).keys()];
    return parts.map((name) => `samples/${samples}/${name}.bin`);
  }
}

/** Until the service worker sees the requests of this page. */
function controlled() {
  const { serviceWorker } = navigator;
  if (serviceWorker.controller) return Promise.resolve();
  return new Promise((resolve) => serviceWorker.addEventListener("controllerchange", resolve, { once: true }));
}

const defaults = (routing) => Object.fromEntries((routing?.options ?? []).map(({ name, value }) => [name, value]));

/** One of the numbers, which ascend: a random one, or the first after `after`, starting over at the end. */
function pick(numbers, random, after) {
  if (!numbers.length) return null;
  if (!random) return numbers.find((n) => after === null || n > after) ?? numbers[0];
  const others = numbers.filter((n) => n !== after), choices = others.length ? others : numbers;
  return choices[Math.floor(Math.random() * choices.length)];
}
