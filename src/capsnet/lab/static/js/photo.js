/**
 * An image file as the input of a network, for the Lab without a server: it mirrors capsnet/data/photo.py, where every step is
 * explained; tests compare the results. A picture is {data, width, height}: RGB bytes, or ink from 0 to 1 in one channel.
 */

import { Refusal } from "./requests.js";

const MOST_PIXELS = 40_000_000;
const LARGE_SIDE = 3000; // larger images are reduced first
const WORKING_SIDE = 256; // pixels of the longer side during the search for ink
const FAINTEST_INK = 0.12; // of the range from paper to black; anything fainter is a shadow
const FORMATS = { PNG: [0x89, 0x50, 0x4e, 0x47], JPEG: [0xff, 0xd8, 0xff], GIF: [0x47, 0x49, 0x46, 0x38], BMP: [0x42, 0x4d], WebP: [0x52, 0x49, 0x46, 0x46] };

/** A file → {note, pixels (c · h · w), shape}; `digit` is [size, box] for a model that sees digits, otherwise null. */
export async function prepare(file, shape, digit) {
  const picture = await decoded(file), [channels, height, width] = shape;
  if (!digit) return { note: "resized to fit.", pixels: fitted(picture, channels, height, width), shape };
  const { field, note } = likeMnist(grey(picture), digit), [size] = digit;
  const padding = channels === 1 && height === size && width === size ? "" : `, padded to ${height}×${width}`;
  return { note: `${note}${padding}.`, pixels: centred(field, size, shape), shape };
}

/** RGB bytes, upright, transparent parts on white. */
async function decoded(file) {
  const start = new Uint8Array(await file.slice(0, 4).arrayBuffer());
  if (!Object.values(FORMATS).some((magic) => magic.every((byte, k) => start[k] === byte))) {
    throw new Refusal("the image format is not supported: use PNG, JPEG, WebP, GIF or BMP.");
  }
  const bitmap = await createImageBitmap(file, { colorSpaceConversion: "none" }).catch(() => {
    throw new Refusal("the image is damaged: save it again.");
  });
  const { width, height } = bitmap;
  if (width * height > MOST_PIXELS) throw new Refusal(`the image has ${width}×${height} pixels: reduce it to at most 40 million.`);
  const scale = Math.min(1, LARGE_SIDE / Math.max(width, height));
  const canvas = new OffscreenCanvas(Math.max(1, Math.round(width * scale)), Math.max(1, Math.round(height * scale)));
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.imageSmoothingQuality = "high";
  context.fillStyle = "white";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return { data: context.getImageData(0, 0, canvas.width, canvas.height).data, width: canvas.width, height: canvas.height, channels: 4 };
}

// ---------------------------------------------------------------- resampling as Pillow does it

const BOX = { support: 0.5, weight: (x) => (x > -0.5 && x <= 0.5 ? 1 : 0) };
const BILINEAR = { support: 1, weight: (x) => Math.max(0, 1 - Math.abs(x)) };
const BICUBIC = { support: 2, weight: (x) => cubic(Math.abs(x)) };

function cubic(x) {
  const a = -0.5;
  if (x < 1) return ((a + 2) * x - (a + 3)) * x * x + 1;
  return x < 2 ? (((x - 5) * x + 8) * x - 4) * a : 0;
}

/** For every output position the first input position and the weights; `from` may be a fraction. */
function kernels(size, from, to, { support, weight }) {
  const scale = from / to, stretch = Math.max(1, scale), reach = support * stretch;
  return Array.from({ length: to }, (_, k) => {
    const centre = (k + 0.5) * scale;
    const low = Math.max(0, Math.trunc(centre - reach + 0.5)), high = Math.min(size, Math.trunc(centre + reach + 0.5));
    const weights = Array.from({ length: high - low }, (_, n) => weight((n + low - centre + 0.5) / stretch));
    const sum = weights.reduce((total, one) => total + one, 0);
    return { low, weights: weights.map((one) => one / sum) };
  });
}

