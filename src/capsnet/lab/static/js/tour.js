// A tour of five steps, each completed by doing it. It never covers what a step needs, can be closed at any time and
// started again with "?". Only this browser remembers that it was seen.

import { html, say, set } from "./elements.js";
import { recall, remember } from "./memory.js";

const ADVANCE_MILLISECONDS = 900;

/** done(lab, then): `then` is the state at the beginning of the step. */
const STEPS = [
  { panel: "panel-input", beside: "panel-primary", title: "Draw a digit",
    text: "Draw on the canvas, or choose a test digit under “Digits”.",
    done: (lab, then) => lab.state.input !== then.input && !lab.empty },
  { panel: "panel-primary", beside: "panel-routing", title: "Look at a primary capsule",
    text: "Point at a capsule, or focus the maps and use the arrow keys. " +
      "Its receptive field is highlighted on the input.",
    done: (lab) => Boolean(lab.transient.receptive) },
  { panel: "panel-routing", beside: "panel-classes", title: "Watch the routing",
    text: "Press Play. At first every capsule sends the same share to every class. " +
      "With each routing iteration more goes where the votes agree.",
    done: (lab, then) => lab.state.routing.t !== then.routing.t },
  { panel: "panel-classes", beside: "panel-pose", title: "Select a class",
    text: "Click a bar. All panels now show that class, even if it is not in the image.",
    done: (lab, then) => lab.state.selected !== null && lab.state.selected !== then.selected },
  { panel: "panel-pose", beside: "panel-classes", title: "Change the pose",
    text: "Drag a slider and see how this pose dimension changes the reconstruction.",
    done: (lab, then) => lab.state.tweak !== then.tweak },
];

export function mount(root, lab) {
  const button = document.getElementById("tour");
  const view = { root, lab, button, step: -1, then: null, timer: 0 };
  view.count = html("span", { class: "small muted num" });
  view.title = html("h3");
  view.text = html("p", { "aria-live": "polite" }); // screen readers announce a new step; the focus stays
  view.skip = html("button", { type: "button", class: "plain", onclick: () => go(view, view.step + 1) }, "Skip");
  view.close = html("button", { type: "button", onclick: () => end(view) }, "Close");
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
  // The steps need capsules, a decoder and two routing iterations
  const able = ({ routing, has_decoder: decoder }) => routing && decoder;
  const model = lab.model && !able(lab.model) ? lab.models.find(able) : null;
  if (model) lab.notice(`The tour needs capsules and a decoder, so the model was changed to ${model.name}.`);
  if (model) lab.update({ model: model.name });
  lab.update({ view: "lab", compare: false, routing: { t: 0 } });
  if (lab.routingOptions().iterations === 1) lab.update({ routing: { options: { iterations: 2 } } });
  go(view, 0);
  view.box.focus({ preventScroll: true });
}

function go(view, step) {
  clearTimeout(view.timer);
  view.timer = 0;
  for (const { panel } of STEPS) document.getElementById(panel).toggleAttribute("data-toured", false);
  view.step = step;
  // Compared with the state after the first frame of the step
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
  say(view.close, "Close");
  view.skip.hidden = false;
  document.getElementById(panel).scrollIntoView({ block: "nearest" });
  place(view);
}

function finish(view) {
  say(view.title, "End of the tour");
  say(view.text, "Next, overlap two digits, compare with a CNN, or route by hand. " +
    "The address bar contains the whole state, so you can share it.");
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

/** Over the lower part of the neighbouring panel; on a narrow screen the style sheet places it at the bottom. */
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
