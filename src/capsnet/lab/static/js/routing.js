// Panel 3, routing by agreement (Procedure 1 of the paper) as a film over its iterations t: from uniform couplings at
// t = 0 to what the agreement made of them. Ribbons say who sends how much to whom; for the selected class a map over
// the input, its votes in the plane of their largest spread, and two curves.
//
// All numbers come from the server's trace. The panel only adds up, and passes smoothly from one t to the next.

import { calm, heading, html, number, say, set, svg } from "./elements.js";
import { rgb, surface } from "./paint.js";
import { primaryLengths } from "./primary.js";
import { together } from "./classes.js";

const GLIDE = 450; // ms from one iteration to the next
const PAUSE = 950; // ms between iterations while playing
const MOST = 10;
const REPAINT = ["result", "routing", "selected", "model", "theme", "flash", "view", "input"];

export function mount(root, lab) {
  heading(root, "Routing");
  const view = { root, lab, shown: 0, target: 0, playing: false, result: null };
  view.body = html("div", { class: "routing-body" }, film(view), options(view), ribbons(view), details(view));
  view.missing = html("p", { class: "muted", hidden: true },
    "A CNN does not route: every layer passes its output on with the same weights, whatever the input.");
  root.append(view.body, view.missing);
  root.addEventListener("keydown", (event) => onKey(view, event));
  lab.on((_, changed) => onFrame(view, changed));
  new ResizeObserver(() => paint(view)).observe(view.ribbons);
}

// ---------------------------------------------------------------- controls

function film(view) {
  const { lab } = view;
  view.play = html("button", { type: "button", id: "play", class: "primary", onclick: () => toggle(view) });
  view.back = html("button", { type: "button", class: "icon", "aria-label": "one iteration back", onclick: () => step(view, -1) }, "‹");
  view.step = html("button", { type: "button", id: "step", class: "icon", "aria-label": "one iteration on", onclick: () => step(view, 1) }, "›");
  view.scrub = html("input", { type: "range", id: "scrub", min: 0, step: 1, "aria-label": "routing iteration", "data-card": "t",
    oninput: (event) => { stop(view); lab.update({ routing: { t: Number(event.target.value) } }); } });
  view.where = html("span", { class: "num where" });
  return html("div", { class: "row film-row", role: "group", "aria-label": "Iterations; space plays, arrow keys step" },
    view.play, view.back, view.scrub, view.step, view.where);
}

function options(view) {
  const { lab } = view;
  const change = (by) => lab.update({ routing: { iterations: clamp(lab.state.routing.iterations + by, 1, MOST) } });
  view.less = html("button", { type: "button", class: "icon", "aria-label": "fewer iterations", onclick: () => change(-1) }, "−");
  view.more = html("button", { type: "button", class: "icon", "aria-label": "more iterations", onclick: () => change(1) }, "+");
  view.count = html("output", { class: "num", id: "iterations", "aria-live": "polite" });
  view.leaky = html("input", { type: "checkbox", id: "leaky", onchange: (event) => lab.update({ routing: { leaky: event.target.checked } }) });
  view.story = html("p", { class: "small story" });
  return html("div", { class: "row routing-options" },
    html("span", { class: "row tight" }, view.less, view.count, view.more),
    html("label", { class: "check small", title: "an extra choice, thrown away afterwards, takes what fits no class" }, view.leaky, "leaky"),
    view.story);
}

function clamp(value, low, high) {
  return Math.max(low, Math.min(high, value));
}

function step(view, by) {
  stop(view);
  const { routing } = view.lab.state;
  view.lab.update({ routing: { t: clamp(routing.t + by, 0, routing.iterations - 1) } });
}

function toggle(view) {
  if (view.playing) return stop(view);
  view.playing = true;
  const { routing } = view.lab.state;
  if (routing.t >= routing.iterations - 1) view.lab.update({ routing: { t: 0 } });
  view.lab.poke("routing");
  view.timer = setTimeout(() => advance(view), PAUSE);
}

function advance(view) {
  const { routing } = view.lab.state;
  if (routing.t >= routing.iterations - 1) return stop(view);
  view.lab.update({ routing: { t: routing.t + 1 } });
  view.timer = setTimeout(() => advance(view), PAUSE);
}

function stop(view) {
  clearTimeout(view.timer);
  if (!view.playing) return;
  view.playing = false;
  view.lab.poke("routing");
}

