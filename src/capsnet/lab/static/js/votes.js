// Below the ribbons, for the selected class: a map over the input of where its votes come from, the votes in their
// principal plane, and entropy and agreement over the steps.

import { html, number, say, set, svg } from "./elements.js";
import { between, rgb, surface, typeScale } from "./paint.js";

// Measures over the steps, for the selected class; the last two only if the algorithm fits Gaussians or moves oscillators
const CURVES = [
  { name: "entropy", digits: 3 }, { name: "agreement", digits: 2 }, { name: "deviation", digits: 2 }, { name: "coherence", digits: 2 },
];

export function buildDetails(view) {
  const figure = (node, caption) => html("figure", {}, node, html("figcaption", { class: "small" }, caption));
  view.over = html("canvas", { id: "coupling-map", class: "crisp", role: "img", "data-card": "coupling-map" });
  view.plane = html("canvas", { id: "votes", role: "img", "data-card": "votes" });
  view.curves = Object.fromEntries(CURVES.map(({ name }) => [name, curve(name)]));
  view.overCaption = html("span");
  view.planeCaption = html("span");
  return html("div", { class: "routing-details" },
    figure(view.over, view.overCaption), figure(view.plane, view.planeCaption),
    html("div", { class: "curves" }, ...Object.values(view.curves).map(({ figure: one }) => one)));
}

// ---------------------------------------------------------------- sums over an answer

/** Σ over the types at each grid position of c_ij ‖û_j|i‖ for the class in focus. */
export function placesAt(weight, t, i, types) {
  const out = new Float32Array(Math.floor(i / types));
  for (let k = 0; k < i; k++) out[Math.floor(k / types)] += weight[t * i + k];
  return out;
}

/** The lengths of votes differ by a factor of a hundred: the plane shows their square roots and keeps directions. */
function rooted(points, [ox, oy]) {
  const out = new Float32Array(points.length);
  for (let k = 0; k < points.length; k += 2) {
    const dx = points[k] - ox, dy = points[k + 1] - oy;
    const factor = 1 / Math.sqrt(Math.hypot(dx, dy) || 1);
    out[k] = dx * factor;
    out[k + 1] = dy * factor;
  }
  return out;
}

export function extremes({ weight, votes2d, outputs2d, origin2d }, places) {
  const votes = rooted(votes2d, origin2d), outputs = rooted(outputs2d, origin2d);
  const points = [votes, outputs, [0, 0]];
  const box = [Infinity, Infinity, -Infinity, -Infinity];
  for (const list of points) {
    for (let k = 0; k < list.length; k++) {
      box[k % 2] = Math.min(box[k % 2], list[k]);
      box[2 + (k % 2)] = Math.max(box[2 + (k % 2)], list[k]);
    }
  }
  const top = (list) => list.reduce((a, b) => Math.max(a, b), 1e-9);
  return { box, votes, outputs, heaviest: top(weight), brightest: Math.max(...places.map(top)) };
}

// ---------------------------------------------------------------- painting

export function paintDetails(view) {
  paintOver(view);
  paintPlane(view);
  paintCurves(view);
}

/** The class in focus. */
function focusOf({ lab }) {
  return lab.result.header.focus;
}

/** Coupling × vote, each lower capsule at the centre of its receptive field, over the pale input. */
function paintOver(view) {
  const { lab, sums, over } = view;
  const [channels, height, width] = lab.model.image_shape;
  over.parentElement.classList.toggle("gone", !sums.onGrid);
  if (!sums.onGrid || lab.input?.length !== channels * height * width) return;
  if (over.width !== width) over.width = width;
  if (over.height !== height) over.height = height;
  const image = new ImageData(width, height);
  const heat = spread(between(sums.places, view.shown), lab.model, sums.brightest);
  const [paper, ink, accent] = [lab.colours.panel, lab.colours.ink, lab.colours.accent].map(rgb);
  for (let k = 0; k < width * height; k++) {
    const grey = 0.6 * grayAt(lab.input, k, channels, width * height);
    const warm = 0.78 * heat[k];
    for (let c = 0; c < 3; c++) {
      const ground = paper[c] * (1 - grey) + ink[c] * grey;
      image.data[4 * k + c] = ground * (1 - warm) + accent[c] * warm;
    }
    image.data[4 * k + 3] = 255;
  }
  over.getContext("2d").putImageData(image, 0, 0);
  const name = lab.model.classes[focusOf(view)];
  say(view.overCaption, `evidence for ${name}`);
  set(over, { "aria-label": `Where the votes for ${name} come from, over the input` });
}

