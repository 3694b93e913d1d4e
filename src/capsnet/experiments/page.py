"""All results on one page: RESULTS.md and docs/results.html, from the JSON files alone.

Nothing in them is typed by hand. Tables and sentences are made anew from the records; pictures are those that lie
beside the JSON files. A file that another version of capsnet wrote is shown and marked.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from PIL import Image

from capsnet import experiments, report
from capsnet.checkpoint import write_bytes
from capsnet.errors import UserError
from capsnet.experiments.plan import BUDGETS, Experiment, Record, Table, by_method, clock, whole
from capsnet.experiments.results import Place, Results, everything

MARKDOWN, HTML = Path("RESULTS.md"), Path("docs/results.html")
TITLE = "The paper's experiments, beside the paper's own numbers"
INTRO = (
    "Written by `capsnet reproduce report` from the files under results/reproduce: no number here is typed by hand. "
    "A row that had less than the paper's network, epochs or data is marked with *, and what it had less of stands "
    "below its table. Times are of training alone. Intervals are of the test images; another seed may differ by more."
)
SHOWN = 840 * 2  # pixels across of the widest picture on the page


def write(place: Place, root: Path) -> list[Path]:
    """Write both pages and return their paths."""
    found = ordered(everything(place))
    if not found:
        raise UserError(
            f"there are no results in {place.results} yet: run an experiment first, for instance "
            f"capsnet reproduce walkthrough."
        )
    write_bytes(root / MARKDOWN, markdown(found, place, root).encode())
    write_bytes(root / HTML, html(found, place).encode())
    return [root / MARKDOWN, root / HTML]


def ordered(found: Sequence[Results]) -> list[Results]:
    """In the order of the experiments; of each the largest budget first, and smoke only where there is nothing else."""
    names, sizes = list(experiments.EXPERIMENTS), list(BUDGETS)
    known = [r for r in found if r.experiment in names and r.budget in sizes and r.rows]
    better = {r.experiment for r in known if r.budget != "smoke"}
    kept = [r for r in known if r.budget != "smoke" or r.experiment not in better]
    return sorted(kept, key=lambda r: (names.index(r.experiment), -sizes.index(r.budget), not r.current))


def mark(results: Results) -> str:
    """What to know of a file as a whole."""
    said = f"Budget `{results.budget}`: {BUDGETS[results.budget]}."
    return said if results.current else f"{said} Made by capsnet {results.version}, another version than this one."


def tell(results: Results) -> tuple[Experiment, Table | None, list[str]]:
    """Table and sentences of a file; of a format that this version does not know, neither."""
    experiment = experiments.get(results.experiment)
    try:
        return experiment, experiment.table(results.rows), experiment.findings(results.rows)
    except (KeyError, TypeError, IndexError, ValueError):
        if results.current:
            raise
        return experiment, None, ["Its records are of a form that this version cannot read; the file is kept as it is."]


def pictures(results: Results, place: Place) -> list[Path]:
    """The PNG files beside a results file: those of all rows together first, then those of single rows."""
    if not results.current:
        return []
    found = sorted(place.pictures(results.experiment, results.budget).glob("*.png"))
    names = tuple(f"{row['name']}-" for row in results.rows)
    return sorted(found, key=lambda path: path.stem.startswith(names))


def own_pages(results: Results, place: Place) -> list[Path]:
    """Pages that an experiment wrote beside its pictures."""
    return sorted(place.pictures(results.experiment, results.budget).glob("*.html")) if results.current else []


def caption(experiment: Experiment, picture: Path) -> str:
    """A picture's sentence: under its whole name, or under the part behind its row's name."""
    said = experiment.captions()
    return next((text for name, text in said.items() if name == picture.stem or f"-{name}" in picture.stem), "")


# --- What each row was -----------------------------------------------------------------------------------------


def origins(records: Sequence[Record]) -> Table:
    """Network, data, seeds and time of each method, and in what it had less than the paper."""
    rows = []
    for group in by_method(records):
        first, made = group[0], group[0]["made"]
        if not made:
            continue
        data = f"{made['data']}: {whole(made['training_images'])} to learn from, {whole(made['tested_on'])} to test on"
        seeds = ", ".join(str(r["seed"]) for r in group)
        rows.append([
            first["method"], made["architecture"], whole(made["parameters"]), str(made["epochs"]), data, seeds,
            clock(sum(r["seconds"] for r in group)), "; ".join(first["less"]) or "–",
        ])  # fmt: skip
    return Table(["row", "network", "parameters", "epochs", "data", "seeds", "training", "less than the paper"], rows)


def certificate(records: Sequence[Record]) -> str:
    """By what the rows were made: every different machine and version once."""
    kinds = dict.fromkeys(
        f"capsnet {c['capsnet']} ({c.get('git') or 'no git'}), torch {c['torch']}, {c['machine']}"
        for c in (r["certificate"] for r in records)
    )
    return "; ".join(kinds)


# --- Markdown --------------------------------------------------------------------------------------------------


def markdown(found: Sequence[Results], place: Place, root: Path) -> str:
    parts = [f"# {TITLE}", INTRO]
    for results in found:
        experiment, table, sentences = tell(results)
        parts += [f"## {experiment.title}", experiment.question, mark(results)]
        parts += ["\n".join(f"- {sentence}" for sentence in sentences)] if sentences else []
        parts += [grid(table)] if table else []
        parts += [f"\\{note}" if note.startswith("*") else note for note in (table.notes if table else ())]
        shown = chosen(pictures(results, place))
        parts += [f"![{path.stem}]({beside(path, root)})" for path in shown]
        parts += [f"All of it on one page: [{p.name}]({beside(p, root)})" for p in own_pages(results, place)]
        parts += details(results) if table else []
    return "\n\n".join(parts) + "\n"


def beside(path: Path, root: Path) -> str:
    """A path as a page in `root` links to it."""
    return (path.relative_to(root) if path.is_relative_to(root) else path).as_posix()


def details(results: Results) -> list[str]:
    table = origins(results.rows)
    inside = grid(table) if table.rows else ""
    return [f"<details><summary>What each row was</summary>\n\n{inside}\n\n{certificate(results.rows)}\n\n</details>"]


def grid(table: Table) -> str:
    """A table as Markdown."""
    lines = [list(table.columns), ["---"] * len(table.columns), *(list(row) for row in table.rows)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def chosen(paths: Sequence[Path], most: int = 8) -> list[Path]:
    """A few pictures for the Markdown page; a long sequence shows its first, its middle and its last ones."""
    if len(paths) <= most:
        return list(paths)
    return [paths[round(k * (len(paths) - 1) / (most - 1))] for k in range(most)]


# --- HTML ------------------------------------------------------------------------------------------------------

STYLE = """<style>
.wide { overflow-x: auto; margin: 12px 0 }
table { border-collapse: collapse; font-size: .875rem; min-width: 100% }
th { text-align: left; font-weight: 600; color: var(--muted); vertical-align: bottom }
th, td { padding: 6px 14px 6px 0; border-bottom: 1px solid var(--line); font-variant-numeric: tabular-nums;
  vertical-align: top }
