// Panel 2, the primary capsules: one map per type, shaded by length (section 4 of the paper: 32 types on a 6×6 grid; any
// grid here). The capsule under the pointer, or selected with the arrow keys, shows its receptive field and its values.
//
// Lower capsules are ordered "(h w n)": first by grid position, then by type.

import { heading, html, number, say, set, svg } from "./elements.js";
import { maps, surface } from "./paint.js";

const GAP = 5; // between maps

export function mount(root, lab) {
  heading(root, "Primary capsules");
  const view = { lab, at: null, layout: null };
  view.canvas = html("canvas", {
    id: "primary", tabindex: 0, role: "application", "aria-describedby": "primary-said", "data-card": "u",
    "aria-label": "Maps of the primary capsules. Arrow keys move over a map, Page Up and Page Down change the type.",
    onpointermove: (event) => point(view, capsuleAt(view, event)), onpointerleave: () => leave(view),
    onpointerdown: (event) => point(view, capsuleAt(view, event)),
    onkeydown: (event) => onKey(view, event), onblur: () => leave(view), onfocus: () => focus(view),
  });
  view.legend = legend();
  view.said = html("p", { id: "primary-said", class: "small", "aria-live": "polite" });
  view.bars = svg("svg", { class: "numbers", role: "img" });
  view.missing = html("p", { class: "muted", hidden: true }, "This model has no primary capsules.");
  root.append(view.canvas, view.legend, view.said, view.bars, view.missing);
  lab.on((_, changed) => {
    if (relevant(changed)) paint(view);
  });
  new ResizeObserver(() => paint(view)).observe(view.canvas);
}

function relevant(changed) {
  return changed.size !== 1 || !["tweak", "names", "routing", "mix"].some((key) => changed.has(key));
}

function legend() {
  return html("div", { class: "legend small num", "aria-hidden": "true" },
    html("span", {}, "0"), html("canvas", { class: "ramp" }), html("span", { class: "top" }));
}

/** The lengths ‖u_i‖ (i). */
export function primaryLengths(primary) {
  const [i, p] = primary.shape;
  return Float32Array.from({ length: i }, (_, k) => Math.hypot(...primary.subarray(k * p, k * p + p)));
}

function ready({ model, result }) {
  return Boolean(model?.grid && result?.primary && result.primary.shape[0] === model.grid[0] * model.grid[1] * model.primary_types);
}

// ---------------------------------------------------------------- painting

function paint(view) {
  const { lab, canvas } = view;
  const able = ready(lab);
  if (!able && lab.waiting && view.layout) return;
  for (const part of [canvas, view.legend, view.said, view.bars]) part.classList.toggle("gone", !able);
  view.missing.hidden = able || !lab.model || Boolean(lab.model.grid || lab.model.phases);
  if (!able || !canvas.clientWidth) return;
  if (view.result !== lab.result) {
    view.result = lab.result;
    view.lengths = primaryLengths(lab.result.primary);
    view.top = view.lengths.reduce((a, b) => Math.max(a, b), 0.1);
  }
  const place = surface(canvas);
  view.layout = layout(lab.model, place.width, place.height);
  paintMaps(view, place.context);
  paintLegend(view);
  paintCapsule(view);
}

/** The number of columns that makes the maps largest. */
function layout({ grid: [rows, columns], primary_types: types }, width, height) {
  let best = { cell: 0 };
  for (let across = 1; across <= types; across++) {
    const down = Math.ceil(types / across);
    const cell = Math.min((width - GAP * (across - 1)) / (across * columns), (height - GAP * (down - 1)) / (down * rows));
    if (cell > best.cell) best = { cell, across, down };
  }
  const cell = best.cell > 3 ? Math.floor(best.cell) : best.cell;
  const used = best.across * columns * cell + GAP * (best.across - 1);
  const spare = best.down > 1 ? Math.floor((height - best.down * rows * cell) / (best.down - 1)) : GAP;
  const left = Math.floor((width - used) / 2);
  return { rows, columns, types, cell, across: best.across, left, right: columns * cell + GAP, below: rows * cell + Math.min(spare, 3 * GAP) };
}

/** The corner of the map of a type; `right` and `below` are the distances between maps. */
function corner({ across, left, right, below }, type) {
  return [left + (type % across) * right, Math.floor(type / across) * below];
}

function paintMaps({ lab, layout: at, lengths, top, at: hovered }, context) {
  const map = maps(lab.colours).heat;
  for (let type = 0; type < at.types; type++) {
    const [x0, y0] = corner(at, type);
    context.fillStyle = lab.colours.line;
    context.fillRect(x0 - 0.5, y0 - 0.5, at.columns * at.cell + 1, at.rows * at.cell + 1);
    for (let y = 0; y < at.rows; y++) {
      for (let x = 0; x < at.columns; x++) {
        const shade = 3 * Math.round((255 * lengths[(y * at.columns + x) * at.types + type]) / top);
        context.fillStyle = `rgb(${map[shade]} ${map[shade + 1]} ${map[shade + 2]})`;
        context.fillRect(x0 + x * at.cell, y0 + y * at.cell, at.cell, at.cell);
      }
    }
  }
  const marked = lab.transient?.type ?? hovered?.type;
  if (marked !== undefined && marked !== null) outline(context, at, marked, lab.colours.muted);
  if (hovered) outlineCell(context, at, hovered, lab.colours.ink);
}

