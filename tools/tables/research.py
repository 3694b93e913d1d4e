"""What hyperparameters do: ablations, searches, and the studies under research/.

Old records are read as plain JSON: their configs may have settings that today's version no longer has.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from capsnet.evaluate import mean_and_std, student, wilson_interval
from capsnet.experiments.ablation import BASE, Outcome, outcomes
from capsnet.experiments.core.plan import Record
from capsnet.search.space import SPACES
from tables import card, error_of, read, table

STUDIES = {
    "minute": "1.4 minutes on one core",
    "five-minutes": "7 minutes on one core",
    "hour": "an hour on one core",
    "hour-branches": "an hour on one core",
    "hour-two-cores": "an hour on two cores",
    "hour-iterations": "an hour on two cores",
}
DESIGN: dict[str, Callable[[dict[str, Any]], bool]] = {
    "reconstruction weight 0.003 instead of 0.0005": lambda c: c["loss"]["reconstruction"] > 0.001,
    "margins 0.95 and 0.05 instead of 0.9 and 0.1": lambda c: c["loss"]["present"] > 0.9,
    "learning rate 0.008 instead of 0.004": lambda c: c["lr"] > 0.005,
    "40 % of the digits augmented instead of 75 %": lambda c: c["augment"]["share"] < 0.5,
    "batch size 64 instead of 128": lambda c: c["batch_size"] < 100,
    "six stem convolutions instead of five, same training time": lambda c: len(c["model"]["stem_channels"]) == 6,
    "primary stride 1 and 16 types instead of 2 and 32": lambda c: c["model"]["primary_stride"] == 1,
}
VERSIONS = (
    "five convolutions, 60 epochs on 55,000 digits",
    "48 epochs on all digits, stronger augmentation, erased squares",
    "milder augmentation of half of the digits, reconstruction weight 0.004",
    "16 instead of 32 channels in the first convolution, 60 epochs",
    "seven convolutions, 50 epochs",
)


# --- Ablations ---------------------------------------------------------------------------------------------------


def ablation(name: str) -> str:
    """One choice at a time against a base, from the most helpful to the most harmful."""
    rows = [Record.from_json(row) for row in read(f"ablation/{name}")["rows"]]
    base, *others = outcomes(rows)
    others.sort(key=lambda o: o.difference)
    return ablation_base(rows, base) + table(
        ["choice", "what it changes", "validation error, %", "difference, points", "seeds", "verdict"],
        (
            (
                f"`{o.name}`",
                o.what,
                f"{o.error_percent:.2f}" + (f" ± {o.std:.2f}" if len(o.seeds) > 1 else ""),
                difference(o),
                str(len(o.seeds)),
                verdict(o),
            )
            for o in others
        ),
    )


def ablation_base(records: list[Record], base: Outcome) -> str:
    """What the base of an ablation is, and its error."""
    record = next(record for record in records if record.method == BASE)
    birth = record.certificate
    deviation = f" ± {base.std:.2f}" if len(base.seeds) > 1 else ""
    return (
        f"Base: preset `{birth.config['preset']}`, {birth.config['epochs']} epochs on "
        f"{birth.training_images:,} images. Validation error {base.error_percent:.2f}{deviation} % on "
        f"{record.outcome['n']:,} images, {len(base.seeds)} seeds.\n\n"
    )


def difference(outcome: Outcome) -> str:
    """A difference from the base, with its interval."""
    half = outcome.half_interval_95
    return f"{round(outcome.difference, 2) or 0.0:+.2f}" + ("" if half is None else f" ± {half:.2f}")


def verdict(outcome: Outcome) -> str:
    if outcome.half_interval_95 is None:
        return "one seed only"
    if not outcome.sure:
        return "no significant difference"
    return "**helps**" if outcome.difference < 0 else "**harms**"


def precision_paper() -> str:
    """The paper's network in float32 and with `--precision bf16`, from its ablation."""
    rows = [Record.from_json(row) for row in read("ablation/paper")["rows"]]
    both = {o.name: o for o in outcomes(rows) if o.name in (BASE, "bf16")}
    errors = {
        name: [r.outcome["error_percent"] for r in rows if r.method == name and r.seed in both["bf16"].seeds]
        for name in both
    }
    return ablation_base(rows, both[BASE]) + table(
        ["precision", "validation error per seed, %", "difference, points"],
        (
            ("fp32", ", ".join(f"{e:.2f}" for e in errors[BASE]), "–"),
            ("bf16", ", ".join(f"{e:.2f}" for e in errors["bf16"]), difference(both["bf16"])),
        ),
    )


# --- Searches ----------------------------------------------------------------------------------------------------


def spaces() -> str:
    """The named search spaces."""
    return table(["name", "fields and values"], [(f"`{n}`", ", ".join(f"`{w}`" for w in s)) for n, s in SPACES.items()])


def searches() -> str:
    """All studies, each with its best trial."""
    rows = []
    for name, budget in STUDIES.items():
        found = read(f"search/{name}")
        complete = [trial for trial in found["trials"] if trial["state"] == "complete"]
        best = min(complete, key=lambda trial: (trial["error_percent"], trial["number"]))
        wrong, n = best["errors"]
        values = ", ".join(f"{field.split('.')[-1]} {plain(value)}" for field, value in best["values"].items())
        counts = found["counts"]
        rows.append(
            (
                name,
                budget,
                f"{counts['complete']} ({counts['pruned']} pruned)",
                f"{best['error_percent']:.2f} % ({wrong} of {n:,})",
                f"{best['epochs']:g}",
                values,
            )
        )
    return table(["study", "time per trial", "trials", "lowest validation error", "epochs", "best trial"], rows)


