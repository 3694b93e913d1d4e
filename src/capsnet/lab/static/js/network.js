/**
 * A capsule network after its convolutions, for the Lab without a server: votes, routing of every capsule layer, branches
 * joined, and the measures that the page draws. It mirrors capsnet/lab/inference.py; tests compare the numbers.
 *
 * A network is {branches: [[layer, …], …], squashed}, where `squashed` says whether primary capsules are; a layer is {weight, shape, matrix, routing, options, parameters, own_activations}
 * with weight W (n, j, q, p), where n < i means that the positions of a grid share their transformations.
 */

import { lengths, ROUTINGS } from "./routings.js";

const LEAK = 1e-4; // couplings that sum to less than 1 by more than this are leaky

/** A parsed layers file as a network. */
export function networkOf(frame) {
  const branches = frame.header.branches.map((layers, g) => layers.map((layer, n) => ({
    ...layer,
    weight: frame[`${g}.${n}.weight`],
    shape: frame[`${g}.${n}.weight`].shape,
    parameters: Object.fromEntries(layer.parameters.map((name) => [name, frame[`${g}.${n}.${name}`]])),
  })));
  return { branches, squashed: frame.header.squashed };
}

/** Everything that the page shows, as new Float32Arrays: `primaries` are the primary capsules of each branch (i · p). */
export function answer(network, primaries, changes, focus) {
  const outputs = network.branches.map((layers, g) => routed(layers, primaries[g], changes, network.squashed));
  const { steps, votes, sizes } = outputs.length === 1 ? outputs[0] : joined(outputs, network.branches[0].at(-1).own_activations);
  const last = steps.at(-1);
  const ranking = ranked(last.activations);
  const chosen = focus ?? ranking[0];
  const [I, J, Q] = sizes, T = steps.length;
  const arrays = {
    activations: [Float32Array.from(last.activations), [J]],
    poses: [Float32Array.from(last.outputs), [J, Q]],
    primary: primary(primaries, network.branches[0][0]),
    couplings: [concat(steps, "couplings"), [T, I, J]],
    outputs: [concat(steps, "outputs"), [T, J, Q]],
    step_activations: [concat(steps, "activations"), [T, J]],
    entropy: [Float32Array.from(entropy(steps, J)), [T]],
    agreement: [concat(steps.map((step) => ({ agreement: agreement(step, votes, sizes) })), "agreement"), [T, J]],
    ...(last.variances && { deviation: [concat(steps.map((step) => ({ deviation: deviation(step, Q) })), "deviation"), [T, J]] }),
    ...(last.oscillators && { coherence: [concat(steps.map((step) => ({ coherence: coherence(step, sizes) })), "coherence"), [T, J]] }),
    ...votesFor(chosen, steps, votes, sizes),
  };
  return { header: { ranking, focus: chosen }, arrays };
}

/** Classes, the most active first. */
export function ranked(activations) {
  return [...activations.keys()].sort((a, b) => activations[b] - activations[a]);
}

function concat(steps, name) {
  const size = steps[0][name].length, all = new Float32Array(size * steps.length);
  steps.forEach((step, t) => all.set(step[name], t * size));
  return all;
}

/** Primary capsules of all branches, interleaved: (i, p). */
function primary(primaries, { shape, matrix }) {
  const P = matrix ? shape[2] * shape[3] : shape[3], all = interleaved(primaries, P);
  return [all, [all.length / P, P]];
}

/** Rows of `width` numbers of several arrays, in turn. */
function interleaved(parts, width) {
  const k = parts.length, all = new Float32Array(k * parts[0].length);
  parts.forEach((part, g) => {
    for (let row = 0; row * width < part.length; row++) all.set(part.subarray(row * width, (row + 1) * width), (row * k + g) * width);
  });
  return all;
}

// ---------------------------------------------------------------- layers and branches

