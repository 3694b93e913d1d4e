// Panel 1: draw a digit, pick a test digit, bring an image, or lay two digits over one another; turn, scale, shear and
// move it; and beside it what the network sees. The canvas is the network's field: a digit's square in its middle,
// painted through the handles. Strokes are kept as drawn; centring them as MNIST was made happens in raster.js.

import { html, number, say, set, svg } from "./elements.js";
import { maps, picture, rgb, surface } from "./paint.js";
import { apply, compose, digitSide, encodeBytes, handles, invert, simplify, smooth } from "./raster.js";
import { DEFAULTS, LIMITS } from "./state.js";

const MODES = { draw: "Draw", test: "Digits", image: "Image", overlap: "Overlap" };
const SLIDERS = {
  rotate: { title: "Rotate", step: 1, unit: "°" },
  scale: { title: "Scale", step: 0.01, unit: "×" },
  shear: { title: "Shear", step: 0.01, unit: "" },
  x: { title: "Move →", step: 0.5, unit: "px" },
  y: { title: "Move ↓", step: 0.5, unit: "px" },
};
const FRAME = 0.8; // the handles' frame, of the digit's square
const FARTHEST = 8; // pixels that the second digit may lie from the first: as far as in MultiMNIST
const TOLERANCE = 3; // thousandths of the digit's square that a stroke may lose when it is simplified
const ASK_AGAIN_MILLISECONDS = 700;

export function mount(root, lab) {
  const stage = html("div", { class: "stage" });
  const tools = html("div", { class: "tools" });
  root.append(modes(lab), stage, tools, below(lab));
  buildStage(stage, lab);
  const builders = { draw: drawTools, test: testTools, image: imageTools, overlap: overlapTools };
  for (const [mode, build] of Object.entries(builders)) {
    const row = build(lab);
    tools.append(row);
    showOnly(row, lab, () => lab.state.input.mode === mode);
  }
  bringImages(stage, lab);
}

function showOnly(element, lab, when) {
  const show = () => (element.hidden = !when());
  lab.on((_, changed) => changed.has("input") && show());
  show();
}

/** Draw | Digits | Image | Overlap, a group of radio buttons. */
function modes(lab) {
  const names = Object.keys(MODES);
  const button = (mode) =>
    html("button", { type: "button", role: "radio", "data-mode": mode, onclick: () => choose(lab, mode) }, MODES[mode]);
  const buttons = names.map(button);
  const about = { class: "segments wide", role: "radiogroup", "aria-label": "Where the input comes from" };
  const group = html("div", about, ...buttons);
  group.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const at = (names.indexOf(lab.state.input.mode) + step + names.length) % names.length;
    choose(lab, names[at]);
    buttons[at].focus();
  });
  const show = () => buttons.forEach((one) => {
    const on = one.dataset.mode === lab.state.input.mode;
    set(one, { "aria-checked": on, tabindex: on ? 0 : -1 });
  });
  lab.on((_, changed) => changed.has("input") && show());
  show();
  return group;
}

let before = null; // the model that overlap mode took the place of

/** Two digits need a network that was taught to see two: change to one, say so, and change back afterwards. */
function choose(lab, mode) {
  const patch = { input: { mode } };
  const two = lab.models.find((model) => model.multi_label && model.kind === "capsnet");
  if (mode === "overlap" && lab.model && !lab.model.multi_label) {
    if (two) {
      before = lab.model.name;
      patch.model = two.name;
      lab.notice(`Changed to ${two.name}, which was taught to see two digits at once.`);
    } else {
      lab.notice("No model here was taught to see two digits at once; this one may name only one of them.");
    }
  } else if (mode !== "overlap" && before && lab.model === two) {
    lab.notice(`Back to ${before}.`);
    patch.model = before;
  }
  if (mode !== "overlap") before = null;
  lab.update(patch);
}

/* ---- the stage: canvas and handles ---- */

