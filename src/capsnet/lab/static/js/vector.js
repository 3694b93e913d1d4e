// A canvas context that writes SVG instead of pixels, with the part of the interface that the panels use. While a canvas
// is recorded, `surface` in paint.js hands out this context, so that a panel exports what it draws without knowing.

import { html } from "./elements.js";

const PRECISION = 100;
export const round = (value) => Math.round(value * PRECISION) / PRECISION;

/** Escape a text for XML. */
export function escaped(text) {
  return String(text).replace(/[&<>"]/g, (sign) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[sign]);
}

/** An element as a string; attributes that are null or undefined are left out. */
export function tag(name, attributes, content = "") {
  const given = Object.entries(attributes).filter(([, value]) => value !== null && value !== undefined);
  const written = given.map(([key, value]) => ` ${key}="${escaped(typeof value === "number" ? round(value) : value)}"`).join("");
  return content ? `<${name}${written}>${content}</${name}>` : `<${name}${written}/>`;
}

/** Any CSS colour as a hexadecimal one and an opacity, which every SVG program reads. */
export function plainColour(colour) {
  if (!known.has(colour)) {
    probe ??= new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
    probe.clearRect(0, 0, 1, 1);
    probe.fillStyle = colour;
    probe.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = probe.getImageData(0, 0, 1, 1).data;
    known.set(colour, { hex: `#${[r, g, b].map((byte) => byte.toString(16).padStart(2, "0")).join("")}`, opacity: a / 255 });
  }
  return known.get(colour);
}
const known = new Map();
let probe = null;

/** fill="#…" with its opacity, or the same for stroke. */
export function paintOf(kind, colour, alpha = 1) {
  const { hex, opacity } = plainColour(colour);
  const total = opacity * alpha;
  return { [kind]: hex, [`${kind}-opacity`]: total < 0.999 ? round(total) : null };
}

/** The pixels of a canvas as a data URL, enlarged so that no program smooths them. */
export function pixelUrl(canvas, factor = 1) {
  const copy = html("canvas", { width: canvas.width * factor, height: canvas.height * factor });
  const context = copy.getContext("2d");
  context.imageSmoothingEnabled = false;
  context.drawImage(canvas, 0, 0, copy.width, copy.height);
  return copy.toDataURL();
}

const ANCHORS = { left: "start", start: "start", center: "middle", right: "end", end: "end" };
const FRESH = {
  fillStyle: "#000", strokeStyle: "#000", lineWidth: 1, lineCap: "butt", lineJoin: "miter", globalAlpha: 1,
  font: "10px sans-serif", textAlign: "left", textBaseline: "alphabetic", matrix: [1, 0, 0, 1, 0, 0], dash: [],
};

export class VectorContext {
  constructor() {
    this.restart();
  }

  /** Forget what was drawn: a panel paints its canvas from the beginning every time. */
  restart() {
    Object.assign(this, structuredClone(FRESH), { parts: [], path: "", saved: [] });
    return this;
  }

  get markup() {
    return this.parts.join("");
  }

  #put(name, attributes, content) {
    const moved = this.matrix.some((value, k) => value !== FRESH.matrix[k]);
    const transform = moved ? `matrix(${this.matrix.map((value) => Number(value.toPrecision(6))).join(" ")})` : null;
    this.parts.push(tag(name, { ...attributes, transform }, content));
  }

  get #stroke() {
    const { lineCap, lineJoin, lineWidth, dash } = this;
    return { fill: "none", ...paintOf("stroke", this.strokeStyle, this.globalAlpha), "stroke-width": lineWidth,
      "stroke-linecap": lineCap === "butt" ? null : lineCap, "stroke-linejoin": lineJoin === "miter" ? null : lineJoin,
      "stroke-dasharray": dash.length ? dash.join(" ") : null };
  }

  get #fill() {
    return paintOf("fill", this.fillStyle, this.globalAlpha);
  }

  save() {
    const { matrix, globalAlpha, fillStyle, strokeStyle, lineWidth } = this;
    this.saved.push({ matrix: [...matrix], globalAlpha, fillStyle, strokeStyle, lineWidth });
  }

  restore() {
    Object.assign(this, this.saved.pop());
  }

  transform(a, b, c, d, e, f) {
    const [g, h, i, j, k, l] = this.matrix;
    this.matrix = [g * a + i * b, h * a + j * b, g * c + i * d, h * c + j * d, g * e + i * f + k, h * e + j * f + l];
  }

  translate(x, y) {
    this.transform(1, 0, 0, 1, x, y);
  }

  scale(x, y) {
    this.transform(x, 0, 0, y, 0, 0);
  }

  setLineDash(dash) {
    this.dash = dash;
  }

  beginPath() {
    this.path = "";
  }

  moveTo(x, y) {
    this.path += `M${round(x)} ${round(y)}`;
  }

  lineTo(x, y) {
    this.path += `L${round(x)} ${round(y)}`;
  }

  bezierCurveTo(...points) {
    this.path += `C${points.map(round).join(" ")}`;
  }

  /** Whole circles and ellipses only. */
  arc(x, y, radius) {
    this.ellipse(x, y, radius, radius, 0);
  }

  ellipse(x, y, rx, ry, turn) {
    const dx = round(rx * Math.cos(turn)), dy = round(rx * Math.sin(turn)), angle = round((turn * 180) / Math.PI);
    const half = `${round(rx)} ${round(ry)} ${angle} 1 1`;
    this.path += `M${round(x - dx)} ${round(y - dy)}a${half} ${2 * dx} ${2 * dy}a${half} ${-2 * dx} ${-2 * dy}`;
  }

  fill() {
    this.#put("path", { d: this.path, ...this.#fill });
  }

  stroke() {
    this.#put("path", { d: this.path, ...this.#stroke });
  }

  fillRect(x, y, width, height) {
    this.#put("rect", { x, y, width, height, ...this.#fill });
  }

  strokeRect(x, y, width, height) {
    this.#put("rect", { x, y, width, height, ...this.#stroke });
  }

  fillText(text, x, y) {
    const [, weight, size, family] = /^(?:(\d+) )?([\d.]+)px (.*)$/.exec(this.font);
    this.#put("text", { x, y: y + (this.textBaseline === "middle" ? 0.36 * size : 0), "font-size": Number(size), "font-family": family,
      "font-weight": weight ?? null, "text-anchor": ANCHORS[this.textAlign], ...this.#fill }, escaped(text));
  }

  drawImage(image, x, y, width, height) {
    this.#put("image", { x, y, width, height, href: pixelUrl(image), preserveAspectRatio: "none",
      opacity: this.globalAlpha < 1 ? this.globalAlpha : null });
  }
}
