// Panel 4, the class capsules: the activation of each (its length in section 3 of the paper) says whether its class is
// present, with the margins 0.1 and 0.9 of Eq. 4 marked. If several classes may be present, each is reconstructed in its
// own colour, and any other class can be reconstructed as well, to see what is NOT there (Fig. 5).

import { heading, html, number, say, set } from "./elements.js";
import { maps, overlay, picture } from "./paint.js";

const PRESENT = 0.5; // a class is present if its activation exceeds this
const MOST_PAINTED = 12;
const REPAINT = ["result", "routing", "selected", "model", "theme", "decoder", "input", "models"];

export function mount(root, lab) {
  const title = heading(root, "Class capsules");
  const prediction = html("p", { id: "prediction", role: "status", "aria-live": "polite" });
  const list = html("div", { id: "classes", role: "radiogroup" });
  const scale = html("div", { class: "class-scale small num", "aria-hidden": "true" }, ...margins());
  const note = html("p", { class: "small class-note" });
  const follow = html("button", { class: "small", type: "button", onclick: () => lab.update({ selected: null }) });
  const decoded = html("div", { class: "decoded" });
  const painted = html("div", { class: "painted", "aria-hidden": "true" }); // the bars say the same in text
  root.append(prediction, list, scale, html("div", { class: "row class-foot" }, note, follow), decoded, painted);
  const view = { root, title, prediction, list, note, follow, decoded, painted, rows: [], model: null, job: 0 };
  lab.on((_, changed) => {
    if (REPAINT.some((key) => changed.has(key))) paint(view, lab);
  });
  paint(view, lab);
}

/** What the number of a class is called: a length where the paper's routing runs, else an activation or probability. */
export function measure(model) {
  if (!model?.capsules) return "probability";
  return model.routing?.name === "dynamic" ? "length" : "activation";
}

function margins() {
  return [0.1, 0.9].map((at) =>
    html("span", { class: `at-${at * 10}`, "data-card": "margin", "data-value": at }, String(at)),
  );
}

function paint(view, lab) {
  if (lab.waiting && view.rows.length) return;
  if (lab.model && view.model !== lab.model) rebuild(view, lab);
  const { result } = lab;
  view.root.classList.toggle("nothing", !result);
  if (!result) say(view.prediction, without(lab));
  if (!result || result.activations.length !== view.rows.length) return;
  view.rows.forEach((row, k) => paintRow(row, k, lab));
  speak(view.prediction, sentence(lab));
  view.root.classList.toggle("unsure", largest(result.activations) <= PRESENT);
  paintFoot(view, lab);
  paintDecoded(view, lab);
  paintEach(view, lab);
}

/** The message while there is no answer. */
function without({ model, input, empty, state }) {
  if (empty) return state.input.mode === "image" && !state.input.pixels ? "No image yet." : "The canvas is empty.";
  return model && !input ? "There is no input." : "…";
}

function rebuild(view, lab) {
  view.model = lab.model;
  view.rows = lab.model.classes.map((name, k) => row(name, k, lab));
  view.list.replaceChildren(...view.rows.map((parts) => parts.label));
  view.painted.replaceChildren();
  view.list.classList.toggle("wide-names", lab.model.classes.some((name) => name.length > 2));
  // A model without capsules answers with probabilities, for which there are no margins
  const shares = measure(lab.model) === "probability";
  view.root.classList.toggle("shares", shares);
  say(view.title, shares ? "Classes" : "Class capsules");
  set(view.list, { "aria-label": `${shares ? "Classes" : "Class capsules"}: ${measure(lab.model)} of each` });
}

/** A radio button styled as a bar: the browser provides arrow keys, focus and names. */
function row(name, k, lab) {
  const radio = html("input", {
    type: "radio", name: "class", value: k, class: "unseen", "aria-label": `class ${name}`,
    onchange: () => lab.update({ selected: k }),
  });
  const fill = html("span", { class: "fill" });
  const then = html("span", { class: "then", title: `${measure(lab.model)} at the routing iteration shown` });
  const meter = html(
    "span",
    {
      class: "meter", role: "meter", "data-class": k, "data-card": measure(lab.model),
      "aria-label": `${measure(lab.model)} of ${name}`,
      "aria-valuemin": 0, "aria-valuemax": 1, "aria-valuenow": 0,
    },
    fill, then, html("i", { class: "at-1" }), html("i", { class: "at-9" }),
  );
  const value = html("span", { class: "num value" });
  const label = html("label", { class: "bar" },
    radio, html("span", { class: "name", title: name }, name), meter, value);
  return { name, label, radio, meter, fill, then, value };
}

