// The second view, routing by hand: a few lower capsules whose votes in the plane can be dragged, Procedure 1 of the
// paper beside them with the current line lit, and every number. The numbers come from the same routing code as the
// networks' (POST /api/hand); this file only draws them.

import { Newest, Refusal } from "./api.js";
import { html, number, say, set, svg } from "./elements.js";

const REACH = 1.3; // a plane goes from −REACH to REACH
const SIDE = 320; // its size in its own units
const MOST = 10;

const PRESETS = {
  "agreeing": [[[0.8, 0.5], [-0.5, 0.7]], [[0.7, 0.65], [0.7, -0.4]], [[0.9, 0.35], [-0.6, -0.6]]],
  "one outlier": [[[0.8, 0.5], [-0.3, 0.6]], [[0.7, 0.65], [0.5, -0.5]], [[0.85, 0.35], [-0.6, -0.3]], [[-0.7, 0.5], [0.1, 0.9]]],
  "opposed": [[[0.9, 0.2], [0.3, 0.8]], [[-0.9, -0.1], [0.1, 0.9]], [[0.8, 0.1], [-0.2, 0.7]], [[-0.8, -0.25], [0.4, 0.7]]],
  "two camps": [[[0.9, 0.4], [0.2, -0.2]], [[0.8, 0.6], [-0.2, 0.1]], [[0.1, -0.3], [-0.8, 0.5]], [[-0.2, 0.1], [-0.9, 0.35]]],
};

const LINES = [
  { line: 1, indent: 0, code: "routing(û, r)", note: "" },
  { line: 2, indent: 1, code: "for all i, j:  bᵢⱼ ← 0", note: "", card: "b" },
  { line: 3, indent: 1, code: "r times:", note: "" },
  { line: 4, indent: 2, code: "for all i:  cᵢ ← softmax(bᵢ)", note: "Eq. 3", card: "c" },
  { line: 5, indent: 2, code: "for all j:  sⱼ ← Σᵢ cᵢⱼ ûⱼ|ᵢ", note: "Eq. 2", card: "s" },
  { line: 6, indent: 2, code: "for all j:  vⱼ ← squash(sⱼ)", note: "Eq. 1", card: "v" },
  { line: 7, indent: 2, code: "for all i, j:  bᵢⱼ ← bᵢⱼ + ûⱼ|ᵢ · vⱼ", note: "", card: "b" },
  { line: 8, indent: 1, code: "return vⱼ", note: "" },
];

export function mount(root, lab) {
  const view = { root, lab, trace: null, asked: "", planes: [], playing: 0 };
  view.newest = new Newest(
    ({ votes, iterations }) => lab.api.hand(votes, iterations),
    (trace, question) => received(view, trace, question),
    (error) => failed(view, error),
  );
  root.append(html("div", { class: "hand" },
    html("section", { class: "hand-left", "aria-label": "Votes" }, head(view), planes(view), numbers(view)),
    html("section", { class: "hand-right", "aria-label": "Procedure 1" }, controls(view), procedure(view), said(view), squashCurve(view))));
  root.addEventListener("keydown", (event) => onKey(view, event));
  lab.on(() => onFrame(view));
}

/** Asked again when the server is back, or has less to do; a refusal stays one. */
function failed(view, error) {
  const again = () => {
    view.asked = "";
    view.lab.poke("hand");
  };
  if (!(error instanceof Refusal)) return void (view.asked = "");
  view.lab.notice(error.message);
  if (error.status === 503) setTimeout(again, 1000);
}

const subscript = (...indices) => indices.map((n) => String.fromCharCode(0x2080 + n + 1)).join("");
const vector = ([x, y]) => `(${number(x)}, ${number(y)})`;

// ---------------------------------------------------------------- where we are in the procedure

/** Every stop of Procedure 1: line 2 once, lines 4 to 7 in each round (the last needs no 7), then the return. */
function stops(iterations) {
  const list = [{ t: 0, line: 2 }];
  for (let t = 0; t < iterations; t++) {
    for (const line of t === iterations - 1 ? [4, 5, 6] : [4, 5, 6, 7]) list.push({ t, line });
  }
  return [...list, { t: iterations - 1, line: 8 }];
}

function position({ lab }) {
  const { iterations, t, line } = lab.state.hand;
  const list = stops(iterations);
  const found = list.findIndex((stop) => stop.t === t && stop.line === line);
  return { list, at: Math.max(0, found) };
}

