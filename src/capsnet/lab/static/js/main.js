/**
 * The start of the page and its main loop: the `lab` object that every panel gets, one frame for all changes, and the
 * decision when to ask the engine.
 *
 * A frame: what changed since the last one → the pixels the network sees → a request to the engine, if one is
 * needed → every panel repaints → the URL is updated.
 */

import * as cards from "./cards.js";
import * as classes from "./classes.js";
import * as compare from "./compare.js";
import { Decoder } from "./decoder.js";
import { Engine } from "./engine.js";
import * as exporting from "./export.js";
import * as hand from "./hand.js";
import * as header from "./header.js";
import * as input from "./input.js";
import { forget, recall, remember } from "./memory.js";
import * as phases from "./phases.js";
import * as pose from "./pose.js";
import * as present from "./present.js";
import * as primary from "./primary.js";
import { see } from "./raster.js";
import { Newest, Refusal } from "./requests.js";
import * as routing from "./routing.js";
import * as share from "./share.js";
import { DEFAULTS, fromFragment, next, optionValue, plainFragment, sanitise, toFragment } from "./state.js";
import * as tour from "./tour.js";

const URL_MILLISECONDS = 400; // browsers limit how often the history may be written
const COLOURS = ["bg", "panel", "ink", "muted", "line", "accent", "a", "b", "good", "warn"];
const DIGITS_KEPT = 200;
const ANSWERED = ["panel-primary", "panel-routing", "panel-classes", "panel-pose"]; // these show the answer of the engine

