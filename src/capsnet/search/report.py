"""What came out of a study: the best trials, what mattered, error against time, and the command that trains the best.

    results/search/NAME.json    everything, each trial with its config and curve
    results/search/NAME.html    the same to look at
    results/search/NAME/*.png   its pictures, each also as .svg

Parameter importance is PED-ANOVA's: how far the values of the best trials differ from those of all; the best are a
tenth of them, and five where that would be fewer, for its authors ask for as many. All errors are of validation images,
on which the best was chosen: it looks a little better than it is.
"""

from __future__ import annotations

import math
import shlex
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

from capsnet import checkpoint
from capsnet.config import Config, from_dict, get_preset
from capsnet.errors import UserError
from capsnet.evaluation import wilson_interval
from capsnet.experiments.plan import Table
from capsnet.pretrained import starting_from
from capsnet.search.space import STEM_LISTS, train_flags
from capsnet.search.storage import FOLDER as TRAININGS
from capsnet.search.study import KILLED, ended

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FOLDER = Path("results/search")
FEWEST, LEADERS = 20, 5  # finished trials without which importance says nothing, and how many of them are the best
Row = dict[str, Any]


def row_of(trial: FrozenTrial) -> Row:
    """A trial as JSON types."""
    said = trial.user_attrs
    return {
        "number": trial.number,
        "state": trial.state.name.lower(),
        "error_percent": trial.value if trial.state == TrialState.COMPLETE else None,
        "values": trial.params,
        **{
            name: said.get(name)
            for name in ("seconds", "epochs", "parameters", "errors", "failure", "curve", "config", "folder")
        },
    }


def rows_of(study: optuna.Study) -> list[Row]:
    """The trials that came to an end."""
    return [row_of(trial) for trial in ended(study.get_trials(deepcopy=False))]


def best_first(rows: Sequence[Row]) -> list[Row]:
    """The trials trained to their end, the best first; of equals the quicker."""
    complete = [row for row in rows if row["state"] == "complete"]
    return sorted(complete, key=lambda row: (row["error_percent"], row["seconds"]))


def front(rows: Sequence[Row]) -> list[Row]:
    """The Pareto front: trials such that no quicker one has as few errors, the quickest first."""
    kept: list[Row] = []
    for row in sorted(best_first(rows), key=lambda row: (row["seconds"], row["error_percent"])):
        if not kept or row["error_percent"] < kept[-1]["error_percent"]:
            kept.append(row)
    return kept


def reached(rows: Sequence[Row]) -> list[tuple[float, float]]:
    """The same within the trials too: seconds of training, and the lowest error that any of them had by then. It may be
    lower than any trial's at its end: of many looks at a training, the lowest is the luckiest."""
    looks = sorted((seconds, error) for row in rows for _, seconds, error in row["curve"] or ())
    kept: list[tuple[float, float]] = []
    for seconds, error in looks:
        if not kept or error < kept[-1][1]:
            kept.append((seconds, error))
    return kept


def importance(study: optuna.Study) -> dict[str, float]:
    """Each searched field's share, the largest first; empty where there are too few trials, or too many of the best."""
    complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    if len(complete) < FEWEST:
        return {}
    best = min(max(0.1, LEADERS / len(complete)), 0.5)
    errors = sorted(trial.value for trial in complete if trial.value is not None)
    last = errors[math.ceil(best * len(errors)) - 1]
    if 2 * sum(error <= last for error in errors) > len(errors):  # ties: most are as good as the last of the best
        return {}
    evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=best)  # needs no scikit-learn
    shares = optuna.importance.get_param_importances(study, evaluator=evaluator)
    return {name: round(share, 4) for name, share in shares.items()}


def command(config: Config) -> str:
    """What trains this config: the preset, and what differs from it."""
    reference = get_preset(config.preset)
    if config.init:  # which brings its own network
        with suppress(UserError):  # if it is still there
            reference = replace(starting_from(reference, config.init), init="")
    return shlex.join(["capsnet", "train", "--preset", config.preset, *train_flags(config, reference)])


