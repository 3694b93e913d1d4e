// Share and export: a link with the whole state, an overview as PNG, a strip of one pose dimension as PNG or GIF, and the
// numbers as JSON. Everything is created in the page; nothing is uploaded.

import { sentence } from "./classes.js";
import { html, number, set } from "./elements.js";
import { gif, maps, picture, png, strip } from "./paint.js";
import { shownParts, tweakedPose, tweakFrames } from "./pose.js";

export function mount(root, lab) {
  const share = html("button", { type: "button", id: "share", onclick: () => copyLink(lab) }, "Copy link");
  const items = [
    ["export-picture", "Overview (PNG)", exportPicture],
    ["export-strip", "Pose dimension (PNG)", exportStrip],
    ["export-gif", "Pose dimension (GIF)", exportGif],
    ["export-json", "Numbers (JSON)", exportNumbers],
  ];
  const menu = html("div", { class: "menu", role: "menu", "aria-label": "Export", hidden: true });
  const open = html("button", { type: "button", id: "export", "aria-haspopup": "menu", "aria-expanded": "false" }, "Export");
  menu.append(...items.map(([id, title, make]) =>
    html("button", { type: "button", role: "menuitem", id, tabindex: -1, onclick: () => run(lab, make, close) }, title)));
  const close = (focus = true) => {
    menu.hidden = true;
    set(open, { "aria-expanded": false });
    if (focus) open.focus();
  };
  open.addEventListener("click", () => {
    menu.hidden = !menu.hidden;
    set(open, { "aria-expanded": !menu.hidden });
    if (!menu.hidden) menu.firstChild.focus();
  });
  menu.addEventListener("keydown", (event) => menuKeys(event, menu, close));
  addEventListener("pointerdown", (event) => !menu.hidden && !root.contains(event.target) && close(false));
  root.append(share, html("span", { class: "holder" }, open, menu));
}

function menuKeys(event, menu, close) {
  const entries = [...menu.children];
  const at = entries.indexOf(document.activeElement);
  const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: -1 }[event.key];
  if (event.key === "Escape" || event.key === "Tab") close(event.key === "Escape");
  else if (to !== undefined) entries.at(to % entries.length).focus();
  else return;
  if (event.key !== "Tab") event.preventDefault();
  event.stopPropagation();
}

async function run(lab, make, close) {
  close();
  try {
    const { blob, name } = await make(lab);
    const link = html("a", { href: URL.createObjectURL(blob), download: name });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  } catch (error) {
    lab.notice(error.message);
  }
}

async function copyLink(lab) {
  const link = await lab.link();
  history.replaceState(null, "", link);
  try {
    await navigator.clipboard.writeText(link);
    lab.notice("Link copied. It contains the whole state, including your drawing.");
  } catch {
    askToCopy(lab, link);
  }
}

/** Without access to the clipboard: the link in a field, selected. */
function askToCopy(lab, link) {
  const field = html("input", { type: "text", readonly: true, value: link, "aria-label": "Link" });
  const dialog = html("dialog", { class: "ask" }, html("p", {}, "Copy this link. It contains the whole state."), field,
    html("button", { type: "button", onclick: () => dialog.close() }, "Close"));
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
  field.select();
}

function needs(lab, what) {
  if (!lab.result) throw new Error("There is nothing to export: draw or choose an input first.");
  if (what === "decoder" && !lab.decoder) throw new Error("This model has no decoder, so there are no reconstructions to export.");
}

function fileName(lab, what, ending) {
  return `capsule-lab-${lab.model.name}-${what}.${ending}`;
}

async function exportStrip(lab) {
  needs(lab, "decoder");
  const dim = lab.tweakDim ?? 0;
  const sheet = strip(tweakFrames(lab, dim), lab.decoder.shape, maps(lab.colours).ink);
  return { blob: await png(sheet), name: fileName(lab, `class-${lab.selected()}-dimension-${dim + 1}`, "png") };
}

async function exportGif(lab) {
  needs(lab, "decoder");
  const dim = lab.tweakDim ?? 0;
  const blob = gif(tweakFrames(lab, dim), lab.decoder.shape, maps(lab.colours).ink);
  return { blob, name: fileName(lab, `class-${lab.selected()}-dimension-${dim + 1}`, "gif") };
}

