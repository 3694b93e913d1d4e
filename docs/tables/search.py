"""What hyper-parameters do: ablations, searches, and the trials from which the best preset came."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from capsnet.config import Config, from_dict, get_preset
from capsnet.evaluation import wilson_interval
from capsnet.search.ablation import BASE, outcomes, student
from capsnet.search.report import best_first, command
from capsnet.search.report import table as trial_table
from capsnet.search.space import SPACES, train_flags
from tables import read, table

DESIGN: dict[str, Callable[[Config], bool]] = {
    "reconstruction 0.003 instead of 0.0005": lambda c: c.loss.reconstruction > 0.001,
    "margins 0.95 and 0.05 instead of 0.9 and 0.1": lambda c: c.loss.present > 0.9,
    "learning rate 0.008 instead of 0.004": lambda c: c.lr > 0.005,
    "40 % of the digits changed instead of 75 %": lambda c: c.augment.share < 0.5,
    "batches of 64 instead of 128": lambda c: c.batch_size < 100,
    "stem `deepest`, for as long: 10.5 epochs instead of 16": lambda c: len(c.model.stem_channels) == 6,
    "primary stride 1 and 16 types instead of 2 and 32: a finer grid": lambda c: c.model.primary_stride == 1,
}


def ablation(name: str) -> str:
    """One choice at a time beside its base: what helps first, what harms last."""
    rows = read(f"ablation/{name}")["rows"]
    base, *others = outcomes(rows)
    others.sort(key=lambda o: o["difference"])
    return ablated(rows, base) + table(
        ["choice", "what it is", "validation error, %", "difference, points", "seeds", "so it"],
        (
            (
                f"`{o['name']}`",
                o["what"],
                f"{o['error_percent']:.2f}" + (f" ± {o['std']:.2f}" if len(o["seeds"]) > 1 else ""),
                apart_by(o),
                str(len(o["seeds"])),
                verdict(o),
            )
            for o in others
        ),
    )


def ablated(records: list[dict[str, Any]], base: dict[str, Any]) -> str:
    """What the base of an ablation is, and what it reached."""
    record = next(record for record in records if record["method"] == BASE)
    birth = record["certificate"]
    config = from_dict(birth["config"])
    flags = train_flags(config, replace(get_preset(config.preset), epochs=config.epochs, validation=config.validation))
    deviation = f" ± {base['std']:.2f}" if len(base["seeds"]) > 1 else ""
    seeds = f", {len(base['seeds'])} seeds" if len(base["seeds"]) > 1 else ", one seed"
    return (
        f"The base is `--preset {' '.join([config.preset, *flags])}`, trained for {config.epochs} epochs on "
        f"{birth['training_images']:,} images: {base['error_percent']:.2f}{deviation} % of "
        f"{record['outcome']['n']:,} validation images wrong{seeds}.\n\n"
    )


def apart_by(outcome: dict[str, Any]) -> str:
    """A difference from the base, and its interval."""
    half = outcome["half_interval_95"]
    return f"{round(outcome['difference'], 2) or 0.0:+.2f}" + ("" if half is None else f" ± {half:.2f}")


def verdict(outcome: dict[str, Any]) -> str:
    if outcome["half_interval_95"] is None:
        return "one seed: not known"
    if not outcome["sure"]:
        return "cannot be told apart"
    return "**helps**" if outcome["difference"] < 0 else "**harms**"


def precision_paper() -> str:
    """The same for the paper's network: two choices of its ablation."""
    rows = read("ablation/paper")["rows"]
    both = {o["name"]: o for o in outcomes(rows) if o["name"] in (BASE, "bf16")}
    apart = both["bf16"]
    errors = {
        name: [r["outcome"]["error_percent"] for r in rows if r["method"] == name and r["seed"] in apart["seeds"]]
        for name in both
    }
    return ablated(rows, both[BASE]) + table(
        ["precision", "validation error of each seed, %", "difference, points"],
        (
            ("fp32", ", ".join(f"{e:.2f}" for e in errors[BASE]), "–"),
            ("bf16", ", ".join(f"{e:.2f}" for e in errors["bf16"]), apart_by(apart)),
        ),
    )