function outline(context, at, type, colour) {
  const [x0, y0] = corner(at, type);
  context.strokeStyle = colour;
  context.lineWidth = 1.5;
  context.strokeRect(x0 - 1.5, y0 - 1.5, at.columns * at.cell + 3, at.rows * at.cell + 3);
}

function outlineCell(context, at, { type, y, x }, colour) {
  const [x0, y0] = corner(at, type);
  context.strokeStyle = colour;
  context.lineWidth = 2;
  context.strokeRect(x0 + x * at.cell, y0 + y * at.cell, at.cell, at.cell);
}

function paintLegend({ lab, legend: bar, top }) {
  const { context, width, height } = surface(bar.querySelector("canvas"));
  const map = maps(lab.colours).heat;
  for (let n = 0; n < 64; n++) {
    const shade = 3 * Math.round((255 * n) / 63);
    context.fillStyle = `rgb(${map[shade]} ${map[shade + 1]} ${map[shade + 2]})`;
    context.fillRect((n * width) / 64, 0, width / 64 + 1, height);
  }
  say(bar.querySelector(".top"), `length ${number(top)}`);
}

// ---------------------------------------------------------------- one capsule

function index(view, { type, y, x }) {
  return (y * view.layout.columns + x) * view.layout.types + type;
}

function longestCapsule(view) {
  const { types, columns } = view.layout;
  let best = 0;
  view.lengths.forEach((length, k) => (best = length > view.lengths[best] ? k : best));
  const place = Math.floor(best / types);
  return { type: best % types, y: Math.floor(place / columns), x: place % columns };
}

function paintCapsule(view) {
  const { lab } = view;
  const shown = view.at ?? longestCapsule(view);
  const k = index(view, shown);
  const p = lab.result.primary.shape[1];
  const values = lab.result.primary.subarray(k * p, k * p + p);
  const where = `type ${shown.type + 1}, row ${shown.y + 1}, column ${shown.x + 1}`;
  say(view.said, `${view.at ? "" : "Longest: "}${where}, length ${number(view.lengths[k])}`);
  set(view.canvas, { "data-value": view.lengths[k].toFixed(4) });
  set(view.bars, { "aria-label": `Its ${p} values: ${[...values].map((value) => number(value)).join(", ")}` });
  paintNumbers(view.bars, values);
}

/** The values of the capsule as bars, with numbers. */
function paintNumbers(bars, values) {
  const n = values.length, wide = 24, middle = 27, reach = 20;
  set(bars, { viewBox: `0 0 ${n * wide} 80` });
  const top = Math.max(0.05, ...values.map(Math.abs));
  if (bars.childElementCount !== 2 * n + 1) {
    const cells = Array.from({ length: n }, () => [svg("rect", { class: "number-bar" }), svg("text", { "text-anchor": "middle" })]);
    bars.replaceChildren(svg("line", { class: "axis" }), ...cells.flat());
  }
  set(bars.firstChild, { x1: 0, x2: n * wide, y1: middle, y2: middle });
  values.forEach((value, d) => {
    const high = (Math.abs(value) / top) * reach;
    set(bars.children[2 * d + 1], { x: d * wide + 6, width: wide - 12, y: value < 0 ? middle : middle - high, height: high });
    set(bars.children[2 * d + 2], { x: (d + 0.5) * wide, y: d % 2 ? 76 : 63 }); // alternating: numbers are wider than bars
    say(bars.children[2 * d + 2], number(value).replace("0.", "."));
  });
}

// ---------------------------------------------------------------- pointing

function capsuleAt({ layout: at, canvas }, event) {
  if (!at) return null;
  const box = canvas.getBoundingClientRect();
  const px = event.clientX - box.left - at.left, py = event.clientY - box.top;
  const across = Math.floor(px / at.right), down = Math.floor(py / at.below);
  const type = down * at.across + across;
  const x = Math.floor((px - across * at.right) / at.cell), y = Math.floor((py - down * at.below) / at.cell);
  const inside = px >= 0 && py >= 0 && across < at.across && type < at.types && x < at.columns && y < at.rows;
  return inside ? { type, y, x } : null;
}

/** Show a capsule and its receptive field on the input. */
function point(view, capsule) {
  if (!capsule) return view.at && document.activeElement !== view.canvas ? leave(view) : null;
  view.at = capsule;
  const { size, stride, offset } = view.lab.model.receptive;
  view.lab.flash("type", capsule.type);
  view.lab.flash("receptive", { y: offset + stride * capsule.y, x: offset + stride * capsule.x, size });
  paint(view);
}

function leave(view) {
  if (!view.at) return;
  view.at = null;
  view.lab.flash("type", null);
  view.lab.flash("receptive", null);
  paint(view);
}

/** Keyboard focus starts at the longest capsule. */
function focus(view) {
  if (view.layout && !view.at && view.canvas.matches(":focus-visible")) point(view, longestCapsule(view));
}

function onKey(view, event) {
  if (!view.layout) return;
  const { rows, columns, types } = view.layout;
  const { type, y, x } = view.at ?? longestCapsule(view);
  const moves = {
    ArrowLeft: { type, y, x: x - 1 }, ArrowRight: { type, y, x: x + 1 },
    ArrowUp: { type, y: y - 1, x }, ArrowDown: { type, y: y + 1, x },
    PageUp: { type: type - 1, y, x }, PageDown: { type: type + 1, y, x },
  };
  const to = moves[event.key];
  if (!to) return;
  event.preventDefault();
  const wrap = (value, n) => (value + n) % n;
  point(view, { type: wrap(to.type, types), y: wrap(to.y, rows), x: wrap(to.x, columns) });
}
