/**
 * The routing algorithms of the package in JavaScript, for the Lab without a server: the network view and the by-hand view.
 *
 * An algorithm is a function (lower, options, parameters) → steps. `lower` holds what the lower capsules say:
 *   votes   û_{j|i} as a flat array (i · j · q), sizes [i, j, q]
 *   a       their activations (i); only algorithms with activations of their own look at it
 *   poses   u (i · p), if there are any; only self-routing looks at them
 * A step is {couplings (i · j), outputs (j · q), activations (j), logits? (i · j), variances? (j · q), oscillators? (i · j · q)}.
 * The equations and their deviations are explained in capsnet/routing; tests compare every algorithm with it.
 */

const EPS = 1e-9; // under the root of a length, as in capsnet/nn/functional.py
const EM_FLOOR = 0.03; // added to variances, as in capsnet/routing/em.py

// ---------------------------------------------------------------- what the algorithms share

/** Σ_i c_ij û_{j|i}: (j · q). */
function weightedSum(c, votes, [I, J, Q]) {
  const s = new Float64Array(J * Q);
  for (let i = 0, at = 0; i < I; i++) {
    for (let j = 0; j < J; j++) {
      const weight = c[i * J + j];
      for (let q = 0; q < Q; q++, at++) s[j * Q + q] += weight * votes[at];
    }
  }
  return s;
}

/** û_{j|i} · v_j: (i · j). */
function products(votes, v, [I, J, Q]) {
  const dot = new Float64Array(I * J);
  for (let k = 0, at = 0; k < I * J; k++) {
    const start = (k % J) * Q;
    for (let q = 0; q < Q; q++, at++) dot[k] += votes[at] * v[start + q];
  }
  return dot;
}

const filled = (n, value) => new Float64Array(n).fill(value);
const plus = (x, y) => x.map((value, k) => value + y[k]);
const sigmoid = (x) => 1 / (1 + Math.exp(-x));

function squaredLength(v, start, Q) {
  let sum = 0;
  for (let q = start; q < start + Q; q++) sum += v[q] * v[q];
  return sum;
}

/** ‖v_j‖ of poses (j · q). */
export function lengths(v, Q) {
  return Float64Array.from({ length: v.length / Q }, (_, j) => Math.sqrt(squaredLength(v, j * Q, Q) + EPS));
}

/** Each pose (of j · q) times a factor that depends on its squared length. */
function rescaled(s, Q, factor) {
  const factors = Float64Array.from({ length: s.length / Q }, (_, j) => factor(squaredLength(s, j * Q, Q)));
  return s.map((value, k) => value * factors[Math.floor(k / Q)]);
}

/** Eq. 1. */
const squash = (s, Q) => rescaled(s, Q, (squared) => Math.sqrt(squared + EPS) / (1 + squared));

/** Every row of x (i · j) replaced by what `change(row)` returns. */
function byRow(x, J, change) {
  const out = new Float64Array(x.length);
  for (let start = 0; start < x.length; start += J) out.set(change(x.subarray(start, start + J)), start);
  return out;
}

function softmaxRow(row) {
  const top = Math.max(...row);
  const weights = row.map((b) => Math.exp(b - top));
  const sum = weights.reduce((total, weight) => total + weight, 0);
  return weights.map((weight) => weight / sum);
}

/** With one more logit of zero, whose share is lost. */
function leakyRow(row) {
  const top = Math.max(0, ...row);
  const weights = row.map((b) => Math.exp(b - top));
  const sum = weights.reduce((total, weight) => total + weight, Math.exp(-top));
  return weights.map((weight) => weight / sum);
}

/** Logits scaled to [0, 1]; 1 where they are all equal. */
function maxMinRow(row) {
  const low = Math.min(...row), width = Math.max(...row) - low;
  return row.map((b) => (width <= 1e-12 ? 1 : (b - low) / width));
}

// ---------------------------------------------------------------- one function an algorithm

