/**
 * The worker of the Lab without a server: onnxruntime-web runs the convolutions, network.js and routings.js the capsules,
 * photo.js prepares images. engine-static.js sends {id, call, args} and gets {id, result} or {id, refused} back.
 */

import * as ort from "../ort/ort.wasm.bundle.min.js";
import { parseFrame } from "./frames.js";
import { answer, networkOf, ranked } from "./network.js";
import { prepare } from "./photo.js";
import { Refusal } from "./requests.js";
import { byHand } from "./routings.js";

const models = new Map(); // name → {session, network}

const CALLS = {
  /** The WebAssembly of onnxruntime-web. */
  start(wasmBinary) {
    Object.assign(ort.env.wasm, { wasmBinary, numThreads: 1 });
    ort.env.logLevel = "error";
  },

  /** A model: its convolutions as ONNX and, if it has capsules, its capsule layers as a frame. */
  async open(name, graph, layers) {
    const session = await ort.InferenceSession.create(new Uint8Array(graph), { executionProviders: ["wasm"] });
    models.set(name, { session, network: layers && networkOf(parseFrame(layers)) });
  },

  async encode(name, pixels, shape, changes, focus) {
    const { session, network } = models.get(name);
    const outputs = await session.run({ images: new ort.Tensor("float32", pixels, [1, ...shape]) });
    const found = session.outputNames.map((output) => outputs[output].data);
    if (network) return answer(network, found, changes, focus);
    const arrays = { activations: [found[0].slice(), [found[0].length]] };
    if (found[1]) arrays.field = [found[1].slice(), outputs[session.outputNames[1]].dims]; // of a model with phases
    return { header: { ranking: ranked(found[0]) }, arrays };
  },

  photo: prepare,
  hand: byHand,
};

/** The arrays of an answer move to the page instead of being copied. */
function buffersOf(result) {
  return Object.values(result?.arrays ?? {}).map(([values]) => values.buffer);
}

/** onnxruntime-web runs one thing at a time. */
let queue = Promise.resolve();

addEventListener("message", ({ data: { id, call, args } }) => {
  queue = queue.then(async () => {
    try {
      const result = await CALLS[call](...args);
      postMessage({ id, result }, buffersOf(result));
    } catch (error) {
      if (!(error instanceof Refusal)) console.error(error);
      postMessage({ id, refused: error instanceof Refusal ? error.message : `The network could not be run in this browser (${error.message}).` });
    }
  });
});
