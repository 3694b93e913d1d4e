// Hover cards for every element with data-card: symbol, value, a sentence and the number of the equation. Small elements
// show theirs at once on hover and focus, large canvases only when the pointer rests, so that the card hides nothing.

import { activationAt, measure } from "./classes.js";
import { html, number, say } from "./elements.js";

const REST_MILLISECONDS = 1100;
const SOON_MILLISECONDS = 250;
const LARGE = 90; // pixels; from here on a card waits for the pointer to rest

/** Symbol as [text, subscript]; a sentence may be a function of the lab; value(lab) if the element has no data-value; `other` replaces the sentence where the
 *  routing algorithm is not that of the paper. */
export const CARDS = {
  u: { symbol: ["u", "i"], title: "Primary capsule", equation: "section 4",
    sentence: ({ model }) => "A small vector for one position in the image. Its direction describes a part; " +
      (model?.primary_squash === false ? "the longer it is, the stronger are its votes." : "its length is the probability that the part is present."),
    value: ({ result }) => result?.primary && result.primary.shape.join(" capsules of ") + " dimensions" },
  W: { symbol: ["W", "ij"], title: "Transformation matrix", equation: "Eq. 2",
    sentence: "A learnt matrix that turns the pose of a part into a vote for the pose of the whole.",
    value: (lab) => matrices(lab) },
  u_hat: { symbol: ["û", "j|i"], title: "Vote", equation: "Eq. 2",
    sentence: "What capsule i predicts for class capsule j: û = W u.",
    value: ({ result }) => result?.couplings && voteCount(result.couplings.shape) },
  b: { symbol: ["b", "ij"], title: "Routing logit", equation: "Procedure 1, line 7",
    sentence: "How strongly capsule i is routed to class j. " +
      "It starts at 0; every routing iteration adds the agreement û · v.",
    other: "The number that the coupling of capsule i with class j is computed from.",
    value: ({ state: { routing: { t } } }) => (t === 0 ? "all 0" : `after ${t} ${t === 1 ? "update" : "updates"}`) },
  c: { symbol: ["c", "ij"], title: "Coupling coefficient", equation: "Eq. 3",
    sentence: "The share of its output that capsule i sends to class j: the softmax of b over the classes.",
    other: "How strongly capsule i is coupled to class j.",
    value: (lab) => coupling(lab) },
  s: { symbol: ["s", "j"], title: "Weighted sum of the votes", equation: "Eq. 2",
    sentence: "The sum of the votes for class j, weighted by their coupling coefficients, plus a bias if the network has one. " +
      "Votes that agree add up; the others cancel out.",
    value: (lab) => before(lab) },
  v: { symbol: ["v", "j"], title: "Class capsule", equation: "Eq. 1",
    sentence: "The squashed sum. Its length is the probability that the class is present; its direction is the pose.",
    other: "The pose of the class.",
    value: (lab) => lab.result?.poses && `${lab.result.poses.shape[1]} pose dimensions` },
  length: { symbol: ["‖v", "j"], after: "‖", title: "Length", equation: "Eq. 1",
    sentence: "The probability that the class is present, from 0 to 1. " +
      "Several class capsules can be long at once: their lengths need not sum to 1.",
    other: "The probability that the class is present, from 0 to 1. Several classes can be active at once.",
    value: (lab) => lab.result && `${lab.model.classes[lab.selected()]}: ${activationOf(lab)}` },
  activation: { symbol: ["a", "j"], title: "Activation", equation: "",
    sentence: "The probability that the class is present, from 0 to 1. Several classes can be active at once.",
    value: (lab) => lab.result && `${lab.model.classes[lab.selected()]}: ${activationOf(lab)}` },
  probability: { symbol: ["p", "j"], title: "Probability", equation: "",
    sentence: "The output of a model without capsules. The probabilities of all classes sum to 1, " +
      "unless the model is multi-label.",
    value: (lab) => lab.result && `${lab.model.classes[lab.selected()]}: ${activationOf(lab)}` },
  variance: { symbol: ["σ", "j"], title: "Standard deviation", equation: "",
    sentence: "The spread of the Gaussian that was fitted to the votes for capsule j. Votes that agree make it small." },
  squash: { symbol: ["squash", ""], title: "Squashing", equation: "Eq. 1",
    sentence: "Keeps the direction of a vector and maps its length n to n² / (1 + n²): " +
      "short vectors shrink to almost 0, long ones approach 1.",
    value: (lab) => before(lab) },
  margin: { symbol: ["m", "±"], title: "Margin", equation: "Eq. 4",
    sentence: "Training lengthens the correct class while it is shorter than 0.9 " +
      "and shortens every other class while it is longer than 0.1." },
  pose: { symbol: ["v", "j, d"], title: "Pose dimension", equation: "section 5.1, Fig. 4",
    sentence: "One number of the class capsule. Move it to see what it represents, such as stroke thickness or slant. " +
      "The shaded band is the range used in the paper, ±0.25." },
  t: { symbol: ["t", ""], title: "Routing iteration", equation: "Procedure 1, line 3",
    sentence: "In the first iteration every class gets the same share; every later one adds the agreement.",
    other: "One step of the routing algorithm.",
    value: (lab) => lab.result?.couplings && `${lab.state.routing.t + 1} of ${lab.result.couplings.shape[0]}` },
  "coupling-map": { symbol: ["c", "ij"], after: " ‖û‖", title: "Evidence for the class", equation: "Eq. 2",
    sentence: "Coupling coefficient times length of the vote, shown at the centre of each receptive field: " +
      "the parts of the image that support the class." },
  votes: { symbol: ["û", "j|i"], title: "The votes for the class", equation: "Eq. 2",
    sentence: "All votes for the selected class, projected onto their two principal directions, on a square-root scale. " +
      "The size of a dot is coupling coefficient times length, the dashed ellipse is the spread of the votes, " +
      "the arrow is the class capsule." },
  entropy: { symbol: ["H(c", "i"], after: ")", title: "Entropy of the couplings", equation: "Eq. 3",
    sentence: "1 if a capsule sends the same share to all classes, 0 if it sends everything to one. Averaged over all capsules.",
    value: (lab) => at(lab, lab.result?.entropy) },
  agreement: { symbol: ["cos(û, v", "j"], after: ")", title: "Agreement", equation: "Procedure 1, line 7",
    sentence: "Cosine between the votes and the class capsule, averaged with the couplings as weights.",
    value: (lab) => lab.result?.agreement && ofClass(lab, lab.result.agreement) },
  deviation: { symbol: ["σ", "j"], title: "Standard deviation", equation: "",
    sentence: "The spread of the Gaussian that was fitted to the votes for the class, averaged over the pose dimensions. " +
      "Votes that agree make it small.",
    value: (lab) => lab.result?.deviation && ofClass(lab, lab.result.deviation) },
  coherence: { symbol: ["r", "j"], title: "Phase coherence", equation: "",
    sentence: "1 if all oscillators of the class are in phase, near 0 if their phases differ. Averaged with the couplings as weights.",
    value: (lab) => lab.result?.coherence && ofClass(lab, lab.result.coherence) },
  phase: { symbol: ["θ", "ij"], title: "Phase", equation: "",
    sentence: "The direction of an oscillator. It starts at the direction of its vote, which holds it back, and is pulled towards the mean field v." },
  receptive: { symbol: ["h × w", ""], title: "Receptive field", equation: "section 4",
    sentence: "The pixels that a primary capsule depends on.",
    value: ({ model }) => model?.receptive && field(model.receptive) },
  input: { symbol: ["x", ""], title: "Input", equation: "section 4",
    sentence: "The pixels as the network sees them, from 0 to 1.",
    value: ({ model }) => model && `${model.image_shape[2]} × ${model.image_shape[1]} pixels` },
  reconstruction: { symbol: ["x̂", ""], title: "Reconstruction", equation: "section 4.1, Fig. 2",
    sentence: "The output of the decoder for the pose of one class capsule; all other capsules are masked." },
  difference: { symbol: ["x̂ − x", ""], title: "Difference", equation: "section 4.1",
    sentence: "Where the reconstruction is brighter or darker than the input. " +
      "The sum of its squares is the reconstruction loss." },
  parameters: { symbol: ["θ", ""], title: "Parameters", equation: "section 5",
    sentence: "The number of learnt weights." },
};

