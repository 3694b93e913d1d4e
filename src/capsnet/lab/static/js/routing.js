// Panel 3, the routing as a film over its steps t, whatever the algorithm: who sends how much to whom (ribbons.js), and
// for the selected class where in the image its votes come from, the votes themselves and two curves (votes.js).
//
// All numbers come from the trace of the engine. The panel only sums them up and animates from one step to the next.

import { calm, clamp, heading, html, say, set } from "./elements.js";
import { optionControls } from "./options.js";
import { primaryLengths } from "./primary.js";
import { buildRibbons, paintRibbons } from "./ribbons.js";
import { buildDetails, extremes, paintDetails, placesAt } from "./votes.js";

const GLIDE = 450; // ms from one step to the next
const PAUSE = 950; // ms between steps while playing
const REPAINT = ["result", "routing", "selected", "model", "theme", "flash", "view", "input"];

export function mount(root, lab) {
  heading(root, "Routing");
  const view = { root, lab, shown: 0, target: 0, steps: 1, playing: false, result: null };
  view.body = html("div", { class: "routing-body" }, film(view), options(view), buildRibbons(view), buildDetails(view));
  view.missing = html("p", { class: "muted", hidden: true },
    "This model has no routing: its layers use the same weights for every input.");
  root.append(view.body, view.missing);
  root.addEventListener("keydown", (event) => onKey(view, event));
  lab.film = { positions: () => positions(view), show: (at) => showAt(view, at) };
  lab.on((_, changed) => onFrame(view, changed));
  const resized = new ResizeObserver(() => paint(view));
  for (const canvas of [view.ribbons, view.plane]) resized.observe(canvas);
}

// ---------------------------------------------------------------- the film

function film(view) {
  const { lab } = view;
  view.play = html("button", { type: "button", id: "play", class: "primary", onclick: () => toggle(view) });
  view.back = html("button", { type: "button", class: "icon", "aria-label": "Previous iteration", onclick: () => step(view, -1) }, "‹");
  view.step = html("button", { type: "button", id: "step", class: "icon", "aria-label": "Next iteration", onclick: () => step(view, 1) }, "›");
  view.scrub = html("input", { type: "range", id: "scrub", min: 0, step: 1, "aria-label": "Routing iteration", "data-card": "t",
    oninput: (event) => { stop(view); lab.update({ routing: { t: Number(event.target.value) } }); } });
  view.where = html("span", { class: "num where" });
  return html("div", { class: "row film-row", role: "group", "aria-label": "Routing iterations. Space plays, arrow keys step." },
    view.play, view.back, view.scrub, view.step, view.where);
}

function step(view, by) {
  stop(view);
  view.lab.update({ routing: { t: clamp(view.lab.state.routing.t + by, 0, view.steps - 1) } });
}

function toggle(view) {
  if (view.playing) return stop(view);
  view.playing = true;
  if (view.lab.state.routing.t >= view.steps - 1) view.lab.update({ routing: { t: 0 } });
  view.lab.poke("routing");
  view.timer = setTimeout(() => advance(view), PAUSE);
}

function advance(view) {
  const { routing } = view.lab.state;
  if (routing.t >= view.steps - 1) return stop(view);
  view.lab.update({ routing: { t: routing.t + 1 } });
  view.timer = setTimeout(() => advance(view), PAUSE);
}

function stop(view) {
  clearTimeout(view.timer);
  if (!view.playing) return;
  view.playing = false;
  view.lab.poke("routing");
}

/** Space plays and arrow keys step, unless the focused control uses the key itself. */
function onKey(view, event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const { tagName, type } = event.target;
  const own = ["BUTTON", "SELECT"].includes(tagName) || type === "checkbox" || type === "number";
  const arrows = type === "range" || type === "number" || tagName === "SELECT";
  if (event.key === " " && !own) toggle(view);
  else if (event.key === "ArrowRight" && !arrows) step(view, 1);
  else if (event.key === "ArrowLeft" && !arrows) step(view, -1);
  else return;
  event.preventDefault();
}

function paintFilm(view) {
  const { steps } = view;
  const t = Math.min(view.lab.state.routing.t, steps - 1);
  say(view.play, view.playing ? "❚❚ Pause" : "▶ Play");
  set(view.scrub, { max: Math.max(1, steps - 1), "aria-valuetext": `iteration ${t + 1} of ${steps}` });
  view.scrub.disabled = view.play.disabled = steps === 1;
  if (Number(view.scrub.value) !== t) view.scrub.value = t;
  view.back.disabled = t === 0;
  view.step.disabled = t >= steps - 1;
  say(view.where, `${t + 1} / ${steps}`);
}

const BETWEEN = 8; // frames of an exported animation from one step to the next

/** What an animation of all steps shows, and for how long, in hundredths of a second. */
function positions({ steps }) {
  if (steps < 2) return [];
  const count = BETWEEN * (steps - 1);
  return Array.from({ length: count + 1 }, (_, n) => {
    const share = (n % BETWEEN) / BETWEEN;
    const at = Math.floor(n / BETWEEN) + share * share * (3 - 2 * share);
    return { at, hundredths: n === count ? 180 : n % BETWEEN ? 6 : 60 };
  });
}

/** Show a position between two steps at once; null goes back to the step that is chosen. */
function showAt(view, at) {
  cancelAnimationFrame(view.gliding);
  view.gliding = 0;
  view.shown = at ?? Math.min(view.lab.state.routing.t, view.steps - 1);
  paint(view);
}

