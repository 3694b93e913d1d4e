// Panel 5, the pose of the selected class capsule: its dimensions as sliders, the reconstruction, and a strip of one
// dimension moved over the range of the paper (Fig. 4). The poses of two digits can be blended.
//
// A slider responds at once: the decoder runs in the page and the reconstruction is painted inside the input event.

import { heading, html, number, say, set } from "./elements.js";
import { difference, maps, picture } from "./paint.js";

export const BAND = 0.25; // the range of the paper
export const STEPS = 11;
const REACH = 0.5; // the range of a slider, twice that of the paper

export function mount(root, lab) {
  const view = { root, lab, rows: [], klass: null, model: null, dim: 0, film: null };
  lab.timings ??= []; // ms from the event of a slider to the painted reconstruction
  lab.frameTimings ??= []; // ms from the event of a slider to the end of its frame
  view.title = heading(root, "Pose");
  view.whose = html("span", { class: "whose" });
  view.title.append(" ", view.whose);
  root.append(pictures(view), film(view), sliders(view), buttons(view), blend(view), missing(view));
  lab.on((_, changed) => onFrame(view, changed));
  paintAll(view);
}

// ---------------------------------------------------------------- the pose that is shown

/** The pose (q) of the selected capsule from the network. */
export function foundPose(lab, klass = lab.selected()) {
  const q = lab.result.poses.shape[1];
  return lab.result.poses.subarray(klass * q, klass * q + q);
}

/** The changes by the sliders (q). */
export function tweakOf(lab, klass = lab.selected()) {
  const q = lab.result.poses.shape[1];
  const stored = lab.state.tweak?.[klass];
  return stored?.length === q ? stored : new Array(q).fill(0);
}

/** Pose + changes, rescaled to the original length if requested. */
function moved(found, tweak, keepLength) {
  const pose = Float32Array.from(found, (value, d) => value + tweak[d]);
  if (!keepLength) return pose;
  const factor = Math.hypot(...found) / (Math.hypot(...pose) || 1);
  return pose.map((value) => value * factor);
}

/** The pose with the changes by the sliders. */
export function tweakedPose(lab) {
  return moved(foundPose(lab), tweakOf(lab), lab.state.keepLength);
}

/** The input of the decoder: the changed pose, or a blend with the saved one, each in the place of its class. */
export function shownParts(lab) {
  const now = { class: lab.selected(), pose: tweakedPose(lab) };
  const kept = keptPose(lab);
  if (!kept) return [now];
  const mix = lab.state.mix;
  if (kept.class === now.class) {
    return [{ class: now.class, pose: now.pose.map((value, d) => value * mix + kept.pose[d] * (1 - mix)) }];
  }
  const share = ({ class: k, pose }, by) => ({ class: k, pose: Float32Array.from(pose, (value) => value * by) });
  return [share(kept, 1 - mix), share(now, mix)];
}

function keptPose({ state, decoder }) {
  const { from } = state;
  return from && from.pose?.length === decoder.pose && from.class < decoder.classes ? from : null;
}

/** The reconstructions of the strip: dimension `dim` moved over the range of the paper. */
export function tweakFrames(lab, dim) {
  return stripPoses(lab, dim).map((pose) => lab.decoder.decode(pose, lab.selected()));
}

function stripPoses(lab, dim) {
  const found = foundPose(lab);
  const tweak = [...tweakOf(lab)];
  return Array.from({ length: STEPS }, (_, n) => {
    tweak[dim] = stepValue(n);
    return moved(found, tweak, lab.state.keepLength);
  });
}

function stepValue(n) {
  return -BAND + (2 * BAND * n) / (STEPS - 1);
}

// ---------------------------------------------------------------- pictures

function pictures(view) {
  const tile = (id, text, card) => {
    const canvas = html("canvas", { id, role: "img", "aria-label": card, "data-card": card });
    view[id] = canvas;
    return html("figure", {}, canvas, html("figcaption", { class: "small" }, text));
  };
  view.error = html("span", { class: "num" });
  const last = tile("pose-difference", "difference", "difference");
  last.lastChild.append(html("br"), view.error);
  return (view.pictures = html(
    "div", { class: "pose-pictures" },
    tile("reconstruction", "reconstruction", "reconstruction"), tile("pose-input", "input", "input"), last,
  ));
}

