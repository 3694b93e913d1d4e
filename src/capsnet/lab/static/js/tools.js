// The tools below the canvas for each kind of input: pen, test digits, image file, two overlapping digits.

import { html, number, say } from "./elements.js";
import { encodeBytes } from "./raster.js";
import { canUndo, clear, undo } from "./stage.js";
import { DEFAULTS } from "./state.js";

const ASK_AGAIN_MILLISECONDS = 700;

export function drawTools(lab) {
  const back = html("button", { type: "button", id: "undo", title: "Undo (Ctrl+Z)", onclick: () => undo(lab) }, "Undo");
  const wipe = () => clear(lab);
  const all = html("button", { type: "button", id: "clear", title: "Clear (Delete)", onclick: wipe }, "Clear");
  const width = html("input", { type: "range", id: "stroke-width", min: 40, max: 180, step: 5,
    "aria-label": "Stroke width", title: "Stroke width",
    oninput: () => lab.update({ input: { width: Number(width.value) } }) });
  const dot = html("span", { class: "dot", "aria-hidden": "true" });
  const centre = html("input", { type: "checkbox", id: "centre",
    onchange: () => lab.update({ input: { centre: centre.checked } }) });
  const show = () => {
    const { strokes, width: w, centre: centred } = lab.state.input;
    back.disabled = !canUndo(lab);
    all.disabled = !strokes.length;
    width.value = w;
    dot.style.transform = `scale(${w / 180})`;
    centre.checked = centred;
  };
  lab.on((_, changed) => changed.has("input") && show());
  show();
  return html("div", {},
    html("div", { class: "row" }, back, all, width, dot),
    html("label", { class: "check small", title: "Scale the drawing to 20×20 pixels and centre its mass, as in MNIST" },
      centre, "Centre and scale like MNIST"));
}

export function testTools(lab) {
  const index = html("input", { type: "number", id: "digit-index", min: 0, max: 9999,
    "aria-label": "Index of the test digit" });
  const label = html("select", { id: "digit-label", "aria-label": "Class" });
  const mistakes = html("input", { type: "checkbox", id: "digit-mistakes" });
  const facts = html("p", { class: "small muted num", "aria-live": "polite" });
  const take = (found) => lab.update({ input: { index: found } });
  const pick = (random) => pickDigit(lab, random, take, (text) => say(facts, text));
  const random = html("button", { type: "button", id: "digit-random", onclick: () => pick(true) }, "Random");
  const following = html("button", { type: "button", id: "digit-next", onclick: () => pick(false) }, "Next");
  index.addEventListener("change", () => {
    const wanted = Math.round(Number(index.value));
    if (index.value !== "" && wanted >= 0 && wanted <= 9999) lab.update({ input: { index: wanted } });
    else index.value = lab.state.input.index;
  });
  label.addEventListener("change", () => {
    lab.update({ input: { label: label.value === "" ? null : Number(label.value) } });
    pick(false);
  });
  mistakes.addEventListener("change", () => {
    lab.update({ input: { only: mistakes.checked ? "mistakes" : "all" } });
    if (mistakes.checked) pick(false);
  });
  const show = () => {
    const { index: n, label: wanted, only } = lab.state.input;
    if (document.activeElement !== index) index.value = n;
    label.value = wanted ?? "";
    mistakes.checked = only === "mistakes";
  };
  lab.on((_, changed) => {
    if (changed.has("model") && lab.model) {
      const classes = lab.model.classes.slice(0, 10).map((name, k) => html("option", { value: k }, `only ${name}`));
      label.replaceChildren(html("option", { value: "" }, "any class"), ...classes);
    }
    if (changed.has("input") || changed.has("model")) show();
    if ((changed.has("input") || changed.has("model")) && lab.state.input.mode === "test" && lab.model) {
      const digit = lab.digit(lab.state.input.index);
      const missing = digit === undefined ? sentence(lab.transient.missing ?? "") : "";
      say(facts, digit ? `Label: ${lab.model.classes[digit.label] ?? digit.label}.${counted(lab)}` : missing);
    }
  });
  return html("div", {},
    html("div", { class: "row" }, random, following,
      html("label", { class: "field" }, html("span", { class: "muted" }, "No."), index)),
    html("div", { class: "row" }, label, html("label", { class: "check small" }, mistakes, "only mistakes")),
    facts);
}

let matching = null; // the number of matches of the last filter

function counted(lab) {
  const { label, only } = lab.state.input;
  if (!matching || matching.label !== label || matching.only !== only || matching.model !== lab.state.model) return "";
  if (only === "mistakes") return ` ${matching.count} mistakes${matching.ready ? "" : " so far"}.`;
  return label === null ? "" : ` ${matching.count} in this class.`;
}

let asking = 0;

