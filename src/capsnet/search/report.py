"""Reports on a study: its best trials, importance, error against time, and the command that trains the best.

    results/search/NAME.json    everything, each trial with its config and learning curve
    results/search/NAME.html    the same as a page
    results/search/NAME/*.png   its figures

Importance is PED-ANOVA's: how far the values of the best trials (a tenth of all, at least five) differ from those of
all trials. All errors are on validation images. The best trial was chosen on them, so its error is slightly
optimistic.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from capsnet import plugins
from capsnet.errors import UserError
from capsnet.evaluate import wilson_interval
from capsnet.files import check_writable, write_bytes
from capsnet.io import checkpoint
from capsnet.io.transfer import starting_from
from capsnet.report.tables import Table
from capsnet.search.storage import FOLDER as TRAININGS
from capsnet.search.study import KILLED, ended, flat
from capsnet.train.config import Config
from capsnet.train.config_records import from_dict
from capsnet.train.presets import get_preset
from capsnet.train.settings import train_flags

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FOLDER = Path("results/search")
FEWEST, LEADERS = 20, 5  # complete trials that importance needs, and how many of them at least count as the best
KEPT = ("seconds", "epochs", "parameters", "errors", "failure", "curve", "config", "folder")
Row = dict[str, Any]


def row_of(trial: FrozenTrial) -> Row:
    """A trial as JSON types."""
    error = trial.value if trial.state == TrialState.COMPLETE else None
    row = {"number": trial.number, "state": trial.state.name.lower(), "error_percent": error, "values": trial.params}
    return row | {name: trial.user_attrs.get(name) for name in KEPT}


def best_first(rows: Sequence[Row]) -> list[Row]:
    """The complete trials, best first; of equals the quicker one."""
    complete = [row for row in rows if row["state"] == "complete"]
    return sorted(complete, key=lambda row: (row["error_percent"], row["seconds"]))


def front(rows: Sequence[Row]) -> list[Row]:
    """The Pareto front of error and time, quickest first: no quicker trial has as low an error."""
    kept: list[Row] = []
    for row in sorted(best_first(rows), key=lambda row: (row["seconds"], row["error_percent"])):
        if not kept or row["error_percent"] < kept[-1]["error_percent"]:
            kept.append(row)
    return kept


def importance(study: optuna.Study) -> dict[str, float]:
    """The share of each searched field, largest first; empty with too few trials or too many equally good ones."""
    complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    if len(complete) < FEWEST:
        return {}
    quantile = min(max(0.1, LEADERS / len(complete)), 0.5)
    errors = sorted(trial.value for trial in complete if trial.value is not None)
    worst = errors[math.ceil(quantile * len(errors)) - 1]
    if 2 * sum(error <= worst for error in errors) > len(errors):  # ties: most trials are among the best
        return {}
    evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=quantile)
    shares = optuna.importance.get_param_importances(study, evaluator=evaluator)
    return {name: round(share, 4) for name, share in shares.items()}


def command(config: Config) -> str:
    """The command that trains this config: its preset, and what differs from it."""
    reference = get_preset(config.preset)
    if config.init:  # its network is the default
        with suppress(UserError):  # if it still exists
            reference = replace(starting_from(reference, config.init), init="")
    return plugins.command("train", "--preset", config.preset, *train_flags(config, reference))


def summary(study: optuna.Study, storage: str) -> dict[str, Any]:
    """All that is known about a study, as JSON types."""
    rows = [row_of(trial) for trial in ended(study.get_trials(deepcopy=False))]
    best = next(iter(best_first(rows)), None)
    birth = checkpoint.certificate({}, sum(row["seconds"] or 0 for row in rows), optuna=optuna.__version__)
    return {
        "study": study.study_name,
        "storage": storage,
        **study.user_attrs["task"],
        "counts": {state: sum(r["state"] == state for r in rows) for state in ("complete", "pruned", "fail")},
        "best": best["number"] if best else None,
        "command": command(from_dict(best["config"])) if best else None,
        "network": network(study.study_name, best) if best else None,
        "importance": importance(study),
        "front": [row["number"] for row in front(rows)],
        "trials": rows,
        "certificate": birth.to_json(),
    }


def network(study: str, row: Row) -> str | None:
    """The folder with a trial's network, if it is on this disk."""
    folder = TRAININGS / study / (row["folder"] or "")
    return str(folder) if (folder / checkpoint.MODEL_FILE).exists() else None


def short(values: dict[str, Any]) -> str:
    """The values of a trial on one line."""
    words = (f"{name}={value:.3g}" if isinstance(value, float) else f"{name}={value}" for name, value in values.items())
    return ", ".join(word.removeprefix("model.") for word in words)


def table(rows: Sequence[Row]) -> Table:
    columns = ["trial", "validation error, %", "95 % interval", "training", "epochs", "parameters", "values"]
    cells = []
    for row in rows:
        low, high = wilson_interval(*row["errors"])
        error, interval = f"{row['error_percent']:.2f}", f"{100 * low:.2f} to {100 * high:.2f}"
        cost = [f"{row['seconds']:,.0f} s", str(row["epochs"]), f"{row['parameters']:,}"]
        cells.append([str(row["number"]), error, interval, *cost, short(row["values"])])
    return Table(columns, cells)