function buildStage(stage, lab) {
  // An application, so that a screen reader hands the arrow keys through
  const canvas = html("canvas", { id: "draw", tabindex: 0, role: "application", "aria-label": "Input" });
  const overlay = svg("svg", { class: "handles", "aria-hidden": "true" });
  const hint = html("p", { class: "hint muted" });
  stage.append(canvas, overlay, hint);
  const outline = svg("polygon", { class: "receptive", visibility: "hidden" });
  overlay.append(outline);
  const grips = buildGrips(overlay, stage, lab);
  pointer(canvas, lab);
  keys(canvas, lab);
  const paint = () => {
    if (!lab.model) return;
    paintInput(canvas, lab);
    placeGrips(grips, canvas, lab);
    outlineReceptive(outline, canvas, lab);
    say(hint, hintFor(lab));
    set(canvas, { "aria-label": describe(lab) });
    canvas.dataset.mode = lab.state.input.mode;
  };
  lab.on((_, changed) => {
    if (lab.model && changed.has("model")) {
      const [, height, width] = lab.model.image_shape;
      stage.style.aspectRatio = `${width} / ${height}`;
    }
    if (["input", "transform", "model", "theme", "flash", "size"].some((key) => changed.has(key))) paint();
  });
  new ResizeObserver(() => lab.poke("size")).observe(stage);
}

function hintFor(lab) {
  const { mode, strokes, pixels, index, overlap } = lab.state.input;
  if (mode === "draw" && !strokes.length) return "Draw a digit here";
  if (mode === "image" && !pixels) return "Drop or paste an image here";
  const digits = { test: [index], overlap: [overlap.a, overlap.b] }[mode]?.map((n) => lab.digit(n)) ?? [];
  if (digits.includes(undefined)) return "The digit cannot be had";
  return digits.includes(null) ? "Fetching the digit …" : "";
}

function describe(lab) {
  const { mode, index, overlap, strokes } = lab.state.input;
  if (mode === "draw") {
    const count = strokes.length === 1 ? "one stroke" : `${strokes.length} strokes`;
    return `Your drawing, ${count}. Arrow keys move it, Control Z takes a stroke back, Delete clears.`;
  }
  if (mode === "test") return `Test digit number ${index}. Arrow keys move it.`;
  if (mode === "overlap") {
    return `Test digits ${overlap.a} and ${overlap.b} over one another. Arrow keys move the second.`;
  }
  return "Your image. Arrow keys move it.";
}

/** CSS pixels of the canvas per pixel of the field. */
function zoom(canvas, lab) {
  return canvas.clientWidth / lab.model.image_shape[2];
}

function paintInput(canvas, lab) {
  const { context, width, height } = surface(canvas);
  const k = zoom(canvas, lab);
  context.translate(width / 2, height / 2);
  context.scale(k, k);
  context.save();
  context.transform(...handles(lab.state.transform));
  const { mode } = lab.state.input;
  if (mode === "draw") paintStrokes(context, lab);
  else if (mode === "overlap") paintTwo(context, lab);
  else paintPixels(context, lab);
  context.restore();
}

function paintStrokes(context, lab) {
  const side = digitSide(lab.model.image_shape);
  context.scale(side / 1000, side / 1000);
  context.translate(-500, -500);
  Object.assign(context, { lineCap: "round", lineJoin: "round", strokeStyle: lab.colours.ink });
  for (const { w, p } of lab.state.input.strokes) {
    const curve = smooth(p);
    context.lineWidth = w;
    context.beginPath();
    context.moveTo(curve[0], curve[1]);
    for (let k = 0; k < Math.max(4, curve.length); k += 2) {
      context.lineTo(curve[k] ?? curve[0], curve[k + 1] ?? curve[1]); // a dot is a line to itself
    }
    context.stroke();
  }
}

function paintTwo(context, lab) {
  const { a, b, dx, dy } = lab.state.input.overlap;
  const first = lab.digit(a), second = lab.digit(b);
  if (!first || !second) return;
  const side = digitSide(lab.model.image_shape);
  paintImage(context, first, lab.colours.a, side);
  context.globalAlpha = 0.85;
  context.translate(dx, dy);
  paintImage(context, second, lab.colours.b, side);
}

function paintPixels(context, lab) {
  const { mode, index } = lab.state.input;
  if (mode === "test") {
    const digit = lab.digit(index);
    if (digit) paintImage(context, digit, lab.colours.ink, digitSide(lab.model.image_shape));
  } else if (lab.input) {
    // A picture is already as the network sees it; undo the handles, which lab.input has inside
    context.transform(...invert(handles(lab.state.transform)));
    const [, height, width] = lab.model.image_shape;
    paintImage(context, { pixels: lab.input, shape: lab.model.image_shape }, lab.colours.ink, Math.max(height, width));
  }
}

