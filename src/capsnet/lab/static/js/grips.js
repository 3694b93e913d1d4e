// The handles: rotate, scale, shear and move the input with four grips at the corners of a frame. The sliders below the
// canvas set the same numbers within the same limits.

import { set, svg } from "./elements.js";
import { apply, compose, digitSide, handles, invert } from "./raster.js";
import { LIMITS } from "./state.js";

export const SLIDERS = {
  rotate: { title: "Rotate", step: 1, unit: "°" },
  scale: { title: "Scale", step: 0.01, unit: "×" },
  shear: { title: "Shear", step: 0.01, unit: "" },
  x: { title: "Move →", step: 0.5, unit: "px" },
  y: { title: "Move ↓", step: 0.5, unit: "px" },
};
const FRAME = 0.8; // size of the frame relative to the digit's square

/** CSS pixels of the canvas per pixel of the field. */
export function zoom(canvas, lab) {
  return canvas.clientWidth / lab.model.image_shape[2];
}

const GRIPS = {
  move: { corner: [-1, -1], title: "Move", sign: "M-4 0H4M0-4V4" },
  rotate: { corner: [1, -1], title: "Rotate", sign: "M-3.5 1.5A3.8 3.8 0 1 1 0 3.8M-5-.5l1.5 2.2 2-1.7" },
  scale: { corner: [1, 1], title: "Scale", sign: "M-3-3 3 3M3-.5V3H-.5M-3 .5V-3H.5" },
  shear: { corner: [-1, 1], title: "Shear", sign: "M-3.5 3-.5-3H3.5L.5 3Z" },
};

export function buildGrips(overlay, stage, lab) {
  const frame = svg("polygon", { class: "frame" });
  overlay.append(frame);
  const grips = { frame };
  for (const [name, { title, sign }] of Object.entries(GRIPS)) {
    const grip = svg("g", { class: "grip", "data-grip": name },
      svg("title", {}, `${title}: drag`), svg("circle", { r: 9 }), svg("path", { d: sign }));
    dragGrip(grip, name, stage, lab);
    overlay.append(grip);
    grips[name] = grip;
  }
  return grips;
}

export function placeGrips(grips, canvas, lab) {
  const k = zoom(canvas, lab);
  const half = (FRAME * digitSide(lab.model.image_shape)) / 2;
  const map = compose([k, 0, 0, k, canvas.clientWidth / 2, canvas.clientHeight / 2], handles(lab.state.transform));
  const at = ([x, y]) => apply(map, x * half, y * half);
  const corners = [[-1, -1], [1, -1], [1, 1], [-1, 1]].map((corner) => at(corner).map((v) => v.toFixed(1)).join(","));
  set(grips.frame, { points: corners.join(" ") });
  for (const [name, { corner }] of Object.entries(GRIPS)) {
    const [x, y] = at(corner);
    const keepIn = (value, room) => Math.min(room - 11, Math.max(11, value));
    const inside = [keepIn(x, canvas.clientWidth), keepIn(y, canvas.clientHeight)];
    set(grips[name], { transform: `translate(${inside.map((v) => v.toFixed(1)).join(" ")})` });
  }
}

/** Drag a grip: `dragged` turns the movement of the pointer into its number. */
function dragGrip(grip, name, stage, lab) {
  let start = null;
  const place = (event) => {
    const box = stage.getBoundingClientRect();
    const k = zoom(stage, lab);
    return [(event.clientX - box.left - box.width / 2) / k, (event.clientY - box.top - box.height / 2) / k];
  };
  grip.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || !lab.model) return;
    event.preventDefault();
    grip.setPointerCapture(event.pointerId);
    start = { at: place(event), transform: lab.state.transform };
  });
  grip.addEventListener("pointermove", (event) => {
    if (start) lab.update({ transform: limited(dragged[name](start, place(event)), lab.model) });
  });
  for (const end of ["pointerup", "pointercancel"]) grip.addEventListener(end, () => (start = null));
}

const dragged = {
  move: ({ at, transform }, [x, y]) => ({ x: transform.x + x - at[0], y: transform.y + y - at[1] }),
  rotate: ({ at, transform }, [x, y]) => {
    const angle = Math.atan2(y - transform.y, x - transform.x) - Math.atan2(at[1] - transform.y, at[0] - transform.x);
    const turned = transform.rotate + (angle * 180) / Math.PI;
    return { rotate: ((((turned + 180) % 360) + 360) % 360) - 180 };
  },
  scale: ({ at, transform }, [x, y]) => {
    const far = Math.hypot(at[0] - transform.x, at[1] - transform.y) || 1;
    return { scale: (transform.scale * Math.hypot(x - transform.x, y - transform.y)) / far };
  },
  shear: ({ at, transform }, to) => {
    // Along the x axis of the digit; the grip is at the bottom left, y > 0, so moving right increases the shear
    const own = invert(handles({ ...transform, shear: 0 }));
    const [x0, y0] = apply(own, ...at), [x1] = apply(own, ...to);
    return { shear: transform.shear + (x1 - x0) / Math.max(4, y0) };
  },
};

/** Rounded to the steps of the sliders and within their limits. */
export function limited(patch, model) {
  return Object.fromEntries(Object.entries(patch).map(([key, value]) => {
    const [low, high] = rangeOf(key, model);
    const { step } = SLIDERS[key];
    return [key, Number(Math.min(high, Math.max(low, Math.round(value / step) * step)).toFixed(2))];
  }));
}

/** The input can be moved over the whole field. */
export function rangeOf(key, model) {
  if (key === "x" || key === "y") {
    const half = Math.round((model?.image_shape[key === "x" ? 2 : 1] ?? 28) / 2);
    return [-half, half];
  }
  return LIMITS[key];
}
