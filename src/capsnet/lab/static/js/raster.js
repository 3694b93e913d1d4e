/**
 * From strokes, digits and images to the pixels that the network sees: pure arithmetic without a canvas, so the same
 * state gives the same pixels in every browser.
 *
 * Every input becomes a *source*: one image {data (c·h·w), shape, scale, samples}, `scale` pixels of the network's
 * field per pixel of its own, with its centre at the centre of the field. `warp` then applies an affine map
 * m = [a, b, c, d, e, f], (x, y) → (a·x + c·y + e, b·x + d·y + f), around the field's centre, in field pixels.
 */

const OVERSAMPLING = 4; // per axis, for strokes
const DIGIT = 28; // side of the digit's square, which is centred in fields up to ROOMY
const ROOMY = 40;
const BOX = 20 / 28; // of the digit's square: MNIST digits are scaled to 20 of 28 pixels
const SOFT = 0.028; // soft edge of the brush, relative to the digit's square: about 0.8 of 28 pixels

export const IDENTITY = Object.freeze([1, 0, 0, 1, 0, 0]);

/** The side of the square on which a digit is drawn, in pixels of the field. */
export function digitSide([, height, width]) {
  const side = Math.min(height, width);
  return side >= DIGIT && side <= ROOMY ? DIGIT : side;
}

/** The side that a stored image covers in a field: one of the field's own size fills it, others are digits for it. */
export function imageSide([, height, width], field) {
  return height === field[1] && width === field[2] ? Math.max(height, width) : digitSide(field);
}

/** first, then second. */
export function compose(second, first) {
  const [a, b, c, d, e, f] = second;
  const [g, h, i, j, k, l] = first;
  return [a * g + c * h, b * g + d * h, a * i + c * j, b * i + d * j, a * k + c * l + e, b * k + d * l + f];
}

export function invert([a, b, c, d, e, f]) {
  const area = a * d - b * c;
  return [d / area, -b / area, -c / area, a / area, (c * f - d * e) / area, (b * e - a * f) / area];
}

export function apply([a, b, c, d, e, f], x, y) {
  return [a * x + c * y + e, b * x + d * y + f];
}

/** The map of the handles: scale, shear along x, rotate clockwise, then move. */
export function handles({ rotate, scale, shear, x, y }) {
  const angle = (rotate * Math.PI) / 180;
  const cos = Math.cos(angle) * scale, sin = Math.sin(angle) * scale;
  return [cos, sin, shear * cos - sin, shear * sin + cos, x, y];
}

/**
 * What the network sees: {pixels (c·h·w), centring, parts}, or null while a test digit is loading.
 * `digit(index)` → {pixels, shape, label} or null; `parts` are the pixels of each digit in overlap mode.
 */
export function see(input, transform, shape, digit) {
  const map = handles(transform);
  if (input.mode === "overlap") return seeTwo(input.overlap, map, shape, digit);
  const source = sourceOf(input, shape, digit);
  if (!source) return null;
  const centring = input.mode === "draw" && input.centre ? centre(source, digitSide(shape)) : IDENTITY;
  return { pixels: warp(source, compose(map, centring), shape), centring, parts: null };
}

function sourceOf(input, shape, digit) {
  if (input.mode === "draw") return strokesSource(input.strokes, shape);
  if (input.mode === "test") {
    const found = digit(input.index);
    return found && imageSource(found.pixels, found.shape, shape);
  }
  return pictureSource(input, shape);
}

function seeTwo({ a, b, dx, dy }, map, shape, digit) {
  const first = digit(a), second = digit(b);
  if (!first || !second) return null;
  const one = warp(imageSource(first.pixels, first.shape, shape), map, shape);
  const other = warp(imageSource(second.pixels, second.shape, shape), compose(map, [1, 0, 0, 1, dx, dy]), shape);
  const pixels = one.map((value, k) => Math.min(1, value + other[k]));
  return { pixels, centring: IDENTITY, parts: [one, other] };
}

/** A stored image, such as a test digit, as a source for a field. */
export function imageSource(data, shape, field) {
  const side = imageSide(shape, field);
  return { data, shape, scale: side / Math.max(shape[1], shape[2]), samples: 1 };
}

