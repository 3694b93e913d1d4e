// Export: any panel, or all of them, as SVG or PNG, routing as a GIF, one pose dimension as PNG or GIF, and the numbers as
// JSON. Everything is created in the page; nothing is uploaded.

import { sentence } from "./classes.js";
import { drawing } from "./drawing.js";
import { html, set } from "./elements.js";
import { gif } from "./gif.js";
import { maps, recorded, strip } from "./paint.js";
import { tweakedPose, tweakFrames } from "./pose.js";
import { VectorContext } from "./vector.js";

const WIDE = 1600; // pixels of a PNG, at least
const FILM_WIDE = 640; // pixels of a GIF, about
const TILE = 8; // pixels of a GIF for a pixel of a reconstruction

export function mount(root, lab) {
  const menu = html("div", { class: "menu export-menu", role: "menu", "aria-label": "Export", hidden: true });
  const open = html("button", { type: "button", id: "export", "aria-haspopup": "menu", "aria-expanded": "false" }, "Export");
  const close = (focus = true) => {
    menu.hidden = true;
    set(open, { "aria-expanded": false });
    if (focus) open.focus();
  };
  open.addEventListener("click", () => {
    if (!menu.hidden) return close();
    menu.replaceChildren(...entries(lab).map((entry) => row(entry, lab, close)));
    menu.hidden = false;
    set(open, { "aria-expanded": true });
    menu.querySelector("button").focus();
  });
  menu.addEventListener("keydown", (event) => menuKeys(event, menu, close));
  addEventListener("pointerdown", (event) => !menu.hidden && !root.contains(event.target) && close(false));
  root.append(html("span", { class: "holder" }, open, menu));
}

/** What can be exported now: {id, title, formats: {svg | png | gif | json: () → Blob}}. */
function entries(lab) {
  if (lab.state.view === "hand") return [panelEntry(lab, "hand", "Routing by hand", document.querySelector("#view-hand .hand"))];
  const panels = [...document.querySelectorAll(".panel")].filter((panel) => panel.offsetWidth);
  const whole = panelEntry(lab, "overview", "All panels", document.getElementById("view-lab"));
  const each = panels.map((panel) => panelEntry(lab, panel.id.replace("panel-", ""), panel.querySelector("h2").firstChild.data.trim(), panel));
  const pose = { id: "strip", title: "Pose dimension", formats: { png: () => stripPng(lab), gif: () => stripGif(lab) } };
  return [whole, ...each, ...(lab.decoder && lab.result?.poses ? [pose] : []), { id: "numbers", title: "Numbers", formats: { json: () => numbers(lab) } }];
}

function panelEntry(lab, id, title, panel) {
  const formats = {
    svg: async () => new Blob([(await drawn(lab, panel)).markup], { type: "image/svg+xml" }),
    png: async () => png(await drawn(lab, panel)),
  };
  if (id === "routing" && lab.film?.positions().length > 1) formats.gif = () => film(lab, panel);
  return { id, title, formats };
}

function row({ id, title, formats }, lab, close) {
  const buttons = Object.entries(formats).map(([ending, make]) =>
    html("button", { type: "button", role: "menuitem", tabindex: -1, id: `export-${id}-${ending}`, "aria-label": `${title} as ${ending.toUpperCase()}`,
      onclick: () => run(lab, make, fileName(lab, id, ending), close) }, ending.toUpperCase()));
  return html("div", { class: "row", role: "group", "aria-label": title }, html("span", { "aria-hidden": "true" }, title), html("span", { class: "spread" }), ...buttons);
}

/** Up and down move between rows, left and right within a row. */
function menuKeys(event, menu, close) {
  const rows = [...menu.children].map((one) => [...one.querySelectorAll("button")]);
  const at = rows.findIndex((buttons) => buttons.includes(document.activeElement));
  const across = rows[at]?.indexOf(document.activeElement) ?? 0;
  const to = { ArrowDown: [at + 1, across], ArrowUp: [at - 1, across], ArrowLeft: [at, across - 1], ArrowRight: [at, across + 1], Home: [0, 0], End: [-1, 0] }[event.key];
  if (event.key === "Escape" || event.key === "Tab") close(event.key === "Escape");
  else if (to) {
    const buttons = rows.at(to[0] % rows.length);
    buttons.at(Math.min(to[1], buttons.length - 1)).focus();
  } else return;
  if (event.key !== "Tab") event.preventDefault();
  event.stopPropagation();
}