/** The capsule layers of one branch; the steps and votes of the last one. */
function routed(layers, primary, changes, squashed) {
  let poses = primary, a = squashed ? null : squashedLengths(primary, layers[0]), result = null;
  for (const layer of layers) {
    const [, J, rows, columns] = layer.shape;
    const P = layer.matrix ? rows * columns : columns, Q = layer.matrix ? P : rows;
    const sizes = [poses.length / P, J, Q];
    const votes = layer.matrix ? matrixVotes(poses, layer, sizes) : vectorVotes(poses, layer, sizes, P);
    const lower = { votes, sizes, poses, a: a ?? shortened(poses, P) };
    const steps = ROUTINGS[layer.routing](lower, { ...layer.options, ...changes }, layer.parameters);
    poses = steps.at(-1).outputs;
    a = layer.own_activations ? steps.at(-1).activations : null;
    result = { steps, votes, sizes };
  }
  return result;
}

/** Lengths that the lower poses would have if they were squashed (Eq. 1). */
function squashedLengths(poses, layer) {
  const P = layer.matrix ? layer.shape[2] * layer.shape[3] : layer.shape[3];
  return Float64Array.from({ length: poses.length / P }, (_, i) => {
    const square = poses.subarray(i * P, (i + 1) * P).reduce((sum, x) => sum + x * x, 0);
    return square / (1 + square);
  });
}

/** Lengths of the lower poses, at most 1: their activations where the layer below has none of its own. */
function shortened(poses, P) {
  return Float64Array.from({ length: poses.length / P }, (_, i) => Math.min(1, Math.hypot(...poses.subarray(i * P, (i + 1) * P))));
}

/** û_{j|i} = W_ij u_i (Eq. 2). */
function vectorVotes(u, { weight, shape: [types] }, [I, J, Q], P) {
  const votes = new Float32Array(I * J * Q);
  for (let i = 0, at = 0; i < I; i++) {
    let w = (i % types) * J * Q * P;
    for (let row = 0; row < J * Q; row++, at++) {
      let sum = 0;
      for (let p = 0; p < P; p++, w++) sum += weight[w] * u[i * P + p];
      votes[at] = sum;
    }
  }
  return votes;
}

/** V_ij = M_i W_ij, for poses that are square matrices. */
function matrixVotes(poses, { weight, shape: [types, , side] }, [I, J, Q]) {
  const votes = new Float32Array(I * J * Q);
  for (let at = 0; at < votes.length; at++) {
    const i = Math.floor(at / (J * Q)), j = Math.floor(at / Q) % J, row = Math.floor((at % Q) / side), column = at % side;
    let sum = 0;
    for (let k = 0; k < side; k++) sum += poses[i * Q + row * side + k] * weight[((i % types) * J + j) * Q + k * side + column];
    votes[at] = sum;
  }
  return votes;
}

/** Branches as one network: lower capsules interleaved, poses joined and divided by √branches. */
function joined(branches, ownActivations) {
  const k = branches.length, [I, J, part] = branches[0].sizes, Q = k * part;
  const steps = branches[0].steps.map((_, t) => {
    const each = branches.map(({ steps }) => steps[t]);
    const outputs = Float64Array.from({ length: J * Q }, (_, n) => {
      const j = Math.floor(n / Q), q = n % Q;
      return each[Math.floor(q / part)].outputs[j * part + (q % part)] / Math.sqrt(k);
    });
    const mean = (j) => each.reduce((sum, { activations }) => sum + activations[j], 0) / k;
    const activations = ownActivations ? Float64Array.from({ length: J }, (_, j) => mean(j)) : lengths(outputs, Q);
    return { couplings: interleaved(each.map(({ couplings }) => couplings), J), outputs, activations };
  });
  const votes = new Float32Array(k * I * J * Q); // a vote is zero in the parts of other branches
  branches.forEach((branch, g) => {
    for (let n = 0; n < I * J; n++) {
      const row = (Math.floor(n / J) * k + g) * J + (n % J);
      votes.set(branch.votes.subarray(n * part, (n + 1) * part), row * Q + g * part);
    }
  });
  return { steps, votes, sizes: [k * I, J, Q] };
}