function paintRow({ name, label, radio, meter, fill, then, value }, k, lab) {
  const length = lab.result.activations[k];
  fill.style.width = `${100 * Math.min(1, length)}%`;
  set(meter, { "aria-valuenow": length.toFixed(4), "data-value": length.toFixed(4) });
  say(value, number(length));
  set(radio, { "aria-label": `class ${name}, ${number(length)}` });
  const place = together(lab).indexOf(k);
  const colour = ["a", "b"][place] ?? "";
  set(label, { "data-colour": colour });
  label.classList.toggle("selected", lab.selected() === k);
  label.classList.toggle("longest", ranking(lab)[0] === k);
  if (radio.checked !== (lab.selected() === k)) radio.checked = lab.selected() === k;
  const at = activationAt(lab, k);
  then.hidden = at === null || Math.abs(at - length) < 0.03; // a ring at the end of the bar adds nothing
  if (at !== null) then.style.left = `${100 * Math.min(1, at)}%`;
}

/** The activation of class k at the routing iteration that is shown; null without routing. */
export function activationAt({ result, state }, k) {
  if (!result?.step_activations) return null;
  const [steps, classes] = result.step_activations.shape;
  return result.step_activations[Math.min(state.routing.t, steps - 1) * classes + k];
}

/** The classes, the most active first. */
function ranking({ result }) {
  return result.header.ranking;
}

/** Whether several classes may be present: the model is multi-label, or two digits overlap before its capsules. */
function several({ model, state }) {
  return Boolean(model) && (model.multi_label || (model.capsules && state.input.mode === "overlap"));
}

/** The classes shown together in colours a and b: the two most active, or those of them that are present. */
export function together(lab) {
  if (!several(lab) || !lab.result) return [];
  const two = ranking(lab).slice(0, 2);
  return lab.state.input.mode === "overlap" ? inOrder(two, lab) : two.filter((k) => isPresent(lab, k));
}

/** A class that is one of the two digits gets the colour of that digit. */
function inOrder([longer, shorter], lab) {
  const { a, b } = lab.state.input.overlap;
  const swapped = lab.digit(b)?.label === longer || lab.digit(a)?.label === shorter;
  return swapped ? [shorter, longer] : [longer, shorter];
}

function isPresent({ result }, k) {
  return result.activations[k] > PRESENT;
}

function largest(values) {
  return values.reduce((a, b) => Math.max(a, b), 0);
}

/** The prediction in a sentence. */
export function sentence(lab) {
  const { result, model } = lab;
  const [first] = ranking(lab);
  const length = number(result.activations[first]);
  if (measure(model) === "probability" && !several(lab)) return `This is ${named(model.classes[first])} (${length}).`;
  if (result.activations[first] <= PRESENT) return `No class: every ${measure(model)} is below ${PRESENT}.`;
  if (!several(lab)) return `This is ${named(model.classes[first])} (${measure(model)} ${length}).`;
  const seen = together(lab).filter((k) => isPresent(lab, k)).map((k) => named(model.classes[k]));
  return seen.length === 2 ? upper(`${seen[0]} and ${seen[1]}.`) : upper(`only ${seen[0]} (${length}).`);
}

/** Keep the bracket on one line. */
function speak(prediction, text) {
  if (prediction.textContent === text) return;
  const cut = text.indexOf(" (");
  const parts = cut < 0 ? [text] : [text.slice(0, cut), " ", html("span", { class: "together" }, text.slice(cut + 1))];
  prediction.replaceChildren(html("span", {}, ...parts));
}

function named(name) {
  if (!/^\d$/.test(name)) return `“${name}”`;
  return name === "8" ? "an 8" : `a ${name}`;
}

function upper(text) {
  return text[0].toUpperCase() + text.slice(1);
}