function paintPictures(view) {
  const { lab } = view;
  const { shape } = lab.decoder;
  const map = maps(lab.colours);
  const painted = lab.decoder.decodeTogether(shownParts(lab));
  picture(view.reconstruction, painted, shape, map.ink);
  if (lab.input?.length !== painted.length) return;
  picture(view["pose-input"], lab.input, shape, map.ink);
  const away = difference(painted, lab.input, shape);
  picture(view["pose-difference"], away, [1, shape[1], shape[2]], map.difference, -1, 1);
  const error = painted.reduce((sum, value, k) => sum + (value - lab.input[k]) ** 2, 0);
  say(view.error, `error ${number(error, 1)}`);
  set(view["pose-difference"], { "data-value": error.toFixed(2) });
}

// ---------------------------------------------------------------- filmstrip

function film(view) {
  view.cells = Array.from({ length: STEPS }, (_, n) =>
    html("button", {
      type: "button", class: "cell", tabindex: -1, "aria-label": `Set to ${number(stepValue(n))}`,
      onclick: () => setTweak(view, view.dim, stepValue(n)),
    }, html("canvas")),
  );
  view.filmTitle = html("span", { class: "small" });
  const end = (text) => html("span", {}, text);
  const ends = html("div", { class: "film-ends small num" }, end(`−${BAND}`), view.filmTitle, end(`+${BAND}`));
  return (view.film = html("div", { class: "film", role: "group", "aria-label": "Reconstructions over one pose dimension" },
    html("div", { class: "cells" }, ...view.cells), ends));
}

/** Eleven reconstructions take too long for one frame: paint three at a time. */
function paintFilm(view) {
  const { lab, dim } = view;
  const key = filmKey(view);
  markCell(view);
  if (key === view.filmKey) return;
  view.filmKey = key;
  say(view.filmTitle, label(view, dim));
  const poses = stripPoses(lab, dim);
  const klass = lab.selected();
  cancelAnimationFrame(view.filmJob);
  const slice = (from) => {
    if (!lab.decoder || view.filmKey !== key) return;
    const map = maps(lab.colours).ink;
    for (let n = from; n < Math.min(from + 3, STEPS); n++) {
      picture(view.cells[n].firstChild, lab.decoder.decode(poses[n], klass), lab.decoder.shape, map);
    }
    if (from + 3 < STEPS) view.filmJob = requestAnimationFrame(() => slice(from + 3));
  };
  view.filmJob = requestAnimationFrame(() => slice(0));
}

/** What the strip depends on. Moving its own dimension changes nothing. */
function filmKey({ lab, dim }) {
  const others = tweakOf(lab).map((value, d) => (d === dim ? 0 : value));
  const found = foundPose(lab);
  const theme = `${lab.colours.panel}${lab.colours.ink}`;
  return [lab.model.name, lab.selected(), dim, lab.state.keepLength, theme, others.join(), found.join()].join("|");
}

function markCell(view) {
  const value = tweakOf(view.lab)[view.dim];
  const nearest = Math.round(((value + BAND) * (STEPS - 1)) / (2 * BAND));
  view.cells.forEach((cell, n) => cell.classList.toggle("now", n === nearest));
}

// ---------------------------------------------------------------- sliders

function sliders(view) {
  view.list = html("div", { id: "pose", role: "group", "aria-label": "Pose of the selected capsule" });
  return view.list;
}

function row(view, d) {
  const name = html("button", {
    type: "button", class: "dim-name", tabindex: -1, title: "Double-click to rename (or press F2 on the slider)",
    ondblclick: () => rename(view, d), onclick: () => look(view, d),
  });
  const slider = html("input", {
    type: "range", min: -REACH, max: REACH, step: 0.005, value: 0, "data-dim": d, "data-card": "pose",
    "aria-keyshortcuts": "R F2",
    oninput: (event) => onSlide(view, d, event), onfocus: () => look(view, d), ondblclick: () => setTweak(view, d, 0),
    onkeydown: (event) => onKey(view, d, event),
  });
  const value = html("span", { class: "num value small", title: "Double-click to reset",
    ondblclick: () => setTweak(view, d, 0) });
  const line = html("div", { class: "dim", onpointerenter: () => look(view, d) }, name, slider, value);
  return { line, name, slider, value };
}