/** Symbols as buttons beside the headings: a legend of the paper's notation, reachable by keyboard. */
const CHIPS = {
  "panel-input": ["input", "receptive"],
  "panel-primary": ["u"],
  "panel-routing": ["W", "u_hat", "b", "c", "s", "squash"],
  "panel-classes": ["length", "activation"],
  "panel-pose": ["v"],
};

export function mount(root, lab) {
  for (const [panel, names] of Object.entries(CHIPS)) {
    document.querySelector(`#${panel} .chips`)?.append(...names.map(chip));
  }
  lab.on((_, changed) => changed.has("model") && showChips(lab));
  const card = buildCard(root);
  let owner = null, timer = 0;
  const show = (element, point) => {
    if (owner !== element) describe(owner, false);
    owner = element;
    describe(owner, true);
    fill(card, element, lab);
    card.box.hidden = false;
    place(card.box, element, point);
  };
  const hide = () => {
    clearTimeout(timer);
    describe(owner, false);
    owner = null;
    card.box.hidden = true;
  };
  const wait = (element, event) => {
    clearTimeout(timer);
    const { width, height } = element.getBoundingClientRect();
    const large = width > LARGE && height > LARGE;
    const point = large ? { x: event.clientX, y: event.clientY } : null;
    timer = setTimeout(() => show(element, point), large ? REST_MILLISECONDS : SOON_MILLISECONDS);
    return large;
  };
  addEventListener("pointermove", (event) => {
    if (event.pointerType === "touch" || event.buttons) return hide();
    const element = known(event.target);
    if (!element) return hide();
    if (owner === element && !isLarge(element)) return;
    if (owner) hide();
    wait(element, event);
  });
  addEventListener("focusin", (event) => {
    const element = known(event.target);
    if (element?.matches(":focus-visible") && !isLarge(element)) show(element, null);
    else hide();
  });
  addEventListener("click", (event) => {
    const clicked = event.target.closest?.(".chip");
    if (clicked) show(clicked, null);
  });
  addEventListener("focusout", hide);
  addEventListener("pointerdown", hide);
  addEventListener("scroll", hide, true);
  addEventListener("keydown", (event) => event.key === "Escape" && hide());
  lab.on(() => owner && (owner.isConnected ? fill(card, owner, lab) : hide()));
}