def spaces() -> str:
    """What each name of a space stands for."""
    return table(["name", "fields and values"], [(f"`{n}`", ", ".join(f"`{w}`" for w in s)) for n, s in SPACES.items()])


def search(name: str) -> str:
    """A study: its command, how large it was, its best trials beside the base, what mattered, and what came out."""
    found = read(f"search/{name}")
    counts, birth, complete = found["counts"], found["certificate"], best_first(found["trials"])
    base, first = from_dict(found["base"]), from_dict(found["trials"][0]["config"])
    own = "" if train_flags(replace(first, epochs=base.epochs), base) else " Trial 0 has the base's own values."
    note = (
        f"{counts['complete']} trials trained to their end, {counts['pruned']} were ended early, {counts['fail']} "
        f"failed: {birth['seconds'] / 60:,.0f} minutes of training in all.{own}\n\n"
    )
    shown = complete[:5] + [trial for trial in complete[5:] if trial["number"] == 0]
    shares = ", ".join(f"`{field}` {100 * share:.0f} %" for field, share in found["importance"].items())
    rough = f"PED-ANOVA, a rough hint from {counts['complete']} trials"
    matters = f"\nWhere the best differ most from all trials ({rough}): {shares}.\n" if shares else ""
    again = command(from_dict(complete[0]["config"]))  # from today's presets, which may not be those of the study
    best = f"\nThe best, to be trained again:\n\n```\n{again}\n```\n"
    trials = trial_table(shown)
    return note + table(trials.columns, trials.rows) + matters + best


def on_two_cores(name: str) -> str:
    """How long the last of a study's trials with the network of best took on one core, and as many epochs on two."""
    network = get_preset("best").model
    alone, both = (
        [trial for trial in read(f"search/{study}")["trials"] if from_dict(trial["config"]).model == network][-1]
        for study in (name, "hour-two-cores")
    )
    reached = np.interp(alone["epochs"], *zip(*((0, 0), *(look[:2] for look in both["curve"])), strict=True))
    return (
        f"\nThe network of `best` took {alone['seconds'] / 60:.0f} minutes for its {alone['epochs']:.1f} epochs in "
        f"trial {alone['number']}, on one core. On two, in the search below, it took {reached / 60:.0f} for as many.\n"
    )


def candidates() -> str:
    """Short trainings of settings for the best preset, each by its certificate and what it has other than the first."""
    births = read("search/best-candidates")
    first = from_dict(births[0]["config"])
    rows = []
    for birth in births:
        config = from_dict(birth["config"])
        flags = train_flags(config, first)
        wrong = round(birth["validation_error_percent"] * config.validation / 100)
        low, high = (100 * bound for bound in wilson_interval(wrong, config.validation))
        rows.append(
            (
                f"`{' '.join(flags)}`" if flags else "as in the command above",
                f"{birth['validation_error_percent']:.2f} ({wrong} of {config.validation:,})",
                f"{low:.2f} to {high:.2f}",
                f"{birth['seconds']:,.0f} s",
            )
        )
    return table(["settings", "validation error, %", "95 % interval", "training, one core"], rows)


def design() -> str:
    """Short trainings in which seven settings were changed, each in half of them, and what each setting did."""
    births = read("search/best-design")
    configs = [from_dict(birth["config"]) for birth in births]
    wrong = [round(b["validation_error_percent"] * c.validation / 100) for b, c in zip(births, configs, strict=True)]
    for one, other in itertools.combinations(DESIGN.values(), 2):  # else a difference would be another setting's too
        assert {sum((one(c), other(c)) == pair for c in configs) for pair in itertools.product((0, 1), (0, 1))} == {2}
    rows, differences = [], []
    for what, changed in DESIGN.items():
        sides = [
            [n for n, config in zip(wrong, configs, strict=True) if changed(config) is side] for side in (False, True)
        ]
        without, having = (sum(side) / len(side) for side in sides)
        differences.append(having - without)
        rows.append((what, *(", ".join(map(str, side)) for side in sides), f"{differences[-1]:+.2f}"))
    chance = student(len(differences)) * math.sqrt(sum(d**2 for d in differences) / len(differences))
    note = (
        f"\nIf no setting mattered, 19 of 20 such differences would lie between −{chance:.0f} and +{chance:.0f}; those "
        f"of two single trainings, as in the next table, between −{2 * chance:.0f} and +{2 * chance:.0f}.\n"
    )
    without_it = f"wrong of {configs[0].validation:,} without it"
    return table(["setting", without_it, "with it", "difference of the means"], rows) + note


