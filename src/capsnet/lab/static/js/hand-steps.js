// Any routing algorithm in the by-hand view, step by step through its trace: which numbers are known at each step, and a
// sentence about it. hand-dynamic.js has the same form for the lines of Procedure 1.

import { number } from "./elements.js";
import { subscript } from "./hand-dynamic.js";
import { inPhase } from "./hand-oscillators.js";

/** `offer` is the algorithm as the engine describes it, `trace` its answer, if it has arrived. */
export function stepwise(offer, trace) {
  const steps = trace?.couplings.length ?? 1;
  const measured = measure(offer);
  return {
    title: offer.name,
    lines: Array.from({ length: steps }, (_, t) => ({ line: t, label: String(t + 1), indent: 0, note: "",
      code: trace ? trace.activations[t].map((a, j) => `${measured(subscript(j))} = ${number(a)}`).join("   ") : "…" })),
    stops: Array.from({ length: steps }, (_, t) => ({ t, line: t })),
    round: ({ t }) => (steps === 1 ? "one step" : `step ${t + 1} of ${steps}`),
    known: ({ t }) => known(trace, t, measured),
    explain: (_, { t }) => explain(offer, trace, t),
    lit: () => [],
    columns: { vote: "û", ...(trace?.oscillators && { phase: "θ" }), ...(trace?.logits && { b: "b" }), c: "c" },
    rows: { v: "v", ...(trace?.variances && { variance: "σ" }), a: measured("") },
  };
}

/** How an activation is written: a, or ‖v‖ where it is the length of the pose. */
export function measure({ own_activations: own }) {
  return (index) => (own ? `a${index}` : `‖v${index}‖`);
}

function known({ couplings, outputs, activations, logits, variances, oscillators }, t, measured) {
  const now = (list) => ({ value: list[t], old: false });
  return {
    c: now(couplings), v: now(outputs), a: now(activations), measured,
    ...(oscillators && { phase: now(oscillators) }), ...(logits && { b: now(logits) }), ...(variances && { variance: now(variances) }),
  };
}

function explain({ learnt }, { activations: all, oscillators }, t) {
  const activations = all[t], last = t === all.length - 1;
  const best = activations.indexOf(Math.max(...activations));
  const equal = activations.every((value) => Math.abs(value - activations[best]) < 0.005);
  const said = equal ? `All upper capsules are equally active (${number(activations[best])}).`
    : `Upper capsule ${best + 1} is the most active (${number(activations[best])})${last ? "." : " so far."}`;
  if (oscillators) return `${said} ${inPhase(oscillators[t])}`;
  return learnt ? `${said} The algorithm has the parameters of an untrained network.` : said;
}
