// A part of the page as an SVG drawing: boxes, text, meters and sliders as the browser lays them out, inline SVG with its
// styles, canvases as vectors where they are recorded (vector.js) and as pixels elsewhere. Controls are left out.

import { html } from "./elements.js";
import { escaped, paintOf, pixelUrl, plainColour, round, tag } from "./vector.js";

const COPIED = [ // computed styles of inline SVG that a file of its own needs
  "stroke-width", "stroke-dasharray", "stroke-linecap", "stroke-linejoin", "vector-effect", "opacity", "fill-opacity", "stroke-opacity",
  "font-size", "font-family", "font-weight", "text-anchor", "font-variant-numeric",
];
const SHARPNESS = 3; // enlarged pixels per CSS pixel, at least

/** {markup, width, height} of an element; `recorded` maps its canvases to their VectorContext. */
export function drawing(root, recorded) {
  const { left, top, width, height } = root.getBoundingClientRect();
  const parts = [];
  walk(root, { left, top, recorded, put: (part) => parts.push(part) });
  const background = getComputedStyle(root).getPropertyValue("--panel").trim();
  const sheet = tag("rect", { width, height, ...paintOf("fill", background) });
  const about = { xmlns: "http://www.w3.org/2000/svg", width: Math.ceil(width), height: Math.ceil(height), viewBox: `0 0 ${Math.ceil(width)} ${Math.ceil(height)}` };
  return { markup: tag("svg", about, sheet + parts.join("")), width: Math.ceil(width), height: Math.ceil(height) };
}

function walk(element, sheet) {
  const style = getComputedStyle(element);
  if (style.display === "none" || style.visibility === "hidden" || style.opacity === "0") return;
  const box = boxOf(element.getBoundingClientRect(), sheet);
  if (element.matches("svg")) return inlineSvg(element, box, sheet);
  if (element.matches(".unseen, option")) return;
  if (element.matches("input[type=range]")) return slider(element, style, box, sheet);
  paintBox(style, box, sheet);
  if (element.matches("canvas")) canvasPixels(element, style, box, sheet);
  else {
    before(element, box, sheet);
    for (const child of element.childNodes) {
      if (child.nodeType === Node.TEXT_NODE) writeText(child, style, sheet);
      else if (child.nodeType === Node.ELEMENT_NODE) walk(child, sheet);
    }
  }
  outline(style, box, sheet);
}

function boxOf({ left, top, width, height }, sheet) {
  return { x: left - sheet.left, y: top - sheet.top, width, height };
}

// ---------------------------------------------------------------- boxes

function paintBox(style, { x, y, width, height }, { put }) {
  const radius = Math.min(parseFloat(style.borderTopLeftRadius) || 0, width / 2, height / 2);
  const rx = style.borderTopLeftRadius.endsWith("%") ? width / 2 : radius;
  // A gradient is drawn in its first colour
  const first = /(rgba?|color|oklab)\([^)]*\)/.exec(style.backgroundImage)?.[0];
  for (const colour of [style.backgroundColor, first]) {
    if (colour && plainColour(colour).opacity > 0) put(tag("rect", { x, y, width, height, rx: rx || null, ...paintOf("fill", colour) }));
  }
  const sides = ["Top", "Right", "Bottom", "Left"].map((side) => ({ wide: parseFloat(style[`border${side}Width`]), colour: style[`border${side}Color`] }));
  if (sides.every(({ wide }) => wide > 0)) {
    const [{ wide, colour }] = sides;
    put(tag("rect", { x: x + wide / 2, y: y + wide / 2, width: width - wide, height: height - wide, rx: rx || null, fill: "none", "stroke-width": wide, ...paintOf("stroke", colour) }));
    return;
  }
  const places = [[x, y, width, 0], [x + width, y, 0, height], [x, y + height, width, 0], [x, y, 0, height]];
  sides.forEach(({ wide, colour }, k) => {
    const [x1, y1, dx, dy] = places[k];
    if (wide > 0) put(tag("line", { x1, y1, x2: x1 + dx, y2: y1 + dy, "stroke-width": wide, ...paintOf("stroke", colour) }));
  });
}

function outline(style, { x, y, width, height }, { put }) {
  const wide = style.outlineStyle === "none" ? 0 : parseFloat(style.outlineWidth);
  if (wide > 0) put(tag("rect", { x, y, width, height, fill: "none", "stroke-width": wide, ...paintOf("stroke", style.outlineColor) }));
}

/** The coloured squares before names. */
function before(element, { x, y, height }, { put }) {
  const style = getComputedStyle(element, "::before");
  const [width, high] = [parseFloat(style.width), parseFloat(style.height)];
  if (style.content === "none" || !(width > 0)) return;
  const tall = element.matches("p") ? parseFloat(getComputedStyle(element).lineHeight) || height : height;
  put(tag("rect", { x, y: y + (tall - high) / 2, width, height: high, rx: style.borderTopLeftRadius.endsWith("%") ? width / 2 : 3, ...paintOf("fill", style.backgroundColor) }));
}