/** Procedure 1 of the paper with a normalisation of the logits of a lower capsule. */
function procedure1({ votes, sizes }, iterations, normalise, bias) {
  const [I, J, Q] = sizes, steps = [];
  let logits = filled(I * J, 0);
  for (let t = 0; t < iterations; t++) {
    const couplings = byRow(logits, J, normalise);
    const s = weightedSum(couplings, votes, sizes);
    const outputs = squash(bias ? plus(s, bias) : s, Q);
    steps.push({ logits, couplings, outputs, activations: lengths(outputs, Q) });
    logits = plus(logits, products(votes, outputs, sizes));
  }
  return steps;
}

const dynamic = (lower, { iterations, leaky }, { bias }) => procedure1(lower, iterations, leaky ? leakyRow : softmaxRow, bias);
const maxMin = (lower, { iterations }) => procedure1(lower, iterations, maxMinRow);
const uniform = (lower) => procedure1(lower, 1, softmaxRow);

/** The votes for an upper capsule attend to each other, in one pass. */
function selfAttention({ votes, sizes }, _, { beta }) {
  const [I, J, Q] = sizes;
  const together = weightedSum(filled(I * J, 1), votes, sizes);
  const logits = products(votes, together, sizes).map((dot) => dot / Math.sqrt(Q));
  const soft = byRow(logits, J, softmaxRow);
  const couplings = beta ? soft.map((c, k) => c + beta[k % beta.length]) : soft; // positions of a grid share β
  const s = weightedSum(couplings, votes, sizes);
  const outputs = rescaled(s, Q, (squared) => -Math.expm1(-Math.sqrt(squared + EPS)) / Math.sqrt(squared + EPS));
  return [{ logits, couplings, outputs, activations: lengths(outputs, Q) }];
}

/** Upper capsules compete for each vote, starting over in every pass; poses are normalised, not squashed. */
function invertedAttention({ votes, sizes }, { iterations }, { gain, bias, readout, offset }) {
  const [I, J, Q] = sizes, steps = [];
  let logits = filled(I * J, 0);
  for (let t = 0; t < iterations; t++) {
    const couplings = byRow(logits, J, softmaxRow);
    const outputs = byRow(weightedSum(couplings, votes, sizes), Q, (pose) => normalised(pose, gain, bias));
    const scores = byRow(outputs, Q, (pose) => pose.map((value, q) => value * readout[q]));
    const activations = Float64Array.from({ length: J }, (_, j) =>
      sigmoid(scores.subarray(j * Q, (j + 1) * Q).reduce((sum, part) => sum + part, offset[0])));
    steps.push({ logits, couplings, outputs, activations });
    logits = products(votes, outputs, sizes).map((dot) => dot / Math.sqrt(Q));
  }
  return steps;
}

/** Layer normalisation with torch's epsilon. */
function normalised(pose, gain, bias) {
  const mean = pose.reduce((sum, value) => sum + value, 0) / pose.length;
  const variance = pose.reduce((sum, value) => sum + (value - mean) ** 2, 0) / pose.length;
  return pose.map((value, q) => ((value - mean) / Math.sqrt(variance + 1e-5)) * gain[q] + bias[q]);
}

/** Each lower capsule decides by itself, by a learnt gate, where its output goes. */
function selfRouting({ votes, sizes, a, poses }, _, { gate, gate_bias: gateBias }) {
  const [I, J, Q] = sizes, P = gate.length / gateBias.length, types = gateBias.length / J;
  const logits = filled(I * J, 0).map((_, k) => {
    const i = Math.floor(k / J), row = ((i % types) * J + (k % J)) * P;
    let sum = gateBias[k % gateBias.length];
    for (let p = 0; poses && p < P; p++) sum += gate[row + p] * poses[i * P + p];
    return sum;
  });
  const couplings = byRow(logits, J, softmaxRow);
  const sent = couplings.map((c, k) => a[Math.floor(k / J)] * c);
  const received = sumOverLower(sent, J), all = a.reduce((sum, value) => sum + value, 0);
  const outputs = weightedSum(sent, votes, sizes).map((value, k) => value / (received[Math.floor(k / Q)] + EPS));
  return [{ logits, couplings, outputs, activations: received.map((value) => value / (all + EPS)) }];
}

/** Σ_i of weights (i · j): (j). */
function sumOverLower(weights, J) {
  const sums = new Float64Array(J);
  weights.forEach((weight, k) => (sums[k % J] += weight));
  return sums;
}