/** Space plays and arrow keys step, unless the focused control has a use for the key itself. */
function onKey(view, event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const { tagName, type } = event.target;
  const own = tagName === "BUTTON" || type === "checkbox";
  if (event.key === " " && !own) toggle(view);
  else if (event.key === "ArrowRight" && type !== "range") step(view, 1);
  else if (event.key === "ArrowLeft" && type !== "range") step(view, -1);
  else return;
  event.preventDefault();
}

function paintControls(view) {
  const { iterations, leaky, t } = view.lab.state.routing;
  const last = iterations - 1;
  say(view.play, view.playing ? "❚❚ Pause" : "▶ Play");
  set(view.scrub, { max: Math.max(1, last), "aria-valuetext": `iteration ${t + 1} of ${iterations}` });
  view.scrub.disabled = view.play.disabled = last === 0;
  if (Number(view.scrub.value) !== t) view.scrub.value = t;
  view.back.disabled = t === 0;
  view.step.disabled = t >= last;
  say(view.where, `${t + 1} / ${iterations}`);
  say(view.count, `${iterations} ${iterations === 1 ? "iteration" : "iterations"}`);
  const { model } = view.lab;
  if (model?.iterations) set(view.count, { title: `taught with ${model.iterations}${model.leaky ? ", leaky" : ""}` });
  view.less.disabled = iterations <= 1;
  view.more.disabled = iterations >= MOST;
  view.leaky.checked = leaky;
}

// ---------------------------------------------------------------- what is added up from an answer

/** For every t: what each type sends to each class, Σ over its positions of c_ij ‖u_i‖; and the map's and plane's sizes. */
function summarise({ result, model }) {
  const [steps, i, j] = result.couplings.shape;
  const onGrid = result.primary.shape[0] === i; // else hidden capsules lie between, which have no place in the image
  const types = onGrid ? model.primary_types : i;
  const lengths = onGrid ? primaryLengths(result.primary) : new Float32Array(i).fill(1);
  const flow = Array.from({ length: steps }, (_, t) => flowAt(result.couplings, lengths, t, i, j, types));
  const sent = new Float32Array(types);
  lengths.forEach((length, k) => (sent[k % types] += length));
  const places = Array.from({ length: steps }, (_, t) => placesAt(result.weight, t, i, types));
  return { steps, i, j, types, sent, flow, places, onGrid, ...extremes(result, places) };
}

function flowAt(couplings, lengths, t, i, j, types) {
  const out = new Float32Array(types * j);
  for (let k = 0; k < i; k++) {
    for (let n = 0; n < j; n++) out[(k % types) * j + n] += lengths[k] * couplings[(t * i + k) * j + n];
  }
  return out;
}

/** Σ over the types at each grid position of c_ij ‖û_j|i‖ for the class in focus. */
function placesAt(weight, t, i, types) {
  const out = new Float32Array(Math.floor(i / types));
  for (let k = 0; k < i; k++) out[Math.floor(k / types)] += weight[t * i + k];
  return out;
}

/** Votes differ in length by a hundred times: the plane shows the root of a length, and directions as they are. */
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

