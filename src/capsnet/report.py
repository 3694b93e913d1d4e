"""The page that a training leaves behind: one HTML file with its result, its origin and its pictures.

Self-contained: style and pictures are inside, nothing is fetched and nothing runs (the page's own policy forbids
both), so it can be mailed or archived as it is. Everything that comes from data, class names first of all, is
escaped. A section that a model cannot have (a CNN has no routing, a network without decoder paints nothing) is
left out, and the page says so.
"""

from __future__ import annotations

import base64
import io
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from capsnet import figures
from capsnet.checkpoint import write_bytes
from capsnet.config import CapsNetConfig, ModelConfig
from capsnet.data import Examples
from capsnet.errors import UserError
from capsnet.evaluation import Evaluation
from capsnet.models import CapsNet, Model

COLUMNS = 10  # of the reconstructions, right and wrong
MISTAKES = 24  # the most confident ones
GRIDS = 10  # tweak grids at most: one is open, the others fold out
GRID_BYTES = 900_000  # and no more than this much of them, for the page should fit into a mail

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
    certificate: Mapping[str, Any],
) -> Path:
    """Write folder/report.html and return its path.

    `evaluation` is the model's on `dataset`, whose images are in the same order; `history` the records of
    metrics.jsonl (may be empty); `certificate` what `checkpoint.certificate` gave.
    """
    if evaluation.n != len(dataset):
        raise UserError(
            f"the evaluation has {evaluation.n} examples and {dataset.name} has {len(dataset)}: "
            f"pass the data set that was evaluated."
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
    """A rendered figure with its words; the image is inside the page."""
    width, height = (round(side * 72 * figures.PER_POINT / 2) for side in figure.get_size_inches())
    source = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    image = f'<img src="{source}" alt="{escape(alt)}" width="{width}" height="{height}">'
    said = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f'<figure><div class="frame" tabindex="0">{image}</div>{said}</figure>'  # a keyboard can scroll it


def drawn(figure: Figure, alt: str, caption: str = "") -> str:
    return picture(figures.render(figure), figure, alt, caption)


def posterised(png: bytes) -> bytes:
    """A PNG with 32 shades a channel (paper as it is): half the size, and nobody sees it in pictures this small."""
    shades = [min(255, round(v / 8) * 8) if v < 244 else v for v in range(256)]
    content = io.BytesIO()
    Image.open(io.BytesIO(png)).convert("RGB").point(shades * 3).save(content, "png")
    return content.getvalue()


def folded(summary: str, *parts: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>\n" + "\n".join(parts) + "\n</details>"


def facts(rows: Iterable[tuple[str, Any]]) -> str:
    """A list of names and values; what is not known is left out."""
    known = ((name, value) for name, value in rows if value not in (None, ""))
    return "<dl>" + "".join(f"<dt>{escape(n)}</dt><dd>{escape(str(v))}</dd>" for n, v in known) + "</dl>"


# --- The result, and where it comes from ---------------------------------------------------------------------


def title_of(evaluation: Evaluation, certificate: Mapping[str, Any]) -> str:
    preset = settings(certificate).get("preset")
    return f"{evaluation.data}, preset {preset}" if preset else evaluation.data


def settings(certificate: Mapping[str, Any]) -> Mapping[str, Any]:
    """The resolved config of the training, as far as it is known."""
    config = certificate.get("config")
    return config if isinstance(config, Mapping) else {}


def result(evaluation: Evaluation, certificate: Mapping[str, Any]) -> str:
    """Title and the figure that people came for, with its uncertainty."""
    summary = evaluation.summary()
    low, high = summary["error_percent_interval_95"]
    digits = 2 if evaluation.n >= 1000 else 1
    cells = [
        ("big", f"{evaluation.error_percent:.{digits}f} %", "test error"),
        ("", f"{low:.{digits}f} to {high:.{digits}f} %", "95 % interval"),
        ("", f"{100 - evaluation.error_percent:.{digits}f} %", "accuracy"),
        ("", f"{evaluation.errors:,} of {evaluation.n:,}", "examples wrong"),
    ]
    boxes = "".join(f'<div class="{kind}"><b>{escape(n)}</b><span>{escape(w)}</span></div>' for kind, n, w in cells)
    preset = settings(certificate).get("preset")
    sub = f'<p class="sub">{escape(f"preset {preset}")}</p>' if preset else '<p class="sub"></p>'
    exact = "An image counts as right only when exactly its classes are named. " if evaluation.multi_label else ""
    interval = (
        f"{exact}The interval says how far chance in the choice of {evaluation.n:,} test images can move the figure; "
        f"another seed moves it too."
    )
    return (
        f'<header><h1>{escape(evaluation.data)}</h1>{sub}</header>\n<div class="result">{boxes}</div>\n'
        f'<p class="note">{escape(interval)}</p>'
    )


def origin(model: Model, dataset: Examples, certificate: Mapping[str, Any]) -> str:
    """How it was made: a compact table, the classes and the whole config."""
    c = settings(certificate)
    parameters = sum(p.numel() for p in model.parameters())
    rows = [
        ("network", architecture(model.config, getattr(model, "grid", None))),
        ("parameters", f"{parameters:,}"),
        ("training", schedule(c, certificate)),
        ("optimiser", optimiser(c)),
        ("seed", c.get("seed")),
        ("wall time", duration(certificate.get("seconds"))),
        ("device", certificate.get("device") or model.device.type),
        ("machine", certificate.get("machine")),
        ("versions", versions(certificate)),
        ("git", certificate.get("git")),
    ]
    numbered = ", ".join(f"{k}: {name}" for k, name in enumerate(dataset.classes))
    whole = escape(json.dumps(dict(certificate), indent=2, ensure_ascii=False, default=str))
    return section(
        "How it was made",
        facts(rows),
        folded(f"The {len(dataset.classes)} classes, by number", paragraph(numbered)),
        folded("Everything, as JSON", f"<pre>{whole}</pre>"),
    )


def architecture(config: ModelConfig, grid: tuple[int, int] | None = None) -> str:
    """A network in words, from the image on."""
    c, h, w = config.image_shape
    colour = {1: "grey", 3: "RGB"}.get(c, f"{c} channels")
    parts = [f"{h}×{w} {colour}"]
    if not isinstance(config, CapsNetConfig):
        norm = ", batch norm" if config.norm else ""
        for channels, kernel, pool in zip(config.channels, config.kernels, config.pool, strict=True):
            pooled = f", max-pooling {pool}" if pool > 1 else ""
            parts.append(f"convolution {kernel}×{kernel}, {channels}{norm}{pooled}")
        parts += [f"fully connected {width}" for width in config.hidden]
        return " → ".join([*parts, f"{config.num_classes} outputs"])
    norm = ", batch norm" if config.stem_norm else ""
    sizes = zip(config.stem_channels, config.stem_kernels, config.stem_strides, strict=True)
    for depth, (channels, kernel, stride) in enumerate(sizes):
        step = f", stride {stride}" if stride > 1 else ""
        apart = f" in {config.branches} branches" if config.branches > 1 and depth >= config.trunk else ""
        parts.append(f"convolution {kernel}×{kernel}, {channels}{apart}{step}{norm}")
    place = f" on {grid[0]}×{grid[1]}" if grid else ""
    parts.append(f"primary capsules: {config.primary_types} types of {config.primary_dim}-D{place}")
    parts += [f"{number} capsules of {dim}-D" for number, dim in config.hidden_caps]
    times = f"{config.iterations} iteration" + ("s" if config.iterations != 1 else "")
    parts.append(f"{config.num_classes} class capsules of {config.class_dim}-D, {config.routing} routing, {times}")
    if config.decoder:
        parts.append("decoder " + ", ".join(map(str, config.decoder)))
    return " → ".join(parts)


def schedule(config: Mapping[str, Any], certificate: Mapping[str, Any]) -> str:
    epochs = certificate.get("epochs", config.get("epochs"))
    if epochs is None:
        return ""
    images, held = certificate.get("training_images"), config.get("validation") or 0
    parts = [f"{epochs} epoch" + ("s" if epochs != 1 else "") + (f" over {images:,} images" if images else "")]
    parts.append(f"batches of {config.get('batch_size')}")
    parts += [f"{held:,} images held back for validation"] if held else []
    return ", ".join(parts)


def optimiser(config: Mapping[str, Any]) -> str:
    if "optimizer" not in config:
        return ""
    name = {"adam": "Adam", "adamw": "AdamW"}.get(config["optimizer"], str(config["optimizer"]))
    decay = f", weight decay {config['weight_decay']:g}" if config.get("weight_decay") else ""
    return f"{name}, learning rate {config.get('lr'):g}, {config.get('schedule')}{decay}, {config.get('precision')}"


def versions(certificate: Mapping[str, Any]) -> str:
    names = ("capsnet", "torch", "numpy", "python")
    return ", ".join(f"{name} {certificate[name]}" for name in names if certificate.get(name))


def duration(seconds: float | None) -> str:
    """Seconds as a person says them.

    >>> duration(42), duration(160), duration(9000)
    ('42 s', '2 min 40 s', '2 h 30 min')
    """
    if seconds is None:
        return ""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def training(history: Sequence[Mapping[str, Any]]) -> str:
    """The curves, where a training was recorded."""
    if not any(record.get("kind") == "train" for record in history):
        return section("How the training went", paragraph("No record of the training was kept beside this model."))
    alt = "Curves of the training: loss and, where recorded, reconstruction error, validation error, learning rate."
    caption = "Faint: every record. Strong: a moving average. The validation error never comes from test images."
    return section("How the training went", drawn(figures.training_curves(history), alt, caption))


# --- What went wrong -----------------------------------------------------------------------------------------


def errors(dataset: Examples, evaluation: Evaluation) -> str:
    """The confusion matrix in a picture and in words, and the most confident mistakes."""
    common = most_confused(evaluation)
    alt = f"Confusion matrix of {len(evaluation.classes)} classes. {common}"
    parts = [paragraph(common), drawn(figures.confusion_matrix(evaluation), alt)]
    if evaluation.errors:
        alt = "Test images that the model got wrong, the most confident mistake first."
        caption = "A long vermillion bar is a firm mistake; two bars alike are a doubt. Some labels are doubtful too."
        worst = figures.worst_mistakes(evaluation, MISTAKES)
        images = dict(zip(worst, pictures(dataset, worst), strict=True))
        parts.append(drawn(figures.mistakes(images, evaluation, MISTAKES), alt, caption))
    return section("Where it errs", *parts)


def most_confused(evaluation: Evaluation, most: int = 5) -> str:
    """The commonest confusions in a sentence."""
    counts = figures.confusions(evaluation)
    pairs = counts.fill_diagonal_(0).flatten()
    names = [*evaluation.classes, "nothing"]
    best = [int(k) for k in pairs.argsort(descending=True, stable=True)[:most] if pairs[k] > 0]
    said = [f"{names[k // len(names)]} for {names[k % len(names)]} ({int(pairs[k])}×)" for k in best]
    return "Most often taken: " + ", ".join(said) + "." if said else "Nothing was confused."


# --- What is inside ------------------------------------------------------------------------------------------


def inside(model: Model, dataset: Examples, evaluation: Evaluation) -> list[str]:
    """Reconstructions, poses and routing: what only a capsule network can show."""
    if not isinstance(model, CapsNet):
        missing = "This is a convolutional network: it has no poses to paint and no routing to show."
        return [section("Inside the network", paragraph(missing))]
    if model.decoder is None:
        missing = "This model has no decoder, so its poses cannot be painted: no reconstructions and no pose grid."
        return [section("What the decoder paints", paragraph(missing)), one_routing(model, dataset, evaluation)]
    return [
        painted(model, dataset, evaluation),
        poses(model, dataset, evaluation),
        one_routing(model, dataset, evaluation),
    ]


def pictures(dataset: Examples, which: Sequence[int]) -> Tensor:
    """Some of the images, (n, c, h, w) in [0, 1] on the CPU, where pictures are drawn."""
    return dataset.gather(torch.tensor(which, dtype=torch.long)).images.cpu()


def examples_by_class(evaluation: Evaluation) -> dict[int, int]:
    """For each class the example that is right and whose capsule is longest, where there is one."""
    sure = torch.where(evaluation.targets.bool() & ~evaluation.wrong[:, None], evaluation.lengths, -1.0)
    best = sure.max(0)
    return {k: int(n) for k, n in enumerate(best.indices) if best.values[k] >= 0}


def names_of(members: Tensor, classes: Sequence[str]) -> str:
    """A set of classes (j,) as a picture shows it."""
    names = "+".join(figures.shown(classes[int(k)], int(k), 8) for k in members.nonzero())
    return figures.shown(names, most=9) or "none"


@torch.inference_mode()
def paint(model: CapsNet, images: Tensor, chosen: Tensor) -> Tensor:
    """Images painted from the poses of the chosen classes (n, j) bool: one as it is, several each in its colour."""
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


def painted(model: CapsNet, dataset: Examples, evaluation: Evaluation) -> str:
    """Fig. 3: some right ones, a class each, and the most confident wrong ones."""
    right = list(dict.fromkeys(examples_by_class(evaluation).values()))
    right = right[:: max(1, len(right) // COLUMNS)][:COLUMNS]
    wrong = figures.worst_mistakes(evaluation, COLUMNS)
    pick = torch.tensor([*right, *wrong], dtype=torch.long)
    images, there, named = (
        pictures(dataset, [*right, *wrong]),
        evaluation.targets[pick].bool(),
        evaluation.predicted[pick],
    )
    figure = figures.painted_beside(
        images,
        paint(model, images, named),
        [names_of(members, evaluation.classes) for members in there],
        [names_of(members, evaluation.classes) for members in named],
        paint(model, images, there) if wrong else None,
    )
    alt = f"{len(right)} right and {len(wrong)} wrong test images, each above what the decoder paints from its pose."
    caption = "The decoder sees nothing of the image but the pose of one class capsule, and paints it again."
    if evaluation.multi_label:
        caption += " Where several classes are named, each is painted by itself, in a colour of its own."
    return section("What the decoder paints", drawn(figure, alt, caption))


def poses(model: CapsNet, dataset: Examples, evaluation: Evaluation) -> str:
    """Fig. 4 for one class, and for others to fold out."""
    chosen = list(examples_by_class(evaluation).items())[:GRIDS]
    if not chosen:
        return section("What the poses know", paragraph("No example was right, so there is no pose worth moving."))
    chosen.insert(0, chosen.pop(len(chosen) // 2))  # the paper shows a 5
    text = (
        "A class capsule's direction says how the thing looks. Each row moves one of its numbers and paints the "
        "outcome: stroke, slant, width or the place of a part. What a number means is learnt, never told."
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
        alt = f"Painted while each pose dimension of class {name} moves from −0.25 to 0.25, a row a dimension."
        grids.append((f"The pose of {name}", picture(content, figure, alt)))
    return section("What the poses know", paragraph(text), grids[0][1], *(folded(*grid) for grid in grids[1:]))


def one_routing(model: CapsNet, dataset: Examples, evaluation: Evaluation) -> str:
    """How the routing of one example went: the most doubtful one that still came out right."""
    example = doubtful(evaluation)
    image = pictures(dataset, [example])[0]
    trace = model.predict(image[None], trace=True).trace
    assert trace is not None
    label = int(torch.where(evaluation.targets[example].bool(), evaluation.lengths[example], -1.0).argmax())
    grid = model.grid if not model.config.hidden_caps else None
    figure = figures.routing(trace, evaluation.classes, true=label, image=image, grid=grid)
    alt = f"Couplings, capsule lengths and entropy over {len(trace.couplings)} routing iterations for one test image."
    caption = "Each capsule sends more of its output to the class whose pose agrees with its own prediction."
    if grid:
        caption += " Discs: how much the capsules at each place add to the class; hollow: they pull against it."
    return section("Routing by agreement", drawn(figure, alt, caption))


def doubtful(evaluation: Evaluation) -> int:
    """The example that is right by the smallest lead (the first example where none is right)."""
    there = evaluation.targets.bool()
    weakest = torch.where(there, evaluation.lengths, 2.0).amin(1)
    rival = torch.where(there, -1.0, evaluation.lengths).amax(1)
    lead = torch.where(evaluation.wrong, float("inf"), weakest - rival)
    return int(lead.argmin())


def next_steps(folder: Path, model: Model, certificate: Mapping[str, Any]) -> str:
    """Commands to copy."""
    where, config = shlex.quote(str(folder)), settings(certificate)
    data = f" --data {shlex.quote(str(config['data']))}" if config.get("data") not in (None, "mnist") else ""
    preset = f" --preset {shlex.quote(str(config['preset']))}" if config.get("preset") else ""
    seed = int(config.get("seed") or 0) + 1
    commands = [
        ("An image of your own:", f"capsnet predict {where} photo.png"),
        ("What each number of a pose means:", f"capsnet reconstruct {where} --what tweaks"),
        ("How much of this is luck? Another seed:", f"capsnet train{preset}{data} --seed {seed}"),
        ("The paper's own network on the same data:", f"capsnet train --preset paper{data}"),
        ("Your own images, one subfolder a class:", "capsnet train --data folder:PATH"),
    ]
    if getattr(model, "decoder", None) is None:
        commands.pop(1)
    lines = "\n".join(f"# {why}\n{command}" for why, command in commands)
    python = f"import capsnet\n\nmodel = capsnet.load({str(folder)!r})\nmodel.predict(images).labels"
    blocks = f"<pre>{escape(lines)}</pre>", paragraph("Or from Python:"), f"<pre>{escape(python)}</pre>"
    return section("What to try next", *blocks)