/** A slider of the pose as its track, the band of the paper in its middle half, and its thumb. */
function slider({ min, max, value }, style, { x, y, width, height }, { put }) {
  const middle = y + height / 2, radius = 5, long = width - 2 * radius;
  const at = x + radius + (long * (Number(value) - Number(min))) / (Number(max) - Number(min));
  const accent = style.getPropertyValue("--accent");
  put(tag("rect", { x: x + radius + long / 4, y: middle - radius, width: long / 2, height: 2 * radius, ...paintOf("fill", accent, 0.2) }));
  put(tag("line", { x1: x, x2: x + width, y1: middle, y2: middle, "stroke-width": 2, ...paintOf("stroke", style.getPropertyValue("--line")) }));
  put(tag("circle", { cx: at, cy: middle, r: radius, ...paintOf("fill", accent) }));
}

// ---------------------------------------------------------------- canvases and inline SVG

function canvasPixels(canvas, style, { x, y, width, height }, { put, recorded }) {
  const markup = recorded.get(canvas)?.markup;
  if (markup) return put(tag("svg", { x, y, width, height, overflow: "hidden" }, markup));
  if (!canvas.width || !canvas.height) return;
  const factor = style.imageRendering === "pixelated" ? Math.max(1, Math.ceil((SHARPNESS * width) / canvas.width)) : 1;
  put(tag("image", { x, y, width, height, href: pixelUrl(canvas, factor), preserveAspectRatio: "none" }));
}

function inlineSvg(element, { x, y, width, height }, { put }) {
  if (!width || !height) return;
  const size = { x, y, width, height, viewBox: element.getAttribute("viewBox"), overflow: "visible" };
  put(tag("svg", size, [...element.children].map(copied).join("")));
}

function copied(element) {
  const style = getComputedStyle(element);
  if (style.display === "none" || style.visibility === "hidden") return "";
  const own = Object.fromEntries([...element.attributes].filter(({ name }) => !/^(class|style|role|tabindex|aria-|data-|visibility)/.test(name)).map(({ name, value }) => [name, value]));
  const colours = ["fill", "stroke"].map((kind) => (style[kind] === "none" ? { [kind]: "none" } : paintOf(kind, style[kind])));
  const kept = Object.fromEntries(COPIED.map((name) => [name, style.getPropertyValue(name)]).filter(([, value]) => value && value !== "none" && value !== "normal"));
  const content = element.children.length ? [...element.children].map(copied).join("") : escaped(element.textContent);
  const geometry = element.tagName === "circle" ? { r: parseFloat(style.r) } : {};
  return tag(element.tagName, { ...kept, ...own, ...geometry, ...colours[0], ...colours[1] }, content);
}

// ---------------------------------------------------------------- text

let ruler = null;

/** The words of a text node, those of a line together. */
function writeText(node, style, { left, top, put }) {
  const { data } = node, range = document.createRange();
  if (!data.trim()) return;
  const lines = [];
  for (const { 0: word, index } of data.matchAll(/\S+/g)) {
    range.setStart(node, index);
    range.setEnd(node, index + word.length);
    const box = range.getClientRects()[0];
    if (!box?.width) continue;
    const line = lines.at(-1);
    if (line && Math.abs(line.box.top - box.top) < 2) Object.assign(line, { end: index + word.length, right: box.right });
    else lines.push({ box, start: index, end: index + word.length, right: box.right });
  }
  const font = { "font-size": parseFloat(style.fontSize), "font-family": style.fontFamily, "font-weight": style.fontWeight === "400" ? null : style.fontWeight,
    "font-style": style.fontStyle === "normal" ? null : style.fontStyle };
  for (const { box, start, end, right } of lines) {
    const text = data.slice(start, end).replace(style.whiteSpace === "pre" ? /\u0000/ : /\s+/g, " ");
    put(tag("text", { x: box.left - left, y: box.top - top + baseline(style, box.height), ...font, textLength: round(right - box.left), lengthAdjust: "spacingAndGlyphs",
      "xml:space": style.whiteSpace === "pre" ? "preserve" : null, ...paintOf("fill", style.color) }, escaped(text)));
  }
}

/** From the top of a line of text to its baseline. */
function baseline(style, height) {
  ruler ??= html("canvas").getContext("2d");
  ruler.font = `${style.fontWeight} ${style.fontSize} ${style.fontFamily}`;
  const { fontBoundingBoxAscent: ascent, fontBoundingBoxDescent: descent } = ruler.measureText("x");
  return (height - ascent - descent) / 2 + ascent;
}