function paintFoot({ note, follow }, lab) {
  const [first, second] = ranking(lab);
  const { activations } = lab.result;
  const lead = activations[first] - activations[second];
  const then = (lab.result.step_activations?.shape[0] ?? 0) > 1;
  if (then) say(note, `○ at iteration ${lab.state.routing.t + 1}`);
  else say(note, several(lab) ? "" : `ahead of ${lab.model.classes[second]} by ${number(lead)}`);
  follow.hidden = lab.state.selected === null;
  say(follow, `Show ${lab.model.classes[first]} again`);
}

function paintDecoded(view, lab) {
  const { decoded } = view;
  decoded.hidden = !(several(lab) && lab.decoder && lab.result.poses);
  if (decoded.hidden) return;
  const tiles = tilesFor(lab);
  while (decoded.children.length > tiles.length) decoded.lastChild.remove();
  while (decoded.children.length < tiles.length) decoded.append(html("figure", {}, html("canvas"), html("figcaption")));
  tiles.forEach((tile, n) => paintTile(decoded.children[n], tile, lab));
}

/** Both together, each by itself, and the selected class if it is neither. */
function tilesFor(lab) {
  const seen = together(lab);
  const parts = seen.map((k, n) => ({ pixels: decodeClass(lab, k), colour: "ab"[n], text: lab.model.classes[k] }));
  const ground = { pixels: lab.input.map((value) => 0.3 * value), colour: "ink" }; // the pale input below
  const tiles = parts.length === 2 ? [{ parts: [...parts, ground], text: "both", also: "over the input" }] : [];
  const doubt = (k) => (isPresent(lab, k) ? "" : "unsure");
  tiles.push(...parts.map((part, n) => ({ parts: [part], text: part.text, also: doubt(seen[n]) })));
  const other = lab.selected();
  if (!seen.includes(other)) {
    const pixels = decodeClass(lab, other);
    tiles.push({ parts: [{ pixels, colour: "ink" }], text: lab.model.classes[other], also: "not present" });
  }
  return tiles;
}

function paintTile(figure, { parts, text, also }, lab) {
  const [canvas, caption] = figure.children;
  const shape = lab.decoder.shape;
  if (shape[0] === 3) picture(canvas, parts[0].pixels, shape, maps(lab.colours).ink);
  else {
    const layers = parts.map(({ pixels, colour }) => ({ pixels, colour: lab.colours[colour] }));
    overlay(canvas, layers, shape, lab.colours.panel);
  }
  set(canvas, { role: "img", "aria-label": `Reconstruction: ${text} ${also}` });
  set(figure, { "data-colour": parts.length === 1 ? parts[0].colour : "both" });
  say(caption, also ? `${text}, ${also}` : text);
}

/** The reconstruction of each class, small and a few at a time. */
function paintEach(view, lab) {
  const { painted } = view;
  painted.hidden = several(lab) || !lab.decoder || !lab.result.poses || view.rows.length > MOST_PAINTED;
  if (painted.hidden) return;
  if (painted.childElementCount !== view.rows.length + 1) painted.replaceChildren(...eachTile(lab));
  [...painted.children].slice(1).forEach((figure, k) => figure.classList.toggle("selected", k === lab.selected()));
  const key = `${lab.colours.panel}${lab.colours.ink}`;
  if (view.paintedOf === lab.result && view.paintedIn === key && view.paintedBy === lab.decoder) return;
  Object.assign(view, { paintedOf: lab.result, paintedIn: key, paintedBy: lab.decoder });
  cancelAnimationFrame(view.job);
  const result = lab.result;
  const slice = (from) => {
    if (lab.result !== result || !lab.decoder) return;
    for (let k = from; k < Math.min(from + 3, view.rows.length); k++) {
      picture(painted.children[k + 1].firstChild, decodeClass(lab, k), lab.decoder.shape, maps(lab.colours).ink);
    }
    if (from + 3 < view.rows.length) view.job = requestAnimationFrame(() => slice(from + 3));
  };
  view.job = requestAnimationFrame(() => slice(0));
}

function eachTile(lab) {
  const tile = (name, k) => html("figure", { title: name, onclick: () => lab.update({ selected: k }) },
    html("canvas"), html("figcaption", {}, name.length > 3 ? "" : name));
  return [html("h3", {}, "Reconstructions"), ...lab.model.classes.map(tile)];
}

function decodeClass(lab, k) {
  const q = lab.result.poses.shape[1];
  return lab.decoder.decode(lab.result.poses.subarray(k * q, k * q + q), k);
}