/** The image as the engine prepared it, fitted into the field of another network if necessary. */
function pictureSource({ pixels, shape }, field) {
  const bytes = pixels && shape ? decodeBytes(pixels) : null;
  if (!bytes || bytes.length !== shape.reduce((product, side) => product * side, 1)) return blank(field);
  const data = Float32Array.from(bytes, (byte) => byte / 255);
  // Fields for digits have the digit in their centre: it keeps its size and only the margin changes
  const digits = digitSide(shape) === DIGIT && digitSide(field) === DIGIT;
  const scale = digits ? 1 : Math.min(field[1] / shape[1], field[2] / shape[2]);
  return { data, shape, scale, samples: scale < 0.7 ? 3 : 1 };
}

function blank(shape) {
  return { data: new Float32Array(shape[1] * shape[2]), shape: [1, shape[1], shape[2]], scale: 1, samples: 1 };
}

function decodeBytes(base64) {
  try {
    return Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
  } catch {
    return null;
  }
}

/** Pixels → base64 bytes, as the state stores an image. */
export function encodeBytes(pixels) {
  let binary = "";
  for (const value of pixels) binary += String.fromCharCode(Math.round(255 * Math.min(1, Math.max(0, value))));
  return btoa(binary);
}

let drawn = { strokes: null, key: "", source: null }; // cached: handles move more often than strokes change

function strokesSource(strokes, shape) {
  const key = shape.join("×");
  if (drawn.strokes !== strokes || drawn.key !== key) drawn = { strokes, key, source: paintStrokes(strokes, shape) };
  return drawn.source;
}

/** Strokes with a soft round brush; each pixel keeps its maximum. */
export function paintStrokes(strokes, [, height, width]) {
  const fine = Math.max(height, width) <= 64 ? OVERSAMPLING : 2;
  const shape = [1, height * fine, width * fine];
  const data = new Float32Array(shape[1] * shape[2]);
  const side = digitSide([1, height, width]);
  const unit = (side * fine) / 1000;
  const left = ((width - side) / 2) * fine, top = ((height - side) / 2) * fine;
  for (const { w, p } of strokes) {
    const curve = smooth(p).map((value, k) => value * unit + (k % 2 ? top : left));
    for (let k = 0; k + 3 < curve.length || k === 0; k += 2) {
      const [x0, y0, x1 = curve[k], y1 = curve[k + 1]] = curve.slice(k, k + 4);
      paintSegment(data, shape, [x0, y0, x1, y1], (w * unit) / 2, SOFT * side * fine);
    }
  }
  return { data, shape, scale: 1 / fine, samples: fine };
}

function paintSegment(data, [, height, width], [x0, y0, x1, y1], radius, soft) {
  const reach = radius + soft / 2;
  const dx = x1 - x0, dy = y1 - y0;
  const squared = dx * dx + dy * dy || 1;
  const top = Math.max(0, Math.floor(Math.min(y0, y1) - reach)), bottom = Math.min(height, Math.max(y0, y1) + reach + 1);
  const left = Math.max(0, Math.floor(Math.min(x0, x1) - reach)), right = Math.min(width, Math.max(x0, x1) + reach + 1);
  for (let row = top; row < bottom; row++) {
    for (let column = left; column < right; column++) {
      const x = column + 0.5 - x0, y = row + 0.5 - y0;
      const along = Math.min(1, Math.max(0, (x * dx + y * dy) / squared));
      const distance = Math.hypot(x - along * dx, y - along * dy);
      const ink = Math.min(1, Math.max(0, (reach - distance) / soft));
      const at = row * width + column;
      if (ink > data[at]) data[at] = ink;
    }
  }
}

/** A Catmull-Rom curve through the points [x0, y0, x1, y1, …]: smooth from few points. */
export function smooth(points, pieces = 4) {
  const n = points.length / 2;
  if (n < 3) return [...points];
  const at = (k, axis) => points[2 * Math.min(n - 1, Math.max(0, k)) + axis];
  const curve = [points[0], points[1]];
  for (let k = 0; k < n - 1; k++) {
    for (let piece = 1; piece <= pieces; piece++) {
      const s = piece / pieces;
      for (const axis of [0, 1]) curve.push(spline(at(k - 1, axis), at(k, axis), at(k + 1, axis), at(k + 2, axis), s));
    }
  }
  return curve;
}

