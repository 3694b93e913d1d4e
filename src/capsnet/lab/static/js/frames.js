/**
 * Frames: a JSON header and named arrays in one body, as `protocol.py` packs them.
 *
 * uint32 LE header length, a JSON header {"arrays": [{"name", "shape"}], …}, then the float32 arrays in order, each padded
 * to 8 bytes. Arrays come out as Float32Array with a `.shape`.
 */

/** ArrayBuffer → {header, name: Float32Array, …}. */
export function parseFrame(buffer) {
  const length = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  const frame = { header };
  let offset = 4 + length;
  for (const { name, shape } of header.arrays) {
    const count = shape.reduce((product, side) => product * side, 1);
    frame[name] = new Float32Array(buffer, offset, count);
    frame[name].shape = shape;
    offset += Math.ceil((count * 4) / 8) * 8;
  }
  return frame;
}