/** Pixels as ink of one colour on nothing (grey) or as they are (colour), the longer side `side` wide. */
function paintImage(context, { pixels, shape: [channels, height, width] }, colour, side) {
  const image = new ImageData(width, height);
  const n = height * width;
  const ink = rgb(colour);
  for (let k = 0; k < n; k++) {
    for (let c = 0; c < 3; c++) image.data[4 * k + c] = channels === 3 ? 255 * pixels[c * n + k] : ink[c];
    image.data[4 * k + 3] = channels === 3 ? 255 : 255 * pixels[k];
  }
  const small = new OffscreenCanvas(width, height);
  small.getContext("2d").putImageData(image, 0, 0);
  context.imageSmoothingQuality = "high";
  const scale = side / Math.max(height, width);
  context.drawImage(small, (-width * scale) / 2, (-height * scale) / 2, width * scale, height * scale);
}

/** The map from the network's pixels to those of the canvas: the drawing there is not centred yet. */
function fieldToCanvas(canvas, lab) {
  const k = zoom(canvas, lab);
  const map = handles(lab.state.transform);
  const uncentred = compose(map, compose(invert(lab.seen?.centring ?? [1, 0, 0, 1, 0, 0]), invert(map)));
  return compose([k, 0, 0, k, canvas.clientWidth / 2, canvas.clientHeight / 2], uncentred);
}

function outlineReceptive(outline, canvas, lab) {
  const field = lab.transient.receptive;
  set(outline, { visibility: field ? "visible" : "hidden" });
  if (!field) return;
  const [, height, width] = lab.model.image_shape;
  const map = fieldToCanvas(canvas, lab);
  const left = field.x - width / 2, top = field.y - height / 2, size = field.size;
  const corners = [[left, top], [left + size, top], [left + size, top + size], [left, top + size]];
  set(outline, { points: corners.map(([x, y]) => apply(map, x, y).map((v) => v.toFixed(1)).join(",")).join(" ") });
}

/* ---- handles ---- */

const GRIPS = {
  move: { corner: [-1, -1], title: "Move", sign: "M-4 0H4M0-4V4" },
  rotate: { corner: [1, -1], title: "Rotate", sign: "M-3.5 1.5A3.8 3.8 0 1 1 0 3.8M-5-.5l1.5 2.2 2-1.7" },
  scale: { corner: [1, 1], title: "Scale", sign: "M-3-3 3 3M3-.5V3H-.5M-3 .5V-3H.5" },
  shear: { corner: [-1, 1], title: "Shear", sign: "M-3.5 3-.5-3H3.5L.5 3Z" },
};

function buildGrips(overlay, stage, lab) {
  const frame = svg("polygon", { class: "frame" });
  overlay.append(frame);
  const grips = { frame };
  for (const [name, { title, sign }] of Object.entries(GRIPS)) {
    const grip = svg("g", { class: "grip", "data-grip": name },
      svg("title", {}, `${title}: drag`), svg("circle", { r: 9 }), svg("path", { d: sign }));
    dragGrip(grip, name, stage, lab);
    overlay.append(grip);
    grips[name] = grip;
  }
  return grips;
}

function placeGrips(grips, canvas, lab) {
  const k = zoom(canvas, lab);
  const half = (FRAME * digitSide(lab.model.image_shape)) / 2;
  const map = compose([k, 0, 0, k, canvas.clientWidth / 2, canvas.clientHeight / 2], handles(lab.state.transform));
  const at = ([x, y]) => apply(map, x * half, y * half);
  const corners = [[-1, -1], [1, -1], [1, 1], [-1, 1]].map((corner) => at(corner).map((v) => v.toFixed(1)).join(","));
  set(grips.frame, { points: corners.join(" ") });
  for (const [name, { corner }] of Object.entries(GRIPS)) {
    const [x, y] = at(corner);
    const keepIn = (value, room) => Math.min(room - 11, Math.max(11, value));
    const inside = [keepIn(x, canvas.clientWidth), keepIn(y, canvas.clientHeight)];
    set(grips[name], { transform: `translate(${inside.map((v) => v.toFixed(1)).join(" ")})` });
  }
}

