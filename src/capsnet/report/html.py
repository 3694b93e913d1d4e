"""The report of a training: one self-contained HTML file with result, origin and pictures.

Style and pictures are embedded; the page loads nothing and runs no scripts, and its content security policy enforces
both. Everything that comes from data, such as class names, is escaped. The page says so if a model has no decoder or no
routing to show.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from capsnet import plugins
from capsnet.data import Examples
from capsnet.errors import UserError
from capsnet.evaluate import Evaluation
from capsnet.files import write_bytes
from capsnet.io.records import Certificate
from capsnet.models.base import Model
from capsnet.report import figures
from capsnet.report.tables import Table
from capsnet.routing import Trace
from capsnet.timing import clock

COLUMNS = 10  # of the reconstructions, correct and wrong
MISTAKES = 24  # the most confident ones
GRIDS = 10  # tweak grids at most; one is open, the others are folded
GRID_BYTES = 900_000  # in total, to keep the page small enough for e-mail

CSS = """
:root { color-scheme: light dark; --page: #f4f2ee; --card: #fbfaf8; --ink: #1f2733; --muted: #5d6772;
  --line: #dcdad5; --accent: #0072b2; --code: #eceae5 }
* { box-sizing: border-box }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.6 system-ui, -apple-system, "Segoe UI",
  Roboto, "Helvetica Neue", sans-serif; -webkit-text-size-adjust: 100% }
main { max-width: 840px; margin: 0 auto; padding: 40px 20px 64px }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0; letter-spacing: -.01em; overflow-wrap: anywhere }
h2 { font-size: 1.25rem; line-height: 1.3; margin: 56px 0 8px; letter-spacing: -.005em }
p { margin: 8px 0 16px; max-width: 68ch }
.sub, figcaption, .note, dt { color: var(--muted) }
.sub { margin: 4px 0 28px }
.result { background: var(--card); border: 1px solid var(--line); border-radius: 14px; padding: 24px 28px;
  display: flex; flex-wrap: wrap; gap: 16px 36px; align-items: flex-end }
.result div { min-width: 0 }
.result b { display: block; font-size: 1.25rem; line-height: 1.15; font-weight: 600;
  font-variant-numeric: tabular-nums }
.result .big b { font-size: 3.2rem; letter-spacing: -.03em; color: var(--accent) }
.result span { color: var(--muted); font-size: .875rem }
dl { display: grid; grid-template-columns: minmax(8em, max-content) 1fr; gap: 6px 24px; margin: 12px 0 16px;
  font-size: .9375rem }
