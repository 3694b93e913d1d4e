// Canvases as an animated GIF with one palette for all frames.

/** Frames [{canvas, hundredths}] of one size as a looping GIF; `hundredths` of a second is how long a frame is shown. */
export async function gif(frames) {
  const { width, height } = frames[0].canvas;
  const images = frames.map(({ canvas }) => canvas.getContext("2d").getImageData(0, 0, width, height).data);
  const { palette, indexOf } = quantise(images);
  const bytes = header(width, height, palette);
  for (const [k, image] of images.entries()) {
    await new Promise((resolve) => setTimeout(resolve)); // the page stays responsive
    append(bytes, Uint8Array.from({ length: width * height }, (_, n) => indexOf(image, 4 * n)), width, height, frames[k].hundredths);
  }
  bytes.push(0x3b);
  return new Blob([new Uint8Array(bytes)], { type: "image/gif" });
}

const binOf = (image, at) => ((image[at] >> 3) << 10) | ((image[at + 1] >> 3) << 5) | (image[at + 2] >> 3);

/** The 256 most frequent colours, where colours with the same five leading bits count as one, and the index of each colour. */
function quantise(images) {
  const sums = new Float64Array(4 * 32768); // n, r, g, b of each bin
  for (const image of images) {
    for (let at = 0; at < image.length; at += 4) {
      const bin = 4 * binOf(image, at);
      sums[bin] += 1;
      for (let c = 0; c < 3; c++) sums[bin + 1 + c] += image[at + c];
    }
  }
  const bins = [...Array(32768).keys()].filter((bin) => sums[4 * bin]).sort((a, b) => sums[4 * b] - sums[4 * a]);
  const mean = (bin) => [1, 2, 3].map((c) => Math.round(sums[4 * bin + c] / sums[4 * bin]));
  const colours = bins.slice(0, 256).map(mean), indices = new Int16Array(32768);
  for (const bin of bins) indices[bin] = nearest(colours, mean(bin));
  const palette = [...colours.flat(), ...Array(3 * (256 - colours.length)).fill(0)];
  return { palette, indexOf: (image, at) => indices[binOf(image, at)] };
}

function nearest(colours, [r, g, b]) {
  const far = ([x, y, z]) => (x - r) ** 2 + (y - g) ** 2 + (z - b) ** 2;
  return colours.reduce((best, colour, n) => (far(colour) < far(colours[best]) ? n : best), 0);
}

const word = (value) => [value & 255, value >> 8];
const text = (value) => [...value].map((letter) => letter.charCodeAt(0));

/** GIF89a with a global table of 2^8 colours, in an endless loop. */
function header(width, height, palette) {
  return [...text("GIF89a"), ...word(width), ...word(height), 0xf7, 0, 0, ...palette, 0x21, 0xff, 11, ...text("NETSCAPE2.0"), 3, 1, 0, 0, 0];
}

function append(bytes, image, width, height, hundredths) {
  bytes.push(0x21, 0xf9, 4, 0, ...word(hundredths), 0, 0, 0x2c, 0, 0, 0, 0, ...word(width), ...word(height), 0, 8);
  for (const block of blocks(compress(image))) bytes.push(block.length, ...block);
  bytes.push(0);
}

function* blocks(bytes) {
  for (let n = 0; n < bytes.length; n += 255) yield bytes.slice(n, n + 255);
}

/** LZW for GIF: codes of 9 to 12 bits, least significant bit first; a full table is cleared. */
function compress(image) {
  const CLEAR = 256, END = 257, FULL = 4096;
  const out = [];
  let buffer = 0, filled = 0, size = 9, next = 258, table = new Map();
  const write = (code) => {
    buffer |= code << filled;
    filled += size;
    for (; filled >= 8; filled -= 8, buffer >>>= 8) out.push(buffer & 255);
  };
  write(CLEAR);
  let prefix = image[0];
  for (let n = 1; n < image.length; n++) {
    const key = prefix * 256 + image[n];
    const known = table.get(key);
    if (known !== undefined) {
      prefix = known;
      continue;
    }
    write(prefix);
    if (next < FULL) {
      if (next === 1 << size) size++;
      table.set(key, next++);
    } else {
      write(CLEAR);
      table = new Map();
      next = 258;
      size = 9;
    }
    prefix = image[n];
  }
  write(prefix);
  // the reader adds an entry for the code just read, which may lengthen its codes
  if (next === 1 << size && size < 12) size++;
  write(END);
  if (filled) out.push(buffer & 255);
  return out;
}