function onKey(view, d, event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "F2") rename(view, d);
  else if (event.key === "r" || event.key === "R") setTweak(view, d, 0);
  else return;
  event.preventDefault();
}

/** Update the state and paint the reconstruction inside the same event. */
function onSlide(view, d, event) {
  setTweak(view, d, Number(event.target.value));
  paintRow(view, d);
  paintPictures(view);
  view.fresh = snapshot(view);
  const took = performance.now() - event.timeStamp;
  remember(view.lab.timings, took);
  afterFrame(() => remember(view.lab.frameTimings, performance.now() - event.timeStamp));
}

function remember(list, took) {
  list.push(took);
  if (list.length > 1000) list.shift();
}

/** A message sent inside a frame arrives after that frame. */
function afterFrame(then) {
  requestAnimationFrame(() => {
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = () => then();
    port2.postMessage(null);
  });
}

function setTweak(view, d, value) {
  const { lab } = view;
  const tweak = [...tweakOf(lab)];
  tweak[d] = value;
  lab.update({ tweak: { [lab.selected()]: tweak } });
}

function look(view, d) {
  if (view.dim === d) return;
  view.dim = d;
  view.lab.tweakDim = d; // the dimension that is exported
  view.rows.forEach(({ line }, n) => line.classList.toggle("looked", n === d));
  if (ready(view.lab)) paintFilm(view);
}

function paintRow(view, d) {
  const { lab } = view;
  const delta = tweakOf(lab)[d];
  const { line, name, slider, value } = view.rows[d];
  const shown = tweakedPose(lab)[d];
  if (Number(slider.value) !== delta) slider.value = delta;
  line.classList.toggle("changed", delta !== 0);
  set(slider, {
    "aria-label": label(view, d), "aria-valuetext": `${number(shown, 3)}, moved by ${number(delta, 3)}`,
    "data-value": shown.toFixed(4),
  });
  say(name, ownName(view, d) ?? String(d + 1));
  name.classList.toggle("named", ownName(view, d) !== null);
  say(value, number(shown, 3));
}

// ---------------------------------------------------------------- names

function nameKey({ lab }, d) {
  return `${lab.model.name}/${lab.selected()}/${d}`;
}

function ownName(view, d) {
  return view.lab.state.names?.[nameKey(view, d)] || null;
}

function label(view, d) {
  const own = ownName(view, d);
  return own ? `${own} (pose dimension ${d + 1})` : `pose dimension ${d + 1}`;
}

function rename(view, d) {
  const { name, slider, line } = view.rows[d];
  const box = html("input", { type: "text", class: "dim-edit small", maxlength: 24, value: ownName(view, d) ?? "",
    "aria-label": `Name of pose dimension ${d + 1}`, placeholder: "thickness" });
  let open = true;
  const close = (keep) => {
    if (!open) return;
    open = false;
    box.replaceWith(name);
    if (keep) view.lab.update({ names: { [nameKey(view, d)]: box.value.trim() || undefined } });
    slider.focus();
  };
  box.addEventListener("keydown", (event) => {
    event.stopPropagation(); // not a shortcut of the page
    if (event.key === "Enter") close(true);
    if (event.key === "Escape") close(false);
  });
  box.addEventListener("blur", () => close(true));
  line.replaceChild(box, name);
  box.focus();
  box.select();
}

// ---------------------------------------------------------------- buttons and blending

function buttons(view) {
  const { lab } = view;
  view.resetOne = html("button", { type: "button", onclick: () => setTweak(view, view.dim, 0) }, "Reset one");
  view.resetAll = html("button", { type: "button", id: "pose-reset",
    onclick: () => lab.update({ tweak: { [lab.selected()]: undefined } }) }, "Reset all");
  view.name = html("button", { type: "button", onclick: () => rename(view, view.dim) }, "Rename");
  view.keep = html("input", { type: "checkbox",
    onchange: (event) => lab.update({ keepLength: event.target.checked }) });
  return (view.buttons = html("div", { class: "row pose-buttons" }, view.resetOne, view.resetAll, view.name,
    html("label", { class: "small" }, view.keep, " Keep length")));
}

