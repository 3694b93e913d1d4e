// A tour of five steps, each completed by doing it. It covers nothing that the step needs, can be left at any time and
// taken again from "?"; that it was seen is remembered in this browser only.

import { html, say, set } from "./elements.js";
import { recall, remember } from "./memory.js";

const ADVANCE_MILLISECONDS = 900;

/** done(lab, then): `then` is what the state was when the step began. */
const STEPS = [
  { panel: "panel-input", beside: "panel-primary", title: "Give it a digit",
    text: "Draw one on the canvas, or take a test digit from “Digits”.",
    done: (lab, then) => lab.state.input !== then.input && !lab.empty },
  { panel: "panel-primary", beside: "panel-routing", title: "Look at a part",
    text: "Point at a primary capsule (or focus the maps and use the arrow keys): " +
      "its receptive field lights up on the input.",
    done: (lab) => Boolean(lab.transient.receptive) },
  { panel: "panel-routing", beside: "panel-classes", title: "Watch the routing",
    text: "Press Play: at first every capsule speaks for every class; step by step those that agree find each other.",
    done: (lab, then) => lab.state.routing.t !== then.routing.t },
  { panel: "panel-classes", beside: "panel-pose", title: "Choose a class",
    text: "Click a bar. Everything else now speaks of that class, even if it is not there.",
    done: (lab, then) => lab.state.selected !== null && lab.state.selected !== then.selected },
  { panel: "panel-pose", beside: "panel-classes", title: "Move its pose",
    text: "Drag a slider and see what that number means to the network.",
    done: (lab, then) => lab.state.tweak !== then.tweak },
];

export function mount(root, lab) {
  const button = document.getElementById("tour");
  const view = { root, lab, button, step: -1, then: null, timer: 0 };
  view.count = html("span", { class: "small muted num" });
  view.title = html("h3");
  view.text = html("p", { "aria-live": "polite" }); // a new step is read out; the focus stays where the hand is
  view.skip = html("button", { type: "button", class: "plain", onclick: () => go(view, view.step + 1) }, "Skip");
  view.close = html("button", { type: "button", onclick: () => end(view) }, "Leave the tour");
  view.box = html("div", { class: "tour", role: "dialog", "aria-label": "Tour", hidden: true, tabindex: -1 },
    html("div", { class: "row" }, view.title, html("span", { class: "spread" }), view.count), view.text,
    html("div", { class: "row" }, view.close, html("span", { class: "spread" }), view.skip));
  root.append(view.box);
  button.addEventListener("click", () => (view.step < 0 ? begin(view) : end(view)));
  button.classList.toggle("fresh", recall("tour") !== "seen");
  addEventListener("keydown", (event) => event.key === "Escape" && view.step >= 0 && end(view));
  addEventListener("resize", () => view.step >= 0 && place(view));
  lab.on(() => watch(view));
}

function begin(view) {
  const { lab } = view;
  // What the steps need: capsules with a decoder, and an iteration to step to
  const able = ({ kind, has_decoder: decoder }) => kind === "capsnet" && decoder;
  const model = lab.model && !able(lab.model) ? lab.models.find(able) : null;
  if (model) lab.notice(`Changed to ${model.name}: the tour needs capsules and a decoder.`);
  if (model) lab.update({ model: model.name });
  const iterations = Math.max(2, lab.state.routing.iterations);
  lab.update({ view: "lab", compare: false, routing: { t: 0, iterations } });
  go(view, 0);
  view.box.focus({ preventScroll: true });
}

function go(view, step) {
  clearTimeout(view.timer);
  view.timer = 0;
  for (const { panel } of STEPS) document.getElementById(panel).toggleAttribute("data-toured", false);
  view.step = step;
  // Measured from what the step changes, once the frame of beginning it is over
  view.then = null;
  requestAnimationFrame(() => (view.then = view.lab.state));
  view.box.hidden = false;
  delete view.box.dataset.done;
  if (step >= STEPS.length) return finish(view);
  const { panel, title, text } = STEPS[step];
  document.getElementById(panel).toggleAttribute("data-toured", true);
  say(view.title, title);
  say(view.text, text);
  say(view.count, `${step + 1} of ${STEPS.length}`);
  say(view.skip, "Skip");
  say(view.close, "Leave the tour");
  view.skip.hidden = false;
  document.getElementById(panel).scrollIntoView({ block: "nearest" });
  place(view);
}

function finish(view) {
  say(view.title, "That was all of it");
  say(view.text, "Lay two digits over one another, compare with a CNN, or do the routing by hand. " +
    "The address bar holds everything: send it.");
  say(view.count, "");
  say(view.close, "Done");
  view.skip.hidden = true;
  remember("tour", "seen");
}

function end(view) {
  clearTimeout(view.timer);
  view.timer = 0;
  view.step = -1;
  view.box.hidden = true;
  for (const { panel } of STEPS) document.getElementById(panel).toggleAttribute("data-toured", false);
  remember("tour", "seen");
  view.button.classList.remove("fresh");
  view.button.focus();
}

function watch(view) {
  const step = STEPS[view.step];
  set(view.button, { "aria-expanded": view.step >= 0 });
  if (!step || !view.then || view.timer || !step.done(view.lab, view.then)) return;
  view.box.dataset.done = "";
  say(view.count, "✓ done");
  view.timer = setTimeout(() => go(view, view.step + 1), ADVANCE_MILLISECONDS);
}

/** Over the neighbour's lower part on a wide screen; at the foot of a narrow one, which the style sheet does. */
function place(view) {
  const { panel, beside } = STEPS[view.step] ?? {};
  if (!panel) return;
  const mine = document.getElementById(panel).getBoundingClientRect();
  const other = document.getElementById(beside).getBoundingClientRect();
  const right = other.left > mine.left;
  const width = view.box.offsetWidth;
  const x = right ? other.left + 10 : other.right - width - 10;
  view.box.style.left = `${Math.max(8, Math.min(innerWidth - width - 8, x))}px`;
}