/** Σ_i w_ij (û_{j|i} − m_j)²: (j · q). */
function scatter(weights, votes, mean, [I, J, Q]) {
  const sums = new Float64Array(J * Q);
  for (let k = 0, at = 0; k < I * J; k++) {
    const start = (k % J) * Q;
    for (let q = 0; q < Q; q++, at++) sums[start + q] += weights[k] * (votes[at] - mean[start + q]) ** 2;
  }
  return sums;
}

/** Σ_q of precision · (û_{j|i} − m_j)²: (i · j). */
function distances(votes, mean, precision, [I, J, Q]) {
  const sums = new Float64Array(I * J);
  for (let k = 0, at = 0; k < I * J; k++) {
    const start = (k % J) * Q;
    for (let q = 0; q < Q; q++, at++) sums[k] += precision[start + q] * (votes[at] - mean[start + q]) ** 2;
  }
  return sums;
}

const sumOfRow = (x, j, Q, of) => x.subarray(j * Q, (j + 1) * Q).reduce((sum, value) => sum + of(value), 0);

/** Each upper capsule is a Gaussian fitted to the votes that choose it. */
function em({ votes, sizes, a }, { iterations, inverse_temperature: sharpness }, { beta_u: betaU, beta_a: betaA }) {
  const [I, J, Q] = sizes, steps = [];
  let couplings = filled(I * J, 1 / J);
  for (let t = 0; t < iterations; t++) {
    const r = couplings.map((c, k) => c * a[Math.floor(k / J)]), S = sumOverLower(r, J);
    const weights = r.map((value, k) => value / (S[k % J] + 1e-8));
    const outputs = weightedSum(weights, votes, sizes);
    const variances = scatter(weights, votes, outputs, sizes).map((value) => value + EM_FLOOR);
    const logit = S.map((share, j) => {
      const perDimension = betaU[j] + (0.5 / Q) * sumOfRow(variances, j, Q, Math.log);
      return sharpness * (1 - 0.95 ** (t + 1)) * (betaA[j] - 16 * perDimension * share * (J / I));
    });
    steps.push({ couplings, outputs, activations: logit.map(sigmoid), variances });
    const constant = logit.map((x, j) =>
      Math.min(0, x) - Math.log1p(Math.exp(-Math.abs(x))) - 0.5 * sumOfRow(variances, j, Q, (v) => Math.log(2 * Math.PI * v)));
    const distance = distances(votes, outputs, variances.map((v) => 1 / v), sizes);
    couplings = byRow(distance.map((d, k) => constant[k % J] - 0.5 * d), J, softmaxRow);
  }
  return steps;
}

/** EM routing with conjugate priors on its Gaussians. */
function vb({ votes, sizes, a }, { iterations }, parameters) {
  const [I, J, Q] = sizes, steps = [];
  let couplings = filled(I * J, 1 / J);
  for (let t = 0; t < iterations; t++) {
    const r = couplings.map((c, k) => c * a[Math.floor(k / J)]), S = sumOverLower(r, J);
    const outputs = weightedSum(r, votes, sizes).map((sum, k) => sum / (1 + S[Math.floor(k / Q)]));
    const psi = scatter(r, votes, outputs, sizes).map((sum, k) => 1 / (1 + sum + outputs[k] ** 2));
    const total = digamma(S.reduce((sum, s) => sum + 1 + s, 0));
    const logPi = S.map((s) => digamma(1 + s) - total);
    const logPrecision = psi.map((value, k) => digamma((2 + S[Math.floor(k / Q)]) / 2) + Math.LN2 + Math.log(value));
    const precision = psi.map((value, k) => value * (2 + S[Math.floor(k / Q)]));
    steps.push({ couplings, outputs, activations: vbActivations(logPi, logPrecision, Q, parameters), variances: precision.map((x) => 1 / x) });
    const constant = S.map((s, j) => logPi[j] + 0.5 * sumOfRow(logPrecision, j, Q, (x) => x - Math.log(2 * Math.PI) - 1 / (1 + s)));
    couplings = byRow(distances(votes, outputs, precision, sizes).map((d, k) => constant[k % J] - 0.5 * d), J, softmaxRow);
  }
  return steps;
}