/** Drag a grip: each knows how the pointer's way from the centre becomes its number. */
function dragGrip(grip, name, stage, lab) {
  let start = null;
  const place = (event) => {
    const box = stage.getBoundingClientRect();
    const k = zoom(stage, lab);
    return [(event.clientX - box.left - box.width / 2) / k, (event.clientY - box.top - box.height / 2) / k];
  };
  grip.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || !lab.model) return;
    event.preventDefault();
    grip.setPointerCapture(event.pointerId);
    start = { at: place(event), transform: lab.state.transform };
  });
  grip.addEventListener("pointermove", (event) => {
    if (start) lab.update({ transform: limited(dragged[name](start, place(event)), lab.model) });
  });
  for (const end of ["pointerup", "pointercancel"]) grip.addEventListener(end, () => (start = null));
}

const dragged = {
  move: ({ at, transform }, [x, y]) => ({ x: transform.x + x - at[0], y: transform.y + y - at[1] }),
  rotate: ({ at, transform }, [x, y]) => {
    const angle = Math.atan2(y - transform.y, x - transform.x) - Math.atan2(at[1] - transform.y, at[0] - transform.x);
    const turned = transform.rotate + (angle * 180) / Math.PI;
    return { rotate: ((((turned + 180) % 360) + 360) % 360) - 180 };
  },
  scale: ({ at, transform }, [x, y]) => {
    const far = Math.hypot(at[0] - transform.x, at[1] - transform.y) || 1;
    return { scale: (transform.scale * Math.hypot(x - transform.x, y - transform.y)) / far };
  },
  shear: ({ at, transform }, to) => {
    // Along the digit's own x axis; the grip is at the bottom left, y > 0, so to the right is a greater shear
    const own = invert(handles({ ...transform, shear: 0 }));
    const [x0, y0] = apply(own, ...at), [x1] = apply(own, ...to);
    return { shear: transform.shear + (x1 - x0) / Math.max(4, y0) };
  },
};

/** Rounded to what the sliders show, within what they allow. */
function limited(patch, model) {
  return Object.fromEntries(Object.entries(patch).map(([key, value]) => {
    const [low, high] = rangeOf(key, model);
    const { step } = SLIDERS[key];
    return [key, Number(Math.min(high, Math.max(low, Math.round(value / step) * step)).toFixed(2))];
  }));
}

/** Moving reaches over the whole field. */
function rangeOf(key, model) {
  if (key === "x" || key === "y") {
    const half = Math.round((model?.image_shape[key === "x" ? 2 : 1] ?? 28) / 2);
    return [-half, half];
  }
  return LIMITS[key];
}

/* ---- pointer and keyboard on the canvas ---- */

const past = []; // strokes before each change, for undo

function draw(lab, strokes) {
  past.push(lab.state.input.strokes);
  if (past.length > 100) past.shift();
  lab.update({ input: { strokes } });
}

function undo(lab) {
  if (!past.length && !lab.state.input.strokes.length) return;
  lab.update({ input: { strokes: past.pop() ?? lab.state.input.strokes.slice(0, -1) } });
}

/** One pointer at a time: a pen, a finger or the mouse draws, or drags what cannot be drawn. */
function pointer(canvas, lab) {
  let active = null;
  canvas.addEventListener("pointerdown", (event) => {
    if (active || event.button !== 0 || !lab.model) return;
    canvas.setPointerCapture(event.pointerId);
    const begin = lab.state.input.mode === "draw" ? drawing : dragging;
    active = { id: event.pointerId, ...begin(event, canvas, lab) };
  });
  canvas.addEventListener("pointermove", (event) => active?.id === event.pointerId && active.move(event));
  const end = (event) => {
    if (active?.id !== event.pointerId) return;
    active.end();
    active = null;
  };
  canvas.addEventListener("pointerup", end);
  canvas.addEventListener("pointercancel", end);
}

function drawing(event, canvas, lab) {
  const points = [];
  const earlier = lab.state.input.strokes;
  const w = lab.state.input.width;
  const add = (moved) => points.push(...toStroke(moved, canvas, lab));
  const show = () => lab.update({ input: { strokes: [...earlier, { w, p: [...points] }] } });
  past.push(earlier);
  add(event);
  show();
  return {
    move: (moved) => {
      const all = moved.getCoalescedEvents?.() ?? [];
      for (const one of all.length ? all : [moved]) add(one);
      show();
    },
    end: () => lab.update({ input: { strokes: [...earlier, { w, p: simplify(points, TOLERANCE) }] } }),
  };
}