/** Hide the symbols that the model or its routing algorithm does not have. */
function showChips(lab) {
  const { model } = lab;
  const has = { "panel-primary": model?.grid, "panel-routing": model?.routing, "panel-pose": model?.capsules };
  for (const one of document.querySelectorAll(".chip")) {
    const panel = one.closest(".panel").id;
    one.hidden = (panel in has && !has[panel]) || (["b", "s", "squash"].includes(one.dataset.card) && !ofPaper(lab));
  }
  document.querySelector(".chip[data-card=receptive]").hidden = !model?.receptive;
  for (const name of ["length", "activation"]) {
    document.querySelector(`.chip[data-card=${name}]`).hidden = measure(model) !== name;
  }
}

function ofPaper({ model }) {
  return !model?.routing || model.routing.name === "dynamic";
}

/** The algorithm that an element is about: that of the model, or the one chosen in the by-hand view. */
function algorithm(element, { model, routings, state }) {
  return element.closest("#view-hand") ? routings.find(({ name }) => name === state.hand.routing) : model?.routing;
}

function chip(name) {
  const label = `What is this? ${CARDS[name].title}`;
  return html("button", { type: "button", class: "chip", "data-card": name, "aria-label": label }, ...symbol(name));
}

/** Screen readers read the card with its element, unless that has a description already. */
function describe(element, on) {
  const now = element?.getAttribute("aria-describedby");
  if (on && !now) element.setAttribute("aria-describedby", "card");
  else if (!on && now === "card") element.removeAttribute("aria-describedby");
}

function known(target) {
  const element = target.closest?.("[data-card]");
  return element && CARDS[element.dataset.card] ? element : null;
}

function isLarge(element) {
  const { width, height } = element.getBoundingClientRect();
  return width > LARGE && height > LARGE;
}