function blend(view) {
  const { lab } = view;
  view.keepPose = html("button", { type: "button", id: "pose-keep", onclick: () => keepThis(view) }, "Save this pose");
  view.mix = html("input", { type: "range", id: "mix", min: 0, max: 1, step: 0.01,
    "aria-label": "Blend of the saved pose and this one",
    oninput: (event) => { lab.update({ mix: Number(event.target.value) }); paintPictures(view); } });
  view.fromName = html("span", { class: "small num" });
  view.toName = html("span", { class: "small num" });
  view.drop = html("button", { type: "button", class: "small", "aria-label": "Discard the saved pose",
    onclick: () => lab.update({ from: null }) }, "×");
  view.blending = html("div", { class: "row blending" }, view.fromName, view.mix, view.toName, view.drop);
  return (view.blend = html("div", { class: "blend" }, view.keepPose, view.blending));
}

function keepThis({ lab }) {
  const klass = lab.selected();
  const pose = [...tweakedPose(lab)].map((value) => Number(value.toFixed(5)));
  lab.update({ from: { class: klass, pose, label: lab.model.classes[klass] }, mix: 1 });
}

function paintBlend(view) {
  const { lab } = view;
  const kept = keptPose(lab);
  view.blending.hidden = !kept;
  say(view.keepPose, kept ? "Save this pose instead" : "Save this pose to blend");
  if (!kept) return;
  say(view.fromName, `saved ${kept.label}`);
  say(view.toName, `current ${lab.model.classes[lab.selected()]}`);
  if (Number(view.mix.value) !== lab.state.mix) view.mix.value = lab.state.mix;
}

// ---------------------------------------------------------------- frames

function missing(view) {
  return (view.missing = html("p", { class: "muted", hidden: true }));
}

function ready(lab) {
  return Boolean(lab.decoder && lab.result?.poses && lab.result.poses.shape[1] === lab.decoder.pose);
}

const OTHERS = new Set(["routing", "flash", "status", "hand", "notice"]); // these change no pose

function onFrame(view, changed) {
  if ([...changed].some((key) => !OTHERS.has(key))) paintAll(view);
}

function paintAll(view) {
  const { lab } = view;
  const able = ready(lab);
  if (!able && lab.waiting && view.rows.length) return;
  for (const part of ["pictures", "film", "list", "buttons", "blend"]) view[part].hidden = !able;
  view.missing.hidden = able;
  say(view.whose, able ? `of ${lab.model.classes[lab.selected()]}` : "");
  if (!able) return say(view.missing, why(lab));
  if (view.rows.length !== lab.decoder.pose) rebuild(view);
  view.keep.checked = lab.state.keepLength;
  for (let d = 0; d < view.rows.length; d++) paintRow(view, d);
  view.resetAll.disabled = tweakOf(lab).every((value) => value === 0);
  if (!isFresh(view)) paintPictures(view);
  paintFilm(view);
  paintBlend(view);
}

/** A slider has already painted its reconstruction; the next frame need not paint it again. */
function isFresh(view) {
  const now = snapshot(view);
  return view.fresh?.every((value, k) => value === now[k]);
}

function snapshot({ lab }) {
  return [lab.state, lab.result, lab.input, lab.decoder, lab.colours];
}

function why(lab) {
  if (lab.model && !lab.model.capsules) return "This model has no capsules, so there is no pose to change.";
  if (!lab.model || !lab.result) return lab.empty ? "The input is empty, so there is no pose." : "";
  if (lab.model.has_decoder) return "Loading the decoder …";
  return "This model has no decoder, so there are no reconstructions.";
}

function rebuild(view) {
  view.rows = Array.from({ length: view.lab.decoder.pose }, (_, d) => row(view, d));
  view.list.replaceChildren(...view.rows.map(({ line }) => line));
  view.dim = -1;
  look(view, 0);
}