/** Rows first, then columns. `round` keeps bytes bytes after each pass. */
function resized({ data, width, height, channels }, [wide, high], filter, round, [fromWide, fromHigh] = [width, height]) {
  const across = kernels(width, fromWide, wide, filter), down = kernels(height, fromHigh, high, filter);
  const middle = new Float32Array(wide * height * channels), out = new Float32Array(wide * high * channels);
  for (let y = 0; y < height; y++) {
    across.forEach(({ low, weights }, x) => {
      for (let c = 0; c < channels; c++) {
        let sum = 0;
        for (let n = 0; n < weights.length; n++) sum += weights[n] * data[(y * width + low + n) * channels + c];
        middle[(y * wide + x) * channels + c] = round(sum);
      }
    });
  }
  down.forEach(({ low, weights }, y) => {
    for (let k = 0; k < wide * channels; k++) {
      let sum = 0;
      for (let n = 0; n < weights.length; n++) sum += weights[n] * middle[(low + n) * wide * channels + k];
      out[y * wide * channels + k] = round(sum);
    }
  });
  return { data: out, width: wide, height: high, channels };
}

const toByte = (value) => Math.min(255, Math.max(0, Math.floor(value + 0.5)));

/** Means over blocks of pixels. */
function reduced({ data, width, height, channels }, fx, fy) {
  const wide = Math.ceil(width / fx), high = Math.ceil(height / fy), out = new Float32Array(wide * high * channels);
  for (let y = 0; y < high; y++) {
    for (let x = 0; x < wide; x++) {
      const right = Math.min(width, (x + 1) * fx), bottom = Math.min(height, (y + 1) * fy);
      const count = (right - x * fx) * (bottom - y * fy);
      for (let c = 0; c < channels; c++) {
        let sum = 0;
        for (let v = y * fy; v < bottom; v++) for (let u = x * fx; u < right; u++) sum += data[(v * width + u) * channels + c];
        out[(y * wide + x) * channels + c] = toByte(sum / count);
      }
    }
  }
  return { data: out, width: wide, height: high, channels };
}

/** Pillow's resize with a reducing gap: large images are reduced by whole factors first. */
function shrunk(picture, size, filter, gap) {
  const [fx, fy] = [picture.width / size[0], picture.height / size[1]].map((ratio) => Math.max(1, Math.trunc(ratio / gap)));
  if (fx === 1 && fy === 1) return resized(picture, size, filter, toByte);
  return resized(reduced(picture, fx, fy), size, filter, toByte, [picture.width / fx, picture.height / fy]);
}

/** round() of Python: halves go to the even neighbour. */
function even(value) {
  const down = Math.floor(value), rest = value - down;
  return rest === 0.5 ? down + (down % 2 ? 1 : 0) : Math.round(value);
}

const within = (width, height, factor) => [width, height].map((side) => Math.max(1, even(side * factor)));
const luma = (r, g, b) => (r * 19595 + g * 38470 + b * 7471 + 32768) >> 16;

/** Scaled to fit, keeping the aspect ratio, centred and padded with zeros. */
function fitted(picture, channels, height, width) {
  const single = channels === 1 ? { ...lumas(picture), channels: 1 } : picture;
  const size = within(single.width, single.height, Math.min(width / single.width, height / single.height));
  const same = size[0] === single.width && size[1] === single.height;
  const scaled = same ? single : shrunk(single, size, BILINEAR, 2);
  const left = Math.floor((width - size[0]) / 2), top = Math.floor((height - size[1]) / 2);
  const pixels = new Float32Array(channels * height * width);
  for (let c = 0; c < channels; c++) {
    for (let y = 0; y < size[1]; y++) {
      for (let x = 0; x < size[0]; x++) {
        pixels[(c * height + y + top) * width + x + left] = scaled.data[(y * size[0] + x) * scaled.channels + c] / 255;
      }
    }
  }
  return pixels;
}

function lumas({ data, width, height, channels }) {
  const out = new Float32Array(width * height);
  for (let k = 0; k < out.length; k++) out[k] = luma(data[k * channels], data[k * channels + 1], data[k * channels + 2]);
  return { data: out, width, height };
}