// ---------------------------------------------------------------- the options of the algorithm, as the engine lists them

function options(view) {
  view.controls = [];
  view.options = html("span", { class: "row routing-controls" });
  view.story = html("p", { class: "small story" });
  return html("div", { class: "row routing-options" }, view.options, view.story);
}

function buildControls(view) {
  view.controls = optionControls(view.lab.model?.routing?.options ?? [], {
    prefix: "option-",
    origin: "The model was trained with",
    change: (name, value) => view.lab.update({ routing: { options: { [name]: value } } }),
  });
  view.options.replaceChildren(...view.controls.map(({ node }) => node));
}

function paintControls(view) {
  const values = view.lab.routingOptions();
  for (const { option, show } of view.controls) show(values[option.name]);
}

// ---------------------------------------------------------------- sums over an answer

/** For every t: what each type sends to each class, Σ over its positions of c_ij ‖u_i‖; sizes of the map and the plane. */
function summarise({ result, model }) {
  const [steps, i, j] = result.couplings.shape;
  const onGrid = Boolean(model.grid) && result.primary?.shape[0] === i; // hidden capsules have no place in the image
  const types = onGrid ? model.primary_types : i;
  const lengths = onGrid ? primaryLengths(result.primary) : new Float32Array(i).fill(1);
  const flow = Array.from({ length: steps }, (_, t) => flowAt(result.couplings, lengths, t, i, j, types));
  const places = Array.from({ length: steps }, (_, t) => placesAt(result.weight, t, i, types));
  return { steps, i, j, types, sent: sentBy(types, lengths, flow, j), flow, places, onGrid, ...extremes(result, places) };
}

function flowAt(couplings, lengths, t, i, j, types) {
  const out = new Float32Array(types * j);
  for (let k = 0; k < i; k++) {
    for (let n = 0; n < j; n++) out[(k % types) * j + n] += lengths[k] * couplings[(t * i + k) * j + n];
  }
  return out;
}

/** What each type has to send: Σ ‖u_i‖, or more if its couplings sum to more than one. */
function sentBy(types, lengths, flow, j) {
  const sent = new Float32Array(types);
  lengths.forEach((length, k) => (sent[k % types] += length));
  for (const step of flow) {
    for (let type = 0; type < types; type++) {
      const sum = step.subarray(type * j, type * j + j).reduce((a, b) => a + b, 0);
      if (sum > 1.001 * sent[type]) sent[type] = sum;
    }
  }
  return sent;
}

// ---------------------------------------------------------------- frames

function onFrame(view, changed) {
  const { lab } = view;
  if (!REPAINT.some((key) => changed.has(key))) return;
  if (changed.has("model")) buildControls(view);
  const able = Boolean(lab.result?.couplings);
  paintControls(view);
  if (!able && lab.waiting && view.sums) return paintFilm(view);
  const without = Boolean(lab.model) && !lab.model.routing;
  view.body.classList.toggle("gone", without);
  view.missing.hidden = !without;
  view.body.classList.toggle("empty", !able);
  if (able && view.result !== lab.result) {
    view.result = lab.result;
    view.sums = summarise(lab);
    view.steps = view.sums.steps;
  }
  paintFilm(view);
  if (!able) return;
  glide(view, Math.min(lab.state.routing.t, view.steps - 1));
  paint(view);
}

function glide(view, target) {
  if (target === view.target && view.gliding) return;
  const from = view.shown;
  view.target = target;
  cancelAnimationFrame(view.gliding);
  view.gliding = 0;
  if (calm() || Math.abs(target - from) < 1e-3 || from > view.steps - 1) {
    view.shown = target;
    return;
  }
  const start = performance.now();
  const tick = (now) => {
    const share = clamp((now - start) / GLIDE, 0, 1);
    view.shown = from + (target - from) * share * share * (3 - 2 * share);
    view.gliding = share < 1 ? requestAnimationFrame(tick) : 0;
    if (share === 1) view.shown = target;
    paint(view);
  };
  view.gliding = requestAnimationFrame(tick);
}

function paint(view) {
  set(view.body, { "data-shown": view.shown });
  if (!view.sums || !view.lab.result?.couplings || view.result !== view.lab.result) return;
  if (view.ribbons.clientWidth) { // a slide of the presentation shows only some of them
    paintRibbons(view);
    paintStory(view);
  }
  paintDetails(view);
}

/** The step in a sentence. */
function paintStory(view) {
  const { lab, sums, nodes } = view;
  const t = Math.min(Math.round(view.shown), sums.steps - 1);
  const name = lab.model.classes[lab.result.header.focus];
  const share = ((100 * nodes.got[lab.result.header.focus]) / nodes.total).toFixed(1);
  const uniform = t === 0 && Math.abs(lab.result.entropy[0] - 1) < 1e-4;
  const dynamic = lab.model.routing.name === "dynamic";
  if (uniform) say(view.story, `Uniform: ${share} % goes to each class.`);
  else if (dynamic) say(view.story, `After ${t === 1 ? "one update" : `${t} updates`}: ${share} % goes to ${name}.`);
  else say(view.story, `${sums.steps > 1 ? `Iteration ${t + 1}: ` : ""}${share} % goes to ${name}.`);
}