def hard() -> str:
    """Digits that several networks all have wrong."""
    found = read("search/best-hard")
    counts = [network["wrong"] for network in found["networks"]]
    most = ", ".join(map(str, counts[:-1]))
    alike, every = found["wrong_by_all_in_the_same_way"], found["wrong_by_all"]
    return (
        f"{len(counts)} trainings that held half of the digits back ([which](best.md#how-its-settings-were-chosen)) "
        f"had {most} and {counts[-1]} of these {found['held_back']:,} wrong. "
        f"{every} of them, one in {found['held_back'] / every:.0f} of all, are the same digits each time, and {alike} "
        f"of these were taken for the same other digit each time.\n"
    )


def likeness() -> str:
    """How alike the slants of MNIST's digits are, by their distance in its order."""
    halves = read("writers")["likeness"]
    apart = list(halves["odd"])
    rows = [
        [f"{half} places", *(f"{round(halves[half][each], 2) + 0:.2f}" for each in apart)] for half in ("odd", "even")
    ]
    return table(["so far apart in their own half", *apart], rows)


def writers() -> str:
    """Errors on the same digits by networks that have seen more or less of their kind."""
    found = read("writers")

    def errors(half: str, key: str) -> str:
        counts = [each[key] for each in found["trainings"] if each["half"] == half]
        return f"{100 * sum(counts) / len(counts) / found['judged']:.2f} % ({', '.join(map(str, counts))})"

    rows = [
        [f"at {half} places", errors(half, "with"), errors(half, "without"), errors(other, "other_half")]
        for half, other in (("odd", "even"), ("even", "odd"))
    ]
    trained, judged = found["trainings"][0]["trained_on"], found["judged"]
    return (
        table(["judged", "half of their neighbours seen", "as many others seen", "none of their collection seen"], rows)
        + f"\nPreset `quick` on {trained:,} digits, judged on {judged:,}; in brackets each seed's errors.\n"
    )


def branches() -> str:
    """Errors on a collection of which few digits were seen, without branches and with them."""
    found = read("search/best-branches")
    names = {"one": "without branches, as before", "branches": "three branches"}
    rows = []
    for name, row in found.items():
        low, high = (100 * bound for bound in wilson_interval(row["errors"], row["judged"]))
        wrong = f"{100 * row['errors'] / row['judged']:.2f} % ({row['errors']} of {row['judged']:,})"
        birth = row["certificate"]
        size, time = f"{birth['parameters']:,}", f"{birth['seconds']:.0f} s"
        rows.append((names[name], size, wrong, f"{low:.2f} to {high:.2f} %", time))
    return table(["network", "parameters", "wrong", "95 % interval", "training, two cores"], rows) + (
        f"\n`python docs/branches.py`: {birth['config']['epochs']} epochs each, for which the branches "
        f"take {birth['seconds'] / found['one']['certificate']['seconds']:.1f} times as long, on "
        f"{birth['training_images']:,} digits: all of one of MNIST's [two "
        f"collections](hyperparameters.md#how-far-held-back-digits-can-be-trusted) and a tenth of the other, judged on "
        f"the rest of that other. One seed each.\n"
    )


TABLES: dict[str, Callable[[], str]] = {
    "ablation-paper": lambda: ablation("paper"),
    "ablation-quick": lambda: ablation("quick"),
    "precision-paper": precision_paper,
    "spaces": spaces,
    "search-minute": lambda: search("minute"),
    "search-five-minutes": lambda: search("five-minutes"),
    "search-hour": lambda: search("hour"),
    "search-hour-branches": lambda: search("hour-branches") + on_two_cores("hour-branches"),
    "search-hour-two-cores": lambda: search("hour-two-cores"),
    "search-hour-iterations": lambda: search("hour-iterations"),
    "best-candidates": candidates,
    "best-design": design,
    "best-hard": hard,
    "best-branches": branches,
    "likeness": likeness,
    "writers": writers,
}
