// Dynamic routing for the by-hand view: the lines of Procedure 1, in which order they run, which numbers are known at each
// of them, and a sentence about it. hand.js draws what an algorithm describes like this.

import { number } from "./elements.js";

export const subscript = (...indices) => indices.map((n) => String.fromCharCode(0x2080 + n + 1)).join("");
export const vector = ([x, y]) => `(${number(x)}, ${number(y)})`;

const LINES = [
  { line: 1, indent: 0, code: "routing(û, r)", note: "" },
  { line: 2, indent: 1, code: "for all i, j:  bᵢⱼ ← 0", note: "", card: "b" },
  { line: 3, indent: 1, code: "r times:", note: "" },
  { line: 4, indent: 2, code: "for all i:  cᵢ ← softmax(bᵢ)", note: "Eq. 3", card: "c" },
  { line: 5, indent: 2, code: "for all j:  sⱼ ← Σᵢ cᵢⱼ ûⱼ|ᵢ", note: "Eq. 2", card: "s" },
  { line: 6, indent: 2, code: "for all j:  vⱼ ← squash(sⱼ)", note: "Eq. 1", card: "v" },
  { line: 7, indent: 2, code: "for all i, j:  bᵢⱼ ← bᵢⱼ + ûⱼ|ᵢ · vⱼ", note: "", card: "b" },
  { line: 8, label: "", indent: 1, code: "return vⱼ", note: "" },
];

/** The order of lines: 2 once, 4 to 7 in each iteration (the last one needs no 7), then the return. */
function stops(iterations) {
  const list = [{ t: 0, line: 2 }];
  for (let t = 0; t < iterations; t++) {
    for (const line of t === iterations - 1 ? [4, 5, 6] : [4, 5, 6, 7]) list.push({ t, line });
  }
  return [...list, { t: iterations - 1, line: 8 }];
}

/** What is known at a line: numbers of this iteration, of the one before (then they are old), or none yet. */
function known({ logits, couplings, sums, outputs, activations, agreement }, { t, line }) {
  const now = (list, from) => (line >= from ? { value: list[t], old: false } : { value: list[t - 1], old: true });
  const done = line === 8;
  const grown = logits[t].map((row, i) => row.map((b, j) => b + (line === 7 ? agreement[t][i][j] : 0)));
  return {
    b: { value: grown, old: false },
    c: now(couplings, 4),
    s: now(sums, 5),
    v: now(outputs, 6),
    a: now(activations, 6),
    measured,
    agreement: line === 7 || done ? { value: agreement[t], old: false } : { value: agreement[t - 1], old: true },
  };
}

/** The current line with its numbers, for the first capsule that it is about. */
function explain({ logits, couplings, sums, outputs, activations, agreement }, votes, { t, line }, leaky) {
  const b = logits[t][0], c = couplings[t], v = outputs[t], one = subscript(0), oneOne = subscript(0, 0);
  if (line === 2) return "All logits start at zero, so every vote has the same weight.";
  if (line === 4) {
    const powers = b.map((value) => `e^${number(value)}`);
    const sum = [...powers, ...(leaky ? ["1"] : [])].join(" + ");
    return `c${oneOne} = ${powers[0]} / (${sum}) = ${number(c[0][0], 3)}.  ` +
      (leaky ? "Leaky: the rest of each row of c, up to one, goes to no upper capsule." : "Each row of c sums to one.");
  }
  if (line === 5) {
    const terms = votes.map((row, i) => `${number(c[i][0])}·${vector(row[0])}`);
    return `s${one} = ${terms.join(" + ")} = ${vector(sums[t][0])}.`;
  }
  const length = Math.hypot(...sums[t][0]);
  if (line === 6) return `‖s${one}‖ = ${number(length)} is squashed to ‖v${one}‖ = ${number(length ** 2)} / ${number(1 + length ** 2)} = ${number(activations[t][0])}, and the direction stays the same.`;
  if (line === 7) return `b${oneOne} = ${number(b[0])} + ${vector(votes[0][0])} · ${vector(v[0])} = ${number(b[0] + agreement[t][0][0])}.  A vote that agrees gets a larger weight.`;
  const best = activations[t].reduce((a, value, j, all) => (value > all[a] ? j : a), 0);
  return `Upper capsule ${best + 1} is the longest (${number(activations[t][best])}): its votes agree best.`;
}

const measured = (index) => `‖v${index}‖`;
const LIT = { 2: ["b"], 4: ["c"], 5: ["s"], 6: ["v", "a"], 7: ["agreement", "b"], 8: ["v", "a"] };

/** The form of hand-steps.js: `trace` is the answer of the engine, if it has arrived. */
export function lineByLine({ iterations, leaky }, trace) {
  return {
    title: "Procedure 1",
    lines: LINES,
    stops: stops(iterations),
    round: ({ t, line }) => (line === 2 ? "initialisation" : line === 8 ? "done" : `iteration ${t + 1} of ${iterations}`),
    known: (stop) => known(trace, stop),
    explain: (votes, stop) => explain(trace, votes, stop, leaky),
    lit: ({ line }) => LIT[line],
    columns: { vote: "û", b: "b", c: "c", agreement: "û·v" },
    rows: { s: "s", v: "v", a: "‖v‖" },
  };
}
