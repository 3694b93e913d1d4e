// The presentation: the panels one at a time, in full screen and with large type, from the input to the pose. A slide is a
// part of the state, so a link opens it.

import { measure, sentence } from "./classes.js";
import { html, say, set } from "./elements.js";

/** What a slide needs of the model, and what it says. The style sheet present.css chooses what it shows. */
const SLIDES = [
  { name: "input", title: () => "Input", text: ({ model: { image_shape: [, height, width] } }) =>
    `The network sees ${width}\u00a0×\u00a0${height} pixels. Draw on the canvas and follow the drawing through the network.` },
  { name: "primary", title: () => "Primary capsules", needs: ({ grid }) => grid,
    text: ({ model: { grid: [rows, columns], primary_types: types, primary_dim: dims, primary_squash: squashed } }) =>
      `${rows * columns * types} vectors of ${dims} numbers, ${types} ${types === 1 ? "type" : "types"} at each of ${rows}\u00a0×\u00a0${columns} positions. ` +
      `The stronger the colour of a square, the longer its vector, and the ${squashed === false ? "stronger are its votes" : "more likely its part is present"}.` },
  { name: "votes", title: () => "Votes", needs: ({ routing }) => routing,
    text: (lab) => `Every capsule predicts the pose of every class. Each dot is a vote for ${named(lab)}. ` +
      "Votes that agree point in the same direction." },
  { name: "routing", title: () => "Routing", needs: ({ routing }) => routing,
    text: ({ model: { routing: { name } } }) => (name === "dynamic"
      ? "At first, every capsule sends the same share to every class. With each iteration it sends more to the classes whose pose it predicted. Press Play."
      : `The couplings of ${name} routing: how much of its output each capsule sends to each class.`) },
  { name: "classes", title: ({ model: { capsules } }) => (capsules ? "Class capsules" : "Classes"),
    text: ({ model }) => ({
      length: "The length of a class capsule is the probability that its class is present. Several can be long at once.",
      activation: "The activation of a class capsule is the probability that its class is present.",
      probability: "The probability of each class.",
    })[measure(model)] },
  { name: "pose", title: () => "Pose", needs: ({ has_decoder: decoder, capsules }) => decoder && capsules,
    text: (lab) => `The direction of the capsule describes how this ${named(lab)} looks, such as its slant. ` +
      "Move a dimension and watch the reconstruction." },
];

const named = (lab) => lab.model.classes[lab.selected()] ?? "the class";

export function mount(root, lab) {
  const view = { root, lab, button: document.getElementById("present") };
  view.count = html("p", { class: "slide-count num" });
  view.title = html("h2");
  view.text = html("p");
  view.prediction = html("p", { class: "slide-prediction" });
  view.back = html("button", { type: "button", id: "slide-back", onclick: () => go(view, -1) }, "‹ Previous");
  view.next = html("button", { type: "button", id: "slide-next", class: "primary", onclick: () => go(view, 1) }, "Next ›");
  const close = html("button", { type: "button", id: "slide-end", onclick: () => end(view) }, "End");
  root.append(
    html("div", { class: "slide-text" },
      html("div", { "aria-live": "polite", "aria-atomic": "true" }, view.count, view.title, view.text), view.prediction),
    html("div", { class: "slide-buttons", role: "group", "aria-label": "Slides. Arrow keys and Page Up or Page Down move, Escape ends." },
      view.back, view.next, close));
  view.button.addEventListener("click", () => begin(view));
  addEventListener("keydown", (event) => onKey(view, event), true); // before the panels, which have arrow keys of their own
  document.addEventListener("fullscreenchange", () => document.fullscreenElement || end(view)); // browsers keep Escape to themselves
  lab.on(() => paint(view));
}

/** The slides that the model has something to show for. */
function slides({ model }) {
  return SLIDES.filter(({ needs }) => !needs || needs(model));
}

/** The slide that is shown; null without a presentation. */
function current({ lab }) {
  const { present, view } = lab.state;
  if (!present || view !== "lab" || !lab.model) return null;
  const all = slides(lab);
  return all.find(({ name }) => name === present) ?? all[0];
}

async function begin(view) {
  show(view, slides(view.lab)[0]);
  view.lab.update({ view: "lab" });
  paint(view);
  view.next.focus();
  try {
    await document.documentElement.requestFullscreen();
  } catch {
    // some phones have no full screen: the slides fill the window
  }
}

function show({ lab }, { name }) {
  lab.update({ present: name, ...(name === "votes" && { routing: { t: 0 } }) }); // the next slide starts with equal couplings
}

function go(view, by) {
  const all = slides(view.lab), at = all.indexOf(current(view)) + by;
  if (all[at]) show(view, all[at]);
}

function end(view) {
  if (!current(view)) return;
  view.lab.update({ present: "" });
  paint(view);
  view.button.focus();
  if (document.fullscreenElement) document.exitFullscreen();
}

/** Arrow keys belong to a focused control that uses them; those of a presenter's remote control always work. */
function onKey(view, event) {
  if (!current(view) || event.ctrlKey || event.metaKey || event.altKey) return;
  const { target, key } = event;
  if (target.closest?.("input[type=number], input[type=text], select, dialog")) return;
  const own = target.closest?.("input[type=range], input[type=radio], [role=radio], canvas");
  if (key === "PageDown" || (key === "ArrowRight" && !own)) go(view, 1);
  else if (key === "PageUp" || (key === "ArrowLeft" && !own)) go(view, -1);
  else if (key === "Escape") end(view);
  else return;
  event.preventDefault();
  event.stopPropagation();
}

function paint(view) {
  const { lab, root } = view;
  const slide = current(view);
  const name = slide?.name ?? "";
  root.hidden = !slide;
  if ((document.documentElement.dataset.present ?? "") !== name) {
    if (slide) document.documentElement.dataset.present = name;
    else delete document.documentElement.dataset.present;
    for (const key of ["size", "theme"]) lab.poke(key); // canvases have another size
    scrollTo(0, 0);
  }
  if (!slide) return;
  const all = slides(lab), at = all.indexOf(slide);
  say(view.count, `${at + 1} of ${all.length}`);
  say(view.title, slide.title(lab));
  say(view.text, slide.text(lab));
  say(view.prediction, name === "classes" || !lab.result ? "" : sentence(lab));
  view.back.disabled = at === 0;
  view.next.disabled = at === all.length - 1;
  set(view.root, { "data-slide": name });
}