def plain(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


# --- The history of `best` and `paper-mnist` ---------------------------------------------------------------------


def best_before() -> str:
    """The versions of the best preset, each with the test errors of its seeds."""
    trained = [*(found["seeds"] for found in read("best-before")), card("best-mnist").seeds]
    rows = []
    for what, seeds in zip((*VERSIONS, "three branches, 24 epochs: the preset of today"), trained, strict=True):
        errors = [row["test_error_percent"] for row in seeds]
        rows.append((what, f"{mean_and_std(errors)[0]:.3f} %", ", ".join(f"{error:.2f}" for error in errors)))
    return table(["version", "mean test error", "per seed, %"], rows)


def design() -> str:
    """Eight short trainings in which seven settings changed, each in half of them, and the effect of each."""
    births = read("search/best-design")
    configs = [birth["config"] for birth in births]
    wrong = [round(b["validation_error_percent"] * b["config"]["validation"] / 100) for b in births]
    rows, effects = [], []
    for what, changed in DESIGN.items():
        sides = [[n for n, c in zip(wrong, configs, strict=True) if changed(c) is side] for side in (False, True)]
        effects.append(sum(sides[1]) / len(sides[1]) - sum(sides[0]) / len(sides[0]))
        rows.append((what, *(", ".join(map(str, side)) for side in sides), f"{effects[-1]:+.2f}"))
    chance = student(len(effects)) * math.sqrt(sum(effect**2 for effect in effects) / len(effects))
    return table(["setting", f"errors of {configs[0]['validation']:,} without it", "with it", "effect"], rows) + (
        f"\nIf no setting mattered, 95 % of such effects would lie between −{chance:.0f} and +{chance:.0f}.\n"
    )


def branches() -> str:
    """Errors on a collection of which few digits were seen, without and with branches."""
    found = read("search/best-branches")
    names = {"one": "no branches", "branches": "three branches"}
    rows = []
    for name, row in found.items():
        low, high = (100 * bound for bound in wilson_interval(row["errors"], row["judged"]))
        wrong = f"{100 * row['errors'] / row['judged']:.2f} % ({row['errors']} of {row['judged']:,})"
        birth = row["certificate"]
        rows.append(
            (names[name], f"{birth['parameters']:,}", wrong, f"{low:.2f} to {high:.2f} %", f"{birth['seconds']:.0f} s")
        )
    return table(["network", "parameters", "errors", "95 % interval", "training, two cores"], rows)


def paper_legs() -> str:
    """The stages in which the paper's network was trained before the shipped run."""
    found = read("legs")
    rows = [
        (row["what"], str(row["epochs"]), f"{row['validation']['error_percent']:.2f} %", error_of(row["test"]))
        for row in found["rows"]
    ]
    return table(["training", "epochs", "validation error", "test error (95 % interval)"], rows)


# --- MNIST itself ------------------------------------------------------------------------------------------------


def hard() -> str:
    """Digits that several networks all get wrong."""
    found = read("search/best-hard")
    counts = [network["wrong"] for network in found["networks"]]
    return (
        f"{len(counts)} networks, trained on the same half of the digits, got {', '.join(map(str, counts[:-1]))} and "
        f"{counts[-1]} of the other {found['held_back']:,} wrong. {found['wrong_by_all']} digits are wrong in all "
        f"{len(counts)}; {found['wrong_by_all_in_the_same_way']} of these are mistaken for the same other digit "
        f"each time.\n"
    )


def likeness() -> str:
    """Correlation of the slants of MNIST's digits, by their distance in the file."""
    halves = read("writers")["likeness"]
    apart = list(halves["odd"])
    rows = [
        [f"{half} positions", *(f"{round(halves[half][each], 2) + 0:.2f}" for each in apart)]
        for half in ("odd", "even")
    ]
    return table(["distance within the half", *apart], rows)


def writers() -> str:
    """Errors on the same digits by networks that have seen more or less of their writers."""
    found = read("writers")

    def errors(half: str, key: str) -> str:
        counts = [each[key] for each in found["trainings"] if each["half"] == half]
        return f"{100 * sum(counts) / len(counts) / found['judged']:.2f} % ({', '.join(map(str, counts))})"

    rows = [
        [f"{half} positions", errors(half, "with"), errors(half, "without"), errors(other, "other_half")]
        for half, other in (("odd", "even"), ("even", "odd"))
    ]
    trained, judged = found["trainings"][0]["trained_on"], found["judged"]
    return (
        table(["tested on", "half of the neighbours seen", "as many others seen", "collection never seen"], rows)
        + f"\nPreset `quick`, {trained:,} training digits, {judged:,} test digits, three seeds (errors in brackets).\n"
    )


TABLES: dict[str, Callable[[], str]] = {
    "ablation-paper": lambda: ablation("paper"),
    "ablation-quick": lambda: ablation("quick"),
    "precision-paper": precision_paper,
    "spaces": spaces,
    "searches": searches,
    "best-before": best_before,
    "best-design": design,
    "best-branches": branches,
    "best-hard": hard,
    "legs": paper_legs,
    "likeness": likeness,
    "writers": writers,
}