// ---------------------------------------------------------------- measures

/** The mean entropy of the couplings of a lower capsule at every step, relative to its maximum. */
function entropy(steps, J) {
  const rows = steps.map(({ couplings }) => Array.from({ length: couplings.length / J }, (_, i) => shares(couplings.subarray(i * J, (i + 1) * J))));
  const leaky = rows.some((step) => step.some(({ leak }) => leak > LEAK));
  const of = ({ kept, leak }) => [...kept, ...(leaky ? [leak] : [])].reduce((sum, c) => sum - (c > 0 ? c * Math.log(c) : 0), 0);
  const most = Math.log(Math.max(2, J + (leaky ? 1 : 0)));
  return Float64Array.from(rows, (step) => step.reduce((sum, row) => sum + of(row), 0) / step.length / most);
}

/** Couplings as shares of at most 1, and what is missing. */
function shares(couplings) {
  const positive = couplings.map((c) => Math.max(0, c));
  const sum = Math.max(1, positive.reduce((total, c) => total + c, 0));
  const kept = positive.map((c) => c / sum);
  return { kept, leak: Math.max(0, 1 - kept.reduce((total, c) => total + c, 0)) };
}

/** The cosine between votes and output, averaged with the couplings as weights, negative ones as zero: (j). */
function agreement({ couplings, outputs }, votes, [I, J, Q]) {
  const sums = new Float64Array(J), weights = new Float64Array(J);
  for (let k = 0; k < I * J; k++) {
    const j = k % J;
    let dot = 0, vote = 0, output = 0;
    for (let q = 0; q < Q; q++) {
      const x = votes[k * Q + q], y = outputs[j * Q + q];
      dot += x * y;
      vote += x * x;
      output += y * y;
    }
    const weight = Math.max(0, couplings[k]);
    sums[j] += (weight * dot) / (Math.max(1e-12, Math.sqrt(vote)) * Math.max(1e-12, Math.sqrt(output)));
    weights[j] += weight;
  }
  return sums.map((sum, j) => sum / Math.max(1e-12, weights[j]));
}

/** The mean standard deviation of the Gaussian of each upper capsule: (j). */
function deviation({ variances }, Q) {
  const sums = new Float64Array(variances.length / Q);
  variances.forEach((value, k) => (sums[Math.floor(k / Q)] += Math.sqrt(value) / Q));
  return sums;
}

/** The length of the mean phase of the oscillators of each upper capsule, with the couplings as weights: (j). */
function coherence({ couplings, oscillators }, [I, J, Q]) {
  const mean = new Float64Array(J * Q), weights = new Float64Array(J);
  for (let k = 0; k < I * J; k++) {
    weights[k % J] += couplings[k];
    for (let q = 0; q < Q; q++) mean[(k % J) * Q + q] += couplings[k] * oscillators[k * Q + q];
  }
  return weights.map((weight, j) => Math.hypot(...mean.subarray(j * Q, (j + 1) * Q)) / Math.max(1e-12, weight));
}

/** The votes for one class, their projection onto their principal plane, and the weight of each. */
function votesFor(focus, steps, votes, [I, J, Q]) {
  const T = steps.length, mine = new Float32Array(I * Q);
  for (let i = 0; i < I; i++) mine.set(votes.subarray((i * J + focus) * Q, (i * J + focus + 1) * Q), i * Q);
  const outputs = Float32Array.from({ length: T * Q }, (_, n) => steps[Math.floor(n / Q)].outputs[focus * Q + (n % Q)]);
  const weight = Float32Array.from({ length: T * I }, (_, n) => {
    const i = n % I;
    return steps[Math.floor(n / I)].couplings[i * J + focus] * Math.hypot(...mine.subarray(i * Q, (i + 1) * Q));
  });
  const { centre, plane } = principalPlane(mine, Q);
  return {
    votes: [mine, [I, Q]],
    votes2d: [projected(mine, centre, plane, Q), [I, 2]],
    outputs2d: [projected(outputs, centre, plane, Q), [T, 2]],
    origin2d: [projected(new Float32Array(Q), centre, plane, Q), [2]],
    weight: [weight, [T, I]],
  };
}