async function run(lab, make, name, close) {
  close();
  try {
    if (!lab.result && lab.state.view === "lab") throw new Error("There is nothing to export: draw or choose an input first.");
    const link = html("a", { href: URL.createObjectURL(await make()), download: name });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  } catch (error) {
    lab.notice(error.message);
  }
}

function fileName(lab, id, ending) {
  const what = id === "strip" ? `class-${lab.selected()}-dimension-${dimension(lab) + 1}` : id;
  return id === "hand" ? `capsule-lab-by-hand.${ending}` : `capsule-lab-${lab.model.name}-${what}.${ending}`;
}

// ---------------------------------------------------------------- panels

/** An element as a drawing, without its controls. */
function drawn(lab, element) {
  return recording(lab, element, () => drawing(element, recorded));
}

/** Lay the element out without controls and with recorded canvases, until `work` is done. */
async function recording(lab, element, work) {
  for (const canvas of element.querySelectorAll("canvas")) recorded.set(canvas, new VectorContext());
  element.toggleAttribute("data-exported", true);
  try {
    await repainted(lab);
    return await work();
  } finally {
    recorded.clear();
    element.toggleAttribute("data-exported", false);
    await repainted(lab);
  }
}

async function repainted(lab) {
  for (let n = 0; n < 2; n++) {
    for (const key of ["theme", "size"]) lab.poke(key);
    await new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)));
  }
}

/** A drawing as pixels. */
async function raster({ markup, width, height }, scale) {
  const image = new Image();
  const address = URL.createObjectURL(new Blob([markup], { type: "image/svg+xml" }));
  try {
    image.src = address;
    await image.decode();
    const canvas = new OffscreenCanvas(Math.round(width * scale), Math.round(height * scale));
    canvas.getContext("2d", { willReadFrequently: true }).drawImage(image, 0, 0, canvas.width, canvas.height);
    return canvas;
  } finally {
    URL.revokeObjectURL(address);
  }
}

async function png(sheet) {
  const canvas = await raster(sheet, Math.max(2, WIDE / sheet.width));
  return canvas.convertToBlob({ type: "image/png" });
}

/** The routing from its first to its last iteration. */
async function film(lab, panel) {
  lab.notice("Creating the animation …");
  return recording(lab, panel, async () => {
    const positions = lab.film.positions(), frames = [];
    for (const { at, hundredths } of positions) {
      lab.film.show(at);
      const sheet = drawing(panel, recorded);
      frames.push({ canvas: await raster(sheet, Math.min(1.5, FILM_WIDE / sheet.width)), hundredths });
    }
    lab.film.show(null);
    return gif(frames);
  });
}

// ---------------------------------------------------------------- reconstructions and numbers

const dimension = (lab) => lab.tweakDim ?? 0;

function stripPng(lab) {
  const sheet = strip(tweakFrames(lab, dimension(lab)), lab.decoder.shape, maps(lab.colours).ink);
  return sheet.convertToBlob({ type: "image/png" });
}

/** Forwards and backwards. */
function stripGif(lab) {
  const { shape } = lab.decoder;
  const frames = tweakFrames(lab, dimension(lab)).map((pixels) => ({ canvas: strip([pixels], shape, maps(lab.colours).ink, TILE), hundredths: 10 }));
  return gif([...frames, ...frames.slice(1, -1).reverse()]);
}

/** Every number on the page: arrays as {shape, data}. */
async function numbers(lab) {
  const array = (values, shape = values.shape) => ({ shape, data: [...values].map((value) => Number(value.toPrecision(7))) });
  const { header, input, ...arrays } = lab.result;
  const kept = Object.fromEntries(Object.entries(arrays).map(([name, values]) => [name, array(values)]));
  const record = {
    model: lab.model, link: await lab.link(), sentence: sentence(lab), selected: lab.selected(),
    answer: header, input: array(input, lab.model.image_shape), ...kept,
  };
  if (lab.result.poses) record.tweaked_pose = array(tweakedPose(lab), [lab.model.class_dim]);
  return new Blob([JSON.stringify(record)], { type: "application/json" });
}
