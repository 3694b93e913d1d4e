// Votes as oscillators in the by-hand view: a dot on a ring for the phase of each, and one colour for those in phase.

import { set, svg } from "./elements.js";

const CLOSE = 15; // degrees between neighbours that are in phase
const COLOURS = 4; // as many as the style sheet has; at most three groups of two fit in six capsules

/** The dots of one upper capsule, on a ring of this radius around a centre. */
export function buildOscillators(lowers, centre, radius) {
  const dots = Array.from({ length: lowers }, (_, i) =>
    svg("g", { class: "oscillator" }, svg("circle", { r: 9 }), svg("text", { "text-anchor": "middle", y: 4 }, String(i + 1))));
  return { dots, centre, radius, group: svg("g", { class: "oscillators gone" }, svg("circle", { class: "ring", cx: centre, cy: centre, r: radius }), ...dots) };
}

/** `phases` are unit vectors, one for each lower capsule; undefined hides the ring. */
export function paintOscillators({ dots, group, centre, radius }, phases) {
  group.classList.toggle("gone", !phases);
  if (!phases) return;
  const groups = groupsOf(phases);
  dots.forEach((dot, i) => {
    const [x, y] = phases[i], of = groups.findIndex((members) => members.includes(i));
    set(dot, { transform: `translate(${(centre + radius * x).toFixed(2)} ${(centre - radius * y).toFixed(2)})`, "data-group": of < 0 ? "" : of % COLOURS });
  });
}

/** Which capsules are in phase, in words: `phases` (i, j, 2) of all upper capsules. */
export function inPhase(phases) {
  return phases[0].map((_, j) => {
    const groups = groupsOf(phases.map((row) => row[j])).map((members) => listed(members.map((i) => i + 1)));
    return `Upper capsule ${j + 1}: ${groups.length ? `votes ${groups.join(", and ")} are in phase` : "no votes are in phase"}.`;
  }).join(" ");
}

function listed(numbers) {
  return `${numbers.slice(0, -1).join(", ")} and ${numbers.at(-1)}`;
}

/** Chains of neighbouring phases with at least two members, in the order of their first member. */
export function groupsOf(phases) {
  const angles = phases.map(([x, y]) => (Math.atan2(y, x) * 180) / Math.PI);
  const order = [...angles.keys()].sort((a, b) => angles[a] - angles[b]);
  const gap = (k) => (angles[order[(k + 1) % order.length]] - angles[order[k]] + 360) % 360;
  const widest = order.map((_, k) => gap(k)).reduce((best, value, k, all) => (value > all[best] ? k : best), 0);
  const groups = [[]];
  for (let n = 1; n <= order.length; n++) {
    const k = (widest + n) % order.length; // starting after the widest gap, a group never spans the ends of the list
    groups.at(-1).push(order[k]);
    if (gap(k) > CLOSE) groups.push([]);
  }
  return groups.filter((members) => members.length > 1).map((members) => members.sort((a, b) => a - b)).sort((a, b) => a[0] - b[0]);
}
