// The drawing canvas: the input field of the network with the square of a digit in its centre, transformed by the
// handles. Strokes are kept as drawn; raster.js centres them like MNIST.

import { html, say, set, svg } from "./elements.js";
import { buildGrips, limited, placeGrips, zoom } from "./grips.js";
import { rgb, surface } from "./paint.js";
import { apply, compose, digitSide, handles, imageSide, invert, simplify, smooth } from "./raster.js";

const FARTHEST = 8; // largest offset of the second digit in pixels, as in MultiMNIST
const TOLERANCE = 3; // of a simplified stroke, in thousandths of the digit's square
const MOST_UNDONE = 100;

export function buildStage(stage, lab) {
  // An application, so that screen readers pass the arrow keys on
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
  if (digits.includes(undefined)) return "This digit is not available";
  return digits.includes(null) ? "Loading the digit …" : "";
}

function describe(lab) {
  const { mode, index, overlap, strokes } = lab.state.input;
  if (mode === "draw") {
    const count = strokes.length === 1 ? "one stroke" : `${strokes.length} strokes`;
    return `Your drawing, ${count}. Arrow keys move it, Control Z undoes a stroke, Delete clears.`;
  }
  if (mode === "test") return `Test image number ${index}. Arrow keys move it.`;
  if (mode === "overlap") {
    return `Overlapping test digits ${overlap.a} and ${overlap.b}. Arrow keys move the second.`;
  }
  return "Your image. Arrow keys move it.";
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
  const field = lab.model.image_shape;
  paintImage(context, first, lab.colours.a, imageSide(first.shape, field));
  context.globalAlpha = 0.85;
  context.translate(dx, dy);
  paintImage(context, second, lab.colours.b, imageSide(second.shape, field));
}

function paintPixels(context, lab) {
  const { mode, index } = lab.state.input;
  if (mode === "test") {
    const digit = lab.digit(index);
    if (digit) paintImage(context, digit, lab.colours.ink, imageSide(digit.shape, lab.model.image_shape));
  } else if (lab.input) {
    // lab.input already includes the transformation of the handles: undo it
    context.transform(...invert(handles(lab.state.transform)));
    const [, height, width] = lab.model.image_shape;
    paintImage(context, { pixels: lab.input, shape: lab.model.image_shape }, lab.colours.ink, Math.max(height, width));
  }
}

/** Grey pixels as transparent ink, colour pixels unchanged; the longer side is `side` wide. */
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

/** The map from the pixels of the network to those of the canvas, where the drawing is not centred yet. */
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
  const [left, right] = [field.x, field.x + field.size].map((x) => Math.min(Math.max(x, 0), width) - width / 2);
  const [top, bottom] = [field.y, field.y + field.size].map((y) => Math.min(Math.max(y, 0), height) - height / 2);
  const corners = [[left, top], [right, top], [right, bottom], [left, bottom]];
  set(outline, { points: corners.map(([x, y]) => apply(map, x, y).map((v) => v.toFixed(1)).join(",")).join(" ") });
}

/* ---- pointer and keyboard ---- */

const past = []; // strokes before each change, for undo

function remember(lab) {
  past.push(lab.state.input.strokes);
  if (past.length > MOST_UNDONE) past.shift();
}

export function clear(lab) {
  remember(lab);
  lab.update({ input: { strokes: [] } });
}

export function canUndo(lab) {
  return past.length > 0 || lab.state.input.strokes.length > 0;
}

export function undo(lab) {
  if (!canUndo(lab)) return;
  lab.update({ input: { strokes: past.pop() ?? lab.state.input.strokes.slice(0, -1) } });
}

/** One pointer at a time (pen, finger or mouse) draws, or drags other inputs. */
function pointer(canvas, lab) {
  let active = null;
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || !lab.model) return;
    if (active && !(event.pointerType === "pen" && active.type === "touch")) return;
    active?.cancel(); // a palm that touched before the pen
    canvas.setPointerCapture(event.pointerId);
    const begin = lab.state.input.mode === "draw" ? drawing : dragging;
    active = { id: event.pointerId, type: event.pointerType, ...begin(event, canvas, lab) };
  });
  canvas.addEventListener("pointermove", (event) => active?.id === event.pointerId && active.move(event));
  const end = (event, how) => {
    if (active?.id !== event.pointerId) return;
    active[how]();
    active = null;
  };
  canvas.addEventListener("pointerup", (event) => end(event, "end"));
  canvas.addEventListener("pointercancel", (event) => end(event, "cancel")); // how the system reports a resting palm
}

function drawing(event, canvas, lab) {
  const points = [];
  const earlier = lab.state.input.strokes;
  const w = lab.state.input.width;
  const add = (moved) => points.push(...toStroke(moved, canvas, lab));
  const show = () => lab.update({ input: { strokes: [...earlier, { w, p: [...points] }] } });
  remember(lab);
  add(event);
  show();
  return {
    move: (moved) => {
      const all = moved.getCoalescedEvents?.() ?? [];
      for (const one of all.length ? all : [moved]) add(one);
      show();
    },
    end: () => lab.update({ input: { strokes: [...earlier, { w, p: simplify(points, TOLERANCE) }] } }),
    cancel: () => {
      past.pop();
      lab.update({ input: { strokes: earlier } });
    },
  };
}

/** The position of the pointer in thousandths of the digit's square, before the handles. */
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
  return { move, end: () => {}, cancel: () => {} };
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
      clear(lab);
    }
  });
}
