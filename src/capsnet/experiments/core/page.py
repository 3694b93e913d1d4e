"""`capsnet reproduce report`: all results as Markdown, from the JSON files alone.

    RESULTS.md                  one table: what the paper claims and what we measured
    docs/results/index.md       the same table, as a page of the documentation
    docs/results/NAME.md        one page per experiment, with its tables and pictures

Tables and sentences are generated from the records; pictures are those next to the JSON files. Results of another
version of capsnet are shown and marked.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from capsnet import experiments
from capsnet.errors import UserError
from capsnet.experiments.core.claims import Claim
from capsnet.experiments.core.plan import BUDGETS, Experiment, Record, by_method, check_budget
from capsnet.experiments.core.results import Place, Results, everything
from capsnet.files import write_bytes
from capsnet.report.tables import Table, whole
from capsnet.timing import clock

SUMMARY, PAGES = Path("RESULTS.md"), Path("docs/results")
TITLE = "Results"
INTRO = (
    "The claims of the paper, measured again. Figures are test errors unless the claim says otherwise, with the 95 % "
    "interval of the test images in brackets. A claim is *reproduced* or *not reproduced* if the intervals of the two "
    "sides do not overlap, and *too close to call* otherwise; another seed may differ by more than the interval. "
    "Claims without a figure of the paper are often made about capsule networks, but are not measured in the paper. "
    "`capsnet reproduce report` generates this page from the JSON files under `results/reproduce`."
)


def write(place: Place, root: Path) -> list[Path]:
    """Write all pages and return their paths."""
    found = ordered(everything(place))
    if not found:
        raise UserError(
            f"there are no results in {place.results} yet: run an experiment first, for instance "
            f"capsnet reproduce walkthrough."
        )
    pages = {SUMMARY: summary(found, PAGES.as_posix()), PAGES / "index.md": summary(found, ".")}
    for name, same in groupby(found, key=lambda results: results.experiment):
        pages[PAGES / f"{name}.md"] = details(experiments.get(name), list(same), place, root / PAGES)
    for path, text in pages.items():
        write_bytes(root / path, text.encode())
    return [root / path for path in pages]


def ordered(found: Sequence[Results]) -> list[Results]:
    """In the order of the experiments, the largest budget first; smoke only if there is nothing else."""
    names, sizes = list(experiments.EXPERIMENTS), list(BUDGETS)
    known = [r for r in found if r.experiment in names and r.budget in sizes and r.rows]
    better = {r.experiment for r in known if r.budget != "smoke"}
    kept = [r for r in known if r.budget != "smoke" or r.experiment not in better]
    return sorted(kept, key=lambda r: (names.index(r.experiment), -sizes.index(r.budget), not r.current))


# --- The summary -------------------------------------------------------------------------------------------------


def summary(found: Sequence[Results], folder: str) -> str:
    """The table of claims; `folder` is where the pages of the experiments are."""
    claims = all_claims(found)
    rows = [
        [
            f"[{c.claim}]({folder}/{r.experiment}.md)",
            *(text.replace(" vs. ", "<br>vs.\u00a0").replace(" %", "\u00a0%") for text in (c.paper, c.ours)),
            str(c.seeds),
            r.budget,
            f"**{c.verdict}**",
        ]
        for c, r in claims
    ]
    header = ["claim", "paper", "ours [95 % interval]", "seeds", "budget", "verdict"]
    budgets = dict.fromkeys(results.budget for results in found)
    parts = [f"# {TITLE}", INTRO, "\n".join(f"- Budget `{name}`: {BUDGETS[name]}." for name in budgets)]
    silent = [r.experiment for r in found if r.experiment not in {results.experiment for _, results in claims}]
    links = ", ".join(f"[{experiments.get(n).title}]({folder}/{n}.md)" for n in dict.fromkeys(silent))
    parts += [Table(header, rows).markdown()] if rows else []
    parts += [f"Without a claim to test: {links}."] if links else []
    return "\n\n".join(parts).replace("](./", "](") + "\n"


def all_claims(found: Sequence[Results]) -> list[tuple[Claim, Results]]:
    """Every claim once, measured at the largest budget that has its rows."""
    claims: dict[str, tuple[Claim, Results]] = {}
    for results in found:
        if results.current:
            for claim in experiments.get(results.experiment).claims(results.rows, results.budget):
                claims.setdefault(claim.claim, (claim, results))
    return list(claims.values())


# --- A page per experiment -----------------------------------------------------------------------------------------


def details(experiment: Experiment, found: Sequence[Results], place: Place, folder: Path) -> str:
    """The page of one experiment, its largest budget first."""
    parts = [f"# {experiment.title}", experiment.question]
    for results in found:
        parts += [f"## Budget `{results.budget}`"] if len(found) > 1 else []
        parts += section(experiment, results, place, folder)
    return "\n\n".join(parts) + "\n"


def section(experiment: Experiment, results: Results, place: Place, folder: Path) -> list[str]:
    experiment.consult(place, check_budget(results.budget))
    try:
        table, sentences = experiment.table(results.rows), experiment.findings(results.rows)
    except (KeyError, TypeError, IndexError, ValueError):
        if results.current:
            raise
        return [budget_note(results), "This version cannot read the records of that version."]
    trained = any(row.made for row in results.rows) or not results.current
    parts = [
        *([budget_note(results)] if trained else []),
        *(["\n".join(f"- {sentence}" for sentence in sentences)] if sentences else []),
    ]
    parts.append(table.markdown())
    parts += ["\\* Less than in the paper:", "\n".join(f"- {note}" for note in table.notes)] if table.notes else []
    for path in pictures(results, place):
        parts += illustrated(experiment, path, folder)
    return [*parts, origin(results.rows)]


def budget_note(results: Results) -> str:
    said = f"Budget `{results.budget}`: {BUDGETS[results.budget]}."
    return said if results.current else f"{said} Measured with capsnet {results.version}."


def pictures(results: Results, place: Place) -> list[Path]:
    """The PNG files next to a results file: those of all rows first, then those of single rows."""
    if not results.current:
        return []
    found = sorted(place.pictures(results.experiment, results.budget).glob("*.png"))
    names = tuple(f"{row.name}-" for row in results.rows)
    return sorted(found, key=lambda path: path.stem.startswith(names))


def illustrated(experiment: Experiment, picture: Path, folder: Path) -> list[str]:
    """A picture with its caption, under the heading of a chapter if one starts with it."""
    heading, text = experiment.chapters().get(picture.stem, ("", ""))
    target = Path(os.path.relpath(picture.resolve(), folder.resolve())).as_posix()
    shown = f"![{picture.stem.replace('-', ' ')}]({target})"
    caption = next(
        (said for name, said in experiment.captions().items() if picture.stem == name or f"-{name}" in picture.stem), ""
    )
    return [
        part for part in (f"## {heading}" if heading else "", text, shown, f"*{caption}*" if caption else "") if part
    ]


def origin(records: Sequence[Record]) -> str:
    """A folded section: what each row was, and which version and machine produced it."""
    rows = []
    for group in by_method(records):
        first, made = group[0], group[0].made
        if made:
            data = f"{made['data']}: {whole(made['training_images'])} for training, {whole(made['tested_on'])} for test"
            seeds = ", ".join(str(r.seed) for r in group)
            time = clock(sum(r.seconds for r in group))
            rows.append([first.method, made["architecture"], data, seeds, time])
    versions = dict.fromkeys(
        f"capsnet {c.capsnet} ({c.git or 'no git'}), torch {c.torch}, {c.machine}"
        for c in (r.certificate for r in records)
    )
    table = [Table(["row", "network", "data", "seeds", "training time"], rows).markdown()] if rows else []
    inside = "\n\n".join([*table, "; ".join(versions)])
    return f'<details markdown="1"><summary>Networks, data and versions</summary>\n\n{inside}\n\n</details>'