td { white-space: nowrap } td.long { white-space: normal; min-width: 14em; max-width: 34em }
@media (min-width: 900px) { .wide { width: max-content; min-width: 100%; max-width: calc(50vw + 384px) } }
nav a { color: var(--accent) } nav li { margin: 2px 0 }
</style>"""


def html(found: Sequence[Results], place: Place) -> str:
    """The page with its pictures inside."""
    told = [(results, *tell(results)) for results in found]
    links = "".join(
        f'<li><a href="#{escape(anchor(r))}">{escape(e.title)}</a> ({escape(r.budget)})</li>' for r, e, _, _ in told
    )
    head = f"<header><h1>{escape(TITLE)}</h1></header>{STYLE}{report.paragraph(INTRO.replace('`', ''))}"
    sections = [f"{head}<nav><ul>{links}</ul></nav>"]
    sections += [part_of(place, *each) for each in told]
    return report.page(TITLE, sections)


def anchor(results: Results) -> str:
    return f"{results.experiment}-{results.budget}" + ("" if results.current else f"-{results.version}")


def part_of(place: Place, results: Results, experiment: Experiment, table: Table | None, said: Sequence[str]) -> str:
    """One experiment's section."""
    parts = [f'<span id="{escape(anchor(results))}"></span>', report.paragraph(experiment.question)]
    parts.append(f'<p class="note">{escape(mark(results).replace("`", ""))}</p>')
    parts += ["<ul>" + "".join(f"<li>{escape(sentence)}</li>" for sentence in said) + "</ul>"] if said else []
    if table:
        notes = "<br>".join(map(escape, table.notes))
        parts += [cells(table), *([f'<p class="note">{notes}</p>'] if notes else [])]
    own = own_pages(results, place)
    for path in chosen(pictures(results, place)) if own else pictures(results, place):
        parts.append(inlined(path, path.stem.replace("-", " "), caption(experiment, path)))
    parts += [f'<p>All of it on one page: <a href="{escape(link_up(path))}">{path.name}</a></p>' for path in own]
    if table:
        rows = origins(results.rows)
        made = report.paragraph(certificate(results.rows))
        parts.append(report.folded("What each row was", *([cells(rows)] if rows.rows else []), made))
    return report.section(experiment.title, *parts)


def link_up(path: Path) -> str:
    """A path as docs/results.html links to it, one folder down."""
    return path.as_posix() if path.is_absolute() else f"../{path.as_posix()}"


def cells(table: Table) -> str:
    """A table as HTML."""
    head = "".join(f"<th>{escape(name)}</th>" for name in table.columns)
    body = "".join("<tr>" + "".join(map(cell, row)) + "</tr>" for row in table.rows)
    return f'<div class="wide" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def cell(words: str) -> str:
    return f"<td{' class=long' * (len(words) > 40)}>{escape(words)}</td>"


def inlined(path: Path, alt: str, said: str = "") -> str:
    """A PNG file inside the page, with fewer shades and not wider than it is shown."""
    image: Any = Image.open(path).convert("RGB")
    if image.width > SHOWN:
        image = image.resize((SHOWN, round(image.height * SHOWN / image.width)), Image.Resampling.LANCZOS)
    content = io.BytesIO()
    image.quantize(128, dither=Image.Dither.NONE).save(content, "png", optimize=True)
    source = f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}"
    width, height = image.width // 2, image.height // 2
    picture = f'<img src="{source}" alt="{escape(alt)}" width="{width}" height="{height}">'
    words = f"<figcaption>{escape(said)}</figcaption>" if said else ""
    return f'<figure><div class="frame" tabindex="0">{picture}</div>{words}</figure>'
