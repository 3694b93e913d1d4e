// The ribbons of the routing panel: capsule types on the left, classes on the right. The width of a ribbon is the flow
// between them, its shade compares the coupling with a uniform one.

import { clamp, html, set } from "./elements.js";
import { between, surface, typeScale } from "./paint.js";
import { together } from "./classes.js";

export function buildRibbons(view) {
  view.ribbons = html("canvas", { id: "ribbons", role: "img", "data-card": "c",
    onpointermove: (event) => pointAt(view, event), onpointerleave: () => view.lab.flash("type", null),
    onclick: (event) => choose(view, event) });
  return view.ribbons;
}

export function paintRibbons(view) {
  const { lab, sums } = view;
  const { context, width, height } = surface(view.ribbons);
  const flow = between(sums.flow, view.shown);
  const at = (view.nodes = nodes(view, flow, width, height));
  const colours = classColours(view);
  for (const ribbon of sorted(view, flow, at, colours)) drawRibbon(context, ribbon, at);
  context.globalAlpha = 1;
  drawLeft(context, view, at, height);
  drawRight(context, view, at, colours, width);
  const { focus } = lab.result.header;
  const share = at.got[focus] / at.total;
  const said = `${(100 * share).toFixed(1)} % of the output goes to ${lab.model.classes[focus]}`;
  set(view.ribbons, { "aria-label": said, "data-value": share.toFixed(4), "data-said": said });
}

/** Positions of the nodes: types by what they send, classes by what they receive. */
function nodes(view, flow, width, height) {
  const { types, j, sent } = view.sums;
  const names = view.lab.model.classes.reduce((a, name) => Math.max(a, name.length), 1);
  const scale = typeScale();
  const right = width - scale * Math.min(112, 56 + 6.5 * Math.min(names, 9)), left = 24 * scale;
  const total = sent.reduce((a, b) => a + b, 0) || 1;
  const gapLeft = Math.min(2, (0.3 * height) / types), gapRight = Math.min(7, (0.35 * height) / j);
  const got = Array.from({ length: j }, (_, n) => sumEvery(flow, n, j));
  const unit = Math.min((height - gapLeft * (types - 1)) / total, (height - gapRight * (j - 1)) / total);
  const stack = (sizes, gap) => {
    let y = (height - unit * sizes.reduce((a, b) => a + b, 0) - gap * (sizes.length - 1)) / 2;
    return Array.from(sizes, (size) => ({ y: (y += size * unit + gap) - size * unit - gap, size: size * unit }));
  };
  return { left, right, unit, scale, total, got, lefts: stack(sent, gapLeft), rights: stack(got, gapRight) };
}

function sumEvery(list, from, every) {
  let sum = 0;
  for (let k = from; k < list.length; k += every) sum += list[k];
  return sum;
}

/** The classes that have a colour of their own. */
function classColours({ lab }) {
  const colours = new Map([[lab.selected(), lab.colours.accent]]);
  together(lab).forEach((k, n) => colours.set(k, n ? lab.colours.b : lab.colours.a));
  return colours;
}

/** Ribbons from pale to strong. */
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

function drawLeft(context, { lab, sums }, { left, lefts, scale }, height) {
  const pointed = lab.transient.type ?? null;
  lefts.forEach(({ y, size }, type) => {
    context.fillStyle = pointed === type ? lab.colours.ink : lab.colours.muted;
    context.fillRect(left, y, 3, Math.max(size, 0.75));
  });
  context.fillStyle = pointed === null ? lab.colours.muted : lab.colours.ink;
  context.font = `${11 * scale}px system-ui, sans-serif`;
  context.textBaseline = "middle";
  context.textAlign = "right";
  const named = pointed === null || !lefts[pointed] ? [0, sums.types - 1] : [pointed];
  for (const type of named) {
    const middle = lefts[type].y + lefts[type].size / 2;
    context.fillText(String(type + 1), left - 5, clamp(middle, 6 * scale, height - 6 * scale)); // the whole number stays inside
  }
}

function drawRight(context, { lab }, { right, rights, got, total, scale }, colours, width) {
  context.textBaseline = "middle";
  const crowded = rights.length > 1 && rights[1].y - rights[0].y < 12 * scale;
  rights.forEach(({ y, size }, n) => {
    const chosen = colours.has(n);
    context.fillStyle = colours.get(n) ?? lab.colours.muted;
    context.fillRect(right - 3, y, chosen ? 5 : 3, Math.max(size, 0.75));
    if (crowded && !chosen) return; // names would overlap; the class panel lists them
    context.font = `${chosen ? "600 " : ""}${12 * scale}px system-ui, sans-serif`;
    context.textAlign = "left";
    context.fillStyle = chosen ? lab.colours.ink : lab.colours.muted;
    const name = lab.model.classes[n];
    context.fillText(name.length > 9 ? `${name.slice(0, 8)}…` : name, right + 7, y + size / 2);
    context.textAlign = "right";
    context.font = `${11 * scale}px system-ui, sans-serif`;
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