/** Ask the engine for a matching digit, repeatedly while it is still counting mistakes and the filter is the same. */
async function pickDigit(lab, random, take, tell) {
  const mine = ++asking;
  const { index, label, only } = lab.state.input;
  const query = { model: lab.state.model, only, random, after: index };
  if (label !== null) query.label = label;
  const wanted = { index, label, only, mode: "test" };
  const stale = () => mine !== asking || lab.state.model !== query.model ||
    Object.entries(wanted).some(([key, value]) => lab.state.input[key] !== value);
  try {
    for (;;) {
      const found = await lab.engine.digits(query);
      if (stale()) return;
      if (found.state === "no data") return tell(sentence(found.why || "the test digits could not be downloaded."));
      matching = { count: found.count, label, only, model: query.model, ready: found.state === "ready" };
      if (found.index !== null) return take(found.index);
      if (found.state === "ready") return tell(only === "mistakes" ? "The model makes no mistakes here." : "No digit matches.");
      const counting = `Looking for mistakes … ${Math.round(100 * found.progress)} %`;
      tell(found.state === "fetching" ? "Downloading the test digits …" : counting);
      await new Promise((resolve) => setTimeout(resolve, ASK_AGAIN_MILLISECONDS));
    }
  } catch (error) {
    tell(sentence(error.message));
  }
}

export function imageTools(lab) {
  const file = html("input", { type: "file", id: "file", class: "unseen",
    accept: "image/png,image/jpeg,image/webp,image/gif,image/bmp" });
  file.addEventListener("change", () => {
    if (file.files[0]) bring(lab, file.files[0]);
    file.value = "";
  });
  const facts = html("p", { class: "small muted" }, "You can also drop or paste one, such as a photo of a digit on paper.");
  lab.on((_, changed) => changed.has("photo") && lab.transient.photo && say(facts, lab.transient.photo));
  const button = html("label", { class: "button", for: "file" }, "Choose an image");
  return html("div", {}, html("div", { class: "row" }, button, file), facts);
}

/** Drop and paste work in every mode and switch to the image mode. */
export function bringImages(stage, lab) {
  const takes = (event) => [...(event.dataTransfer?.items ?? [])].some((item) => item.kind === "file");
  addEventListener("dragover", (event) => {
    if (!takes(event)) return;
    event.preventDefault();
    stage.dataset.drop = "";
  });
  addEventListener("dragleave", (event) => !event.relatedTarget && delete stage.dataset.drop);
  addEventListener("drop", (event) => {
    delete stage.dataset.drop;
    if (!takes(event)) return;
    event.preventDefault();
    if (event.dataTransfer.files[0]) bring(lab, event.dataTransfer.files[0]);
  });
  addEventListener("paste", (event) => {
    const found = [...(event.clipboardData?.files ?? [])].find((one) => one.type.startsWith("image/"));
    if (!found) return;
    event.preventDefault();
    bring(lab, found);
  });
}

/** The engine prepares the image for the network; the state keeps these pixels, not the file. */
async function bring(lab, file) {
  if (!lab.model) return;
  try {
    const { header, pixels } = await lab.engine.photo(file, lab.state.model);
    lab.transient.photo = header.note ? sentence(header.note) : "";
    lab.poke("photo");
    const input = { mode: "image", pixels: encodeBytes(pixels), shape: [...pixels.shape] };
    lab.update({ view: "lab", transform: DEFAULTS.transform, input });
  } catch (error) {
    lab.notice(error.message);
  }
}

function sentence(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

export function overlapTools(lab) {
  const facts = html("p", { class: "small muted num" });
  const rows = ["a", "b"].map((which) => overlapRow(lab, which));
  lab.on((_, changed) => {
    if (!changed.has("input") || lab.state.input.mode !== "overlap") return;
    const { dx, dy } = lab.state.input.overlap;
    say(facts, `Drag to move the second digit: ${number(dx, 0)}, ${number(dy, 0)} px`);
  });
  return html("div", {}, ...rows, facts);
}

function overlapRow(lab, which) {
  const name = which === "a" ? "First" : "Second";
  const index = html("input", { type: "number", min: 0, max: 9999, id: `overlap-${which}`,
    "aria-label": `Index of the ${name.toLowerCase()} digit` });
  const label = html("b", { class: "num" });
  const take = (n) => lab.update({ input: { overlap: { [which]: n } } });
  index.addEventListener("change", () => {
    const wanted = Math.round(Number(index.value));
    if (index.value !== "" && wanted >= 0 && wanted <= 9999) take(wanted);
    else index.value = lab.state.input.overlap[which];
  });
  const random = html("button", { type: "button", "aria-label": `New ${name.toLowerCase()} digit`,
    onclick: () => another(lab, which, take) }, "New");
  lab.on((_, changed) => {
    if (!changed.has("input") && !changed.has("model")) return;
    const n = lab.state.input.overlap[which];
    if (document.activeElement !== index) index.value = n;
    if (lab.state.input.mode === "overlap" && lab.model) say(label, `${lab.digit(n)?.label ?? "…"}`);
  });
  const swatch = html("span", { class: `swatch ${which}` }, name);
  return html("div", { class: "row" }, swatch, label, html("span", { class: "spread" }), index, random);
}

/** A random digit of another class than the other digit. */
async function another(lab, which, take) {
  const other = lab.digit(lab.state.input.overlap[which === "a" ? "b" : "a"]);
  const labels = [...Array(10).keys()].filter((label) => label !== other?.label);
  const label = labels[Math.floor(Math.random() * labels.length)];
  try {
    const found = await lab.engine.digits({ model: lab.state.model, label, only: "all", random: true });
    if (found.index === null) lab.notice(found.why || "The test digits are being downloaded: try again in a moment.");
    else take(found.index);
  } catch (error) {
    lab.notice(error.message);
  }
}
