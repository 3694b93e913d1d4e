/**
 * The state of the page: its defaults, how a patch is merged into it, and its form in the URL fragment.
 *
 * It is plain JSON. The fragment is "z" + base64url(deflate-raw(JSON)), or "j" + base64url(JSON) if the browser cannot
 * compress. The content of a fragment is never trusted: `sanitise` rebuilds it field by field.
 */

const LONGEST_FRAGMENT = 400_000; // characters; a photo of 64×64 in colour needs about 17,000
const LONGEST_JSON = 1_000_000; // characters after inflating, so that a crafted link cannot fill the memory

/** A hand-drawn five, so that the page shows something without any data. Coordinates on a field of 1000×1000. */
const EXAMPLE = [
  {
    w: 95,
    p: [
      655, 232, 520, 240, 398, 236, 384, 340, 372, 452, 452, 424, 545, 436, 622, 500, 640, 592, 604, 684, 520, 742, 430,
      752, 346, 716,
    ],
  },
];

export const DEFAULTS = freeze({
  v: 1,
  view: "lab",
  present: "", // the slide of the presentation
  model: "",
  input: {
    mode: "draw",
    strokes: EXAMPLE,
    width: 95,
    centre: true,
    index: 0,
    label: null,
    only: "all",
    pixels: "",
    shape: null,
    overlap: { a: 1, b: 4, dx: 5, dy: -3 },
  },
  transform: { rotate: 0, scale: 1, shear: 0, x: 0, y: 0 },
  routing: { options: {}, t: 0 }, // options that differ from those of the model
  selected: null,
  tweak: {},
  keepLength: false,
  names: {},
  from: null,
  mix: 0,
  compare: false,
  hand: {
    votes: [
      [[0.8, 0.5], [-0.3, 0.6]],
      [[0.7, 0.65], [0.5, -0.5]],
      [[0.85, 0.35], [-0.6, -0.3]],
      [[-0.4, 0.6], [0.1, 0.8]],
    ],
    routing: "dynamic",
    against: "", // the algorithm to compare with; without one dynamic, or uniform for dynamic itself
    options: {}, // that differ from the defaults
    t: 0,
    line: 2,
  },
});

/** Limits of the handles, the sliders and links. */
export const LIMITS = freeze({
  rotate: [-180, 180],
  scale: [0.3, 2],
  shear: [-1, 1],
  x: [-60, 60],
  y: [-60, 60],
});

/** Deep-merge: objects are merged, everything else replaces; `undefined` removes a key. Returns a new object. */
export function merge(old, patch) {
  if (!isObject(old) || !isObject(patch)) return patch;
  const merged = { ...old };
  for (const [key, value] of Object.entries(patch)) {
    if (value === undefined) delete merged[key];
    else merged[key] = merge(old[key], value);
  }
  return merged;
}

/** The next state. With `replace` the top-level values of the patch replace the old ones instead of being merged. */
export function next(state, patch, { replace = false } = {}) {
  const newModel = patch.model !== undefined && patch.model !== state.model;
  // Poses, classes and routing options of one network mean nothing to another
  const routing = { ...state.routing, options: {} };
  const fresh = newModel ? { ...state, routing, selected: null, tweak: {}, from: null, mix: 0 } : state;
  return replace ? { ...fresh, ...patch } : merge(fresh, patch);
}

/** A routing option as a control of the engine describes it: the wanted value if it is valid, otherwise the model's. */
export function optionValue({ type, value, min, max, choices }, wanted) {
  if (type === "bool") return flag(wanted, value);
  if (type === "choice") return oneOf(wanted, choices, value);
  return (type === "int" ? whole : number)(wanted, min ?? -Infinity, max ?? Infinity, value);
}

/** Keep the well-formed parts of an unknown value and fill the rest with the defaults. */
export function sanitise(raw) {
  const d = DEFAULTS;
  const o = isObject(raw) ? raw : {};
  const input = isObject(o.input) ? o.input : {};
  const overlap = isObject(input.overlap) ? input.overlap : {};
  const transform = isObject(o.transform) ? o.transform : {};
  const routing = isObject(o.routing) ? o.routing : {};
  return {
    v: 1,
    view: oneOf(o.view, ["lab", "hand"], d.view),
    present: oneOf(o.present, ["input", "primary", "votes", "routing", "classes", "pose"], d.present),
    model: text(o.model, 200, d.model),
    input: {
      mode: oneOf(input.mode, ["draw", "test", "image", "overlap"], d.input.mode),
      strokes: strokes(input.strokes),
      width: whole(input.width, 20, 250, d.input.width),
      centre: flag(input.centre, d.input.centre),
      index: whole(input.index, 0, 1e6, d.input.index),
      label: input.label === null ? null : whole(input.label, 0, 9, null),
      only: oneOf(input.only, ["all", "mistakes"], d.input.only),
      pixels: text(input.pixels, 300_000, ""),
      shape: shape(input.shape),
      overlap: {
        a: whole(overlap.a, 0, 1e6, d.input.overlap.a),
        b: whole(overlap.b, 0, 1e6, d.input.overlap.b),
        dx: number(overlap.dx, -60, 60, d.input.overlap.dx),
        dy: number(overlap.dy, -60, 60, d.input.overlap.dy),
      },
    },
    transform: Object.fromEntries(
      Object.entries(LIMITS).map(([key, [low, high]]) => [key, number(transform[key], low, high, d.transform[key])]),
    ),
    routing: { options: options(routing), t: whole(routing.t, 0, 9999, 0) },
    selected: o.selected === null ? null : whole(o.selected, 0, 9999, null),
    tweak: tweaks(o.tweak),
    keepLength: flag(o.keepLength, d.keepLength),
    names: names(o.names),
    from: kept(o.from),
    mix: number(o.mix, 0, 1, d.mix),
    compare: flag(o.compare, d.compare),
    hand: hand(o.hand),
  };
}

