// The second view, routing by hand: a few lower capsules whose votes in the plane can be dragged, an algorithm with its
// current step highlighted, every number, and how its couplings differ from those of another algorithm on the same votes.
// The numbers come from the routing code of the networks (engine.js); this file draws them. hand-dynamic.js
// describes the lines of Procedure 1, hand-steps.js the steps of any other algorithm.

import { Newest, Refusal } from "./requests.js";
import { html, number, say, set, svg } from "./elements.js";
import { buildCouplings, paintCouplings } from "./hand-couplings.js";
import { lineByLine, vector } from "./hand-dynamic.js";
import { paintPlane, plane } from "./hand-plane.js";
import { stepwise } from "./hand-steps.js";
import { byHand } from "./routings.js";
import { optionControls } from "./options.js";
import { optionValue } from "./state.js";

const START = { t: 0, line: 2 };
const END = { t: 99, line: 8 }; // the last step, however many there are

const PRESETS = {
  "Agreeing": [[[0.8, 0.5], [-0.5, 0.7]], [[0.7, 0.65], [0.7, -0.4]], [[0.9, 0.35], [-0.6, -0.6]]],
  "One outlier": [[[0.8, 0.5], [-0.3, 0.6]], [[0.7, 0.65], [0.5, -0.5]], [[0.85, 0.35], [-0.6, -0.3]], [[-0.7, 0.5], [0.1, 0.9]]],
  "Opposed": [[[0.9, 0.2], [0.3, 0.8]], [[-0.9, -0.1], [0.1, 0.9]], [[0.8, 0.1], [-0.2, 0.7]], [[-0.8, -0.25], [0.4, 0.7]]],
  "Two groups": [[[0.9, 0.4], [0.2, -0.2]], [[0.8, 0.6], [-0.2, 0.1]], [[0.1, -0.3], [-0.8, 0.5]], [[-0.2, 0.1], [-0.9, 0.35]]],
};

export function mount(root, lab) {
  const view = { root, lab, answer: null, asked: "", planes: [], playing: 0, controls: [] };
  view.newest = new Newest(
    ({ votes, first, second }) => Promise.all([first, second].map((algorithm) => traceOf(lab, votes, algorithm))),
    (traces, question) => received(view, traces, question),
    (error) => failed(view, error),
  );
  root.append(html("div", { class: "hand" },
    html("section", { class: "hand-left", "aria-label": "Votes" }, head(view), planes(view), numbers(view)),
    html("section", { class: "hand-right", "aria-label": "Algorithm" }, summaries(view), controls(view), procedure(view), said(view), squashCurve(view))));
  root.addEventListener("keydown", (event) => onKey(view, event));
  lab.on((_, changed) => onFrame(view, changed));
}

const COUPLING = { name: "coupling", type: "range", value: 4, min: 0, max: 8, step: 0.1, help: "κ: how strongly oscillators pull each other into phase." };
const SMOOTH = { iterations: 10, step: 0.2 }; // oscillators move in small steps here, so that the eye can follow

/** The trace of an algorithm; the page computes that of oscillators, whose coupling strength is a parameter elsewhere. */
function traceOf({ engine }, votes, { name, options }) {
  if (name !== "kuramoto") return engine.hand(votes, name, options);
  const { coupling, ...others } = options;
  return byHand(votes, name, others, { kappa: votes[0].map(() => coupling) });
}

/** Ask again when the server is back or less busy; other errors stay. */
function failed(view, error) {
  const again = () => {
    view.asked = "";
    view.lab.poke("hand");
  };
  if (!(error instanceof Refusal)) return void (view.asked = "");
  view.lab.notice(error.message);
  if (error.status === 503) setTimeout(again, 1000);
}

// ---------------------------------------------------------------- the two algorithms and the current step

/** The chosen algorithm and the one it is compared with, each as the engine describes it, with the options in use. */
function shown({ lab }) {
  const { routing, against, options } = lab.state.hand;
  const find = (name) => asOscillators(lab.routings.find((one) => one.name === name));
  const first = find(routing) ?? find("dynamic");
  const usual = find(first.name === "dynamic" ? "uniform" : "dynamic");
  const second = against === first.name ? usual : find(against) ?? usual;
  return { first: inUse(first, options), second: inUse(second, options) };
}

function asOscillators(offer) {
  if (offer?.name !== "kuramoto") return offer;
  return { ...offer, options: [COUPLING, ...offer.options.map((option) => ({ ...option, value: SMOOTH[option.name] ?? option.value }))] };
}