function go(view, by) {
  const { list, at } = position(view);
  view.lab.update({ hand: list[Math.max(0, Math.min(list.length - 1, at + by))] });
}

/** What is known at a stop: each number of this round, or of the round before (then it is old), or nothing yet. */
function known({ logits, couplings, s, v, agreement }, { t, line }) {
  const now = (list, from) => (line >= from ? { value: list[t], old: false } : { value: list[t - 1], old: true });
  const done = line === 8;
  const grown = logits[t].map((row, i) => row.map((b, j) => b + (line === 7 ? agreement[t][i][j] : 0)));
  return {
    b: { value: grown, old: false },
    c: now(couplings, 4),
    s: now(s, 5),
    v: now(v, 6),
    agreement: line === 7 || done ? { value: agreement[t], old: false } : { value: agreement[t - 1], old: true },
  };
}

// ---------------------------------------------------------------- server

function ask(view) {
  const { votes, iterations } = view.lab.state.hand;
  const key = JSON.stringify([votes, iterations]);
  if (key === view.asked) return;
  view.asked = key;
  view.newest.request({ votes, iterations });
}

function received(view, trace, question) {
  view.trace = { ...trace, iterations: question.iterations, votes: question.votes };
  view.lab.poke("hand-trace");
}

function onFrame(view) {
  if (view.lab.state.view !== "hand") return stop(view);
  if (view.lab.status !== "gone") ask(view);
  paint(view);
}

// ---------------------------------------------------------------- building

function head(view) {
  const { lab } = view;
  const take = (name) => html("button", { type: "button", "data-preset": name,
    onclick: () => lab.update({ hand: { votes: PRESETS[name], t: 0, line: 2 } }) }, name);
  view.less = html("button", { type: "button", class: "icon", "aria-label": "one lower capsule fewer", onclick: () => resize(view, -1) }, "−");
  view.more = html("button", { type: "button", class: "icon", "aria-label": "one lower capsule more", onclick: () => resize(view, 1) }, "+");
  view.count = html("output", { class: "num" });
  return html("div", { class: "hand-head" },
    html("div", {}, html("h2", {}, "Routing by hand"),
      html("p", { class: "small muted" }, "Each lower capsule votes for every upper one. Drag a vote, or move it with the arrow keys.")),
    html("div", { class: "row" }, ...Object.keys(PRESETS).map(take)),
    html("div", { class: "row tight" }, view.less, view.count, view.more));
}

function resize({ lab }, by) {
  const { votes } = lab.state.hand;
  const n = Math.max(2, Math.min(6, votes.length + by));
  const added = [[-0.5, -0.5], [0.5, 0.5]].slice(0, votes[0].length);
  while (added.length < votes[0].length) added.push([0.3, 0.3]);
  lab.update({ hand: { votes: n > votes.length ? [...votes, added] : votes.slice(0, n) } });
}

function planes(view) {
  view.planesRow = html("div", { class: "planes" });
  return view.planesRow;
}