def summary(study: optuna.Study, storage: str) -> dict[str, Any]:
    """All that is known of a study, as JSON types."""
    rows = rows_of(study)
    best = best_first(rows)[:1]
    spent = sum(row["seconds"] or 0 for row in rows)
    return {
        "study": study.study_name,
        "storage": storage,
        **study.user_attrs["task"],
        "counts": {state: sum(r["state"] == state for r in rows) for state in ("complete", "pruned", "fail")},
        "best": best[0]["number"] if best else None,
        "command": command(from_dict(best[0]["config"])) if best else None,
        "network": network(study.study_name, best[0]) if best else None,
        "importance": importance(study),
        "front": [row["number"] for row in front(rows)],
        "trials": rows,
        "certificate": checkpoint.certificate({}, spent, optuna=optuna.__version__),
    }


def network(study: str, row: Row) -> str | None:
    """The folder with a trial's network, if it is kept and on this disk."""
    folder = TRAININGS / study / (row["folder"] or "")
    return str(folder) if (folder / checkpoint.MODEL_FILE).exists() else None


def failures(found: dict[str, Any]) -> dict[str, int]:
    """Why trials failed, the commonest reason first."""
    reasons = Counter(row["failure"] or KILLED for row in found["trials"] if row["state"] == "fail")
    return dict(reasons.most_common())


# --- Tables, pictures, page ------------------------------------------------------------------------------------


def short(values: dict[str, Any]) -> str:
    """The values of a trial in a line."""
    words = (f"{k}={v:.3g}" if isinstance(v, float) else f"{k}={v}" for k, v in values.items())
    return ", ".join(word.removeprefix("model.") for word in words)


def cells_of(row: Row) -> list[str]:
    low, high = wilson_interval(*row["errors"])
    return [
        str(row["number"]), f"{row['error_percent']:.2f}", f"{100 * low:.2f} to {100 * high:.2f}",
        f"{row['seconds']:,.0f} s", str(row["epochs"]), f"{row['parameters']:,}", short(row["values"]),
    ]  # fmt: skip


def table(rows: Sequence[Row]) -> Table:
    columns = ["trial", "validation error, %", "95 % interval", "training", "epochs", "parameters", "values"]
    return Table(columns, [cells_of(row) for row in rows])


def tables(found: dict[str, Any], most: int = 10) -> dict[str, Table]:
    """What the terminal and the page show, each under its title."""
    shares = Table(["field", "importance"], [(n, f"{100 * share:.0f} %") for n, share in found["importance"].items()])
    made = {
        "The best trials": table(best_first(found["trials"])[:most]),
        "The best in their time: no quicker trial has as few errors": table(front(found["trials"])),
        "Where the best differ from the rest": shares,
        "What failed": Table(["trials", "why"], [(str(n), why) for why, n in failures(found).items()]),
    }
    return {title: each for title, each in made.items() if each.rows}