/** Options that both algorithms have, such as the number of iterations, are shared. */
function inUse(offer, changes) {
  const options = Object.fromEntries(offer.options.map((control) => [control.name, optionValue(control, changes[control.name])]));
  return { name: offer.name, offer, options };
}

/** The answer to what is shown; that to other votes is good enough until theirs arrives. */
function answered(view) {
  const { votes } = view.lab.state.hand;
  const { answer } = view;
  if (!answer || answer.votes.length !== votes.length || answer.votes[0].length !== votes[0].length) return null;
  return settings(answer) === settings(shown(view)) ? answer : null;
}

const settings = ({ first, second }) => JSON.stringify([first, second].map(({ name, options }) => [name, options]));

function described(view) {
  const { first } = shown(view);
  const trace = answered(view)?.traces[0];
  return first.name === "dynamic" ? lineByLine(first.options, trace) : stepwise(first.offer, trace);
}

function position(view) {
  const { t, line } = view.lab.state.hand;
  const list = described(view).stops;
  const found = list.findIndex((stop) => stop.t === t && stop.line === line);
  return { list, at: found >= 0 ? found : t > list.at(-1).t ? list.length - 1 : list.findIndex((stop) => stop.t === t) };
}

function go(view, by) {
  const { list, at } = position(view);
  view.lab.update({ hand: list[Math.max(0, Math.min(list.length - 1, at + by))] });
}

// ---------------------------------------------------------------- engine

function ask(view) {
  const question = { votes: view.lab.state.hand.votes, ...shown(view) };
  const key = JSON.stringify(question.votes) + settings(question);
  if (key === view.asked) return;
  view.asked = key;
  view.newest.request(question);
}

function received(view, traces, question) {
  view.answer = { traces, ...question };
  view.lab.poke("hand-trace");
}

function onFrame(view, changed) {
  if (changed.has("models")) fillChoice(view);
  if (view.lab.state.view !== "hand" || !view.lab.routings.length) return stop(view);
  warnAboutUnknown(view);
  if (view.lab.status !== "gone") ask(view);
  paint(view);
}

/** A link may name an algorithm that this Lab does not have. */
function warnAboutUnknown({ lab }) {
  const { routing } = lab.state.hand;
  if (lab.routings.some(({ name }) => name === routing)) return;
  lab.notice(`This Lab has no routing “${routing}”, so the page shows dynamic.`);
  lab.update({ hand: { routing: "dynamic" } });
}

// ---------------------------------------------------------------- building

function head(view) {
  const { lab } = view;
  const take = (name) => html("button", { type: "button", "data-preset": name,
    onclick: () => lab.update({ hand: { votes: PRESETS[name], ...(shown(view).first.name === "dynamic" ? START : END) } }) }, name);
  view.less = html("button", { type: "button", class: "icon", "aria-label": "Fewer lower capsules", onclick: () => resize(view, -1) }, "−");
  view.more = html("button", { type: "button", class: "icon", "aria-label": "More lower capsules", onclick: () => resize(view, 1) }, "+");
  view.count = html("output", { class: "num" });
  return html("div", { class: "hand-head" },
    html("h2", {}, "Routing by hand"), choice(view),
    html("p", { class: "small muted" }, "Each lower capsule votes for every upper capsule. Drag a vote, or move it with the arrow keys."),
    html("div", { class: "row" }, ...Object.keys(PRESETS).map(take), oscillators(view)),
    html("div", { class: "row tight" }, view.less, view.count, view.more));
}

/** Kuramoto routing from its first step, playing. */
function oscillators(view) {
  const play = () => {
    stop(view);
    view.lab.update({ hand: { routing: "kuramoto", t: 0, line: 0 } });
    toggle(view);
  };
  view.oscillators = html("button", { type: "button", id: "hand-oscillators", onclick: play,
    title: "Let the votes pull each other into phase, as in Kuramoto's model" }, "Oscillators");
  return view.oscillators;
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
  view.couplings = buildCouplings();
  return view.planesRow;
}

function numbers(view) {
  view.table = html("table", { class: "num hand-numbers" });
  return html("div", { class: "hand-scroll", tabindex: 0, role: "region", "aria-label": "All numbers" }, view.table);
}

/** Which algorithm, and the one it is compared with. */
function choice(view) {
  const { lab } = view;
  view.choose = html("select", { id: "hand-routing", "aria-label": "Algorithm", onchange: ({ target }) => {
    stop(view);
    lab.update({ hand: { routing: target.value, ...END } }); // where the couplings differ most
  } });
  view.against = html("select", { id: "hand-against", "aria-label": "Algorithm to compare with",
    onchange: ({ target }) => lab.update({ hand: { against: target.value } }) });
  return html("div", { class: "row" }, html("span", { class: "swatch" }, view.choose), "compared with", html("span", { class: "swatch b" }, view.against));
}