/** Every number on the page: arrays as {shape, data}. */
async function exportNumbers(lab) {
  needs(lab);
  const array = (values, shape = values.shape) => ({ shape, data: [...values].map((value) => Number(value.toPrecision(7))) });
  const { header, input, ...arrays } = lab.result;
  const kept = Object.fromEntries(Object.entries(arrays).map(([name, values]) => [name, array(values)]));
  const numbers = {
    model: lab.model, link: await lab.link(), sentence: sentence(lab), selected: lab.selected(),
    answer: header, input: array(input, lab.model.image_shape), ...kept,
  };
  if (lab.result.poses) numbers.tweaked_pose = array(tweakedPose(lab), [lab.model.class_dim]);
  return { blob: new Blob([JSON.stringify(numbers)], { type: "application/json" }), name: fileName(lab, "numbers", "json") };
}

/* ---- the overview: all panels from left to right on one sheet ---- */

const SHEET = { width: 1600, height: 640, margin: 40, top: 120, tall: 400 };

async function exportPicture(lab) {
  needs(lab);
  const sheet = new OffscreenCanvas(SHEET.width, SHEET.height);
  const context = sheet.getContext("2d");
  const { colours, model } = lab;
  context.fillStyle = colours.panel;
  context.fillRect(0, 0, SHEET.width, SHEET.height);
  write(context, sentence(lab), SHEET.margin, 56, 30, colours.ink, 650);
  const { couplings } = lab.result;
  const iteration = () => `routing iteration ${lab.state.routing.t + 1} of ${couplings.shape[0]}`;
  const about = couplings ? `${model.name} · ${iteration()}` : model.name;
  write(context, about, SHEET.margin, 86, 17, colours.muted);
  let x = SHEET.margin;
  const put = (title, width, paint) => {
    write(context, title, x, SHEET.top + SHEET.tall + 32, 17, colours.muted);
    paint(x, width);
    x += width + 36;
  };
  put("input", 260, (left, width) => square(context, lab, lab.input, left, width));
  for (const [id, title, width] of [["primary", "primary capsules", 190], ["ribbons", "routing", 380]]) {
    const canvas = document.getElementById(id);
    if (couplings && canvas?.width) put(title, width, (left, wide) => fit(context, canvas, left, wide));
  }
  put(lab.result.poses ? "class capsules" : "classes", 220, (left, width) => bars(context, lab, left, width));
  if (lab.decoder) {
    const painted = lab.decoder.decodeTogether(shownParts(lab));
    put("reconstruction", 260, (left, width) => square(context, lab, painted, left, width));
  }
  return { blob: await png(sheet), name: fileName(lab, "picture", "png") };
}

function write(context, text, x, y, size, colour, weight = 400) {
  context.font = `${weight} ${size}px system-ui, sans-serif`;
  context.fillStyle = colour;
  context.fillText(text, x, y);
}

/** Sharp pixels, centred in the row. */
function square(context, lab, pixels, left, width) {
  const [, height, across] = lab.model.image_shape;
  const small = new OffscreenCanvas(across, height);
  picture(small, pixels, lab.model.image_shape, maps(lab.colours).ink);
  const high = (width * height) / across;
  const top = SHEET.top + (SHEET.tall - high) / 2;
  context.imageSmoothingEnabled = false;
  context.drawImage(small, left, top, width, high);
  context.strokeStyle = lab.colours.line;
  context.strokeRect(left, top, width, high);
}

/** A canvas of the page, as large as fits. */
function fit(context, canvas, left, width) {
  const scale = Math.min(width / canvas.width, SHEET.tall / canvas.height);
  const wide = canvas.width * scale, high = canvas.height * scale;
  context.imageSmoothingEnabled = true;
  context.imageSmoothingQuality = "high";
  context.drawImage(canvas, left + (width - wide) / 2, SHEET.top + (SHEET.tall - high) / 2, wide, high);
}

function bars(context, lab, left, width) {
  const { activations, header } = lab.result;
  const shown = Math.min(10, activations.length);
  const classes = header.ranking.slice(0, shown).sort((a, b) => a - b);
  const step = SHEET.tall / shown;
  const room = width - 110;
  classes.forEach((k, n) => {
    const y = SHEET.top + n * step;
    const first = k === header.ranking[0];
    const colour = first ? lab.colours.accent : lab.colours.muted;
    write(context, lab.model.classes[k].slice(0, 6), left, y + step / 2 + 6, 17, lab.colours.ink, first ? 650 : 400);
    context.fillStyle = lab.colours.line;
    context.fillRect(left + 50, y + step / 2 - 8, room, 16);
    context.fillStyle = colour;
    context.fillRect(left + 50, y + step / 2 - 8, room * Math.min(1, activations[k]), 16);
    write(context, number(activations[k]), left + 60 + room, y + step / 2 + 6, 17, lab.colours.ink, first ? 650 : 400);
  });
}