def tables(found: dict[str, Any]) -> dict[str, Table]:
    """The tables of the terminal and the page, by title."""
    shares = [(name, f"{100 * share:.0f} %") for name, share in found["importance"].items()]
    reasons = Counter(row["failure"] or KILLED for row in found["trials"] if row["state"] == "fail")
    made = {
        "Best trials": table(best_first(found["trials"])[:10]),
        "Pareto front: no quicker trial has as low an error": table(front(found["trials"])),
        "Importance": Table(["field", "importance"], shares),
        "Failures": Table(["trials", "reason"], [(str(n), why) for why, n in reasons.most_common()]),
    }
    return {title: each for title, each in made.items() if each.rows}


# --- Figures and page ------------------------------------------------------------------------------------------


def figures_of(found: dict[str, Any]) -> dict[str, Figure]:
    """Importance as bars, and error against time with its Pareto front."""
    from capsnet.report import figures

    drawn: dict[str, Figure] = {}
    if found["importance"]:
        shares = [figures.Bar(name, 100 * share, figures.BLUE) for name, share in found["importance"].items()]
        note = "How far the values of the best trials differ from those of all trials (PED-ANOVA)"
        drawn["importance"] = figures.bars("Importance of each field", note, {"": shares}, "%", 0)
    if complete := best_first(found["trials"]):
        light = figures.PALETTE[5]
        curves = [list(zip(*row["curve"], strict=True)) for row in found["trials"] if len(row["curve"] or ()) > 1]
        lines = [figures.Line("learning curve", curve[1], curve[2], light, thin=True) for curve in curves]
        for label, rows, colour in (("trial", complete, light), ("Pareto front", front(complete), figures.BLUE)):
            time, error = [row["seconds"] for row in rows], [row["error_percent"] for row in rows]
            lines.append(figures.Line(label, time, error, colour, dots=label == "trial"))
        title = f"{found['study']}: {len(complete)} of {len(found['trials'])} trials complete"
        panel = figures.Panel("", "seconds of training", "validation error, %", lines, log_x=True, log_y=True)
        drawn["front"] = figures.lines(title, "Error on validation images against training time", [panel])
    return drawn


def html(found: dict[str, Any], drawn: dict[str, Figure]) -> str:
    """The page, figures included."""
    from capsnet.report import html

    title, space = f"Search {found['study']}", html.facts(found["space"].items())
    told = f"{counted(found)}. All errors are on validation images, on which the best trial was chosen: its error is "
    told += "slightly optimistic. The test set was not used."
    shared = html.facts((name, value) for name, value in flat(found["base"]).items() if name not in found["space"])
    commands = [html.section(what, f"<pre>{escape(line)}</pre>") for what, line in next_steps(found).items()]
    return html.page(title, [
        f"<header><h1>{escape(title)}</h1></header>{html.STYLE}{html.paragraph(told)}", *commands,
        *(html.drawn(figure, name) for name, figure in drawn.items()),
        *(html.section(name, html.cells(each)) for name, each in tables(found).items()),
        html.section("Search space", space, html.folded("Settings of all trials", shared)),
    ])  # fmt: skip


def counted(found: dict[str, Any]) -> str:
    counts = found["counts"]
    return f"{counts['complete']} trials complete, {counts['pruned']} pruned, {counts['fail']} failed"


def next_steps(found: dict[str, Any]) -> dict[str, str]:
    """What to do with the best trial → the command."""
    steps = {"Train the best": found["command"]}
    if found["network"]:
        steps["Or test its network, which was kept"] = plugins.command("evaluate", found["network"])
    return {what: line for what, line in steps.items() if line}


def check_place(name: str, storage: str, folder: Path = FOLDER) -> None:
    """Refuse to overwrite the report of another study, and a place that cannot be written to: before any trial."""
    file = folder / f"{name}.json"
    check_writable(file)
    found = checkpoint.read_json(file) if file.exists() else {"storage": storage}
    if not isinstance(found, dict) or found.get("storage") != storage:
        raise UserError(f"{file} belongs to another study: choose another name with --study, or move the file away.")


def write(found: dict[str, Any], folder: Path = FOLDER) -> list[Path]:
    """Write the JSON file and, if matplotlib is installed, figures and page; return their paths."""
    name = found["study"]
    check_place(name, found["storage"], folder)
    data, page = folder / f"{name}.json", folder / f"{name}.html"
    checkpoint.write_json(data, found)
    if find_spec("matplotlib") is None:
        return [data]
    from capsnet.experiments.core.conduct import save_picture

    drawn = figures_of(found)
    for which, figure in drawn.items():
        save_picture(figure, folder / name / which)
    write_bytes(page, html(found, drawn).encode())
    return [data, *(folder / name / f"{which}.png" for which in drawn), page]