function extremes({ weight, votes2d, outputs2d, origin2d }, places) {
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

/** Between iterations: numbers glide from one t to the next. */
function between(list, at) {
  const low = Math.floor(at), share = at - low;
  if (!share || low + 1 >= list.length) return list[Math.min(low, list.length - 1)];
  return list[low].map((value, k) => value * (1 - share) + list[low + 1][k] * share);
}

// ---------------------------------------------------------------- frames

function onFrame(view, changed) {
  const { lab } = view;
  if (!REPAINT.some((key) => changed.has(key))) return;
  const able = Boolean(lab.result?.couplings);
  if (!able && lab.waiting && view.sums) return changed.has("routing") ? paintControls(view) : undefined;
  view.body.classList.toggle("gone", lab.model?.kind === "cnn");
  view.missing.hidden = lab.model?.kind !== "cnn";
  if (changed.has("routing") || changed.has("model")) paintControls(view);
  view.body.classList.toggle("empty", !able);
  if (!able) return;
  paintControls(view);
  if (view.result !== lab.result) {
    view.result = lab.result;
    view.sums = summarise(lab);
  }
  glide(view, Math.min(lab.state.routing.t, view.sums.steps - 1));
  paint(view);
}

function glide(view, target) {
  if (target === view.target && view.gliding) return;
  const from = view.shown;
  view.target = target;
  cancelAnimationFrame(view.gliding);
  view.gliding = 0;
  if (calm() || Math.abs(target - from) < 1e-3 || from > view.sums.steps - 1) {
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
  if (!view.sums || !view.lab.result?.couplings || view.result !== view.lab.result || !view.ribbons.clientWidth) return;
  paintRibbons(view);
  paintStory(view);
  paintOver(view);
  paintPlane(view);
  paintCurves(view);
}

function focusOf({ lab }) {
  return lab.result.header.focus;
}

// ---------------------------------------------------------------- ribbons

function ribbons(view) {
  view.ribbons = html("canvas", { id: "ribbons", role: "img", "data-card": "c",
    onpointermove: (event) => pointAt(view, event), onpointerleave: () => view.lab.flash("type", null),
    onclick: (event) => choose(view, event) });
  return view.ribbons;
}

/** Where nodes stand: types on the left by what they have to send, classes on the right by what they get. */
function nodes(view, flow, width, height) {
  const { types, j, sent } = view.sums;
  const names = view.lab.model.classes.reduce((a, name) => Math.max(a, name.length), 1);
  const right = width - Math.min(112, 56 + 6.5 * Math.min(names, 9)), left = 24;
  const total = sent.reduce((a, b) => a + b, 0) || 1;
  const gapLeft = Math.min(2, (0.3 * height) / types), gapRight = Math.min(7, (0.35 * height) / j);
  const got = Array.from({ length: j }, (_, n) => sumEvery(flow, n, j));
  const unit = Math.min((height - gapLeft * (types - 1)) / total, (height - gapRight * (j - 1)) / total);
  const stack = (sizes, gap) => {
    let y = (height - unit * sizes.reduce((a, b) => a + b, 0) - gap * (sizes.length - 1)) / 2;
    return Array.from(sizes, (size) => ({ y: (y += size * unit + gap) - size * unit - gap, size: size * unit }));
  };
  return { left, right, unit, total, got, lefts: stack(sent, gapLeft), rights: stack(got, gapRight) };
}

function sumEvery(list, from, every) {
  let sum = 0;
  for (let k = from; k < list.length; k += every) sum += list[k];
  return sum;
}

function paintRibbons(view) {
  const { lab, sums } = view;
  const { context, width, height } = surface(view.ribbons);
  const flow = between(sums.flow, view.shown);
  const at = (view.nodes = nodes(view, flow, width, height));
  const colours = classColours(view);
  for (const ribbon of sorted(view, flow, at, colours)) drawRibbon(context, ribbon, at);
  context.globalAlpha = 1;
  drawLeft(context, view, at, height);
  drawRight(context, view, at, colours, width);
  const share = at.got[focusOf(view)] / at.total;
  const name = lab.model.classes[focusOf(view)];
  set(view.ribbons, { "aria-label": `${(100 * share).toFixed(1)} percent of what the primary capsules send goes to ${name}`, "data-value": share.toFixed(4), "data-said": `${(100 * share).toFixed(1)} % of what is sent goes to ${name}` });
}

/** Which classes are drawn in a colour of their own. */
function classColours({ lab }) {
  const colours = new Map([[lab.selected(), lab.colours.accent]]);
  together(lab).forEach((k, n) => colours.set(k, n ? lab.colours.b : lab.colours.a));
  return colours;
}

/** Ribbons from pale to strong: width is the flow, shade how the coupling compares with a uniform one. */
function sorted(view, flow, { lefts, rights, unit }, colours) {
  const { types, j, sent } = view.sums;
  const pointed = view.lab.transient.type ?? null;
  const used = new Float32Array(j);
  const list = [];
  for (let type = 0; type < types; type++) {
    let y = lefts[type].y;
    for (let n = 0; n < j; n++) {
      const size = flow[type * j + n] * unit;
      const ratio = sent[type] ? (flow[type * j + n] / sent[type]) * j : 0;
      const colour = colours.get(n) ?? view.lab.colours.ink;
      const strength = shadeOf(ratio, colours.has(n), pointed === null ? null : pointed === type);
      if (size > 0.05) list.push({ from: y, to: rights[n].y + used[n], size, colour, strength });
      y += size;
      used[n] += size;
    }
  }
  return list.sort((a, b) => a.strength - b.strength);
}

function shadeOf(ratio, chosen, pointed) {
  const strength = chosen ? Math.min(0.92, 0.34 * ratio ** 1.6) : Math.min(0.6, 0.1 * ratio ** 2);
  if (pointed === null) return strength;
  return pointed ? Math.min(1, 0.25 + 1.6 * strength) : strength * 0.3;
}

function drawRibbon(context, { from, to, size, colour, strength }, { left, right }) {
  const bend = (left + right) / 2;
  const thick = Math.max(size, 0.5);
  context.globalAlpha = strength;
  context.fillStyle = colour;
  context.beginPath();
  context.moveTo(left + 4, from);
  context.bezierCurveTo(bend, from, bend, to, right - 4, to);
  context.lineTo(right - 4, to + thick);
  context.bezierCurveTo(bend, to + thick, bend, from + thick, left + 4, from + thick);
  context.fill();
}

function drawLeft(context, { lab, sums }, { left, lefts }, height) {
  const pointed = lab.transient.type ?? null;
  lefts.forEach(({ y, size }, type) => {
    context.fillStyle = pointed === type ? lab.colours.ink : lab.colours.muted;
    context.fillRect(left, y, 3, Math.max(size, 0.75));
  });
  context.fillStyle = pointed === null ? lab.colours.muted : lab.colours.ink;
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  context.textAlign = "right";
  const named = pointed === null || !lefts[pointed] ? [0, sums.types - 1] : [pointed];
  for (const type of named) {
    const middle = lefts[type].y + lefts[type].size / 2;
    context.fillText(String(type + 1), left - 5, clamp(middle, 6, height - 6)); // its upper and lower half inside, too
  }
}

function drawRight(context, { lab }, { right, rights, got, total }, colours, width) {
  context.textBaseline = "middle";
  const crowded = rights.length > 1 && rights[1].y - rights[0].y < 12;
  rights.forEach(({ y, size }, n) => {
    const chosen = colours.has(n);
    context.fillStyle = colours.get(n) ?? lab.colours.muted;
    context.fillRect(right - 3, y, chosen ? 5 : 3, Math.max(size, 0.75));
    if (crowded && !chosen) return; // names would run into each other; the bars beside have them
    context.font = `${chosen ? "600 " : ""}12px system-ui, sans-serif`;
    context.textAlign = "left";
    context.fillStyle = chosen ? lab.colours.ink : lab.colours.muted;
    const name = lab.model.classes[n];
    context.fillText(name.length > 9 ? `${name.slice(0, 8)}…` : name, right + 7, y + size / 2);
    context.textAlign = "right";
    context.font = "11px system-ui, sans-serif";
    context.fillText(`${((100 * got[n]) / total).toFixed(1)} %`, width, y + size / 2);
  });
}

function nearest(list, y) {
  const distance = ({ y: top, size }) => Math.abs(top + size / 2 - y) - size / 2;
  return list.reduce((best, node, n) => (distance(node) < distance(list[best]) ? n : best), 0);
}

function pointAt(view, event) {
  if (!view.nodes) return;
  const x = event.offsetX;
  const onLeft = x < (view.nodes.left + view.nodes.right) / 2;
  view.ribbons.style.cursor = x > view.nodes.right - 8 ? "pointer" : "default";
  const type = onLeft ? nearest(view.nodes.lefts, event.offsetY) : null;
  if (view.lab.transient.type !== type) view.lab.flash("type", type);
}

function choose(view, event) {
  if (view.nodes && event.offsetX > view.nodes.right - 8) view.lab.update({ selected: nearest(view.nodes.rights, event.offsetY) });
}

/** The iteration in a sentence. */
function paintStory(view) {
  const { lab, nodes: at } = view;
  const { t } = lab.state.routing;
  const name = lab.model.classes[focusOf(view)];
  const share = ((100 * at.got[focusOf(view)]) / at.total).toFixed(1);
  const fair = (100 / view.sums.j).toFixed(view.sums.j > 20 ? 1 : 0);
  const shared = lab.state.routing.leaky ? "each class, and to none of them" : `each class (${fair} %)`;
  say(view.story, t === 0 ? `Uniform: the same to ${shared}.` : `Agreement, ${t}× added: ${share} % goes to ${name}.`);
}

// ---------------------------------------------------------------- the selected class: map, plane, curves

function details(view) {
  const figure = (node, caption) => html("figure", {}, node, html("figcaption", { class: "small" }, caption));
  view.over = html("canvas", { id: "coupling-map", class: "crisp", role: "img", "data-card": "coupling-map" });
  view.plane = html("canvas", { id: "votes", role: "img", "data-card": "votes" });
  view.curves = { entropy: curve("entropy"), agreement: curve("agreement") };
  view.overCaption = html("span");
  view.planeCaption = html("span");
  return html("div", { class: "routing-details" },
    figure(view.over, view.overCaption), figure(view.plane, view.planeCaption),
    html("div", { class: "curves" }, view.curves.entropy.figure, view.curves.agreement.figure));
}

/** Coupling × vote, each lower capsule at the middle of its receptive field, over a pale input. */
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
  say(view.overCaption, `who speaks for ${name}`);
  set(over, { "aria-label": `coupling times vote for ${name}, over the input` });
}

function grayAt(pixels, k, channels, n) {
  let sum = 0;
  for (let c = 0; c < channels; c++) sum += pixels[c * n + k];
  return sum / channels;
}

/** Grid weights to pixels: a soft tent about the centre of each receptive field, 1 where the weight is largest. */
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

/** The votes for the class as points, sized by what each counts for; v_j as an arrow; the ellipse is the votes' spread. */
function paintPlane(view) {
  const { lab, sums } = view;
  const { context, width, height } = surface(view.plane);
  const { votes } = sums;
  const place = fit(sums.box, width, height, 10);
  const now = between(rows(lab.result.weight, sums.i), view.shown);
  context.fillStyle = lab.colours.ink;
  const thin = Math.min(1, Math.sqrt(300 / sums.i)); // a thousand points are a blot unless each is fainter
  for (let k = 0; k < sums.i; k++) {
    const share = Math.sqrt(now[k] / sums.heaviest);
    context.globalAlpha = (0.1 + 0.55 * share) * thin;
    context.beginPath();
    context.arc(...place(votes[2 * k], votes[2 * k + 1]), 0.7 + 3.6 * share * thin, 0, 7);
    context.fill();
  }
  context.globalAlpha = 1;
  drawEllipse(context, cluster(votes, now), place, lab.colours.accent);
  drawArrow(context, place, [0, 0], between(rows(sums.outputs, 2), view.shown), lab.colours.accent);
  const name = lab.model.classes[focusOf(view)];
  say(view.planeCaption, `votes for ${name}, and v`);
  set(view.plane, { "aria-label": `votes for ${name} in two dimensions; the arrow is the class capsule` });
}

const chunks = new WeakMap(); // the rows of an answer's array, cut once
function rows(list, n) {
  if (!chunks.has(list)) {
    chunks.set(list, Array.from({ length: list.length / n }, (_, k) => list.subarray(k * n, k * n + n)));
  }
  return chunks.get(list);
}

/** One scale for both axes, so that angles are what they are. */
function fit([x0, y0, x1, y1], width, height, margin) {
  const scale = Math.min((width - 2 * margin) / (x1 - x0 || 1), (height - 2 * margin) / (y1 - y0 || 1));
  const dx = width / 2 - (scale * (x0 + x1)) / 2, dy = height / 2 + (scale * (y0 + y1)) / 2;
  return (x, y) => [dx + scale * x, dy - scale * y];
}

/** Mean and covariance of the votes, each counted by its weight. */
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

function drawArrow(context, place, from, to, colour) {
  const [x0, y0] = place(...from), [x1, y1] = place(...to);
  const angle = Math.atan2(y1 - y0, x1 - x0);
  context.strokeStyle = context.fillStyle = colour;
  context.lineWidth = 2.5;
  context.beginPath();
  context.moveTo(x0, y0);
  context.lineTo(x1 - 5 * Math.cos(angle), y1 - 5 * Math.sin(angle));
  context.stroke();
  context.beginPath();
  context.moveTo(x1, y1);
  for (const turn of [2.65, -2.65]) context.lineTo(x1 + 9 * Math.cos(angle + turn), y1 + 9 * Math.sin(angle + turn));
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
  const agreement = Array.from({ length: sums.steps }, (_, t) => lab.result.agreement[t * sums.j + focus]);
  paintCurve(view.curves.entropy, [...lab.result.entropy], view.shown, 3);
  paintCurve(view.curves.agreement, agreement, view.shown, 2);
}

/** A small curve fills its height whatever its range, so the number stands beside it. */
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
  set(picture, { "aria-label": `${name} over the iterations: ${values.map((value) => number(value, digits)).join(", ")}` });
}
