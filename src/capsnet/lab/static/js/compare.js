// Panel 6, optional: the answer of a model without capsules to the same input, class by class. It replaces the pose panel,
// or appears next to it on a wide screen.

import { Newest } from "./requests.js";
import { html, number, say, set } from "./elements.js";
import { millions } from "./header.js";

const ASK_AGAIN_MILLISECONDS = 1000;
const NO_CHANGES = {}; // the other model is routed as it was trained

export function mount(root, lab) {
  const view = { root, lab, other: null, answer: null, asked: null, rows: [] };
  view.encoder = new Newest(
    (question) => lab.engine.encode(question.pixels, question),
    (answer, question) => answered(view, answer, question),
    (error) => failed(view, error),
  );
  const button = document.getElementById("compare");
  button.addEventListener("click", () => toggle(view));
  view.verdict = html("p", { class: "verdict", id: "compare-verdict", "aria-live": "polite" });
  view.head = html("div", { class: "compare-head small" });
  view.list = html("div", { class: "compare-rows" });
  root.append(view.verdict, view.head, view.list,
    html("p", { class: "small muted" },
      "Rotate, scale, shear or move the input with its handles: which model stays correct longer?"));
  lab.on((_, changed) => onFrame(view, button, changed));
}

/** The model of the other kind with the same input size and classes. */
export function partner(models, model) {
  const same = (a, b) => a.length === b.length && a.every((value, k) => value === b[k]);
  const fits = (other) => same(other.image_shape, model.image_shape) && same(other.classes, model.classes);
  return models.find((other) => other.capsules !== model.capsules && fits(other)) ?? null;
}

/** Turn it on. If the current model has no partner, change to one that has, with a message. */
function toggle({ lab }) {
  if (lab.state.compare) return lab.update({ compare: false });
  if (!lab.model) return;
  if (partner(lab.models, lab.model)) return lab.update({ compare: true, view: "lab" });
  const pair = lab.models.find((model) => model.capsules && partner(lab.models, model));
  if (!pair) return lab.notice("There is no CNN with the same input size and classes to compare with.");
  lab.notice(`No CNN has the input size of ${lab.model.name}, so the model was changed to ${pair.name}.`);
  lab.update({ compare: true, view: "lab", model: pair.name });
}

function onFrame(view, button, changed) {
  const { lab, root } = view;
  const other = lab.model && lab.state.compare ? partner(lab.models, lab.model) : null;
  if (other !== view.other) view.answer = null;
  view.other = other;
  const on = lab.state.compare && Boolean(lab.model);
  set(button, { "aria-pressed": lab.state.compare });
  root.hidden = !on;
  document.body.toggleAttribute("data-compare", on);
  if (!on) return;
  if (!view.other) return alone(view);
  ask(view);
  if (changed.has("model") || changed.has("models") || !view.rows.length) build(view);
  paint(view);
}

function alone(view) {
  view.answer = null;
  view.rows = [];
  view.head.replaceChildren();
  view.list.replaceChildren();
  say(view.verdict, "No CNN has the same input size and classes as this model.");
}

function ask(view) {
  const { lab, other } = view;
  if (!lab.input || lab.empty || lab.status === "gone") {
    view.asked = null;
    return;
  }
  const question = { pixels: lab.input, model: other.name, routing: NO_CHANGES };
  if (view.asked && Object.keys(question).every((key) => view.asked[key] === question[key])) return;
  view.asked = question;
  view.encoder.request(question);
}

function answered(view, answer, question) {
  if (question.model !== view.other?.name) return;
  view.answer = answer;
  view.lab.poke("compare-result");
}

/** Ask a busy server again; main.js handles a lost one. */
function failed(view, error) {
  const { lab } = view;
  if (lab.status === "gone") return;
  lab.notice(error.message);
  if (error.status !== 503) return;
  setTimeout(() => {
    view.asked = null;
    lab.poke("compare-result");
  }, ASK_AGAIN_MILLISECONDS);
}

/** Capsules left, CNN right, whichever is the current model. */
function sides({ lab, other, answer }) {
  const mine = { model: lab.model, activations: lab.result?.activations ?? null };
  const theirs = { model: other, activations: answer?.activations ?? null };
  return lab.model.capsules ? [mine, theirs] : [theirs, mine];
}

function build(view) {
  const heads = sides(view).map(({ model }, n) =>
    html("div", {},
      html("b", {}, n === 0 ? "Capsules" : "CNN"), html("span", {}, model.name),
      counted(model),
      html("span", { class: "num muted" }, errorOf(model))));
  view.head.replaceChildren(html("span"), ...heads);
  view.rows = view.lab.model.classes.map((name) => buildRow(name));
  view.list.replaceChildren(...view.rows.map(({ row }) => row));
}

function counted({ parameters }) {
  const value = parameters.toLocaleString("en");
  return html("span", { class: "num muted", "data-card": "parameters", "data-value": value, tabindex: 0 },
    `${millions(parameters)} parameters`);
}

function errorOf({ error_percent: error }) {
  return Number.isFinite(error) ? `${error.toFixed(2)} % test error` : "";
}

function buildRow(name) {
  const bars = ["capsules", "cnn"].map((kind) => {
    const fill = html("span", { class: "fill" });
    const value = html("span", { class: "num small" });
    const meter = html("span", { class: `meter ${kind}`, role: "meter", "aria-valuemin": 0, "aria-valuemax": 1,
      "aria-label": `${name}, ${kind === "cnn" ? "CNN" : "capsules"}` }, fill);
    return { fill, value, meter };
  });
  const cells = bars.flatMap(({ meter, value }) => [meter, value]);
  return { bars, row: html("div", { class: "compare-row" }, html("span", { class: "name" }, name), ...cells) };
}

function paint(view) {
  const both = sides(view);
  const { lab } = view;
  view.rows.forEach(({ bars, row }, k) => {
    bars.forEach(({ fill, value, meter }, n) => {
      const length = lab.empty ? null : both[n].activations?.[k];
      fill.style.width = `${100 * Math.min(1, length ?? 0)}%`;
      say(value, Number.isFinite(length) ? number(length) : "–");
      set(meter, { "aria-valuenow": (length ?? 0).toFixed(3) });
      meter.classList.toggle("first", Number.isFinite(length) && best(both[n].activations) === k);
    });
    row.classList.toggle("told", both.some(({ activations }) => activations && best(activations) === k));
  });
  say(view.verdict, verdict(both, lab));
}

function best(activations) {
  return activations.indexOf(Math.max(...activations));
}

function verdict([capsules, cnn], lab) {
  if (lab.empty) return "The input is empty.";
  if (!capsules.activations || !cnn.activations) return "…";
  const { classes } = lab.model;
  const [one, other] = [best(capsules.activations), best(cnn.activations)];
  const [length, share] = [number(capsules.activations[one]), number(cnn.activations[other])];
  if (one === other) return `Both say ${classes[one]}: ${length} and ${share}.`;
  return `They disagree: the capsules say ${classes[one]} (${length}), the CNN says ${classes[other]} (${share}).`;
}
