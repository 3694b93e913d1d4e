// The top row: model, view, light or dark; and the message at the bottom of the page.

import { html, say, set } from "./elements.js";
import { recall, remember } from "./memory.js";

const THEMES = ["auto", "light", "dark"];
const SIGNS = { auto: "◐", light: "☀", dark: "☾" };
const NOTICE_MILLISECONDS = 7000, FADED_MILLISECONDS = 300;

export function mount(root, lab) {
  theme(root.querySelector("#theme"), lab);
  tabs(root, lab);
  models(root, lab);
  notices(document.getElementById("notice"), lab);
  document.querySelector(".skip").addEventListener("click", (event) => {
    event.preventDefault(); // the fragment contains the state
    document.getElementById("panel-input").focus();
  });
}

/** Light, dark or the setting of the system; remembered in this browser only. */
function theme(button, lab) {
  const system = matchMedia("(prefers-color-scheme: dark)");
  let choice = THEMES.includes(recall("theme")) ? recall("theme") : "auto";
  const show = () => {
    document.documentElement.dataset.theme = choice === "auto" ? (system.matches ? "dark" : "light") : choice;
    say(button, SIGNS[choice]);
    set(button, { "aria-label": `Colours: ${choice}`, title: `Colours: ${choice}` });
    lab.readColours();
  };
  button.addEventListener("click", () => {
    choice = THEMES[(THEMES.indexOf(choice) + 1) % THEMES.length];
    remember("theme", choice);
    show();
  });
  system.addEventListener("change", show);
  show();
}

function tabs(root, lab) {
  const buttons = { lab: root.querySelector("#tab-lab"), hand: root.querySelector("#hand") };
  for (const [view, button] of Object.entries(buttons)) {
    button.addEventListener("click", () => lab.update({ view }));
    button.addEventListener("keydown", (event) => {
      if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
      const other = view === "lab" ? "hand" : "lab";
      lab.update({ view: other });
      buttons[other].focus();
    });
  }
  const show = () => {
    const { view } = lab.state;
    document.body.dataset.view = view;
    for (const name of ["lab", "hand"]) {
      document.getElementById(`view-${name}`).hidden = name !== view;
      set(buttons[name], { "aria-selected": name === view, tabindex: name === view ? 0 : -1 });
    }
  };
  lab.on((_, changed) => changed.has("view") && show());
  show();
}

function models(root, lab) {
  const select = root.querySelector("#model");
  const facts = root.querySelector("#model-facts");
  select.addEventListener("change", () => lab.update({ model: select.value }));
  lab.on((_, changed) => {
    if (changed.has("models")) {
      select.replaceChildren(...lab.models.map(({ name, kind, capsules }) =>
        html("option", { value: name }, capsules ? name : `${name} (${kind === "cnn" ? "CNN" : kind})`)));
    }
    if (lab.model && (changed.has("model") || changed.has("models"))) {
      select.value = lab.model.name;
      say(facts, factsOf(lab.model));
      facts.title = lab.model.title ?? "";
    }
  });
}

function factsOf({ image_shape: [, height, width], parameters, error_percent: error }) {
  const facts = [`${width}×${height}`, `${millions(parameters)} parameters`];
  if (error !== null && error !== undefined) facts.push(`${error.toFixed(2)} % test error`);
  return facts.join(" · ");
}

/** 1984272 → "1.98 million". */
export function millions(count) {
  return count >= 1e6 ? `${(count / 1e6).toFixed(2)} million` : count.toLocaleString("en");
}

/** Messages fade after a while; that of a lost server stays until it is back. */
function notices(box, lab) {
  let timer = 0;
  const hide = () => {
    delete box.dataset.shown;
    timer = setTimeout(() => say(box, ""), FADED_MILLISECONDS); // so that the same message is announced again
  };
  const show = (sentence, kind) => {
    clearTimeout(timer);
    say(box, sentence);
    box.dataset.kind = kind;
    box.dataset.shown = "";
    if (kind !== "gone") timer = setTimeout(hide, NOTICE_MILLISECONDS);
  };
  lab.on((_, changed) => {
    if (changed.has("status")) {
      if (lab.status === "gone") show("The Lab server is not running. Waiting for it to restart …", "gone");
      else if (box.dataset.kind === "gone" && box.dataset.shown !== undefined) show("The Lab server is back.", "said");
    }
    if (changed.has("notice") && lab.status !== "gone") show(lab.transient.notice.sentence, "said");
  });
  addEventListener("keydown", (event) => event.key === "Escape" && lab.status !== "gone" && hide());
}