class Lab {
  constructor() {
    this.state = sanitise(DEFAULTS);
    this.models = [];
    this.routings = []; // the algorithms of the by-hand view
    this.model = null;
    this.result = null; // the last answer of this model
    this.input = null; // Float32Array (c·h·w)
    this.seen = null; // {pixels, centring, parts} as raster.js gives it
    this.empty = false; // all pixels are zero
    this.decoder = null;
    this.status = "busy";
    this.colours = {};
    this.transient = {}; // what the pointer is on: shown, never saved
    this.timings = []; // milliseconds from a slider's event to the painted reconstruction
    this.encodings = []; // milliseconds from question to answer
    this.engine = new Engine({ onStatus: (status) => this.#setStatus(status), onReturn: (anew) => this.#returned(anew) });
    this.#encoder = new Newest((q) => this.#encode(q), (a, q) => this.#answered(a, q), (e) => this.#failed(e));
  }

  #listeners = [];
  #changed = new Set();
  #scheduled = false;
  #encoder;
  #asked = ""; // the last request, to see whether a new one is needed
  #digits = new Map(); // model/index → {pixels, shape, label}, null while loading, undefined if that failed
  #saving = 0; // the timer of the next save
  #saved = 0; // time of the last save
  #fragment = "";
  #replaced = false; // the drawn digit by an image of another kind

  /** Merge a patch into the state; panels repaint in the next frame, once for all updates. */
  update(patch, options) {
    const old = this.state;
    if (patch.input?.mode !== undefined || patch.input?.index !== undefined) this.#forgetFailed();
    this.state = next(old, patch, options);
    for (const key of Object.keys(this.state)) if (this.state[key] !== old[key]) this.poke(key);
    if (this.state.model !== old.model) this.#useModel();
  }

  /** The routing options in use: those of the model, with the changes of the state. */
  routingOptions() {
    const changes = this.state.routing.options;
    const controls = this.model?.routing?.options ?? [];
    return Object.fromEntries(controls.map((control) => [control.name, optionValue(control, changes[control.name])]));
  }

  /** An answer is on its way: panels stay as they are, inert, instead of flashing empty. */
  get waiting() {
    return Boolean(this.model && !this.result && !this.empty && (this.input || this.#fetching()));
  }

  /** fn(lab, changed) on every frame; changed contains keys of the state and "result", "status", "flash", "theme" … */
  on(fn) {
    this.#listeners.push(fn);
  }

  /** Repaint what depends on `key` although the state is the same. */
  poke(key) {
    this.#changed.add(key);
    if (this.#scheduled) return;
    this.#scheduled = true;
    requestAnimationFrame(() => this.#frame());
  }

  /** Show something temporarily, such as a receptive field: kept in lab.transient, never in the URL. */
  flash(name, value) {
    this.transient[name] = value;
    this.poke("flash");
  }

  /** A message at the bottom of the page. */
  notice(text) {
    this.transient.notice = { sentence: text.charAt(0).toUpperCase() + text.slice(1) };
    this.poke("notice");
  }

  /** The class that is shown: the selected one, or the most active. */
  selected() {
    const { selected } = this.state;
    if (selected !== null && selected < (this.model?.classes.length ?? 0)) return selected;
    return this.result?.header.ranking[0] ?? null;
  }

  /** The reconstruction of one pose, for use from outside. */
  decode(pose, klass) {
    return this.decoder?.decode(pose, klass) ?? null;
  }

  /** A test digit {pixels, shape, label}, null while it is loading, undefined if it is not available. */
  digit(index) {
    const key = `${this.state.model}/${index}`;
    if (!this.#digits.has(key)) this.#fetchDigit(key, index);
    return this.#digits.get(key);
  }

  async start() {
    this.readColours();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.readColours());
    addEventListener("hashchange", () => this.#restore());
    const left = this.#unsaved();
    await this.#restore(left);
    if (left) await this.#save(); // at once, so that the address is up to date
    addEventListener("beforeunload", () => this.#saveNow());
    await this.#connect();
  }

  /** The style sheet defines the colours; canvases need their values. */
  readColours() {
    const style = getComputedStyle(document.documentElement);
    this.colours = Object.fromEntries(COLOURS.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
    this.poke("theme");
  }

  /** Restore the state from the address, or what a reload of this tab left behind. */
  async #restore(left = null) {
    if (this.#fragment && location.hash.slice(1) === this.#fragment) return;
    try {
      const found = (await fromFragment(left ?? "").catch(() => null)) ?? (await fromFragment(location.hash));
      if (found) this.update({ ...found, model: found.model || this.state.model }, { replace: true });
    } catch (error) {
      this.notice(error.message);
    }
  }

  /** The state that this tab saved before a reload. */
  #unsaved() {
    if (performance.getEntriesByType("navigation")[0]?.type === "reload") return recall("unsaved", "sessionStorage");
    forget("unsaved", "sessionStorage"); // left by an earlier visit
    return null;
  }

  async #connect() {
    try {
      await this.engine.greet();
      const [{ models, default: preferred }, { routings }] = await Promise.all([this.engine.models(), this.engine.routings()]);
      this.models = models;
      this.routings = routings;
      this.preferred = preferred;
      this.poke("models");
      this.#useModel();
    } catch (error) {
      if (error instanceof Refusal) this.notice(error.message);
    }
  }

  /** Open the model of the state; an unknown one is replaced by the default, with a message. */
  #useModel() {
    if (!this.models.length) return;
    const found = this.models.find((model) => model.name === this.state.model);
    if (!found) {
      if (this.state.model) this.notice(`This Lab has no model “${this.state.model}”, so the page shows ${this.preferred}.`);
      this.update({ model: this.preferred });
      return;
    }
    if (found === this.model) return;
    Object.assign(this, { model: found, result: null, input: null, seen: null, decoder: null });
    this.#asked = "";
    this.#suitExample();
    this.poke("model");
    if (found.has_decoder) this.#fetchDecoder(found);
  }

  /** The drawn digit that the page opens with says nothing to a network that knows no digits: show one of its images. */
  #suitExample() {
    const { mode, strokes } = this.state.input;
    const opened = mode === "draw" && JSON.stringify(strokes) === JSON.stringify(DEFAULTS.input.strokes);
    const digits = input.knowsDigits(this.model);
    if (opened && this.model.examples && !digits) this.update({ input: { mode: "test", index: 0 } });
    else if (this.#replaced && mode === "test" && digits) this.update({ input: { mode: "draw" } });
    this.#replaced = !digits && (this.#replaced || opened);
  }

  async #fetchDecoder(model) {
    try {
      const decoder = new Decoder(await this.engine.decoder(model.name));
      if (this.model !== model) return; // another model was selected meanwhile
      this.decoder = decoder;
      this.poke("decoder");
    } catch (error) {
      if (!(error instanceof Refusal)) return; // retried when the server is back
      this.notice(error.message);
      if (error.status === 503) setTimeout(() => this.model === model && this.#fetchDecoder(model), 2000);
    }
  }

  #fetching() {
    return [...this.#digits.values()].includes(null);
  }

  async #fetchDigit(key, index) {
    this.#digits.set(key, null);
    try {
      const { header, pixels } = await this.engine.digit(index, this.state.model);
      if (this.#digits.size > DIGITS_KEPT) this.#digits.delete(this.#digits.keys().next().value);
      const shape = pixels.shape.length === 2 ? [1, ...pixels.shape] : pixels.shape;
      this.#digits.set(key, { pixels, shape, label: header.label });
      this.poke("input");
    } catch (error) {
      const soon = error.status === 503; // the server is downloading the dataset
      this.#digits.set(key, soon ? null : undefined); // undefined, or every frame would ask again
      this.poke("input");
      if (soon) setTimeout(() => this.#askAgain(key), 2000);
      if (!(error instanceof Refusal)) return; // retried when the server is back
      this.transient.missing = error.message;
      this.notice(error.message);
    }
  }

  /** Retry one digit, or all that failed. */
  #askAgain(key) {
    if (key) this.#digits.delete(key);
    else this.#forgetFailed();
    this.poke("input");
  }

  #forgetFailed() {
    for (const [key, digit] of this.#digits) if (digit === undefined) this.#digits.delete(key);
  }

  #frame() {
    const changed = this.#changed;
    this.#changed = new Set();
    this.#scheduled = false;
    if (this.model) this.#look(changed);
    for (const id of ANSWERED) document.getElementById(id).toggleAttribute("inert", this.waiting);
    for (const listener of this.#listeners) {
      try {
        listener(this, changed);
      } catch (error) {
        reportError(error); // an error in one panel must not stop the others
      }
    }
    if (Object.keys(this.state).some((key) => changed.has(key))) this.#saveSoon();
  }

  #look(changed) {
    if (!this.input || ["input", "transform", "model"].some((key) => changed.has(key))) {
      const seen = see(this.state.input, this.state.transform, this.model.image_shape, (index) => this.digit(index));
      if (!seen && this.#fetching()) return; // a new frame follows when the digit arrives
      if (!seen) return this.#seeNothing(changed);
      const same = this.input && seen.pixels.every((value, k) => value === this.input[k]);
      this.seen = seen;
      if (!same) this.#asked = "";
      this.input = seen.pixels;
      this.empty = this.input.every((value) => value === 0);
    }
    this.#ask(changed);
  }

  /** The digit is not available: the previous answer does not apply to it. */
  #seeNothing(changed) {
    if (this.input || this.result) changed.add("result");
    Object.assign(this, { input: null, seen: null, result: null, empty: false });
    this.#asked = "";
  }

  /** Ask only if the request differs from the last one. */
  #ask(changed) {
    if (this.empty) {
      if (this.result) changed.add("result");
      this.result = null;
      this.#asked = "";
      return;
    }
    const { model, selected } = this.state;
    const focus = selected !== null && selected < this.model.classes.length ? selected : null;
    const question = { model, routing: this.routingOptions(), focus };
    const key = JSON.stringify(question);
    if (key === this.#asked) return;
    this.#asked = key;
    this.#encoder.request({ ...question, pixels: this.input });
  }

  async #encode(question) {
    const start = performance.now();
    const answer = await this.engine.encode(question.pixels, question);
    this.encodings.push(performance.now() - start);
    if (this.encodings.length > 1000) this.encodings.shift();
    return answer;
  }

  /** Ignore an answer for another model or for a canvas that was cleared meanwhile. */
  #answered(answer, question) {
    if (question.model !== this.model?.name || this.empty || !this.input) return;
    this.result = Object.assign(answer, { input: question.pixels });
    const last = (answer.couplings?.shape[0] ?? 1) - 1;
    if (answer.couplings && this.state.routing.t > last) this.update({ routing: { t: last } });
    this.poke("result");
  }

  /** A rejected request is not repeated, or every frame would; one to a busy server is, after a second. */
  #failed(error) {
    if (!(error instanceof Refusal)) return; // repeated when the server is back
    this.notice(error.message);
    if (error.status !== 503) return this.engine.check();
    setTimeout(() => {
      this.#asked = "";
      this.poke("input");
    }, 1000);
  }

  #setStatus(status) {
    if (status === this.status) return;
    this.status = status;
    this.poke("status");
  }