/** Grey from 0 to 1, the longer side at most WORKING_SIDE. */
function grey(picture) {
  const factor = WORKING_SIDE / Math.max(picture.width, picture.height);
  const scaled = factor < 1 ? shrunk(picture, within(picture.width, picture.height, factor), BOX, 3) : picture;
  const { data, width, height } = lumas(scaled);
  return { data: data.map((value) => value / 255), width, height };
}

// ---------------------------------------------------------------- a digit, as MNIST was made

function likeMnist(picture, [size, box]) {
  const { ink, steps } = findInk(picture);
  const cropped = crop(ink, box);
  steps.push(`cropped to ${cropped.width}×${cropped.height}`);
  const { scaled, thickened } = scaleInto(cropped, box);
  steps.push(thickened ? `thin strokes thickened, scaled into ${box}×${box}` : `scaled into ${box}×${box}`);
  const field = centreByMass(scaled, size).map((value) => even(255 * value) / 255);
  return { field, note: [...steps, `centred by mass in ${size}×${size}`].join(", ") };
}

function median(values) {
  const sorted = Float64Array.from(values).sort(), half = sorted.length >> 1;
  return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
}

/** The values of the outermost pixels. */
function border({ data, width, height }) {
  const rows = [data.subarray(0, width), data.subarray((height - 1) * width)];
  const columns = [0, width - 1].map((x) => Array.from({ length: height }, (_, y) => data[y * width + x]));
  return [...rows, ...columns].flatMap((values) => [...values]);
}

const largest = (values) => values.reduce((best, value) => Math.max(best, value), -Infinity);
const smallest = (values) => values.reduce((best, value) => Math.min(best, value), Infinity);

/** The amount of ink at each pixel, 0 to 1, and the steps that found it. */
function findInk(picture) {
  const edge = border(picture), paper = median(edge), { data } = picture;
  const darkOnLight = paper - smallest(data) > largest(data) - paper;
  const steps = [darkOnLight ? "dark on light, inverted" : "light on dark, kept"];
  const bright = { ...picture, data: darkOnLight ? data.map((value) => 1 - value) : data };
  const plain = edge.filter((value) => Math.abs(value - paper) < 1.5 / 255).length > 0.7 * edge.length;
  const { ink, noise } = plain ? inkOnPlain(bright) : inkOnPhoto(bright, darkOnLight);
  if (!plain) steps.push("uneven light and noise removed");
  const peak = largest(ink);
  if (peak < Math.max(FAINTEST_INK, 6 * noise)) {
    throw new Refusal("the picture looks blank: draw or photograph a dark digit on a light background.");
  }
  if (!noise) return { ink: { ...picture, data: ink.map((value) => value / peak) }, steps };
  const floor = Math.max(4 * noise, 0.2 * peak), full = median(ink.filter((value) => value > 0.5 * peak));
  const stretched = ink.map((value) => clip((value - floor) / Math.max(full - floor, 1e-3)));
  return { ink: withoutSpecks({ ...picture, data: stretched }), steps };
}

const clip = (value) => Math.min(1, Math.max(0, value));

/** A drawing or a scan: the border is paper. */
function inkOnPlain(bright) {
  const paper = median(border(bright));
  return { ink: bright.data.map((value) => clip(value - paper)), noise: 0 };
}

/** A photo: ink is measured relative to the light at each pixel. */
function inkOnPhoto(bright, darkOnLight) {
  const { background, noise } = smoothBackground(bright);
  const light = background.map((value) => (darkOnLight ? Math.max(1 - value, 0.1) : 1));
  const ink = bright.data.map((value, k) => clip((value - background[k]) / light[k]));
  return { ink, noise: noise / smallest(light) };
}

/** A quadratic surface fitted to the paper without the ink, and the noise of the paper around it. */
function smoothBackground({ data, width, height }) {
  const place = (k, side) => (side === 1 ? -1 : -1 + (2 * k) / (side - 1));
  const terms = (k) => {
    const x = place(k % width, width), y = place(Math.floor(k / width), height);
    return [1, x, y, x * x, x * y, y * y];
  };
  const step = 1 + Math.floor(data.length / 8000);
  const few = Array.from({ length: Math.ceil(data.length / step) }, (_, n) => n * step);
  const values = few.map((k) => data[k]), middle = median(values);
  let paper = values.map((value) => value <= middle + 0.25), surface = [], noise = 0;
  for (let round = 0; round < 6; round++) {
    surface = leastSquares(few.filter((_, n) => paper[n]).map(terms), values.filter((_, n) => paper[n]));
    const apart = few.map((k, n) => Math.abs(values[n] - dot(terms(k), surface)));
    noise = 1.4826 * median(apart.filter((_, n) => paper[n]));
    paper = apart.map((distance) => distance < Math.max(3 * noise, 0.02));
    if (paper.filter(Boolean).length < 0.1 * values.length) break;
  }
  return { background: data.map((_, k) => clip(dot(terms(k), surface))), noise: Math.max(noise, 1e-3) };
}