function grayAt(pixels, k, channels, n) {
  let sum = 0;
  for (let c = 0; c < channels; c++) sum += pixels[c * n + k];
  return sum / channels;
}

/** Grid weights to pixels: a linear tent around the centre of each receptive field, 1 for the largest weight. */
function spread(places, { grid: [rows, columns], receptive, image_shape: [, height, width] }, brightest) {
  const { size, stride, offset } = receptive;
  const middle = offset + (size - 1) / 2;
  const tents = (n, count) => Array.from({ length: n }, (_, pixel) =>
    Array.from({ length: count }, (_, g) => Math.max(0, 1 - Math.abs((pixel - middle) / stride - g))));
  const down = tents(height, rows), across = tents(width, columns);
  const out = new Float32Array(height * width);
  for (let y = 0; y < height; y++) {
    for (let g = 0; g < rows; g++) {
      if (!down[y][g]) continue;
      for (let x = 0; x < width; x++) {
        for (let h = 0; h < columns; h++) out[y * width + x] += down[y][g] * across[x][h] * (places[g * columns + h] / brightest);
      }
    }
  }
  return out;
}

/** The votes for the class as dots sized by their weight, v_j as an arrow, the spread of the votes as an ellipse. */
function paintPlane(view) {
  const { lab, sums } = view;
  if (!view.plane.clientWidth) return;
  const { context, width, height } = surface(view.plane);
  const { votes } = sums;
  const scale = Math.max(typeScale(), width / 170);
  const place = fit(sums.box, width, height, 10);
  const now = between(rows(lab.result.weight, sums.i), view.shown);
  context.fillStyle = lab.colours.ink;
  const thin = Math.min(1, Math.sqrt(300 / sums.i)); // a thousand dots need to be fainter
  for (let k = 0; k < sums.i; k++) {
    const share = Math.sqrt(now[k] / sums.heaviest);
    context.globalAlpha = (0.1 + 0.55 * share) * thin;
    context.beginPath();
    context.arc(...place(votes[2 * k], votes[2 * k + 1]), scale * (0.7 + 3.6 * share * thin), 0, 7);
    context.fill();
  }
  context.globalAlpha = 1;
  drawEllipse(context, cluster(votes, now), place, lab.colours.accent);
  drawArrow(context, place, [0, 0], between(rows(sums.outputs, 2), view.shown), lab.colours.accent, scale);
  const name = lab.model.classes[focusOf(view)];
  say(view.planeCaption, `votes for ${name}, and v`);
  set(view.plane, { "aria-label": `Votes for ${name} in two dimensions. The arrow is the class capsule.` });
}

const chunks = new WeakMap(); // rows of an array of the answer, cut once
function rows(list, n) {
  if (!chunks.has(list)) {
    chunks.set(list, Array.from({ length: list.length / n }, (_, k) => list.subarray(k * n, k * n + n)));
  }
  return chunks.get(list);
}

/** One scale for both axes keeps angles. */
function fit([x0, y0, x1, y1], width, height, margin) {
  const scale = Math.min((width - 2 * margin) / (x1 - x0 || 1), (height - 2 * margin) / (y1 - y0 || 1));
  const dx = width / 2 - (scale * (x0 + x1)) / 2, dy = height / 2 + (scale * (y0 + y1)) / 2;
  return (x, y) => [dx + scale * x, dy - scale * y];
}