  async #returned(anew) {
    if (anew || !this.models.length) {
      this.model = null;
      this.#digits.clear();
      await this.#connect();
    }
    this.#asked = "";
    if (this.model?.has_decoder && !this.decoder) this.#fetchDecoder(this.model);
    this.#askAgain();
  }

  /** At once after a pause, then as often as browsers allow. */
  #saveSoon() {
    const wait = Math.max(0, this.#saved + URL_MILLISECONDS - performance.now());
    this.#saving ||= setTimeout(() => this.#save(), wait);
  }

  async #save() {
    this.#saving = 0;
    this.#saved = performance.now();
    const before = location.hash;
    const link = await this.link();
    if (location.hash === before) history.replaceState(null, "", link); // otherwise another link was pasted meanwhile
  }

  /** A reload uses the last address that the browser accepted; later changes are saved in this tab. */
  #saveNow() {
    remember("unsaved", plainFragment(this.state), "sessionStorage");
  }

  /** The address that restores the whole state. */
  async link() {
    this.#fragment = await toFragment(this.state);
    return `${location.origin}${location.pathname}#${this.#fragment}`;
  }
}

const lab = new Lab();
window.lab = lab;

const PANELS = [
  [header, "header"],
  [input, "panel-input"],
  [primary, "panel-primary"],
  [phases, "panel-primary"],
  [routing, "panel-routing"],
  [classes, "panel-classes"],
  [pose, "panel-pose"],
  [compare, "panel-compare"],
  [hand, "view-hand"],
  [share, "share-menu"],
  [exporting, "share-menu"],
  [cards, "cards"],
  [tour, "tour-card"],
  [present, "slide"],
];
for (const [panel, id] of PANELS) panel.mount(document.getElementById(id), lab);
lab.start();
