// The link with the whole state.

import { html } from "./elements.js";

export function mount(root, lab) {
  root.append(html("button", { type: "button", id: "share", onclick: () => copyLink(lab) }, "Copy link"));
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