/** The plane of upper capsule j, with one arrow for each vote. */
function plane(view, j, lowers) {
  const arrow = (kind) => ({ line: svg("line", { class: `${kind}-line` }), head: svg("path", { class: `${kind}-head` }) });
  const votes = Array.from({ length: lowers }, (_, i) => ({ ...arrow("vote"), handle: handle(view, i, j) }));
  const sum = arrow("sum"), out = arrow("out");
  const picture = svg("svg", { viewBox: `0 0 ${SIDE} ${SIDE}`, class: "plane", "data-upper": j, role: "group", "aria-label": `upper capsule ${j + 1}` },
    svg("line", { class: "axis", x1: 0, x2: SIDE, y1: SIDE / 2, y2: SIDE / 2 }),
    svg("line", { class: "axis", x1: SIDE / 2, x2: SIDE / 2, y1: 0, y2: SIDE }),
    svg("circle", { class: "unit", cx: SIDE / 2, cy: SIDE / 2, r: SIDE / 2 / REACH }),
    ...votes.flatMap(({ line, head: tip }) => [line, tip]), sum.line, sum.head, out.line, out.head,
    ...votes.map((vote) => vote.handle));
  const caption = html("figcaption", { class: "num" });
  return { j, votes, sum, out, caption, figure: html("figure", {}, caption, picture) };
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

/** Handles may lie over one another: the one nearest to the pointer is meant, not the one on top. */
function grab(view, j, event) {
  const [x, y] = toVector(event);
  const far = view.lab.state.hand.votes.map((row) => Math.hypot(row[j][0] - x, row[j][1] - y));
  const { handle: meant } = view.planes[j].votes[far.indexOf(Math.min(...far))];
  meant.setPointerCapture(event.pointerId);
  meant.focus({ preventScroll: true });
  event.preventDefault(); // or the browser would focus the one on top
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

function numbers(view) {
  view.table = html("table", { class: "num hand-numbers" });
  return html("div", { class: "hand-scroll", tabindex: 0, role: "region", "aria-label": "Every number" }, view.table);
}

function controls(view) {
  const { lab } = view;
  view.back = html("button", { type: "button", class: "icon", "aria-label": "one line back", onclick: () => { stop(view); go(view, -1); } }, "‹");
  view.step = html("button", { type: "button", id: "hand-step", class: "primary", onclick: () => { stop(view); go(view, 1); } }, "Next line ›");
  view.play = html("button", { type: "button", id: "hand-play", onclick: () => toggle(view) });
  view.restart = html("button", { type: "button", onclick: () => { stop(view); lab.update({ hand: { t: 0, line: 2 } }); } }, "Restart");
  const change = (by) => {
    const iterations = Math.max(1, Math.min(MOST, lab.state.hand.iterations + by));
    lab.update({ hand: { iterations, t: 0, line: 2 } });
  };
  view.fewer = html("button", { type: "button", class: "icon", "aria-label": "fewer iterations", onclick: () => change(-1) }, "−");
  view.rounds = html("output", { class: "num" });
  view.further = html("button", { type: "button", class: "icon", "aria-label": "more iterations", onclick: () => change(1) }, "+");
  return html("div", { class: "hand-controls" },
    html("div", { class: "row" }, view.back, view.step, view.play, view.restart),
    html("div", { class: "row tight" }, view.fewer, view.rounds, view.further));
}

function toggle(view) {
  if (view.playing) return stop(view);
  const { list, at } = position(view);
  if (at === list.length - 1) view.lab.update({ hand: list[0] });
  view.playing = setInterval(() => {
    const now = position(view);
    if (now.at === now.list.length - 1) stop(view);
    else go(view, 1);
  }, 1100);
  view.lab.poke("hand");
}

function stop(view) {
  if (!view.playing) return;
  clearInterval(view.playing);
  view.playing = 0;
  view.lab.poke("hand");
}

function onKey(view, event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest(".hand-scroll")) return;
  if (event.key === "ArrowRight") go(view, 1);
  else if (event.key === "ArrowLeft") go(view, -1);
  else if (event.key === " " && event.target.tagName !== "BUTTON") toggle(view);
  else return;
  event.preventDefault();
}

function procedure(view) {
  view.lines = LINES.map(({ line, indent, code, note, card }) =>
    html("li", { class: `indent-${indent}`, "data-line": line, "data-card": card ?? null },
      html("span", { class: "line-number num", "aria-hidden": "true" }, line === 8 ? "" : String(line)),
      html("code", {}, code), html("span", { class: "small muted" }, note)));
  view.round = html("span", { class: "small muted num" });
  return html("div", {}, html("h3", { class: "row" }, "Procedure 1", view.round), html("ol", { class: "procedure" }, ...view.lines));
}

function said(view) {
  view.said = html("p", { class: "hand-said num", "aria-live": "polite" });
  return view.said;
}

/** ‖v‖ = ‖s‖² / (1 + ‖s‖²), with a dot for each upper capsule. */
function squashCurve(view) {
  const points = Array.from({ length: 61 }, (_, k) => [k / 20, (k / 20) ** 2 / (1 + (k / 20) ** 2)]);
  const [x, y] = [(s) => 30 + s * 90, (v) => 96 - v * 84];
  view.dots = svg("g");
  const axes = svg("g", {},
    svg("line", { class: "axis", x1: x(0), x2: x(3), y1: y(0), y2: y(0) }), svg("line", { class: "axis", x1: x(0), x2: x(0), y1: y(0), y2: y(1) }),
    svg("line", { class: "axis dashed", x1: x(0), x2: x(3), y1: y(1), y2: y(1) }),
    svg("text", { x: x(0) - 6, y: y(1) + 4, "text-anchor": "end" }, "1"), svg("text", { x: x(0) - 6, y: y(0) + 4, "text-anchor": "end" }, "0"),
    svg("text", { x: x(3), y: y(0) + 14, "text-anchor": "end" }, "‖s‖ = 3"), svg("text", { x: x(0) + 6, y: y(1) - 5 }, "‖v‖"));
  const line = svg("polyline", { class: "curve", points: points.map(([s, v]) => `${x(s)},${y(v)}`).join(" ") });
  view.squashAt = (s) => [x(Math.min(3, s)), y((s * s) / (1 + s * s))];
  return html("figure", { class: "squash", "data-card": "squash" },
    html("h3", {}, "Squash, Eq. 1: short vectors shrink to nothing, long ones stay just below one"),
    svg("svg", { viewBox: "0 0 320 114", role: "img", "aria-label": "the squash curve" }, axes, line, view.dots));
}

// ---------------------------------------------------------------- painting

function paint(view) {
  const { votes, iterations } = view.lab.state.hand;
  const { list, at } = position(view);
  rebuild(view, votes.length, votes[0].length);
  paintControls(view, list, at, iterations, votes.length);
  const fits = view.trace && view.trace.iterations === iterations && view.trace.votes.length === votes.length && view.trace.votes[0].length === votes[0].length;
  const now = fits ? known(view.trace, list[at]) : null;
  view.planes.forEach((one) => paintPlane(view, one, votes, now));
  if (!now) return;
  paintTable(view, votes, now, list[at].line);
  say(view.said, explain(view.trace, votes, list[at]));
  paintSquash(view, now);
}

function rebuild(view, lowers, uppers) {
  const shape = `${lowers}×${uppers}`;
  if (view.shape === shape) return;
  view.shape = shape;
  view.planes = Array.from({ length: uppers }, (_, j) => plane(view, j, lowers));
  view.planesRow.replaceChildren(...view.planes.map(({ figure }) => figure));
  view.table.replaceChildren();
}

function paintControls(view, list, at, iterations, lowers) {
  const { t, line } = list[at];
  view.back.disabled = at === 0;
  view.step.disabled = at === list.length - 1;
  say(view.play, view.playing ? "❚❚ Pause" : "▶ Play");
  say(view.rounds, `${iterations} ${iterations === 1 ? "iteration" : "iterations"}`);
  view.fewer.disabled = iterations <= 1;
  view.further.disabled = iterations >= MOST;
  say(view.count, `${lowers} lower capsules`);
  view.less.disabled = lowers <= 2;
  view.more.disabled = lowers >= 6;
  say(view.round, line === 2 ? "before the first round" : line === 8 ? "done" : `round ${t + 1} of ${iterations}`);
  for (const item of view.lines) {
    const lit = Number(item.dataset.line) === line;
    item.classList.toggle("lit", lit);
    if (lit) item.setAttribute("aria-current", "step");
    else item.removeAttribute("aria-current");
  }
}

const onPlane = ([x, y]) => [SIDE / 2 + (x / REACH) * (SIDE / 2), SIDE / 2 - (y / REACH) * (SIDE / 2)];

function paintPlane(view, { j, votes: arrows, sum, out, caption }, votes, now) {
  arrows.forEach((arrow, i) => {
    const share = now?.c.value ? now.c.value[i][j] : 0.5;
    placeArrow(arrow, votes[i][j], 1 + 5 * share, 9);
    const [x, y] = onPlane(votes[i][j]);
    set(arrow.handle, {
      transform: `translate(${x} ${y})`, "aria-label": `vote of lower capsule ${i + 1} for upper capsule ${j + 1}`,
      "aria-valuenow": votes[i][j][0], "aria-valuetext": `x ${number(votes[i][j][0])}, y ${number(votes[i][j][1])}`, "data-value": vector(votes[i][j]),
    });
  });
  hide(sum, !now?.s.value);
  hide(out, !now?.v.value);
  if (now?.s.value) placeArrow(sum, now.s.value[j], 1.5, 7);
  if (now?.v.value) placeArrow(out, now.v.value[j], 4, 12);
  const length = now?.v.value ? Math.hypot(...now.v.value[j]) : null;
  say(caption, `Upper capsule ${j + 1}${length === null ? "" : `:  ‖v${subscript(j)}‖ = ${number(length)}`}`);
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

/** Every number: a row for each lower capsule, then s_j, v_j and its length; what this line computes is lit. */
function paintTable(view, votes, now, line) {
  const uppers = votes[0].length;
  if (!view.table.childElementCount) buildTable(view, votes.length, uppers);
  const lit = { 2: ["b"], 4: ["c"], 5: ["s"], 6: ["v", "length"], 7: ["agreement", "b"], 8: ["v", "length"] }[line];
  const put = (key, i, j, text, old) => {
    const cell = view.cells.get(`${key}/${i}/${j}`);
    say(cell, text);
    set(cell, { "data-value": text });
    cell.classList.toggle("old", old);
    cell.classList.toggle("lit", lit.includes(key));
  };
  for (let j = 0; j < uppers; j++) {
    votes.forEach((row, i) => {
      put("vote", i, j, vector(row[j]), false);
      for (const key of ["b", "c", "agreement"]) put(key, i, j, now[key].value ? number(now[key].value[i][j], 3) : "·", now[key].old);
    });
    for (const key of ["s", "v"]) put(key, 0, j, now[key].value ? vector(now[key].value[j]) : "·", now[key].old);
    put("length", 0, j, now.v.value ? number(Math.hypot(...now.v.value[j]), 3) : "·", now.v.old);
  }
}

function buildTable(view, lowers, uppers) {
  view.cells = new Map();
  const cell = (key, i, j, span) => {
    const made = html("td", { colspan: span ?? 1, "data-card": { vote: "u_hat", length: "length" }[key] ?? key });
    view.cells.set(`${key}/${i}/${j}`, made);
    return made;
  };
  const js = Array.from({ length: uppers }, (_, j) => j);
  const foot = (key, name) => html("tr", { class: "foot" }, html("th", { scope: "row" }, name), ...js.map((j) => cell(key, 0, j, 4)));
  view.table.replaceChildren(
    html("thead", {},
      html("tr", {}, html("td"), ...js.map((j) => html("th", { colspan: 4, scope: "colgroup", class: "upper" }, `upper ${j + 1}`))),
      html("tr", {}, html("th", { scope: "col" }, "i"), ...js.flatMap(() => ["û", "b", "c", "û·v"].map((name) => html("th", { scope: "col" }, name))))),
    html("tbody", {}, ...Array.from({ length: lowers }, (_, i) =>
      html("tr", {}, html("th", { scope: "row" }, String(i + 1)), ...js.flatMap((j) => ["vote", "b", "c", "agreement"].map((key) => cell(key, i, j)))))),
    html("tfoot", {}, foot("s", "s"), foot("v", "v"), foot("length", "‖v‖")));
}

/** The current line with its numbers, for the first capsule that it is about. */
function explain({ logits, couplings, s, v, agreement }, votes, { t, line }) {
  const b = logits[t][0], c = couplings[t], one = subscript(0), oneOne = subscript(0, 0);
  if (line === 2) return "No vote counts more than another yet: every logit is zero.";
  if (line === 4) {
    const powers = b.map((value) => `e^${number(value)}`);
    return `c${oneOne} = ${powers[0]} / (${powers.join(" + ")}) = ${number(c[0][0], 3)}.  Each row of c adds up to one.`;
  }
  if (line === 5) {
    const terms = votes.map((row, i) => `${number(c[i][0])}·${vector(row[0])}`);
    return `s${one} = ${terms.join(" + ")} = ${vector(s[t][0])}.`;
  }
  const length = Math.hypot(...s[t][0]);
  if (line === 6) return `‖s${one}‖ = ${number(length)} becomes ‖v${one}‖ = ${number(length ** 2)} / ${number(1 + length ** 2)} = ${number(Math.hypot(...v[t][0]))}; the direction stays.`;
  if (line === 7) return `b${oneOne} = ${number(b[0])} + ${vector(votes[0][0])} · ${vector(v[t][0])} = ${number(b[0] + agreement[t][0][0])}.  A vote that agrees will count more.`;
  const best = v[t].map((value) => Math.hypot(...value)).reduce((a, value, j, all) => (value > all[a] ? j : a), 0);
  return `Upper capsule ${best + 1} is the longest, ${number(Math.hypot(...v[t][best]))}: its votes, each times its coupling, add up to the longest sum.`;
}

function paintSquash(view, now) {
  const list = now.s.value ?? [];
  while (view.dots.childElementCount > 2 * list.length) view.dots.lastChild.remove();
  while (view.dots.childElementCount < 2 * list.length) view.dots.append(svg("circle", { class: "curve-dot", r: 4 }), svg("text"));
  list.forEach((value, j) => {
    const [x, y] = view.squashAt(Math.hypot(...value));
    set(view.dots.children[2 * j], { cx: x, cy: y });
    set(view.dots.children[2 * j + 1], { x: x + 8, y: y + 12 });
    say(view.dots.children[2 * j + 1], `${j + 1}`);
  });
}