const dot = (x, y) => x.reduce((sum, value, k) => sum + value * y[k], 0);

/** By the normal equations, solved by elimination with pivoting. */
function leastSquares(rows, values) {
  const n = rows[0].length;
  const system = Array.from({ length: n }, (_, p) => [
    ...Array.from({ length: n }, (_, q) => rows.reduce((sum, row) => sum + row[p] * row[q], p === q ? 1e-9 : 0)),
    rows.reduce((sum, row, k) => sum + row[p] * values[k], 0),
  ]);
  for (let p = 0; p < n; p++) {
    const pivot = system.slice(p).reduce((best, row, k) => (Math.abs(row[p]) > Math.abs(system[best][p]) ? p + k : best), p);
    [system[p], system[pivot]] = [system[pivot], system[p]];
    for (let r = 0; r < n; r++) {
      if (r === p) continue;
      const factor = system[r][p] / system[p][p];
      for (let c = p; c <= n; c++) system[r][c] -= factor * system[p][c];
    }
  }
  return system.map((row, p) => row[n] / row[p]);
}

/** Remove regions far smaller than the largest stroke, and regions at the border unless all of them are. */
function withoutSpecks(ink) {
  const { data, width, height } = ink;
  const step = Math.max(width, height) > WORKING_SIDE / 2 ? 2 : 1;
  const wide = Math.ceil(width / step), high = Math.ceil(height / step);
  const mask = Float32Array.from({ length: wide * high }, (_, k) => Number(data[Math.floor(k / wide) * step * width + (k % wide) * step] > 0.4));
  const { labels, areas } = regions(mask, wide, high);
  if (!areas.length) return ink;
  const atBorder = new Set(border({ data: labels, width: wide, height: high }));
  const inside = areas.map((_, n) => !atBorder.has(n + 1));
  const most = largest(areas), mostInside = Math.max(0, largest(areas.filter((_, n) => inside[n])));
  const keep = areas.map((area, n) => (mostInside >= 0.1 * most ? inside[n] && area >= 0.04 * mostInside : area >= 0.04 * most));
  const kept = Float32Array.from({ length: wide * step * high * step }, (_, k) => {
    const label = labels[Math.floor(k / (wide * step * step)) * wide + Math.floor((k % (wide * step)) / step)];
    return Number(label > 0 && keep[label - 1]);
  });
  const near = spread({ data: kept, width: wide * step, height: high * step }, 2);
  return { ...ink, data: data.map((value, k) => value * near.data[Math.floor(k / width) * wide * step + (k % width)]) };
}

/** Connected regions (also over corners), numbered from 1, and their areas. */
function regions(mask, width, height) {
  const labels = new Int32Array(mask.length), areas = [];
  for (let start = 0; start < mask.length; start++) {
    if (!mask[start] || labels[start]) continue;
    const label = areas.push(0), open = [start];
    labels[start] = label;
    while (open.length) {
      const k = open.pop(), x = k % width, y = Math.floor(k / width);
      areas[label - 1] += 1;
      for (let v = Math.max(0, y - 1); v <= Math.min(height - 1, y + 1); v++) {
        for (let u = Math.max(0, x - 1); u <= Math.min(width - 1, x + 1); u++) {
          const next = v * width + u;
          if (mask[next] && !labels[next]) open.push(next) && (labels[next] = label);
        }
      }
    }
  }
  return { labels, areas };
}