dd { margin: 0; overflow-wrap: anywhere }
figure { margin: 16px 0 24px }
.frame { background: #fbfaf8; border: 1px solid var(--line); border-radius: 14px; overflow-x: auto }
.frame img { display: block; width: 100%; min-width: 560px; height: auto; border-radius: 13px }
figcaption { font-size: .875rem; margin-top: 8px; max-width: 76ch }
details { margin: 8px 0; border-top: 1px solid var(--line); padding-top: 8px }
summary { cursor: pointer; color: var(--accent); padding: 4px 0 }
summary:focus-visible { outline: 2px solid var(--accent); outline-offset: 3px; border-radius: 4px }
pre { background: var(--code); border-radius: 10px; padding: 14px 16px; overflow-x: auto; font-size: .875rem;
  line-height: 1.55; margin: 12px 0 }
code, pre { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace }
footer { margin-top: 64px; padding-top: 16px; border-top: 1px solid var(--line); color: var(--muted);
  font-size: .875rem }
@media (prefers-color-scheme: dark) { :root { --page: #14181d; --card: #1d232a; --ink: #e6e8ea; --muted: #9aa5b1;
  --line: #323a44; --accent: #6db8e8; --code: #262d36 }
  .frame img { filter: brightness(.93) } .frame { background: #ebeae8; border-color: transparent } }
@media (max-width: 560px) { main { padding: 24px 16px 48px } .result { padding: 20px } .result .big b {
  font-size: 2.8rem } dl { grid-template-columns: 1fr; gap: 0 } dd { margin-bottom: 10px } }
@media print { body { background: #fff } .frame, .result { break-inside: avoid } }
""".strip()
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def write_report(
    folder: Path,
    *,
    model: Model,
    evaluation: Evaluation,
    dataset: Examples,
    history: Sequence[Mapping[str, Any]],
    certificate: Certificate,
) -> Path:
    """Write folder/report.html and return its path.

    `evaluation` is the model's on `dataset`, whose images are in the same order; `history` the records of
    metrics.jsonl (may be empty); `certificate` what `checkpoint.certificate` gave.
    """
    if evaluation.n != len(dataset):
        raise UserError(
            f"the evaluation has {evaluation.n} examples and {dataset.name} has {len(dataset)}: "
            f"pass the dataset that was evaluated."
        )
    folder = Path(folder)
    sections = [
        result(evaluation, certificate),
        origin(model, dataset, certificate),
        training(history),
        errors(dataset, evaluation),
        *inside(model, dataset, evaluation),
        next_steps(folder, model, certificate),
    ]
    path = folder / "report.html"
    write_bytes(path, page(title_of(evaluation, certificate), sections).encode())
    return path


# --- Small pieces of HTML ------------------------------------------------------------------------------------


def page(title: str, sections: Iterable[str]) -> str:
    """The whole document around its sections."""
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="color-scheme" content="light dark">\n<title>{escape(title)}</title>\n'
        f"<style>\n{CSS}\n</style>\n</head>\n<body>\n<main>\n" + "\n".join(sections) + "\n</main>\n</body>\n</html>\n"
    )


def section(title: str, *parts: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n" + "\n".join(parts) + "\n</section>"


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def picture(content: bytes, figure: Figure, alt: str, caption: str = "") -> str:
    """A rendered figure with its caption, embedded in the page."""
    width, height = (round(side * 72 * figures.PER_POINT / 2) for side in figure.get_size_inches())
    source = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    image = f'<img src="{source}" alt="{escape(alt)}" width="{width}" height="{height}">'
    said = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f'<figure><div class="frame" tabindex="0">{image}</div>{said}</figure>'  # a keyboard can scroll it


def drawn(figure: Figure, alt: str, caption: str = "") -> str:
    return picture(figures.render(figure), figure, alt, caption)


def posterised(png: bytes) -> bytes:
    """A PNG with 32 shades per channel: half the size, without a visible difference in small pictures."""
    shades = [min(255, round(v / 8) * 8) if v < 244 else v for v in range(256)]
    content = io.BytesIO()
    Image.open(io.BytesIO(png)).convert("RGB").point(shades * 3).save(content, "png")
    return content.getvalue()


def folded(summary: str, *parts: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>\n" + "\n".join(parts) + "\n</details>"


STYLE = """<style>
.wide { overflow-x: auto; margin: 12px 0 }
table { border-collapse: collapse; font-size: .875rem; min-width: 100% }
th { text-align: left; font-weight: 600; color: var(--muted); vertical-align: bottom }
th, td { padding: 6px 14px 6px 0; border-bottom: 1px solid var(--line); font-variant-numeric: tabular-nums;
  vertical-align: top }
td { white-space: nowrap } td.long { white-space: normal; min-width: 14em; max-width: 34em }
@media (min-width: 900px) { .wide { width: max-content; min-width: 100%; max-width: calc(50vw + 384px) } }
</style>"""  # of a page with tables


def cells(table: Table) -> str:
    """A table of text."""
    head = "".join(f"<th>{escape(name)}</th>" for name in table.columns)
    body = "".join("<tr>" + "".join(map(cell, row)) + "</tr>" for row in table.rows)
    return f'<div class="wide" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def cell(words: str) -> str:
    kind = ' class="long"' if len(words) > 40 else ""
    return f"<td{kind}>{escape(words)}</td>"


def facts(rows: Iterable[tuple[str, Any]]) -> str:
    """A list of names and values, without unknown ones."""
    known = ((name, value) for name, value in rows if value not in (None, ""))
    return "<dl>" + "".join(f"<dt>{escape(n)}</dt><dd>{escape(str(v))}</dd>" for n, v in known) + "</dl>"


# --- The result, and where it comes from ---------------------------------------------------------------------


def title_of(evaluation: Evaluation, certificate: Certificate) -> str:
    preset = certificate.config.get("preset")
    return f"{evaluation.data}, preset {preset}" if preset else evaluation.data


def result(evaluation: Evaluation, certificate: Certificate) -> str:
    """Title and test error with its interval."""
    summary = evaluation.summary()
    low, high = summary["error_percent_interval_95"]
    digits = 2 if evaluation.n >= 1000 else 1
    cells = [
        ("big", f"{evaluation.error_percent:.{digits}f} %", "test error"),
        ("", f"{low:.{digits}f} to {high:.{digits}f} %", "95 % interval"),
        ("", f"{100 - evaluation.error_percent:.{digits}f} %", "accuracy"),
        ("", f"{evaluation.errors:,} of {evaluation.n:,}", "errors"),
    ]
    boxes = "".join(f'<div class="{kind}"><b>{escape(n)}</b><span>{escape(w)}</span></div>' for kind, n, w in cells)
    preset = certificate.config.get("preset")
    sub = f'<p class="sub">{escape(f"preset {preset}")}</p>' if preset else '<p class="sub"></p>'
    exact = "An image is correct only if exactly its classes are predicted. " if evaluation.multi_label else ""
    interval = (
        f"{exact}The interval reflects the choice of {evaluation.n:,} test images; results also vary with the seed."
    )
    return (
        f'<header><h1>{escape(evaluation.data)}</h1>{sub}</header>\n<div class="result">{boxes}</div>\n'
        f'<p class="note">{escape(interval)}</p>'
    )


def origin(model: Model, dataset: Examples, certificate: Certificate) -> str:
    """How the model was trained: a table, the classes and the whole config."""
    c = certificate.config
    parameters = sum(p.numel() for p in model.parameters())
    rows = [
        ("network", model.describe()),
        ("parameters", f"{parameters:,}"),
        ("training", schedule(c, certificate)),
        ("optimiser", optimiser(c)),
        ("seed", c.get("seed")),
        ("wall time", clock(certificate.seconds) if certificate.seconds else ""),
        ("device", certificate.device or model.device.type),
        ("machine", certificate.machine),
        ("versions", versions(certificate)),
        ("git", certificate.git),
    ]
    numbered = ", ".join(f"{k}: {name}" for k, name in enumerate(dataset.classes))
    whole = escape(json.dumps(certificate.to_json(), indent=2, ensure_ascii=False, default=str))
    return section(
        "How it was trained",
        facts(rows),
        folded(f"The {len(dataset.classes)} classes, by number", paragraph(numbered)),
        folded("Complete record as JSON", f"<pre>{whole}</pre>"),
    )


def schedule(config: Mapping[str, Any], certificate: Certificate) -> str:
    epochs = certificate.epochs if certificate.epochs is not None else config.get("epochs")
    if epochs is None:
        return ""
    images, held = certificate.training_images, config.get("validation") or 0
    parts = [f"{epochs} epoch" + ("s" if epochs != 1 else "") + (f" over {images:,} images" if images else "")]
    parts.append(f"batch size {config.get('batch_size')}")
    parts += [f"{held:,} validation images"] if held else []
    return ", ".join(parts)


def optimiser(config: Mapping[str, Any]) -> str:
    if "optimizer" not in config:
        return ""
    name = {"adam": "Adam", "adamw": "AdamW"}.get(config["optimizer"], str(config["optimizer"]))
    decay = f", weight decay {config['weight_decay']:g}" if config.get("weight_decay") else ""
    return f"{name}, learning rate {config.get('lr'):g}, {config.get('schedule')}{decay}, {config.get('precision')}"


def versions(certificate: Certificate) -> str:
    names = ("capsnet", "torch", "numpy", "python")
    return ", ".join(f"{name} {getattr(certificate, name)}" for name in names if getattr(certificate, name))


def training(history: Sequence[Mapping[str, Any]]) -> str:
    """The training curves, if recorded."""
    if not any(record.get("kind") == "train" for record in history):
        return section("Training", paragraph("No training record was found for this model."))
    alt = "Training curves: loss and, if recorded, reconstruction error, validation error and learning rate."
    caption = "Faint: every record. Strong: moving average. Validation images are never test images."
    return section("Training", drawn(figures.training_curves(history), alt, caption))


# --- What went wrong -----------------------------------------------------------------------------------------


def errors(dataset: Examples, evaluation: Evaluation) -> str:
    """The confusion matrix and the most confident mistakes."""
    common = most_confused(evaluation)
    alt = f"Confusion matrix of {len(evaluation.classes)} classes. {common}"
    parts = [paragraph(common), drawn(figures.confusion_matrix(evaluation), alt)]
    if evaluation.errors:
        alt = "Misclassified test images, the most confident mistake first."
        caption = "A long orange bar is a confident mistake; two similar bars indicate doubt. Some labels are wrong."
        worst = figures.worst_mistakes(evaluation, MISTAKES)
        images = dict(zip(worst, pictures(dataset, worst), strict=True))
        parts.append(drawn(figures.mistakes(images, evaluation, MISTAKES), alt, caption))
    return section("Errors", *parts)


def most_confused(evaluation: Evaluation) -> str:
    """The five most frequent confusions in a sentence."""
    counts = figures.confusions(evaluation)
    pairs = counts.fill_diagonal_(0).flatten()
    names = [*evaluation.classes, "nothing"]
    best = [int(k) for k in pairs.argsort(descending=True, stable=True)[:5] if pairs[k] > 0]
    said = [f"{names[k // len(names)]} as {names[k % len(names)]} ({int(pairs[k])}×)" for k in best]
    return "Most frequent confusions: " + ", ".join(said) + "." if said else "There are no confusions."


# --- What is inside ------------------------------------------------------------------------------------------


def inside(model: Model, dataset: Examples, evaluation: Evaluation) -> list[str]:
    """Reconstructions, poses and routing, as far as the model's output has them."""
    example = doubtful(evaluation)
    image = pictures(dataset, [example])
    seen = model.predict(image, trace=True)
    if seen.poses is None:
        missing = "This network has no capsules: there are no poses to decode and no routing to show."
        return [section("Inside the network", paragraph(missing))]
    routing = [one_routing(model, evaluation, example, image[0], seen.trace)] if seen.trace else []
    if seen.reconstructions is None:
        missing = "This model has no decoder, so there are no reconstructions and no pose grid."
        return [section("Reconstructions", paragraph(missing)), *routing]
    return [reconstructed(model, dataset, evaluation), poses(model, dataset, evaluation), *routing]


def pictures(dataset: Examples, which: Sequence[int]) -> Tensor:
    """Some of the images, (n, c, h, w) in [0, 1] on the CPU."""
    return dataset.gather(torch.tensor(which, dtype=torch.long)).images.cpu()


def examples_by_class(evaluation: Evaluation) -> dict[int, int]:
    """For each class, the correct example with the highest activation, if there is one."""
    sure = torch.where(evaluation.targets.bool() & ~evaluation.wrong[:, None], evaluation.activations, -1.0)
    best = sure.max(0)
    return {k: int(n) for k, n in enumerate(best.indices) if best.values[k] >= 0}


def names_of(members: Tensor, classes: Sequence[str]) -> str:
    """A set of classes (j,) as a caption."""
    names = "+".join(figures.short_name(classes[int(k)], int(k), 8) for k in members.nonzero())
    return figures.short_name(names, most=9) or "none"


@torch.inference_mode()
def decoded(model: Model, images: Tensor, chosen: Tensor) -> Tensor:
    """Images decoded from the poses of the chosen classes (n, j) bool; several classes in different colours."""
    poses = model.predict(images).poses
    assert poses is not None
    canvas = []
    for pose, classes in zip(poses.to(model.device), chosen, strict=True):
        which = classes.nonzero()[:, 0].to(model.device)
        each = model.reconstruct(pose.expand(len(which), -1, -1), which)
        assert each is not None
        canvas.append(each[0] if len(which) == 1 else figures.in_colours(each))
    rgb = any(len(image) == 3 for image in canvas)
    return torch.stack([image.expand(3, -1, -1) if rgb and len(image) == 1 else image for image in canvas]).cpu()


def reconstructed(model: Model, dataset: Examples, evaluation: Evaluation) -> str:
    """Fig. 3: correct examples, one per class, and the most confident wrong ones."""
    right = list(dict.fromkeys(examples_by_class(evaluation).values()))
    right = right[:: max(1, len(right) // COLUMNS)][:COLUMNS]
    wrong = figures.worst_mistakes(evaluation, COLUMNS)
    pick = torch.tensor([*right, *wrong], dtype=torch.long)
    images, there, named = (
        pictures(dataset, [*right, *wrong]),
        evaluation.targets[pick].bool(),
        evaluation.predicted[pick],
    )
    figure = figures.reconstruction_rows(
        images,
        decoded(model, images, named),
        [names_of(members, evaluation.classes) for members in there],
        [names_of(members, evaluation.classes) for members in named],
        decoded(model, images, there) if wrong else None,
    )
    alt = f"{len(right)} correct and {len(wrong)} wrong test images, each above its reconstruction."
    caption = "The decoder sees nothing of the image but the pose of one class capsule."
    if evaluation.multi_label:
        caption += " Several predicted classes are decoded separately, in different colours."
    return section("Reconstructions", drawn(figure, alt, caption))


def poses(model: Model, dataset: Examples, evaluation: Evaluation) -> str:
    """Fig. 4 for one class, and folded for the others."""
    chosen = list(examples_by_class(evaluation).items())[:GRIDS]
    if not chosen:
        return section(
            "Pose dimensions", paragraph("No example was classified correctly, so there is no pose to show.")
        )
    chosen.insert(0, chosen.pop(len(chosen) // 2))  # the paper shows a 5
    text = (
        "The direction of a class capsule describes how the object looks. Each row changes one dimension of the pose "
        "and decodes the result: stroke, slant, width or the position of a part. What a dimension represents is learnt "
        "without supervision."
    )
    grids: list[tuple[str, str]] = []
    size = 0
    for label, example in chosen:
        figure = figures.tweak_grid(model, pictures(dataset, [example])[0], label)
        content = posterised(figures.render(figure, per_point=2))
        size += len(content)
        if grids and size > GRID_BYTES:
            break
        name = evaluation.classes[label]
        alt = f"Reconstructions while each pose dimension of {name} changes from −0.25 to 0.25, one per row."
        grids.append((f"The pose of {name}", picture(content, figure, alt)))
    return section("Pose dimensions", paragraph(text), grids[0][1], *(folded(*grid) for grid in grids[1:]))


def one_routing(model: Model, evaluation: Evaluation, example: int, image: Tensor, trace: Trace) -> str:
    """The routing of one example: the least certain one that is still correct."""
    label = int(torch.where(evaluation.targets[example].bool(), evaluation.activations[example], -1.0).argmax())
    place = model.shown().get("routed_grid")
    grid = (place[0], place[1]) if place else None
    figure = figures.routing(trace, evaluation.classes, true=label, image=image, grid=grid)
    alt = f"Couplings, activations and entropy over {len(trace.couplings)} routing iterations for one test image."
    caption = "The couplings say how each lower capsule divides its output among the classes."
    if grid:
        caption += " Discs: contribution of the capsules at each position to the class; hollow if negative."
    return section("Routing", drawn(figure, alt, caption))


def doubtful(evaluation: Evaluation) -> int:
    """The correct example with the smallest margin (the first example if none is correct)."""
    there = evaluation.targets.bool()
    weakest = torch.where(there, evaluation.activations, 2.0).amin(1)
    rival = torch.where(there, -1.0, evaluation.activations).amax(1)
    lead = torch.where(evaluation.wrong, float("inf"), weakest - rival)
    return int(lead.argmin())


def next_steps(folder: Path, model: Model, certificate: Certificate) -> str:
    """Commands to copy."""
    where, config = str(folder), certificate.config
    data = ["--data", str(config["data"])] if config.get("data") not in (None, "mnist") else []
    preset = ["--preset", str(config["preset"])] if config.get("preset") else []
    seed = str(int(config.get("seed") or 0) + 1)
    commands = [
        ("Classify your own image:", plugins.command("predict", where, "photo.png")),
        ("What each pose dimension represents:", plugins.command("reconstruct", where, "--what", "tweaks")),
        ("Train with another seed:", plugins.command("train", *preset, *data, "--seed", seed)),
        ("Train the paper's network on the same data:", plugins.command("train", "--preset", "paper", *data)),
        ("Train on your own images, one subfolder per class:", "capsnet train --data folder:PATH"),
    ]
    if model.decoder is None:
        commands.pop(1)
    lines = "\n".join(f"# {why}\n{command}" for why, command in commands)
    python = f"import capsnet\n\nmodel = capsnet.load({str(folder)!r})\nmodel.predict(images).labels"
    blocks = f"<pre>{escape(lines)}</pre>", paragraph("Or from Python:"), f"<pre>{escape(python)}</pre>"
    return section("Next steps", *blocks)