/** Where the pointer is, in thousandths of the digit's square, seen through the handles. */
function toStroke(event, canvas, lab) {
  const box = canvas.getBoundingClientRect();
  const k = zoom(canvas, lab);
  const x = (event.clientX - box.left - box.width / 2) / k, y = (event.clientY - box.top - box.height / 2) / k;
  const side = digitSide(lab.model.image_shape);
  return apply(invert(handles(lab.state.transform)), x, y).map((v) =>
    Math.min(3000, Math.max(-2000, Math.round((v / side + 0.5) * 1000))));
}

function dragging(event, canvas, lab) {
  const k = zoom(canvas, lab);
  const { transform, input: { mode, overlap } } = lab.state;
  const unmap = invert(handles({ ...transform, x: 0, y: 0 }));
  const from = [event.clientX, event.clientY];
  const move = (moved) => {
    const way = [(moved.clientX - from[0]) / k, (moved.clientY - from[1]) / k];
    if (mode === "overlap") {
      const [dx, dy] = apply(unmap, ...way);
      moveSecond(lab, overlap.dx + dx, overlap.dy + dy);
    } else {
      lab.update({ transform: limited({ x: transform.x + way[0], y: transform.y + way[1] }, lab.model) });
    }
  };
  return { move, end: () => {} };
}

function moveSecond(lab, dx, dy) {
  const whole = (value) => Math.min(FARTHEST, Math.max(-FARTHEST, Math.round(value))) + 0; // no −0 in the link
  lab.update({ input: { overlap: { dx: whole(dx), dy: whole(dy) } } });
}

const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

function keys(canvas, lab) {
  canvas.addEventListener("keydown", (event) => {
    const arrow = ARROWS[event.key];
    if (!arrow || !lab.model) return;
    event.preventDefault();
    const { transform, input: { mode, overlap } } = lab.state;
    if (mode === "overlap") moveSecond(lab, overlap.dx + arrow[0], overlap.dy + arrow[1]);
    else lab.update({ transform: limited({ x: transform.x + arrow[0], y: transform.y + arrow[1] }, lab.model) });
  });
  addEventListener("keydown", (event) => {
    if (lab.state.view !== "lab" || lab.state.input.mode !== "draw") return;
    if (event.target.closest?.("input:not([type=range]):not([type=checkbox]), textarea, [contenteditable]")) return;
    if ((event.ctrlKey || event.metaKey) && !event.shiftKey && event.key.toLowerCase() === "z") {
      event.preventDefault();
      undo(lab);
    } else if (event.key === "Delete" && lab.state.input.strokes.length) {
      draw(lab, []);
    }
  });
}

/* ---- each mode's tools ---- */

function drawTools(lab) {
  const back = html("button", { type: "button", id: "undo", title: "Undo (Ctrl+Z)", onclick: () => undo(lab) }, "Undo");
  const wipe = () => draw(lab, []);
  const clear = html("button", { type: "button", id: "clear", title: "Clear (Delete)", onclick: wipe }, "Clear");
  const width = html("input", { type: "range", id: "stroke-width", min: 40, max: 180, step: 5,
    "aria-label": "Stroke width", title: "Stroke width",
    oninput: () => lab.update({ input: { width: Number(width.value) } }) });
  const dot = html("span", { class: "dot", "aria-hidden": "true" });
  const centre = html("input", { type: "checkbox", id: "centre",
    onchange: () => lab.update({ input: { centre: centre.checked } }) });
  const show = () => {
    const { strokes, width: w, centre: centred } = lab.state.input;
    back.disabled = !strokes.length && !past.length;
    clear.disabled = !strokes.length;
    width.value = w;
    dot.style.transform = `scale(${w / 180})`;
    centre.checked = centred;
  };
  lab.on((_, changed) => changed.has("input") && show());
  show();
  return html("div", {},
    html("div", { class: "row" }, back, clear, width, dot),
    html("label", { class: "check small", title: "The ink scaled into 20×20 pixels, its centre of mass in the middle" },
      centre, "Centre and scale like MNIST"));
}