/** What the two algorithms do. */
function summaries(view) {
  view.summaries = ["swatch", "swatch b"].map((kind) => html("p", { class: `small ${kind}` }));
  return html("div", { class: "hand-summaries" }, ...view.summaries);
}

function fillChoice(view) {
  view.oscillators.hidden = !view.lab.routings.some(({ name }) => name === "kuramoto");
  for (const select of [view.choose, view.against]) {
    select.replaceChildren(...view.lab.routings.map(({ name }) => html("option", { value: name }, name)));
  }
}

function paintChoice(view, { first, second }) {
  view.choose.value = first.name;
  view.against.value = second.name;
  for (const option of view.against.options) option.disabled = option.value === first.name;
  [first, second].forEach(({ offer }, k) => say(view.summaries[k], offer.summary));
  if (view.controlsOf === first.name) return;
  view.controlsOf = first.name;
  view.controls = optionControls(first.offer.options, { prefix: "hand-option-", origin: "The default is",
    change: (name, value) => view.lab.update({ hand: { options: { [name]: value }, ...(first.name === "dynamic" ? START : END) } }) });
  view.options.replaceChildren(...view.controls.map(({ node }) => node));
}

function controls(view) {
  view.back = html("button", { type: "button", class: "icon", "aria-label": "Back", onclick: () => { stop(view); go(view, -1); } }, "‹");
  view.step = html("button", { type: "button", id: "hand-step", class: "primary", onclick: () => { stop(view); go(view, 1); } });
  view.play = html("button", { type: "button", id: "hand-play", onclick: () => toggle(view) });
  view.restart = html("button", { type: "button", onclick: () => { stop(view); view.lab.update({ hand: position(view).list[0] }); } }, "Restart");
  view.options = html("div", { class: "row routing-controls" });
  return html("div", { class: "hand-controls" },
    html("div", { class: "row" }, view.back, view.step, view.play, view.restart), view.options);
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

/** Space plays and arrow keys step, unless the focused control uses the key itself. */
function onKey(view, event) {
  const { target, key } = event;
  if (event.ctrlKey || event.metaKey || event.altKey || target.closest(".hand-scroll, select, input[type=number]")) return;
  if (key === "ArrowRight") go(view, 1);
  else if (key === "ArrowLeft") go(view, -1);
  else if (key === " " && !target.closest("button, input")) toggle(view);
  else return;
  event.preventDefault();
}

function procedure(view) {
  view.title = html("span");
  view.round = html("span", { class: "small muted num" });
  view.list = html("ol", { class: "procedure" });
  return html("div", {}, html("h3", { class: "row" }, view.title, view.round), view.list);
}

/** The lines of the algorithm; those of steps contain numbers. */
function buildLines(view, lines) {
  const key = JSON.stringify(lines);
  if (view.linesOf === key) return;
  view.linesOf = key;
  view.lines = lines.map(({ line, label, indent, code, note, card }) =>
    html("li", { class: `indent-${indent}`, "data-line": line, "data-card": card ?? null },
      html("span", { class: "line-number num", "aria-hidden": "true" }, label ?? String(line)),
      html("code", {}, code), html("span", { class: "small muted" }, note)));
  view.list.replaceChildren(...view.lines);
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
  view.squash = html("figure", { class: "squash", "data-card": "squash" },
    html("h3", {}, "Squash (Eq. 1): from the length of s to that of v"),
    svg("svg", { viewBox: "0 0 320 114", role: "img", "aria-label": "Squash curve: the length of v over the length of s" }, axes, line, view.dots));
  return view.squash;
}

// ---------------------------------------------------------------- painting

function paint(view) {
  const { votes } = view.lab.state.hand;
  const both = shown(view), answer = answered(view), algorithm = described(view);
  const { list, at } = position(view);
  rebuild(view, votes.length, votes[0].length);
  paintChoice(view, both);
  buildLines(view, algorithm.lines);
  paintControls(view, algorithm, list, at, votes.length, both.first);
  const now = answer && algorithm.known(list[at]);
  for (const one of view.planes) paintPlane(one, votes, now);
  if (!now) return;
  paintTable(view, votes, now, algorithm, list[at], both.first.offer);
  say(view.said, algorithm.explain(votes, list[at]));
  view.squash.classList.toggle("gone", !now.s);
  if (now.s) paintSquash(view, now);
  const last = list[at].t === list.at(-1).t;
  const pair = [both.first, both.second].map(({ name }, k) => ({ name, couplings: answer.traces[k].couplings }));
  paintCouplings(view.couplings, pair, last ? Infinity : list[at].t);
}

function rebuild(view, lowers, uppers) {
  const shape = `${lowers}×${uppers}`;
  if (view.shape === shape) return;
  view.shape = shape;
  view.planes = Array.from({ length: uppers }, (_, j) => plane(view, j, lowers));
  view.planesRow.replaceChildren(...view.planes.map(({ figure }) => figure), view.couplings.figure);
}

function paintControls(view, algorithm, list, at, lowers, { name, options }) {
  const { line } = list[at];
  view.back.disabled = view.restart.disabled = at === 0;
  view.step.disabled = at === list.length - 1;
  say(view.step, name === "dynamic" ? "Next line ›" : "Next step ›");
  view.play.disabled = list.length === 1;
  say(view.play, view.playing ? "❚❚ Pause" : "▶ Play");
  for (const { option, show } of view.controls) show(options[option.name]);
  say(view.count, `${lowers} lower capsules`);
  view.less.disabled = lowers <= 2;
  view.more.disabled = lowers >= 6;
  say(view.title, algorithm.title);
  say(view.round, algorithm.round(list[at]));
  for (const item of view.lines) {
    const lit = Number(item.dataset.line) === line;
    item.classList.toggle("lit", lit);
    if (lit) item.setAttribute("aria-current", "step");
    else item.removeAttribute("aria-current");
  }
}

const TEXTS = { phase: ([x, y]) => `${number((Math.atan2(y, x) * 180) / Math.PI, 0)}°`, vote: vector, s: vector, v: vector, variance: (pair) => vector(pair.map(Math.sqrt)) };
const text = (key, value) => (TEXTS[key] ?? ((one) => number(one, 3)))(value);

/** All numbers: a row per lower capsule, then rows per upper capsule; what the current line computes is highlighted. */
function paintTable(view, votes, now, { columns, rows, lit }, stop, offer) {
  const uppers = votes[0].length;
  buildTable(view, votes.length, uppers, columns, rows, offer);
  const put = (key, i, j, { value, old }, pick) => {
    const cell = view.cells.get(`${key}/${i}/${j}`), found = value ? text(key, pick(value)) : "·";
    say(cell, found);
    set(cell, { "data-value": found });
    cell.classList.toggle("old", old);
    cell.classList.toggle("lit", lit(stop).includes(key));
  };
  const known = { ...now, vote: { value: votes, old: false } };
  for (let j = 0; j < uppers; j++) {
    for (const key of Object.keys(columns)) votes.forEach((_, i) => put(key, i, j, known[key], (value) => value[i][j]));
    for (const key of Object.keys(rows)) put(key, 0, j, known[key], (value) => value[j]);
  }
}

function buildTable(view, lowers, uppers, columns, rows, { own_activations: own }) {
  const shape = JSON.stringify([lowers, uppers, columns, rows]);
  if (view.tableOf === shape) return;
  view.tableOf = shape;
  view.cells = new Map();
  const cards = { vote: "u_hat", a: own ? "activation" : "length" };
  const cell = (key, i, j, span) => {
    const made = html("td", { colspan: span ?? 1, "data-card": cards[key] ?? key });
    view.cells.set(`${key}/${i}/${j}`, made);
    return made;
  };
  const js = Array.from({ length: uppers }, (_, j) => j);
  const across = Object.keys(columns).length;
  const foot = (key, name) => html("tr", { class: "foot" }, html("th", { scope: "row" }, name), ...js.map((j) => cell(key, 0, j, across)));
  view.table.replaceChildren(
    html("thead", {},
      html("tr", {}, html("td"), ...js.map((j) => html("th", { colspan: across, scope: "colgroup", class: "upper" }, `upper capsule ${j + 1}`))),
      html("tr", {}, html("th", { scope: "col" }, "i"), ...js.flatMap(() => Object.values(columns).map((name) => html("th", { scope: "col" }, name))))),
    html("tbody", {}, ...Array.from({ length: lowers }, (_, i) =>
      html("tr", {}, html("th", { scope: "row" }, String(i + 1)), ...js.flatMap((j) => Object.keys(columns).map((key) => cell(key, i, j)))))),
    html("tfoot", {}, ...Object.entries(rows).map(([key, name]) => foot(key, name))));
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
