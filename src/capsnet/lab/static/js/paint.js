// Numbers to images: colour maps and a Float32Array on a canvas. The maps are straight lines in OKLab between
// the colours of the page, so equal steps of a number look equal in light and dark mode.

/** A CSS colour as [r, g, b] in 0…255. */
export function rgb(colour) {
  if (!parsed.has(colour)) {
    probe ??= new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
    probe.clearRect(0, 0, 1, 1);
    probe.fillStyle = colour;
    probe.fillRect(0, 0, 1, 1);
    parsed.set(colour, [...probe.getImageData(0, 0, 1, 1).data.slice(0, 3)]);
  }
  return parsed.get(colour);
}
const parsed = new Map();
let probe = null;

/** 256 colours evenly spaced from stop to stop, as (256 · 3) bytes. */
export function ramp(...stops) {
  const key = stops.join("|");
  if (!ramps.has(key)) {
    const labs = stops.map((stop) => toLab(rgb(stop)));
    const bytes = new Uint8ClampedArray(256 * 3);
    for (let n = 0; n < 256; n++) bytes.set(mixed(labs, n / 255), n * 3);
    ramps.set(key, bytes);
  }
  return ramps.get(key);
}
const ramps = new Map();

function mixed(labs, at) {
  const place = at * (labs.length - 1);
  const n = Math.min(labs.length - 2, Math.floor(place));
  const share = place - n;
  return fromLab(labs[n].map((value, k) => value * (1 - share) + labs[n + 1][k] * share));
}

/** The colour maps: ink for images, heat for sizes, difference for signed values, a, b. */
export function maps(colours) {
  const paper = colours.panel;
  return {
    ink: ramp(paper, colours.ink),
    heat: ramp(paper, colours.accent),
    difference: ramp(colours.warn, paper, colours.accent),
    a: ramp(paper, colours.a),
    b: ramp(paper, colours.b),
  };
}

function toLab(bytes) {
  const [r, g, b] = bytes.map((byte) => {
    const x = byte / 255;
    return x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4;
  });
  const l = Math.cbrt(0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b);
  const m = Math.cbrt(0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b);
  const s = Math.cbrt(0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b);
  return [
    0.2104542553 * l + 0.793617785 * m - 0.0040720468 * s,
    1.9779984951 * l - 2.428592205 * m + 0.4505937099 * s,
    0.0259040371 * l + 0.7827717662 * m - 0.808675766 * s,
  ];
}

function fromLab([L, A, B]) {
  const l = (L + 0.3963377774 * A + 0.2158037573 * B) ** 3;
  const m = (L - 0.1055613458 * A - 0.0638541728 * B) ** 3;
  const s = (L - 0.0894841775 * A - 1.291485548 * B) ** 3;
  const linear = [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ];
  return linear.map((x) => 255 * (x <= 0.0031308 ? 12.92 * x : 1.055 * x ** (1 / 2.4) - 0.055));
}

/** Pixels (c, h, w) through a map; three channels are painted directly. CSS scales the canvas. */
export function picture(canvas, pixels, [channels, height, width], map, low = 0, high = 1) {
  const image = sized(canvas, width, height);
  const n = height * width;
  for (let k = 0; k < n; k++) {
    const from = channels === 3 ? null : shade(pixels[k], low, high) * 3;
    for (let c = 0; c < 3; c++) {
      image.data[4 * k + c] = channels === 3 ? 255 * pixels[c * n + k] : map[from + c];
    }
    image.data[4 * k + 3] = 255;
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
}

function shade(value, low, high) {
  return Math.max(0, Math.min(255, Math.round((255 * (value - low)) / (high - low)))) || 0;
}

function sized(canvas, width, height) {
  if (canvas.width !== width) canvas.width = width;
  if (canvas.height !== height) canvas.height = height;
  return new ImageData(width, height);
}

/** Several images in their own colours, blended: layers [{pixels, colour}] on paper. */
export function overlay(canvas, layers, [, height, width], paper) {
  const image = sized(canvas, width, height);
  const inks = layers.map(({ colour }) => rgb(colour));
  const ground = rgb(paper);
  for (let k = 0; k < height * width; k++) {
    const shares = layers.map(({ pixels }) => Math.max(0, Math.min(1, pixels[k])));
    const total = shares.reduce((a, b) => a + b, 0);
    const cover = 1 - shares.reduce((left, share) => left * (1 - share), 1);
    for (let c = 0; c < 3; c++) {
      const mixed = total ? shares.reduce((sum, share, n) => sum + share * inks[n][c], 0) / total : 0;
      image.data[4 * k + c] = ground[c] * (1 - cover) + mixed * cover;
    }
    image.data[4 * k + 3] = 255;
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
}

/** Numbers between two steps: list[⌊at⌋] mixed with the next. */
export function between(list, at) {
  const low = Math.floor(at), share = at - low;
  if (!share || low + 1 >= list.length) return list[Math.min(low, list.length - 1)];
  return list[low].map((value, k) => value * (1 - share) + list[low + 1][k] * share);
}

/** How much larger than usual the type of the page is, for what canvases draw. */
export function typeScale() {
  return parseFloat(getComputedStyle(document.documentElement).fontSize) / 10;
}

/** The canvases that are drawn as vectors, with their contexts, while a panel is exported. */
export const recorded = new Map();

/** A canvas for drawing in CSS pixels, sharp on any screen; returns its cleared context and its size. */
export function surface(canvas) {
  if (recorded.has(canvas)) return { context: recorded.get(canvas).restart(), width: canvas.clientWidth, height: canvas.clientHeight };
  const ratio = globalThis.devicePixelRatio || 1;
  const { clientWidth: width, clientHeight: height } = canvas;
  const wide = Math.round(width * ratio), high = Math.round(height * ratio);
  if (canvas.width !== wide) canvas.width = wide;
  if (canvas.height !== high) canvas.height = high;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

/** The difference reconstruction − input as one channel: −1…1. */
export function difference(painted, input, [channels, height, width]) {
  const n = height * width;
  const out = new Float32Array(n);
  for (let c = 0; c < channels; c++) {
    for (let k = 0; k < n; k++) out[k] += (painted[c * n + k] - input[c * n + k]) / channels;
  }
  return out;
}

/** Images side by side on one canvas, enlarged by a whole factor. */
export function strip(frames, shape, map, scale = 4, gap = 4) {
  const [, height, width] = shape;
  const sheet = new OffscreenCanvas(frames.length * (width * scale + gap) - gap, height * scale);
  const context = sheet.getContext("2d", { willReadFrequently: true });
  context.imageSmoothingEnabled = false;
  const one = new OffscreenCanvas(width, height);
  frames.forEach((frame, n) => {
    picture(one, frame, shape, map);
    context.drawImage(one, n * (width * scale + gap), 0, width * scale, height * scale);
  });
  return sheet;
}