/** The maximum over a square of 2 · reach + 1 pixels around each one. */
function spread({ data, width, height }, reach) {
  const along = (source, count, stride, length, offset) => {
    const out = new Float32Array(source.length);
    for (let line = 0; line < count; line++) {
      for (let n = 0; n < length; n++) {
        let best = -Infinity;
        for (let m = Math.max(0, n - reach); m <= Math.min(length - 1, n + reach); m++) best = Math.max(best, source[line * offset + m * stride]);
        out[line * offset + n * stride] = best;
      }
    }
    return out;
  };
  return { data: along(along(data, height, 1, width, width), width, width, height, 1), width, height };
}

/** Crop to the ink; in a large image soft edges do not count. */
function crop({ data, width, height }, box) {
  const faint = Math.max(width, height) <= 2 * box ? 0.02 : 0.3;
  const rows = [], columns = [];
  data.forEach((value, k) => value > faint && (rows.push(Math.floor(k / width)), columns.push(k % width)));
  const [top, bottom] = [smallest(rows), largest(rows)], [left, right] = [smallest(columns), largest(columns)];
  const wide = right - left + 1, high = bottom - top + 1;
  return { data: Float32Array.from({ length: wide * high }, (_, k) => data[(top + Math.floor(k / wide)) * width + left + (k % wide)]), width: wide, height: high };
}

/** Scale the longer side to `box`; strokes that would become too thin are thickened first. */
function scaleInto(ink, box) {
  const factor = box / Math.max(ink.width, ink.height), stroke = strokeWidth(ink);
  const thickened = stroke * factor < 0.9;
  const grow = Math.max(1, even((1.8 / factor - stroke) / 2));
  const thick = thickened ? spread(padded(ink, grow), grow) : ink;
  const [wide, high] = within(thick.width, thick.height, box / Math.max(thick.width, thick.height));
  const same = wide === thick.width && high === thick.height;
  const scaled = same ? thick : resized({ ...thick, channels: 1 }, [wide, high], BICUBIC, (value) => value);
  const data = scaled.data.map(same ? (value) => value : clip), peak = largest(data);
  return { scaled: { data: data.map((value) => value / peak), width: wide, height: high }, thickened };
}

function padded({ data, width, height }, by) {
  const wide = width + 2 * by, high = height + 2 * by, out = new Float32Array(wide * high);
  for (let y = 0; y < height; y++) out.set(data.subarray(y * width, (y + 1) * width), (y + by) * wide + by);
  return { data: out, width: wide, height: high };
}

/** Ink divided by half its outline, in pixels. */
function strokeWidth(ink) {
  const { data, width, height } = padded(ink, 1);
  let outline = 0, sum = 0;
  for (let y = 0; y < height; y++) {
    for (let x = 0; x < width; x++) {
      const here = data[y * width + x];
      sum += here;
      if (x + 1 < width) outline += Math.abs(data[y * width + x + 1] - here);
      if (y + 1 < height) outline += Math.abs(data[(y + 1) * width + x] - here);
    }
  }
  return (2 * sum) / Math.max(outline, 1e-6);
}

/** Place the ink in a black field, with its centre of mass at the centre to the nearest pixel. */
function centreByMass({ data, width, height }, size) {
  let mass = 0, across = 0, down = 0;
  data.forEach((value, k) => {
    mass += value;
    across += value * (k % width);
    down += value * Math.floor(k / width);
  });
  const corner = (centre, side) => Math.min(Math.max(even(size / 2 - centre), 0), size - side);
  const left = corner(across / mass, width), top = corner(down / mass, height);
  const field = new Float32Array(size * size);
  for (let y = 0; y < height; y++) field.set(data.subarray(y * width, (y + 1) * width), (top + y) * size + left);
  return field;
}

/** A square field of one channel, centred in an image of another size, cropped if it is larger, in every channel. */
function centred(field, size, [channels, height, width]) {
  const top = Math.floor((height - size) / 2), left = Math.floor((width - size) / 2);
  const pixels = new Float32Array(channels * height * width);
  for (let k = 0; k < pixels.length; k++) {
    const y = (Math.floor(k / width) % height) - top, x = (k % width) - left;
    if (y >= 0 && y < size && x >= 0 && x < size) pixels[k] = field[y * size + x];
  }
  return pixels;
}
