// The plane of one upper capsule in the by-hand view: an arrow for each vote with a handle to drag it, the output and,
// where an algorithm fits Gaussians, their spread.

import { number, say, set, html, svg } from "./elements.js";
import { subscript, vector } from "./hand-dynamic.js";
import { buildOscillators, paintOscillators } from "./hand-oscillators.js";

const REACH = 1.3; // a plane ranges from −REACH to REACH
const RING = 1.17; // the radius of the ring of oscillators
const SIDE = 320; // its size in its own units

/** The plane of upper capsule j with an arrow per vote. */
export function plane(view, j, lowers) {
  const arrow = (kind) => ({ line: svg("line", { class: `${kind}-line` }), head: svg("path", { class: `${kind}-head` }) });
  const votes = Array.from({ length: lowers }, (_, i) => ({ ...arrow("vote"), handle: handle(view, i, j) }));
  const sum = arrow("sum"), out = arrow("out"), spread = svg("ellipse", { class: "spread-line" });
  const oscillators = buildOscillators(lowers, SIDE / 2, (RING / REACH) * (SIDE / 2));
  const picture = svg("svg", { viewBox: `0 0 ${SIDE} ${SIDE}`, class: "plane", "data-upper": j, role: "group", "aria-label": `Upper capsule ${j + 1}` },
    svg("line", { class: "axis", x1: 0, x2: SIDE, y1: SIDE / 2, y2: SIDE / 2 }),
    svg("line", { class: "axis", x1: SIDE / 2, x2: SIDE / 2, y1: 0, y2: SIDE }),
    svg("circle", { class: "unit", cx: SIDE / 2, cy: SIDE / 2, r: SIDE / 2 / REACH }),
    spread, oscillators.group, ...votes.flatMap(({ line, head: tip }) => [line, tip]), sum.line, sum.head, out.line, out.head,
    ...votes.map((vote) => vote.handle));
  const caption = html("figcaption", { class: "num" });
  return { j, votes, sum, out, spread, oscillators, caption, figure: html("figure", {}, caption, picture) };
}

function handle(view, i, j) {
  const knob = svg("g", {
    class: "handle", tabindex: 0, role: "slider", "aria-roledescription": "vote", "data-vote": `${i}-${j}`, "data-card": "u_hat",
    "aria-valuemin": -REACH, "aria-valuemax": REACH,
    onpointerdown: (event) => grab(view, j, event),
    onpointermove: (event) => {
      if (knob.hasPointerCapture(event.pointerId)) moveTo(view, i, j, toVector(event));
    },
    onkeydown: (event) => nudge(view, i, j, event),
  }, svg("circle", { r: 16, class: "reach" }), svg("circle", { r: 9, class: "knob" }), svg("text", { "text-anchor": "middle", y: 4 }, String(i + 1)));
  return knob;
}

/** Handles may overlap: take the one nearest to the pointer, not the one on top. */
function grab(view, j, event) {
  const [x, y] = toVector(event);
  const far = view.lab.state.hand.votes.map((row) => Math.hypot(row[j][0] - x, row[j][1] - y));
  const { handle: meant } = view.planes[j].votes[far.indexOf(Math.min(...far))];
  meant.setPointerCapture(event.pointerId);
  meant.focus({ preventScroll: true });
  event.preventDefault(); // the browser would focus the one on top
}

function toVector(event) {
  const box = event.currentTarget.ownerSVGElement.getBoundingClientRect();
  const across = (event.clientX - box.left) / box.width, down = (event.clientY - box.top) / box.height;
  return [(2 * across - 1) * REACH, (1 - 2 * down) * REACH];
}

function moveTo({ lab }, i, j, [x, y]) {
  const tidy = (value) => Math.round(100 * Math.max(-REACH, Math.min(REACH, value))) / 100;
  const votes = lab.state.hand.votes.map((row) => [...row]);
  votes[i][j] = [tidy(x), tidy(y)];
  lab.update({ hand: { votes } });
}

function nudge(view, i, j, event) {
  const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] };
  const move = moves[event.key];
  if (!move) return;
  event.preventDefault();
  event.stopPropagation(); // elsewhere in the view these keys step through the lines
  const [x, y] = view.lab.state.hand.votes[i][j];
  const by = event.shiftKey ? 0.01 : 0.05;
  moveTo(view, i, j, [x + by * move[0], y + by * move[1]]);
}

const onPlane = ([x, y]) => [SIDE / 2 + (x / REACH) * (SIDE / 2), SIDE / 2 - (y / REACH) * (SIDE / 2)];

/** `now` are the numbers known at the current step. */
export function paintPlane({ j, votes: arrows, sum, out, spread, oscillators, caption }, votes, now) {
  arrows.forEach((arrow, i) => {
    const share = now?.c.value ? now.c.value[i][j] : 0.5;
    placeArrow(arrow, votes[i][j], 1 + 5 * share, 9);
    const [x, y] = onPlane(votes[i][j]);
    set(arrow.handle, {
      transform: `translate(${x} ${y})`, "aria-label": `Vote of lower capsule ${i + 1} for upper capsule ${j + 1}`,
      "aria-valuenow": votes[i][j][0], "aria-valuetext": `x ${number(votes[i][j][0])}, y ${number(votes[i][j][1])}`, "data-value": vector(votes[i][j]),
    });
  });
  hide(sum, !now?.s?.value);
  hide(out, !now?.v.value);
  if (now?.s?.value) placeArrow(sum, now.s.value[j], 1.5, 7);
  if (now?.v.value) placeArrow(out, now.v.value[j], 4, 12);
  paintOscillators(oscillators, now?.phase?.value.map((row) => row[j]));
  placeSpread(spread, now?.v.value?.[j], now?.variance?.value[j]);
  say(caption, `Upper capsule ${j + 1}${now?.a.value ? `:  ${now.measured(subscript(j))} = ${number(now.a.value[j])}` : ""}`);
}

/** One standard deviation of the Gaussian around its mean. */
function placeSpread(ellipse, mean, variance) {
  ellipse.classList.toggle("gone", !variance);
  if (!variance) return;
  const [cx, cy] = onPlane(mean), [rx, ry] = variance.map((value) => (Math.sqrt(value) / REACH) * (SIDE / 2));
  set(ellipse, { cx, cy, rx, ry });
}

function hide({ line, head: tip }, hidden) {
  for (const part of [line, tip]) part.classList.toggle("gone", hidden);
}

function placeArrow({ line, head: tip }, to, width, size) {
  const [x0, y0] = onPlane([0, 0]), [x1, y1] = onPlane(to);
  const angle = Math.atan2(y1 - y0, x1 - x0);
  size = Math.min(size, 0.7 * Math.hypot(x1 - x0, y1 - y0)); // a short arrow has a small head
  const corner = (turn) => `${x1 + size * Math.cos(angle + turn)} ${y1 + size * Math.sin(angle + turn)}`;
  set(line, { x1: x0, y1: y0, x2: x1 - 0.6 * size * Math.cos(angle), y2: y1 - 0.6 * size * Math.sin(angle), "stroke-width": width });
  set(tip, { d: size < 1 ? "" : `M ${x1} ${y1} L ${corner(2.7)} L ${corner(-2.7)} Z` });
}