function spline(p0, p1, p2, p3, s) {
  const linear = p2 - p0, square = 2 * p0 - 5 * p1 + 4 * p2 - p3, cube = 3 * (p1 - p2) + p3 - p0;
  return 0.5 * (2 * p1 + s * (linear + s * (square + s * cube)));
}

/** Fewer points for the same curve (Douglas-Peucker), to keep links short. */
export function simplify(points, tolerance) {
  const n = points.length / 2;
  if (n < 3) return [...points];
  const keep = new Uint8Array(n);
  keep[0] = keep[n - 1] = 1;
  const spans = [[0, n - 1]];
  while (spans.length) {
    const [first, last] = spans.pop();
    const [far, distance] = farthest(points, first, last);
    if (distance <= tolerance) continue;
    keep[far] = 1;
    spans.push([first, far], [far, last]);
  }
  return points.filter((_, k) => keep[k >> 1]);
}

function farthest(points, first, last) {
  const x0 = points[2 * first], y0 = points[2 * first + 1];
  const dx = points[2 * last] - x0, dy = points[2 * last + 1] - y0;
  const squared = dx * dx + dy * dy || 1;
  let far = first, most = 0;
  for (let k = first + 1; k < last; k++) {
    const x = points[2 * k] - x0, y = points[2 * k + 1] - y0;
    const along = Math.min(1, Math.max(0, (x * dx + y * dy) / squared));
    const distance = Math.hypot(x - along * dx, y - along * dy);
    if (distance > most) [far, most] = [k, distance];
  }
  return [far, most];
}

/** Like MNIST: the bounding box scaled to 20 of 28 pixels and the mass centred. A map in field pixels. */
export function centre({ data, shape: [, height, width], scale }, side) {
  let left = width, right = -1, top = height, bottom = -1;
  let mass = 0, massX = 0, massY = 0;
  for (let row = 0; row < height; row++) {
    for (let column = 0; column < width; column++) {
      const ink = data[row * width + column];
      mass += ink;
      massX += ink * (column + 0.5);
      massY += ink * (row + 0.5);
      if (ink < 0.3) continue;
      left = Math.min(left, column);
      right = Math.max(right, column);
      top = Math.min(top, row);
      bottom = Math.max(bottom, row);
    }
  }
  if (right < 0) return IDENTITY;
  const longest = Math.max(right - left, bottom - top) + 1;
  const factor = Math.min(4, (BOX * side) / (longest * scale)); // a dot stays small
  const x = (massX / mass - width / 2) * scale, y = (massY / mass - height / 2) * scale;
  return [factor, 0, 0, factor, -factor * x, -factor * y];
}

/** Map a source onto a field (c, h, w): bilinear, averaged over the samples per pixel. */
export function warp(source, map, [channels, height, width]) {
  const field = new Float32Array(channels * height * width);
  const [own, sourceHeight, sourceWidth] = source.shape;
  const back = invert(compose(map, [source.scale, 0, 0, source.scale, 0, 0]));
  const n = source.samples;
  for (let row = 0; row < height; row++) {
    for (let column = 0; column < width; column++) {
      for (let k = 0; k < n * n; k++) {
        const fieldX = column + ((k % n) + 0.5) / n - width / 2, fieldY = row + (Math.floor(k / n) + 0.5) / n - height / 2;
        const x = back[0] * fieldX + back[2] * fieldY + back[4] + sourceWidth / 2 - 0.5;
        const y = back[1] * fieldX + back[3] * fieldY + back[5] + sourceHeight / 2 - 0.5;
        if (x <= -1 || y <= -1 || x >= sourceWidth || y >= sourceHeight) continue;
        for (let c = 0; c < channels; c++) {
          field[(c * height + row) * width + column] += sample(source, own === channels ? c : 0, x, y) / (n * n);
        }
      }
    }
  }
  return field;
}

function sample({ data, shape: [, height, width] }, channel, x, y) {
  const left = Math.floor(x), top = Math.floor(y);
  const right = x - left, down = y - top;
  const at = (row, column) =>
    row < 0 || column < 0 || row >= height || column >= width ? 0 : data[(channel * height + row) * width + column];
  const upper = at(top, left) * (1 - right) + (right && at(top, left + 1) * right);
  const lower = down && at(top + 1, left) * (1 - right) + (right && at(top + 1, left + 1) * right);
  return upper * (1 - down) + lower * down;
}