/** State → fragment, without the "#". */
export async function toFragment(state) {
  if (typeof CompressionStream === "undefined") return plainFragment(state);
  const bytes = new TextEncoder().encode(JSON.stringify(state));
  const stream = new Blob([bytes]).stream().pipeThrough(new CompressionStream("deflate-raw"));
  return "z" + toBase64url(new Uint8Array(await new Response(stream).arrayBuffer()));
}

/** The same, synchronous and uncompressed. */
export function plainFragment(state) {
  return "j" + toBase64url(new TextEncoder().encode(JSON.stringify(state)));
}

/** Fragment → state, or null without a fragment; throws a sentence if the fragment is broken. */
export async function fromFragment(fragment) {
  const body = fragment.replace(/^#/, "");
  if (!body) return null;
  try {
    if (body.length > LONGEST_FRAGMENT) throw new Error("too long");
    const bytes = fromBase64url(body.slice(1));
    const json = body[0] === "z" ? await inflate(bytes) : body[0] === "j" ? new TextDecoder().decode(bytes) : "";
    const parsed = JSON.parse(json);
    if (!isObject(parsed) || parsed.v !== 1) throw new Error("not a state of this page");
    return sanitise(parsed);
  } catch {
    throw new Error("The link could not be read. It may have been truncated, so the page shows the example instead.");
  }
}

async function inflate(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let json = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return json;
    json += value;
    if (json.length > LONGEST_JSON) {
      await reader.cancel();
      throw new Error("too long");
    }
  }
}

export function toBase64url(bytes) {
  let binary = "";
  for (let k = 0; k < bytes.length; k += 8192) binary += String.fromCharCode(...bytes.subarray(k, k + 8192));
  return btoa(binary).replaceAll("+", "-").replaceAll("/", "_").replace(/=+$/, "");
}

export function fromBase64url(string) {
  return Uint8Array.from(atob(string.replaceAll("-", "+").replaceAll("_", "/")), (c) => c.charCodeAt(0));
}

function isObject(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function freeze(value) {
  if (typeof value === "object" && value !== null) Object.values(value).forEach(freeze);
  return Object.freeze(value);
}

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const clamp = (value, low, high) => Math.min(high, Math.max(low, value));
const number = (value, low, high, otherwise) => (isNumber(value) ? clamp(value, low, high) : otherwise);
const whole = (value, low, high, otherwise) => (isNumber(value) ? clamp(Math.round(value), low, high) : otherwise);
const flag = (value, otherwise) => (typeof value === "boolean" ? value : otherwise);
const oneOf = (value, choices, otherwise) => (choices.includes(value) ? value : otherwise);
const text = (value, longest, otherwise) => (typeof value === "string" && value.length <= longest ? value : otherwise);

function numbers(value, longest, low, high) {
  return Array.isArray(value) && value.length <= longest && value.every(isNumber)
    ? value.map((x) => clamp(x, low, high))
    : null;
}

function strokes(value) {
  if (!Array.isArray(value)) return DEFAULTS.input.strokes;
  return value.slice(0, 500).flatMap((stroke) => {
    const p = numbers(stroke?.p, 4000, -2000, 3000)?.map(Math.round);
    return p && p.length >= 2 && p.length % 2 === 0 ? [{ w: whole(stroke.w, 20, 250, DEFAULTS.input.width), p }] : [];
  });
}

/** Routing options by name; older links had `iterations` and `leaky` beside t. */
function options(routing) {
  const { iterations, leaky } = routing;
  const raw = isObject(routing.options) ? routing.options : { iterations, leaky };
  const plain = (value) => isNumber(value) || typeof value === "boolean" || text(value, 60, null) !== null;
  return Object.fromEntries(Object.entries(raw).filter(([name, value]) => name.length <= 60 && plain(value)).slice(0, 20));
}

function shape(value) {
  const sides = numbers(value, 3, 1, 512);
  return sides?.length === 3 ? sides.map(Math.round) : null;
}

function tweaks(value) {
  if (!isObject(value)) return {};
  return Object.fromEntries(
    Object.entries(value).slice(0, 200).flatMap(([klass, deltas]) => {
      const row = numbers(deltas, 256, -10, 10);
      return /^\d{1,4}$/.test(klass) && row ? [[klass, row]] : [];
    }),
  );
}

function names(value) {
  if (!isObject(value)) return {};
  const entries = Object.entries(value).filter(([key, name]) => key.length < 300 && text(name, 60, null) !== null);
  return Object.fromEntries(entries.slice(0, 500));
}

function kept(value) {
  const pose = numbers(value?.pose, 256, -10, 10);
  if (!pose) return null;
  return { class: whole(value.class, 0, 9999, 0), pose, label: text(value.label, 60, "") };
}

function hand(value) {
  const d = DEFAULTS.hand;
  const o = isObject(value) ? value : {};
  return {
    votes: votes(o.votes) ?? d.votes,
    routing: text(o.routing, 60, d.routing),
    against: text(o.against, 60, d.against),
    options: options(o),
    t: whole(o.t, 0, 99, d.t),
    line: whole(o.line, 0, 99, d.line),
  };
}

function votes(value) {
  if (!Array.isArray(value) || value.length < 2 || value.length > 6) return null;
  const rows = value.map((row) => (Array.isArray(row) ? row.map((vote) => numbers(vote, 2, -10, 10)) : []));
  const uppers = rows[0].length;
  const regular = rows.every((row) => row.length === uppers && row.every((vote) => vote?.length === 2));
  return regular && uppers >= 2 && uppers <= 4 ? rows : null;
}