function vbActivations(logPi, logPrecision, Q, { beta_u: betaU, beta_a: betaA, running_mean: mean, running_var: variance }) {
  return logPi.map((x, j) => {
    const entropy = 0.5 * sumOfRow(logPrecision, j, Q, (value) => Math.log(2 * Math.PI * Math.E) - value);
    return sigmoid(betaA[j] - (betaU[j] * (Math.exp(x) * entropy - mean[j])) / Math.sqrt(variance[j] + 1e-5));
  });
}

/** ψ(x) for x ≥ ½, by the series of capsnet/routing/vb.py. */
function digamma(x) {
  let below = 0;
  for (let k = 0; k < 6; k++) below += 1 / (x + k);
  const y = x + 6, z = 1 / (y * y);
  return Math.log(y) - 0.5 / y - z * (1 / 12 - z * (1 / 120 - z * (1 / 252 - z * (1 / 240 - z / 132)))) - below;
}

/** Votes are oscillators on a sphere that pull each other into phase. */
function kuramoto({ votes, sizes }, { iterations, step }, { kappa }) {
  const [I, J, Q] = sizes, steps = [];
  const amplitude = lengths(votes, Q);
  const own = Float64Array.from(votes, (value, k) => value / amplitude[Math.floor(k / Q)]);
  let oscillators = own, logits = filled(I * J, 0);
  for (let t = 0; t < iterations; t++) {
    const couplings = byRow(logits, J, softmaxRow);
    const outputs = squash(weightedSum(couplings.map((c, k) => c * amplitude[k]), oscillators, sizes), Q);
    steps.push({ logits, couplings, outputs, activations: lengths(outputs, Q), oscillators });
    const field = outputs.map((value, k) => kappa[Math.floor(k / Q)] * value);
    const force = own.map((value, k) => value + couplings[Math.floor(k / Q)] * field[k % (J * Q)]);
    oscillators = turned(oscillators, force, step, Q);
    logits = products(oscillators, field, sizes);
  }
  return steps;
}

/** Unit vectors x after one step along the sphere: Π(x + γ (f − (f·x) x)). */
function turned(x, force, step, Q) {
  const out = new Float64Array(x.length);
  for (let start = 0; start < x.length; start += Q) {
    let along = 0;
    for (let q = start; q < start + Q; q++) along += force[q] * x[q];
    for (let q = start; q < start + Q; q++) out[q] = x[q] + step * (force[q] - along * x[q]);
    const length = Math.sqrt(squaredLength(out, start, Q) + EPS);
    for (let q = start; q < start + Q; q++) out[q] /= length;
  }
  return out;
}

export const ROUTINGS = {
  dynamic, uniform, "max-min": maxMin, "self-attention": selfAttention, "inverted-attention": invertedAttention,
  "self-routing": selfRouting, em, vb, kuramoto,
};

// ---------------------------------------------------------------- the by-hand view

/** An algorithm on votes (i × j × 2) that somebody has drawn: every number of every step, as nested arrays. */
export function byHand(votes, name, options, parameters) {
  const sizes = [votes.length, votes[0].length, 2], [I, J] = sizes;
  const flat = Float64Array.from(votes.flat(2));
  const steps = ROUTINGS[name]({ votes: flat, sizes, a: filled(I, 1) }, options, parameters);
  const rows = (x, width) => Array.from({ length: x.length / width }, (_, k) => Array.from(x.subarray(k * width, (k + 1) * width)));
  const cut = (list, width) => Array.from({ length: list.length / width }, (_, k) => list.slice(k * width, (k + 1) * width));
  return {
    couplings: steps.map((step) => rows(step.couplings, J)),
    outputs: steps.map((step) => rows(step.outputs, 2)),
    activations: steps.map((step) => Array.from(step.activations)),
    ...(steps[0].logits && { logits: steps.map((step) => rows(step.logits, J)) }),
    ...(steps[0].oscillators && { oscillators: steps.map((step) => cut(rows(step.oscillators, 2), J)) }),
    ...(steps[0].variances && { variances: steps.map((step) => rows(step.variances, 2)) }),
    sums: steps.map((step) => rows(weightedSum(step.couplings, flat, sizes), 2)),
    agreement: steps.map((step) => rows(products(flat, step.outputs, sizes), J)),
  };
}