function buildCard(root) {
  const parts = { symbol: html("span", { class: "symbol" }), title: html("b"), value: html("p", { class: "num value" }),
    sentence: html("p"), equation: html("p", { class: "small muted" }) };
  parts.box = html("div", { class: "card", role: "tooltip", id: "card", hidden: true },
    html("div", { class: "row" }, parts.symbol, parts.title), parts.value, parts.sentence, parts.equation);
  root.append(parts.box);
  return parts;
}

function fill(card, element, lab) {
  const name = element.dataset.card;
  const { title, sentence, other, equation, value } = CARDS[name];
  const routing = algorithm(element, lab);
  const paper = !routing || routing.name === "dynamic";
  if (card.name !== name) card.symbol.replaceChildren(...symbol(name));
  card.name = name;
  say(card.title, name === "c" && !paper ? upper(routing.couplings) : title);
  const own = element.dataset.said ?? element.dataset.value ?? element.getAttribute("aria-valuenow");
  // The by-hand view shows its own numbers; those of the network would differ
  const found = own ?? (element.closest("#view-hand") ? "" : value?.(lab)) ?? "";
  say(card.value, found || "");
  card.value.hidden = !found;
  const said = paper ? sentence : other ?? sentence;
  say(card.sentence, typeof said === "function" ? said(lab) : said);
  say(card.equation, equation && paper ? `${equation} of the paper` : "");
}

function symbol(name) {
  const { symbol: [text, below], after = "" } = CARDS[name];
  return [html("i", {}, text), below ? html("sub", {}, below) : "", after];
}

/** Below the element, or above it if there is no room; beside the pointer for a large one. */
function place(box, element, point) {
  const { left, bottom, top, width } = element.getBoundingClientRect();
  const { offsetWidth: wide, offsetHeight: high } = box;
  const x = point ? point.x + 14 : left + width / 2 - wide / 2;
  const under = point ? point.y + 14 : bottom + 8;
  const over = point ? point.y - 14 - high : top - 8 - high;
  const y = under + high <= innerHeight - 8 ? under : over;
  box.style.left = `${Math.max(8, Math.min(innerWidth - wide - 8, x))}px`;
  box.style.top = `${Math.max(8, y)}px`;
}

function at(lab, values) {
  const t = Math.min(lab.state.routing.t, (values?.length ?? 0) - 1);
  return values ? number(values[t], 3) : "";
}

function upper(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

function activationOf(lab) {
  return number(lab.result.activations[lab.selected()], 3);
}

/** The matrices of the last layer, if its lower capsules are the primary ones. */
function matrices({ model, result }) {
  if (model?.kind !== "capsnet" || !result?.couplings) return "";
  const direct = result.primary?.shape[0] === result.couplings.shape[1];
  const lower = model.shared ? "type" : "capsule";
  const rows = model.class_dim;
  return direct ? `${rows} × ${model.primary_dim} for each pair of ${lower} and class` : "";
}

function voteCount([, capsules, classes]) {
  return `${(capsules * classes).toLocaleString("en")} votes`;
}

function field({ size, stride }) {
  return `${size} × ${size} pixels, every ${stride}`;
}

/** The mean coupling with the selected class at the routing iteration shown. */
function coupling(lab) {
  const couplings = lab.result?.couplings;
  if (!couplings) return "";
  const [steps, capsules, classes] = couplings.shape;
  const t = Math.min(lab.state.routing.t, steps - 1), j = lab.selected();
  let sum = 0;
  for (let i = 0; i < capsules; i++) sum += couplings[(t * capsules + i) * classes + j];
  return `${lab.model.classes[j]}: ${number(sum / capsules, 3)} on average`;
}

/** ‖s‖ at the routing iteration shown, computed from ‖v‖; only a plain capsule network squashes the whole sum. */
function before(lab) {
  const length = activationAt(lab, lab.selected());
  if (length === null || lab.model.kind !== "capsnet") return "";
  return `‖s‖ ${number(Math.sqrt(length / (1 - length)), 2)} → ‖v‖ ${number(length, 3)}`;
}

/** A measure (t, j) of the selected class at the routing iteration shown. */
function ofClass(lab, values) {
  const [steps, classes] = values.shape;
  const t = Math.min(lab.state.routing.t, steps - 1);
  return `${lab.model.classes[lab.selected()]}: ${number(values[t * classes + lab.selected()], 3)}`;
}
