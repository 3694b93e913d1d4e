// The decoder in the page (section 4.1 of the paper): the pose of one class, all others masked to zero → 512 ReLU →
// 1024 ReLU → pixels with a sigmoid. It runs here with the weights from the engine, so that a slider responds within a
// frame (about 1.3 million multiply-adds for 28×28 pixels). All other numbers of the page come from the engine.

/** Weights in torch's layout (out × in), the first layer's input class-major: class k has columns k·q … k·q + q − 1. */
export class Decoder {
  /** frame: {header: {layers, classes, pose, image_shape}, w0, b0, w1, b1, …} as the engine gives it. */
  constructor(frame) {
    const header = frame.header ?? frame;
    this.classes = header.classes;
    this.pose = header.pose;
    this.shape = header.image_shape;
    this.layers = Array.from({ length: header.layers }, (_, n) => ({ w: frame[`w${n}`], b: frame[`b${n}`] }));
    this.sums = this.layers.map(({ b }) => new Float32Array(b.length)); // reused by every call
  }

  /** Pose (q) of class `klass` → pixels (c·h·w). */
  decode(pose, klass) {
    return this.decodeTogether([{ class: klass, pose }]);
  }

  /** The poses of several classes, decoded together into one image. */
  decodeTogether(parts) {
    this.#first(parts);
    for (let n = 1; n < this.layers.length; n++) {
      rectify(this.sums[n - 1]);
      multiply(this.layers[n], this.sums[n - 1], this.sums[n]);
    }
    return sigmoid(this.sums.at(-1));
  }

  /** Masked poses are zero, so only the columns of the given classes count. */
  #first(parts) {
    const { w, b } = this.layers[0];
    const out = this.sums[0];
    const width = this.classes * this.pose;
    for (let o = 0; o < out.length; o++) {
      let sum = b[o];
      for (const part of parts) {
        const start = o * width + part.class * this.pose;
        for (let q = 0; q < this.pose; q++) sum += w[start + q] * part.pose[q];
      }
      out[o] = sum;
    }
  }
}

/** out = w x + b, with four independent sums for speed. */
function multiply({ w, b }, x, out) {
  const n = x.length;
  const whole = n - (n % 4);
  for (let o = 0, row = 0; o < out.length; o++, row += n) {
    let s0 = b[o], s1 = 0, s2 = 0, s3 = 0;
    for (let k = 0; k < whole; k += 4) {
      s0 += w[row + k] * x[k];
      s1 += w[row + k + 1] * x[k + 1];
      s2 += w[row + k + 2] * x[k + 2];
      s3 += w[row + k + 3] * x[k + 3];
    }
    for (let k = whole; k < n; k++) s0 += w[row + k] * x[k];
    out[o] = s0 + s1 + (s2 + s3);
  }
}

function rectify(x) {
  for (let k = 0; k < x.length; k++) if (x[k] < 0) x[k] = 0;
}

function sigmoid(x) {
  const out = new Float32Array(x.length);
  for (let k = 0; k < x.length; k++) out[k] = 1 / (1 + Math.exp(-x[k]));
  return out;
}
