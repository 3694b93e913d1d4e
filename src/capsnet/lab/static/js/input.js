// Panel 1: draw a digit, choose a test digit, open an image or overlap two digits; rotate, scale, shear and move the
// input; and see what the network sees. The canvas is in stage.js, its handles are in grips.js, and the tools below the
// canvas are in tools.js.

import { html, number, say, set, svg } from "./elements.js";
import { SLIDERS, limited, rangeOf } from "./grips.js";
import { maps, picture } from "./paint.js";
import { buildStage } from "./stage.js";
import { DEFAULTS } from "./state.js";
import { bringImages, drawTools, imageTools, overlapTools, testTools } from "./tools.js";

const MODES = { draw: "Draw", test: "Digits", image: "Image", overlap: "Overlap" };

export function mount(root, lab) {
  const stage = html("div", { class: "stage" });
  const tools = html("div", { class: "tools" });
  root.append(modes(lab), stage, tools, below(lab));
  buildStage(stage, lab);
  const builders = { draw: drawTools, test: testTools, image: imageTools, overlap: overlapTools };
  for (const [mode, build] of Object.entries(builders)) {
    const row = build(lab);
    tools.append(row);
    showOnly(row, lab, () => lab.state.input.mode === mode);
  }
  bringImages(stage, lab);
}

/** Whether the classes of a model are digits. */
export function knowsDigits(model) {
  return model.classes.every((name) => /^\d$/.test(name));
}

function showOnly(element, lab, when) {
  const show = () => (element.hidden = !when());
  lab.on((_, changed) => changed.has("input") && show());
  show();
}

/** Draw | Digits | Image | Overlap, a group of radio buttons. */
function modes(lab) {
  const names = Object.keys(MODES);
  const button = (mode) =>
    html("button", { type: "button", role: "radio", "data-mode": mode, onclick: () => choose(lab, mode) }, MODES[mode]);
  const buttons = names.map(button);
  const about = { class: "segments wide", role: "radiogroup", "aria-label": "Kind of input" };
  const group = html("div", about, ...buttons);
  group.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const at = (names.indexOf(lab.state.input.mode) + step + names.length) % names.length;
    choose(lab, names[at]);
    buttons[at].focus();
  });
  const show = () => buttons.forEach((one) => {
    const on = one.dataset.mode === lab.state.input.mode;
    set(one, { "aria-checked": on, tabindex: on ? 0 : -1 });
  });
  const test = buttons[names.indexOf("test")];
  lab.on((_, changed) => {
    if (changed.has("input")) show();
    if (changed.has("model") && lab.model) {
      say(test, knowsDigits(lab.model) ? MODES.test : "Examples");
    }
  });
  show();
  return group;
}

let before = null; // the model that overlap mode replaced

/** Overlapping digits need a multi-label model: change to one, with a message, and change back afterwards. */
function choose(lab, mode) {
  const patch = { input: { mode } };
  const two = lab.models.find((model) => model.multi_label && model.capsules);
  if (mode === "overlap" && lab.model && !lab.model.multi_label) {
    if (two) {
      before = lab.model.name;
      patch.model = two.name;
      lab.notice(`Model changed to ${two.name}, which was trained on overlapping digits.`);
    } else {
      lab.notice("No model here was trained on overlapping digits, so the answer may miss one of them.");
    }
  } else if (mode !== "overlap" && before && lab.model === two) {
    lab.notice(`Model changed back to ${before}.`);
    patch.model = before;
  }
  if (mode !== "overlap") before = null;
  lab.update(patch);
}

/* ---- below: what the network sees, and the handles as sliders ---- */

function below(lab) {
  const canvas = html("canvas", { id: "seen", role: "img", "aria-label": "What the network sees" });
  const field = svg("rect", { class: "receptive", visibility: "hidden" });
  const outline = svg("svg", { class: "handles", "aria-hidden": "true" }, field);
  const caption = html("span", { class: "small muted num" });
  const holder = html("div", { class: "seen", "data-card": "input" }, canvas, outline);
  lab.on((_, changed) => {
    if (!lab.model) return;
    if (["input", "transform", "model", "theme", "size"].some((key) => changed.has(key))) {
      const [channels, height, width] = lab.model.image_shape;
      const pixels = lab.input ?? new Float32Array(channels * height * width);
      picture(canvas, pixels, lab.model.image_shape, maps(lab.colours).ink);
      set(outline, { viewBox: `0 0 ${width} ${height}` });
      holder.style.width = `${wholePixels(holder, width)}px`;
      say(caption, `${width}×${height} pixels`);
    }
    if (changed.has("flash")) outlineSeen(field, lab.transient.receptive);
  });
  return html("div", { class: "below" },
    html("div", { class: "row top" },
      holder,
      html("div", { class: "beside" }, html("h3", {}, "What the network sees"), caption, resetButton(lab))),
    sliders(lab));
}

/** A width that is a multiple of the number of pixels. */
function wholePixels(holder, width) {
  const room = (innerHeight >= 900 ? 0.7 : 0.52) * holder.closest(".panel").querySelector(".stage").clientWidth;
  return Math.max(1, Math.round(room / width)) * width;
}

function outlineSeen(rect, field) {
  set(rect, { visibility: field ? "visible" : "hidden" });
  if (field) set(rect, { x: field.x, y: field.y, width: field.size, height: field.size });
}

function sliders(lab) {
  const rows = Object.entries(SLIDERS).map(([key, { title, step, unit }]) => sliderRow(lab, key, title, step, unit));
  return html("div", { class: "sliders" }, ...rows);
}

function resetButton(lab) {
  const reset = html("button", { type: "button", id: "reset-transform", class: "small",
    onclick: () => lab.update({ transform: DEFAULTS.transform }) }, "Reset");
  const untouched = ([key, value]) => lab.state.transform[key] === value;
  const show = () => (reset.hidden = Object.entries(DEFAULTS.transform).every(untouched));
  lab.on((_, changed) => changed.has("transform") && show());
  show();
  return reset;
}

function sliderRow(lab, key, title, step, unit) {
  const range = html("input", { type: "range", step, "data-transform": key,
    "aria-label": title, title: `${title} ${unit}`,
    oninput: () => lab.update({ transform: limited({ [key]: Number(range.value) }, lab.model) }),
    ondblclick: () => lab.update({ transform: { [key]: DEFAULTS.transform[key] } }) });
  const value = html("output", { class: "num small" });
  const show = () => {
    const [low, high] = rangeOf(key, lab.model);
    set(range, { min: low, max: high });
    range.value = lab.state.transform[key];
    const digits = key === "rotate" ? 0 : step < 0.1 ? 2 : 1;
    say(value, number(lab.state.transform[key], digits) + (unit === "px" ? "" : unit));
  };
  lab.on((_, changed) => (changed.has("transform") || changed.has("model")) && show());
  show();
  return html("label", { class: "slider" }, html("span", { class: "small muted" }, title), range, value);
}
