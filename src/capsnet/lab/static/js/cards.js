// Hover cards: symbol, value, a sentence, the equation's number, for whatever has data-card. Small things show theirs
// at once, on hover and on focus; large canvases only when the pointer rests, so that no card hides what is looked at.

import { lengthAt } from "./classes.js";
import { html, number, say } from "./elements.js";

const REST_MILLISECONDS = 1100;
const SOON_MILLISECONDS = 250;
const LARGE = 90; // pixels; from here on a card waits for the pointer to rest

/** Symbol as [text, subscript]; value(lab) where the element has no data-value. */
export const CARDS = {
  u: { symbol: ["u", "i"], title: "Primary capsule", equation: "section 4",
    sentence: "A small vector at one place of the image: " +
      "its direction says how a part looks, its length how surely it is there.",
    value: ({ result }) => result?.primary && result.primary.shape.join(" capsules of ") + " numbers" },
  W: { symbol: ["W", "ij"], title: "Transformation", equation: "Eq. 2",
    sentence: "A learned matrix that turns what a part looks like into what the whole would look like.",
    value: (lab) => matrices(lab) },
  u_hat: { symbol: ["û", "j|i"], title: "Vote", equation: "Eq. 2",
    sentence: "What capsule i expects class capsule j to be: û = W u.",
    value: ({ result }) => result?.couplings && voteCount(result.couplings.shape) },
  b: { symbol: ["b", "ij"], title: "Routing logit", equation: "Procedure 1, line 7",
    sentence: "How much capsule i has come to trust class j: " +
      "it starts at 0, and after each iteration the agreement û · v is added.",
    value: ({ state: { routing: { t } } }) => (t === 0 ? "all 0" : `after ${t} ${t === 1 ? "update" : "updates"}`) },
  c: { symbol: ["c", "ij"], title: "Coupling", equation: "Eq. 3",
    sentence: "The share of its output that capsule i sends to class j: the softmax of b over the classes.",
    value: (lab) => coupling(lab) },
  s: { symbol: ["s", "j"], title: "Weighted sum of the votes", equation: "Eq. 2",
    sentence: "All votes for class j, each weighted by its coupling, and a learnt bias where the network has one; " +
      "agreeing votes add up, others cancel.",
    value: (lab) => before(lab) },
  v: { symbol: ["v", "j"], title: "Class capsule", equation: "Eq. 1",
    sentence: "The squashed sum: its length is the probability that the class is there, its direction the pose.",
    value: (lab) => lab.result?.poses && `${lab.result.poses.shape[1]} numbers, length ${lengthOf(lab)}` },
  length: { symbol: ["‖v", "j"], after: "‖", title: "Length", equation: "Eq. 1",
    sentence: "How surely the class is there, from 0 to 1. " +
      "Several may be long at once: they do not compete for a sum of 1.",
    value: (lab) => lab.result && `${lab.model.classes[lab.selected()]}: ${lengthOf(lab)}` },
  probability: { symbol: ["p", "j"], title: "Probability", equation: "",
    sentence: "What a CNN answers instead of a length: a share for each class, and all of them add up to 1.",
    value: (lab) => lab.result && `${lab.model.classes[lab.selected()]}: ${lengthOf(lab)}` },
  squash: { symbol: ["squash", ""], title: "Squashing", equation: "Eq. 1",
    sentence: "Keeps a vector's direction and maps its length n to n² / (1 + n²): " +
      "short ones vanish, long ones approach 1.",
    value: (lab) => before(lab) },
  margin: { symbol: ["m", "±"], title: "Margin", equation: "Eq. 4",
    sentence: "Training pulls the right class up as long as it is shorter than 0.9, " +
      "and pushes every other one down as long as it is longer than 0.1." },
  pose: { symbol: ["v", "j, d"], title: "Pose dimension", equation: "section 5.1, Fig. 4",
    sentence: "One number of the class capsule; move it and see what it means: thickness, slant, a tail. " +
      "The shaded band is the paper's ±0.25." },
  t: { symbol: ["t", ""], title: "Routing iteration", equation: "Procedure 1, line 3",
    sentence: "How often the votes were compared; at first every class gets the same share.",
    value: (lab) => `${lab.state.routing.t + 1} of ${lab.state.routing.iterations}` },
  "coupling-map": { symbol: ["c", "ij"], after: " ‖û‖", title: "Who speaks for the class", equation: "Eq. 2",
    sentence: "Coupling times the length of the vote, painted where the capsule looks: " +
      "the parts of the image that speak for the class." },
  votes: { symbol: ["û", "j|i"], title: "The votes for the class", equation: "Eq. 2",
    sentence: "All votes for the chosen class in the plane of their two main directions, on a square-root scale: " +
      "four times as long is drawn twice as far. A dot's size is coupling times length, " +
      "the dashed ellipse the spread of the votes, the arrow the class capsule." },
  entropy: { symbol: ["H(c", "i"], after: ")", title: "Entropy of the couplings", equation: "Eq. 3",
    sentence: "1 when a capsule sends to all classes alike, 0 when it has decided for one; the mean over all capsules.",
    value: (lab) => at(lab, lab.result?.entropy) },
  agreement: { symbol: ["cos(û, v", "j"], after: ")", title: "Agreement", equation: "Procedure 1, line 7",
    sentence: "How well the votes point the way the class capsule points, weighted by the couplings.",
    value: (lab) => lab.result?.agreement && agreement(lab) },
  receptive: { symbol: ["h × w", ""], title: "Receptive field", equation: "section 4",
    sentence: "The pixels that a primary capsule sees; nothing outside can change it.",
    value: ({ model }) => model?.receptive && field(model.receptive) },
  input: { symbol: ["x", ""], title: "Input", equation: "section 4",
    sentence: "The pixels as the network sees them, from 0 to 1.",
    value: ({ model }) => model && `${model.image_shape[2]} × ${model.image_shape[1]} pixels` },
  reconstruction: { symbol: ["x̂", ""], title: "Reconstruction", equation: "section 4.1, Fig. 2",
    sentence: "What the decoder paints from the pose of one class capsule alone; all others are masked." },
  difference: { symbol: ["x̂ − x", ""], title: "Difference", equation: "section 4.1",
    sentence: "Where the reconstruction is brighter or darker than the input; " +
      "its squares, summed, are the reconstruction loss." },
  parameters: { symbol: ["θ", ""], title: "Parameters", equation: "section 5",
    sentence: "How many numbers were learned." },
};

