// Options of a routing algorithm as controls: one for each option that the engine lists, by its type.

import { clamp, html, say } from "./elements.js";

const BUILDERS = { int: stepper, bool: checkbox, float: numberBox, choice: selection, range: slider };

/**
 * `change(name, value)` is called when a reader changes an option. The id of a control starts with `prefix`; its tooltip
 * is the help text followed by `origin` and the value that the engine lists. Returns [{option, node, show(value)}].
 */
export function optionControls(listed, { prefix, origin, change }) {
  return listed.map((option) => {
    const about = `${option.help} ${origin} ${option.value}.`.trim();
    return { option, ...BUILDERS[option.type]({ ...option, prefix, about }, (value) => change(option.name, value)) };
  });
}

const words = (name) => name.replaceAll("_", " ");
const within = ({ min, max }, value) => clamp(value, min ?? -Infinity, max ?? Infinity);

function stepper(option, change) {
  const { name } = option;
  let now = option.value;
  const button = (by, sign, word) => html("button", { type: "button", class: "icon", "aria-label": `${word} ${words(name)}`,
    onclick: () => change(within(option, now + by)) }, sign);
  const less = button(-1, "−", "Fewer"), more = button(1, "+", "More");
  const output = html("output", { class: "num", id: `${option.prefix}${name}`, "aria-live": "polite", title: option.about });
  const show = (value) => {
    now = value;
    say(output, `${value} ${value === 1 ? words(name).replace(/s$/, "") : words(name)}`);
    less.disabled = option.min !== null && value <= option.min;
    more.disabled = option.max !== null && value >= option.max;
  };
  return { node: html("span", { class: "row tight" }, less, output, more), show };
}

function checkbox(option, change) {
  const box = html("input", { type: "checkbox", id: `${option.prefix}${option.name}`, onchange: () => change(box.checked) });
  const node = html("label", { class: "check small", title: option.about }, box, words(option.name));
  return { node, show: (value) => (box.checked = value) };
}

function numberBox(option, change) {
  const { name, min, max } = option;
  let now = option.value;
  const box = html("input", { type: "number", id: `${option.prefix}${name}`, step: "any", min, max,
    onchange: () => (Number.isFinite(box.valueAsNumber) ? change(within(option, box.valueAsNumber)) : (box.value = now)) });
  const show = (value) => {
    now = value;
    if (document.activeElement !== box) box.value = value;
  };
  return { node: html("label", { class: "field small", title: option.about }, words(name), box), show };
}

function slider({ prefix, name, about, min, max, step }, change) {
  const range = html("input", { type: "range", id: `${prefix}${name}`, min, max, step, oninput: () => change(Number(range.value)) });
  const value = html("output", { class: "num" });
  const show = (now) => {
    range.value = now;
    say(value, now.toFixed(1));
  };
  return { node: html("label", { class: "field small", title: about }, words(name), range, value), show };
}

function selection(option, change) {
  const select = html("select", { id: `${option.prefix}${option.name}`, onchange: () => change(select.value) },
    ...option.choices.map((choice) => html("option", { value: choice }, choice)));
  const node = html("label", { class: "field small", title: option.about }, words(option.name), select);
  return { node, show: (value) => (select.value = value) };
}
