// Panel 2 for a synchronisation network: the input coloured by phase, step by step. What has the same hue is in phase; a
// position whose units disagree is pale. It takes the place of the primary capsules, which such a network does not have.

import { calm, heading, html, say, set } from "./elements.js";
import { rgb } from "./paint.js";

const MILLISECONDS = 350; // of a step
const THIRD = (2 * Math.PI) / 3;

export function mount(root, lab) {
  const view = { lab, heading: heading(root, "Primary capsules"), step: Infinity, timer: 0 };
  view.canvas = html("canvas", { id: "phases", role: "img", style: { width: "100%", imageRendering: "pixelated" } });
  view.slider = html("input", {
    type: "range", min: 0, step: 1, "aria-label": "Step of the oscillators", oninput: () => go(view, Number(view.slider.value)),
  });
  view.play = html("button", { type: "button", onclick: () => (view.timer ? stop(view) : start(view)) }, "Play");
  view.said = html("p", { class: "small muted", "aria-live": "polite" });
  view.box = html("div", { hidden: true }, view.canvas, html("div", { class: "legend" }, view.play, view.slider), view.said);
  root.append(view.box);
  lab.on((_, changed) => {
    if (changed.has("model")) stop(view);
    if (["model", "result", "theme"].some((key) => changed.has(key))) paint(view);
  });
}

function go(view, step) {
  stop(view);
  view.step = step;
  paint(view);
}

function stop(view) {
  clearInterval(view.timer);
  view.timer = 0;
  say(view.play, "Play");
}

/** From the first step to the last, or straight to the last for readers who prefer no motion. */
function start(view) {
  const last = view.lab.result?.field ? view.lab.result.field.shape[0] - 1 : 0;
  if (calm()) return go(view, last);
  view.step = 0;
  say(view.play, "Stop");
  view.timer = setInterval(() => {
    if (view.step >= last) return stop(view);
    view.step += 1;
    paint(view);
  }, MILLISECONDS);
  paint(view);
}

function paint(view) {
  const { lab, box, slider } = view;
  const { model, result } = lab;
  say(view.heading, model?.phases ? "Phases" : "Primary capsules");
  const able = Boolean(model?.phases && result?.field);
  if (!able && lab.waiting && model?.phases) return;
  box.hidden = !able;
  if (!able) return;
  const last = result.field.shape[0] - 1;
  const step = Math.min(view.step, last);
  set(slider, { max: last });
  slider.value = step;
  colour(view.canvas, result, model, step, lab.colours.panel);
  set(view.canvas, { "aria-label": `The input, coloured by phase after step ${step} of ${last}` });
  say(view.said, `Step ${step} of ${last}: one hue for what is in phase.`);
}

/** Every pixel in the hue of the nearest position's phase, as dense as the input is bright there. */
function colour(canvas, { field, input }, { phases, image_shape: [channels, height, width] }, step, paper) {
  const [rows, columns] = phases.grid, n = rows * columns, ground = rgb(paper);
  Object.assign(canvas, { width, height });
  const image = new ImageData(width, height);
  for (let k = 0; k < height * width; k++) {
    const y = Math.min(rows - 1, Math.round(Math.floor(k / width) / phases.stride));
    const x = Math.min(columns - 1, Math.round((k % width) / phases.stride));
    const re = field[2 * n * step + y * columns + x], im = field[2 * n * step + n + y * columns + x];
    const angle = Math.atan2(im, re), together = 0.35 + 0.65 * Math.min(1, Math.hypot(re, im));
    let ink = 0;
    for (let c = 0; c < channels; c++) ink += input[c * height * width + k] / channels;
    for (let c = 0; c < 3; c++) {
      const hue = 200 * (0.5 + 0.5 * Math.cos(angle - c * THIRD)) * together + 120 * (1 - together);
      image.data[4 * k + c] = ground[c] * (1 - ink) + hue * ink;
    }
    image.data[4 * k + 3] = 255;
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
}