def pictures(found: dict[str, Any]) -> dict[str, Figure]:
    """Importance as bars; error against time with its front, and the best error so far."""
    from capsnet import figures

    drawn: dict[str, Figure] = {}
    if found["importance"]:
        shares = [figures.Bar(name, 100 * share, figures.BLUE) for name, share in found["importance"].items()]
        note = "How far the values of the best trials differ from those of all (PED-ANOVA)"
        drawn["importance"] = figures.bars("Where the best differ from the rest", note, {"": shares}, "%", 0)
    complete, ahead = best_first(found["trials"]), reached(found["trials"])
    if not complete:
        return drawn
    in_turn = sorted(complete, key=lambda row: row["number"])
    numbers, errors = [row["number"] for row in in_turn], [row["error_percent"] for row in in_turn]
    so_far = [min(errors[: k + 1]) for k in range(len(errors))]
    wide = min(errors) > 0 and max(errors) > 3 * min(errors)  # else a digit more or less would fill the picture
    error, time = "validation error, %", [row["seconds"] for row in complete]
    light, strong = figures.PALETTE[5], figures.BLUE
    ways = [
        figures.Line("on its way", [s for _, s, _ in row["curve"]], [e for *_, e in row["curve"]], light, thin=True)
        for row in found["trials"]
        if len(row["curve"] or ()) > 1
    ]
    points = figures.Line("a trial's end", time, [row["error_percent"] for row in complete], light, dots=True)
    until = max(seconds for row in found["trials"] for _, seconds, _ in row["curve"] or ())
    steps = stairs([*(seconds for seconds, _ in ahead), until], [*(error for _, error in ahead), ahead[-1][1]])
    line = figures.Line("the lowest by then", *steps, strong, bare=True)
    trials = figures.Line("a trial's end", numbers, errors, light, dots=True)
    best = figures.Line("best so far", *stairs(numbers, so_far), figures.VERMILLION, bare=True)
    against_time = figures.Panel(
        "Error against time", "seconds of training", error, [*ways, line, points], log_x=True, log_y=True
    )
    ticks = numbers[:: 1 + len(numbers) // 8]
    in_turns = figures.Panel("How the search went", "trial", error, [best, trials], False, wide, not wide, ticks)
    drawn["front"] = figures.lines(
        f"{found['study']}: {len(complete)} of {len(found['trials'])} trials trained to their end",
        "On validation images",
        [against_time, in_turns],
    )
    return drawn


def stairs(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
    """A curve that stays as it is until the next point.

    >>> stairs([0, 1, 4], [9, 7, 7])
    ([0, 1, 1, 4, 4], [9, 9, 7, 7, 7])
    """
    return [*x[:1], *(v for v in x[1:] for _ in "to")], [*(v for v in y[:-1] for _ in "to"), *y[-1:]]


def html(found: dict[str, Any], drawn: dict[str, Figure]) -> str:
    """The page, with its pictures inside."""
    from capsnet import report
    from capsnet.experiments import page

    title, counts = f"Search {found['study']}", found["counts"]
    told = (
        f"{counts['complete']} trials trained to their end, {counts['pruned']} ended early because others were better, "
        f"{counts['fail']} failed. All errors are of validation images, on which the best was chosen: it looks a "
        f"little better than it is. The test set was not looked at."
    )
    parts = [f"<header><h1>{escape(title)}</h1></header>{page.STYLE}{report.paragraph(told)}"]
    if found["command"]:
        parts.append(report.section("Train the best", f"<pre>{escape(found['command'])}</pre>"))
    if found["network"]:
        trained = f"<pre>capsnet evaluate {escape(found['network'])}</pre>"
        parts.append(report.section("The best trial's network, to be tested once", trained))
    parts += [report.drawn(figure, name) for name, figure in drawn.items()]
    parts += [report.section(name, page.cells(each)) for name, each in tables(found).items()]
    space = report.facts([*found["space"].items(), ("minutes a trial", found["minutes"] or None)])
    parts.append(report.section("The space", space, report.folded("The other settings", report.facts(flat(found)))))
    return report.page(title, parts)


def flat(found: dict[str, Any]) -> list[tuple[str, Any]]:
    """The base's settings one by one, without those that a trial has of its own."""
    base, own = found["base"], {*found["space"], *(["epochs"] if found["minutes"] else [])}
    if "stem" in own:
        own |= {*STEM_LISTS, "model.branches", "model.trunk"}
    nested = [(f"{k}.{n}", v) for k in ("model", "loss", "augment") for n, v in base[k].items()]
    settings = [(k, v) for k, v in base.items() if not isinstance(v, dict)] + nested
    return [(name, value) for name, value in settings if name not in own]


def check_place(name: str, storage: str, folder: Path = FOLDER) -> None:
    """Refuse to write over what is known of something else (a study in another storage, or in one that is gone), and
    where nothing can be written: before the trials, not after them."""
    file = folder / f"{name}.json"
    checkpoint.check_writable(file)
    if not file.exists():
        return
    found = checkpoint.read_json(file)
    other = found.get("storage") if isinstance(found, dict) else None
    gone = storage.startswith("sqlite:///") and not Path(storage.removeprefix("sqlite:///")).exists()
    if other != storage or gone:
        what = f"the study in {other}" if other else "something else"
        what += ", which is not here" if other == storage else ""
        raise UserError(f"{file} is about {what}: choose another name with --study, or move that file away.")


def write(found: dict[str, Any], folder: Path = FOLDER) -> list[Path]:
    """Write the JSON and, where the pictures' library is installed, pictures and page; gives their paths."""
    name = found["study"]
    check_place(name, found["storage"], folder)
    paths = [folder / f"{name}.json"]
    checkpoint.write_json(paths[0], found)
    if find_spec("matplotlib") is None:
        return paths
    from capsnet.experiments.conduct import save_picture

    drawn = pictures(found)
    for which, figure in drawn.items():
        save_picture(figure, folder / name / which)
        paths.append(folder / name / f"{which}.png")
    checkpoint.write_bytes(folder / f"{name}.html", html(found, drawn).encode())
    return [*paths, folder / f"{name}.html"]