function projected(points, centre, plane, Q) {
  const flat = new Float32Array((points.length / Q) * 2);
  for (let n = 0; n < flat.length; n++) {
    const start = Math.floor(n / 2) * Q;
    for (let q = 0; q < Q; q++) flat[n] += (points[start + q] - centre[q]) * plane[n % 2][q];
  }
  return flat;
}

/** The centre of points (n · q) and their two principal directions, with signs that do not flip at random. */
function principalPlane(points, Q) {
  const n = points.length / Q, centre = new Float64Array(Q);
  points.forEach((value, k) => (centre[k % Q] += value / n));
  const spread = Array.from({ length: Q }, () => new Float64Array(Q));
  for (let start = 0; start < points.length; start += Q) {
    for (let p = 0; p < Q; p++) {
      for (let q = 0; q <= p; q++) spread[p][q] += (points[start + p] - centre[p]) * (points[start + q] - centre[q]);
    }
  }
  for (let p = 0; p < Q; p++) for (let q = 0; q < p; q++) spread[q][p] = spread[p][q];
  const { values, vectors } = eigen(spread);
  const order = [...values.keys()].sort((a, b) => values[b] - values[a]);
  const plane = [0, 1].map((rank) => upright(rank < Q ? vectors.map((row) => row[order[rank]]) : Array(Q).fill(0)));
  return { centre, plane };
}

function upright(direction) {
  const largest = direction.reduce((best, value) => (Math.abs(value) > Math.abs(best) ? value : best), 0);
  return largest < 0 ? direction.map((value) => -value) : direction;
}

/** Eigenvalues and eigenvectors (columns) of a symmetric matrix, by Jacobi's rotations; the matrix is overwritten. */
export function eigen(matrix) {
  const n = matrix.length;
  const vectors = matrix.map((_, p) => Float64Array.from({ length: n }, (_, q) => (p === q ? 1 : 0)));
  const scale = Math.sqrt(matrix.reduce((sum, row) => sum + row.reduce((total, x) => total + x * x, 0), 0));
  for (let sweep = 0; sweep < 60; sweep++) {
    let off = 0;
    for (let p = 0; p < n; p++) for (let q = 0; q < p; q++) off += matrix[p][q] ** 2;
    if (Math.sqrt(off) <= 1e-12 * scale) break;
    for (let p = 0; p < n; p++) for (let q = p + 1; q < n; q++) rotate(matrix, vectors, p, q);
  }
  return { values: Float64Array.from(matrix, (row, p) => row[p]), vectors };
}

/** The rotation that makes the element (p, q) zero. */
function rotate(matrix, vectors, p, q) {
  if (matrix[p][q] === 0) return;
  const theta = (matrix[q][q] - matrix[p][p]) / (2 * matrix[p][q]);
  const t = (theta >= 0 ? 1 : -1) / (Math.abs(theta) + Math.hypot(theta, 1));
  const c = 1 / Math.hypot(t, 1), s = t * c;
  for (const row of matrix) [row[p], row[q]] = [c * row[p] - s * row[q], s * row[p] + c * row[q]];
  const [above, below] = [matrix[p], matrix[q]];
  for (let k = 0; k < matrix.length; k++) [above[k], below[k]] = [c * above[k] - s * below[k], s * above[k] + c * below[k]];
  for (const row of vectors) [row[p], row[q]] = [c * row[p] - s * row[q], s * row[p] + c * row[q]];
}