function testTools(lab) {
  const index = html("input", { type: "number", id: "digit-index", min: 0, max: 9999,
    "aria-label": "Number of the test digit" });
  const label = html("select", { id: "digit-label", "aria-label": "Only one class" });
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
    if (changed.has("input") && lab.state.input.mode === "test" && lab.model) {
      const digit = lab.digit(lab.state.input.index);
      if (digit) say(facts, `Its label: ${lab.model.classes[digit.label] ?? digit.label}.${counted(lab)}`);
    }
  });
  return html("div", {},
    html("div", { class: "row" }, random, following,
      html("label", { class: "field" }, html("span", { class: "muted" }, "No."), index)),
    html("div", { class: "row" }, label, html("label", { class: "check small" }, mistakes, "only mistakes")),
    facts);
}

let matching = null; // how many digits fit the last question, and to which filter

function counted(lab) {
  const { label, only } = lab.state.input;
  if (!matching || matching.label !== label || matching.only !== only || matching.model !== lab.state.model) return "";
  if (only === "mistakes") return ` ${matching.count} mistakes${matching.ready ? "" : " so far"}.`;
  return label === null ? "" : ` ${matching.count} like it.`;
}

let asking = 0;

/** Ask the server for a digit that fits; mistakes may still be counted: then ask again. */
async function pickDigit(lab, random, take, tell) {
  const mine = ++asking;
  const { index, label, only } = lab.state.input;
  const query = { model: lab.state.model, only, random, after: index };
  if (label !== null) query.label = label;
  try {
    for (;;) {
      const found = await lab.api.digits(query);
      if (mine !== asking) return; // a newer question is under way
      if (found.state === "no data") return tell(sentence(found.why || "the test digits could not be fetched."));
      matching = { count: found.count, label, only, model: query.model, ready: found.state === "ready" };
      if (found.index !== null) return take(found.index);
      if (found.state === "ready") return tell(only === "mistakes" ? "It makes no mistake here." : "No digit fits.");
      tell(`Looking for mistakes … ${Math.round(100 * found.progress)} %`);
      await new Promise((resolve) => setTimeout(resolve, ASK_AGAIN_MILLISECONDS));
    }
  } catch (error) {
    tell(sentence(error.message));
  }
}

function imageTools(lab) {
  const file = html("input", { type: "file", id: "file", class: "unseen",
    accept: "image/png,image/jpeg,image/webp,image/gif,image/bmp" });
  file.addEventListener("change", () => {
    if (file.files[0]) bring(lab, file.files[0]);
    file.value = "";
  });
  const facts = html("p", { class: "small muted" }, "Or drop or paste one. A photo of a digit on paper will do.");
  lab.on((_, changed) => changed.has("photo") && lab.transient.photo && say(facts, lab.transient.photo));
  const button = html("label", { class: "button", for: "file" }, "Choose an image");
  return html("div", {}, html("div", { class: "row" }, button, file), facts);
}