/** Weighted mean and covariance of the votes. */
function cluster(points, weights) {
  let total = 1e-12, mx = 0, my = 0, xx = 0, xy = 0, yy = 0;
  weights.forEach((w, k) => {
    total += w;
    mx += w * points[2 * k];
    my += w * points[2 * k + 1];
  });
  mx /= total;
  my /= total;
  weights.forEach((w, k) => {
    const dx = points[2 * k] - mx, dy = points[2 * k + 1] - my;
    xx += (w * dx * dx) / total;
    xy += (w * dx * dy) / total;
    yy += (w * dy * dy) / total;
  });
  return { mx, my, xx, xy, yy };
}

function drawEllipse(context, { mx, my, xx, xy, yy }, place, colour) {
  const middle = (xx + yy) / 2, off = Math.hypot((xx - yy) / 2, xy);
  const [a, b] = [Math.sqrt(middle + off), Math.sqrt(Math.max(0, middle - off))];
  const angle = Math.atan2(2 * xy, xx - yy) / 2;
  const [x, y] = place(mx, my);
  const scale = place(mx + 1, my)[0] - x;
  context.strokeStyle = colour;
  context.lineWidth = 1;
  context.setLineDash([3, 3]);
  context.beginPath();
  context.ellipse(x, y, a * scale, b * scale, -angle, 0, 7);
  context.stroke();
  context.setLineDash([]);
}

function drawArrow(context, place, from, to, colour, scale) {
  const [x0, y0] = place(...from), [x1, y1] = place(...to);
  const angle = Math.atan2(y1 - y0, x1 - x0);
  context.strokeStyle = context.fillStyle = colour;
  context.lineWidth = 2.5 * scale;
  context.beginPath();
  context.moveTo(x0, y0);
  context.lineTo(x1 - 5 * scale * Math.cos(angle), y1 - 5 * scale * Math.sin(angle));
  context.stroke();
  context.beginPath();
  context.moveTo(x1, y1);
  for (const turn of [2.65, -2.65]) context.lineTo(x1 + 9 * scale * Math.cos(angle + turn), y1 + 9 * scale * Math.sin(angle + turn));
  context.fill();
}

function curve(name) {
  const line = svg("polyline", { class: "curve" });
  const dot = svg("circle", { class: "curve-dot", r: 3.5 });
  const picture = svg("svg", { viewBox: "0 0 120 44", role: "img" }, line, dot);
  const caption = html("figcaption", { class: "small num" });
  return { name, line, dot, picture, caption, figure: html("figure", { "data-card": name }, caption, picture) };
}

function paintCurves(view) {
  const { lab, sums } = view;
  const focus = focusOf(view);
  for (const { name, digits } of CURVES) {
    const found = lab.result[name];
    view.curves[name].figure.classList.toggle("gone", !found);
    if (!found) continue;
    const ofClass = found.length === sums.steps ? [...found] : Array.from({ length: sums.steps }, (_, t) => found[t * sums.j + focus]);
    paintCurve(view.curves[name], ofClass, view.shown, digits);
  }
}

/** A curve fills its height whatever its range; the caption gives the value. */
function paintCurve({ name, line, dot, picture, caption, figure }, values, at, digits) {
  const low = Math.min(...values), high = Math.max(...values);
  const x = (t) => (values.length === 1 ? 60 : 6 + (108 * t) / (values.length - 1));
  const y = (value) => (high - low < 1e-6 ? 22 : 38 - (32 * (value - low)) / (high - low));
  set(line, { points: values.map((value, t) => `${x(t).toFixed(1)},${y(value).toFixed(1)}`).join(" ") });
  const below = Math.min(Math.floor(at), values.length - 1), above = Math.min(below + 1, values.length - 1);
  const now = values[below] + (values[above] - values[below]) * (at - below);
  set(dot, { cx: x(at), cy: y(now) });
  say(caption, `${name} ${number(now, digits)}`);
  set(figure, { "data-value": now.toFixed(4) });
  set(picture, { "aria-label": `${name} over the routing iterations: ${values.map((value) => number(value, digits)).join(", ")}` });
}
