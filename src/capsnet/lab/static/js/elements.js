// Create HTML and SVG elements. Nothing is parsed from a string, so the strict Content-Security-Policy holds and no text
// can become markup.

const SVG = "http://www.w3.org/2000/svg";

/** An HTML element: names that start with "on" are listeners, "style" is an object, all others are attributes. */
export function html(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

/** Change only attributes that differ, to avoid layout work. */
export function set(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
  }
}

/** Change a text only if it differs, so that live regions announce only changes. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** The heading of a panel: the existing one, or a new one. */
export function heading(root, text) {
  const found = root.querySelector("h2");
  if (found) return found;
  const made = html("h2", {}, text);
  root.prepend(made);
  return made;
}

/** A number with a proper minus sign and a fixed number of decimals. */
export function number(value, digits = 2) {
  if (!Number.isFinite(value)) return "–";
  const text = Math.abs(value).toFixed(digits);
  return (value < 0 && Number(text) !== 0 ? "−" : "") + text;
}

export function clamp(value, low, high) {
  return Math.max(low, Math.min(high, value));
}

/** Whether the reader prefers reduced motion. */
export function calm() {
  return matchMedia("(prefers-reduced-motion: reduce)").matches;
}
