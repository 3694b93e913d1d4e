// How the couplings of two algorithms differ on the same votes: for each pair of capsules two bars, one above the other.

import { html, number, say, set, svg } from "./elements.js";

const WIDE = 320, LEFT = 18, TOP = 22; // in units of the picture
const ROW = 52; // the highest row
const DIGITS = 34; // room for a number

export function buildCouplings() {
  const picture = svg("svg", { class: "pairs", role: "img" });
  const legends = ["a", "b"].map((colour) => html("span", { class: colour === "a" ? "swatch" : "swatch b" }));
  const difference = html("p", { class: "small muted", id: "hand-difference" });
  const figure = html("figure", { class: "hand-couplings" }, html("figcaption", {}, "Couplings"),
    html("div", { class: "row legends small num" }, ...legends), picture, difference);
  return { figure, picture, legends, difference, bars: [], shape: "" };
}

/** `pair`: two of {name, couplings (t, i, j)}; each is shown at step t, or at its last one if it has fewer. */
export function paintCouplings(view, pair, t) {
  const shown = pair.map(({ name, couplings }) => {
    const at = Math.min(t, couplings.length - 1);
    return { name, at, steps: couplings.length, values: couplings[at] };
  });
  rebuild(view, shown[0].values.length, shown[0].values[0].length);
  shown.forEach(({ name, at, steps }, k) => say(view.legends[k], `${name}, ${steps === 1 ? "one step" : `step ${at + 1} of ${steps}`}`));
  for (const { k, i, j, bar, text, full } of view.bars) {
    const value = shown[k].values[i][j];
    set(bar, { width: full * Math.max(0, Math.min(1, value)), "data-value": number(value, 3) });
    say(text, number(value));
  }
  const said = largest(shown);
  say(view.difference, said);
  set(view.picture, { "aria-label": said });
}

function largest([one, other]) {
  const all = one.values.flatMap((row, i) => row.map((value, j) => ({ i, j, value, against: other.values[i][j] })));
  const far = ({ value, against }) => Math.abs(value - against);
  const { i, j, value, against } = all.reduce((a, b) => (far(b) > far(a) ? b : a));
  if (far({ value, against }) < 0.005) return "Both algorithms have the same couplings here.";
  return `Largest difference: from lower capsule ${i + 1} to upper capsule ${j + 1}, ${number(value)} (${one.name}) and ${number(against)} (${other.name}).`;
}

function rebuild(view, lowers, uppers) {
  const shape = `${lowers}×${uppers}`;
  if (view.shape === shape) return;
  view.shape = shape;
  const row = Math.min(ROW, 250 / lowers), column = (WIDE - LEFT) / uppers, full = column - DIGITS - 12;
  const thick = Math.min(12, (row - 8) / 2);
  view.bars = [];
  const parts = [];
  for (let j = 0; j < uppers; j++) {
    parts.push(svg("text", { class: "pair-head", x: LEFT + j * column, y: 12 }, uppers > 2 ? `upper ${j + 1}` : `upper capsule ${j + 1}`));
    for (let i = 0; i < lowers; i++) for (const k of [0, 1]) parts.push(...bar(view, { k, i, j, full }, LEFT + j * column, TOP + i * row + k * (thick + 1), thick));
  }
  for (let i = 0; i < lowers; i++) parts.push(svg("text", { x: 0, y: TOP + i * row + thick + 4 }, String(i + 1)));
  set(view.picture, { viewBox: `0 0 ${WIDE} ${TOP + lowers * row}` });
  view.picture.replaceChildren(...parts);
}

function bar(view, { k, i, j, full }, x, y, height) {
  const track = svg("rect", { class: "pair-track", x, y, width: full, height });
  const made = svg("rect", { class: k ? "pair-b" : "pair-a", x, y, height, width: 0, "data-pair": `${k}/${i}/${j}` });
  const text = svg("text", { class: "num", x: x + full + 4, y: y + height - 2 });
  view.bars.push({ k, i, j, full, bar: made, text });
  return [track, made, text];
}