/** Drop and paste work in every mode, and lead to the image mode. */
function bringImages(stage, lab) {
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

/** The server prepares the image as the network wants it; the state keeps these pixels, not the file. */
async function bring(lab, file) {
  if (!lab.model) return;
  try {
    const { header, pixels } = await lab.api.photo(file, lab.state.model);
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

function overlapTools(lab) {
  const facts = html("p", { class: "small muted num" });
  const rows = ["a", "b"].map((which) => overlapRow(lab, which));
  lab.on((_, changed) => {
    if (!changed.has("input") || lab.state.input.mode !== "overlap") return;
    const { dx, dy } = lab.state.input.overlap;
    say(facts, `Drag the second: ${number(dx, 0)}, ${number(dy, 0)} px`);
  });
  return html("div", {}, ...rows, facts);
}

function overlapRow(lab, which) {
  const name = which === "a" ? "First" : "Second";
  const index = html("input", { type: "number", min: 0, max: 9999, id: `overlap-${which}`,
    "aria-label": `${name} digit's number` });
  const label = html("b", { class: "num" });
  const take = (n) => lab.update({ input: { overlap: { [which]: n } } });
  index.addEventListener("change", () => {
    const wanted = Math.round(Number(index.value));
    if (index.value !== "" && wanted >= 0 && wanted <= 9999) take(wanted);
    else index.value = lab.state.input.overlap[which];
  });
  const random = html("button", { type: "button", "aria-label": `Another ${name.toLowerCase()} digit`,
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

/** A random digit of another class than the other one's: two of a kind cannot be told apart. */
async function another(lab, which, take) {
  const other = lab.digit(lab.state.input.overlap[which === "a" ? "b" : "a"]);
  const labels = [...Array(10).keys()].filter((label) => label !== other?.label);
  const label = labels[Math.floor(Math.random() * labels.length)];
  try {
    const found = await lab.api.digits({ model: lab.state.model, label, only: "all", random: true });
    if (found.index === null) lab.notice(found.why || "The test digits are not here.");
    else take(found.index);
  } catch (error) {
    lab.notice(error.message);
  }
}

/* ---- below: what the network sees, and the handles as sliders ---- */

function below(lab) {
  const canvas = html("canvas", { id: "seen", role: "img", "aria-label": "What the network sees" });
  const field = svg("rect", { class: "receptive", visibility: "hidden" });
  const outline = svg("svg", { class: "handles", "aria-hidden": "true" }, field);
  const caption = html("span", { class: "small muted num" });
  const holder = html("div", { class: "seen", "data-card": "input" }, canvas, outline);
  lab.on((_, changed) => {
    if (!lab.model) return;
    if (["input", "transform", "model", "theme", "size"].some((key) => changed.has(key))) {
      const [channels, height, width] = lab.model.image_shape;
      const pixels = lab.input ?? new Float32Array(channels * height * width);
      picture(canvas, pixels, lab.model.image_shape, maps(lab.colours).ink);
      set(outline, { viewBox: `0 0 ${width} ${height}` });
      holder.style.width = `${wholePixels(holder, width)}px`;
      say(caption, `${width}×${height} pixels`);
    }
    if (changed.has("flash")) outlineSeen(field, lab.transient.receptive);
  });
  return html("div", { class: "below" },
    html("div", { class: "row top" },
      holder,
      html("div", { class: "beside" }, html("h3", {}, "What the network sees"), caption, resetButton(lab))),
    sliders(lab));
}

/** A width that shows every pixel as large as every other. */
function wholePixels(holder, width) {
  const room = (innerHeight >= 900 ? 0.7 : 0.52) * holder.closest(".panel").querySelector(".stage").clientWidth;
  return Math.max(1, Math.round(room / width)) * width;
}

function outlineSeen(rect, field) {
  set(rect, { visibility: field ? "visible" : "hidden" });
  if (field) set(rect, { x: field.x, y: field.y, width: field.size, height: field.size });
}

function sliders(lab) {
  const rows = Object.entries(SLIDERS).map(([key, { title, step, unit }]) => sliderRow(lab, key, title, step, unit));
  return html("div", { class: "sliders" }, ...rows);
}

function resetButton(lab) {
  const reset = html("button", { type: "button", id: "reset-transform", class: "small",
    onclick: () => lab.update({ transform: DEFAULTS.transform }) }, "Reset");
  const untouched = ([key, value]) => lab.state.transform[key] === value;
  const show = () => (reset.hidden = Object.entries(DEFAULTS.transform).every(untouched));
  lab.on((_, changed) => changed.has("transform") && show());
  show();
  return reset;
}

function sliderRow(lab, key, title, step, unit) {
  const range = html("input", { type: "range", step, "data-transform": key,
    "aria-label": title, title: `${title} ${unit}`,
    oninput: () => lab.update({ transform: limited({ [key]: Number(range.value) }, lab.model) }),
    ondblclick: () => lab.update({ transform: { [key]: DEFAULTS.transform[key] } }) });
  const value = html("output", { class: "num small" });
  const show = () => {
    const [low, high] = rangeOf(key, lab.model);
    set(range, { min: low, max: high });
    range.value = lab.state.transform[key];
    const digits = key === "rotate" ? 0 : step < 0.1 ? 2 : 1;
    say(value, number(lab.state.transform[key], digits) + (unit === "px" ? "" : unit));
  };
  lab.on((_, changed) => (changed.has("transform") || changed.has("model")) && show());
  show();
  return html("label", { class: "slider" }, html("span", { class: "small muted" }, title), range, value);
}