/** Symbols as chips beside the headings: reachable by keyboard, and a legend of the paper's letters. */
const CHIPS = {
  "panel-input": ["input", "receptive"],
  "panel-primary": ["u"],
  "panel-routing": ["W", "u_hat", "b", "c", "s", "squash"],
  "panel-classes": ["length"],
  "panel-pose": ["v"],
};

export function mount(root, lab) {
  for (const [panel, names] of Object.entries(CHIPS)) {
    document.querySelector(`#${panel} .chips`)?.append(...names.map(chip));
  }
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

function chip(name) {
  const label = `${CARDS[name].title}: what is it?`;
  return html("button", { type: "button", class: "chip", "data-card": name, "aria-label": label }, ...symbol(name));
}

/** The card is read out with the element that it explains, unless that one is described by something else. */
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
  const { title, sentence, equation, value } = CARDS[name];
  if (card.name !== name) card.symbol.replaceChildren(...symbol(name));
  card.name = name;
  say(card.title, title);
  const own = element.dataset.said ?? element.dataset.value ?? element.getAttribute("aria-valuenow");
  // By hand the numbers stand in the view itself; those of the network would be others
  const found = own ?? (element.closest("#view-hand") ? "" : value?.(lab)) ?? "";
  say(card.value, found || "");
  card.value.hidden = !found;
  say(card.sentence, sentence);
  say(card.equation, equation && `${equation} of the paper`);
}

function symbol(name) {
  const { symbol: [text, below], after = "" } = CARDS[name];
  return [html("i", {}, text), below ? html("sub", {}, below) : "", after];
}

/** Below the element, or above it where there is no room; beside the pointer for a large one. */
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

function lengthOf(lab) {
  return number(lab.result.lengths[lab.selected()], 3);
}

/** The last routing's matrices: their lower capsules are the primary ones, unless hidden ones lie between. */
function matrices({ model, result }) {
  if (!model?.class_dim || !result?.couplings) return "";
  const direct = result.primary?.shape[0] === result.couplings.shape[1];
  const lower = model.shared ? "type" : "capsule";
  const rows = model.class_dim / model.branches;
  return direct ? `${rows} × ${model.primary_dim} for each pair of ${lower} and class` : "";
}

function voteCount([, capsules, classes]) {
  return `${(capsules * classes).toLocaleString("en")} votes`;
}

function field({ size, stride }) {
  return `${size} × ${size} pixels, every ${stride}`;
}

/** The mean coupling to the shown class at the shown iteration. */
function coupling(lab) {
  const couplings = lab.result?.couplings;
  if (!couplings) return "";
  const [steps, capsules, classes] = couplings.shape;
  const t = Math.min(lab.state.routing.t, steps - 1), j = lab.selected();
  let sum = 0;
  for (let i = 0; i < capsules; i++) sum += couplings[(t * capsules + i) * classes + j];
  return `to ${lab.model.classes[j]}: ${number(sum / capsules, 3)} on average`;
}

/** The sum's length at the shown iteration, from the squashed one; branches squash each their own. */
function before(lab) {
  const length = lengthAt(lab, lab.selected());
  if (length === null || lab.model.branches > 1) return "";
  return `‖s‖ ${number(Math.sqrt(length / (1 - length)), 2)} → ‖v‖ ${number(length, 3)}`;
}

function agreement(lab) {
  const { agreement: values } = lab.result;
  const [steps, classes] = values.shape;
  const t = Math.min(lab.state.routing.t, steps - 1);
  return `${lab.model.classes[lab.selected()]}: ${number(values[t * classes + lab.selected()], 3)}`;
}
