"""Write the tables of README.md and docs/*.md from results/*.json, between the markers that name them.

    python docs/generate.py           writes them
    python docs/generate.py --check   exits with 1 if any is not what the JSON files say

A block looks like this, and whatever stands between its markers is replaced:

    <!-- table: demo -->
    <!-- end -->
"""

from __future__ import annotations

import itertools
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from capsnet.config import PRESETS, Config, from_dict, get_preset
from capsnet.evaluation import mean_and_std, wilson_interval
from capsnet.experiments.conduct import same_training
from capsnet.search.ablation import BASE, outcomes, student
from capsnet.search.report import best_first, command
from capsnet.search.report import table as trial_table
from capsnet.search.space import SPACES, train_flags

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
PRECISIONS = {
    "half": "half precision",
    "stem-full": "half precision, the stem in full",
    "mixed": "the decoder in half precision, all else in full",
}
RATIOS = {
    "train_ratio_fp32": "training, `fast` beside `public`",
    "train_ratio_bf16": "training, `fast-bf16` beside `public`",
    "train_ratio_fp32_same_allocator": "training, `fast` beside `plain`",
    "train_ratio_bf16_same_allocator": "training, `fast-bf16` beside `plain`",
    "inference_ratio_batch128": "inference of 128 images, `fast` beside `public`",
    "inference_ratio_batch128_same_allocator": "inference of 128 images, `fast` beside `plain`",
    "inference_ratio_batch1": "inference of one image, `fast` beside `plain`",
}

DESIGN: dict[str, Callable[[Config], bool]] = {
    "reconstruction 0.003 instead of 0.0005": lambda c: c.loss.reconstruction > 0.001,
    "margins 0.95 and 0.05 instead of 0.9 and 0.1": lambda c: c.loss.present > 0.9,
    "learning rate 0.008 instead of 0.004": lambda c: c.lr > 0.005,
    "40 % of the digits changed instead of 75 %": lambda c: c.augment.share < 0.5,
    "batches of 64 instead of 128": lambda c: c.batch_size < 100,
    "stem `deepest`, for as long: 10.5 epochs instead of 16": lambda c: len(c.model.stem_channels) == 6,
    "primary stride 1 and 16 types instead of 2 and 32: a finer grid": lambda c: c.model.primary_stride == 1,
}


def read(name: str) -> Any:
    return json.loads((ROOT / "results" / f"{name}.json").read_text())


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def demo(name: str = "quick") -> str:
    """What `make demo` reached (or another training of all digits): one row for each seed that was run."""
    rows = []
    for run in read(name):
        test, birth = run["test"], run["certificate"]
        low, high = test["error_percent_interval_95"]
        rows.append(
            (
                str(birth["config"]["seed"]),
                f"{test['error_percent']:.2f} % ({test['errors']} of {test['n']:,})",
                f"{low:.2f} to {high:.2f} %",
                str(birth["config"]["epochs"]),
                f"{birth['seconds']:.0f} s",
            )
        )
    return table(["seed", "test error", "95 % interval", "epochs", "training time, two cores"], rows)


def summary() -> str:
    """The README's table: what is promised, what was measured."""
    runs = read("quick")
    errors = [run["test"]["error_percent"] for run in runs]
    seconds = [run["certificate"]["seconds"] for run in runs]
    config = runs[0]["certificate"]["config"]
    card = read("models/best-mnist")
    lowest = [row["test_error_percent"] for row in card["seeds"]]
    bench = read("bench")
    public = bench["train_seconds"]["public"]["median"]
    fast = bench["train_seconds"]["fast"]["median"]
    rows = [
        (
            f"`quick` on MNIST, {len(runs)} seeds, {config['epochs']} epochs",
            f"{sum(errors) / len(errors):.2f} % mean test error ({min(errors):.2f} to {max(errors):.2f} %)",
            f"{sum(seconds) / len(seconds):.0f} s of training",
        ),
        (
            f"`best` on MNIST, {len(lowest)} seeds, {card['epochs']} epochs",
            f"{sum(lowest) / len(lowest):.2f} % mean test error ({min(lowest):.2f} to {max(lowest):.2f} %)",
            f"about {minutes_alone(card['epochs']):.0f} minutes of training, by the time of a step",
        ),
        (
            "paper's network, a training step of 128 images",
            f"{bench['train_ratio_fp32']:.1f}× as fast as public-style code",
            f"{fast:.2f} s instead of {public:.2f} s",
        ),
        (
            "the same, beside our own plain version",
            f"{bench['train_ratio_fp32_same_allocator']:.1f}× as fast",
            f"{bench['peak_mb_fast']:,} MB instead of {bench['peak_mb_plain']:,} MB",
        ),
        (
            "paper's network, inference, 128 images",
            f"{bench['inference_ratio_batch128']:.1f}× as fast as public-style code",
            f"{bench['inference_images_per_second']['fast']:,.0f} images/s",
        ),
    ]
    return table(["what", "result", "cost on two cores"], rows)


def bench(name: str) -> str:
    """The sides of a benchmark, and the ratios between them."""
    result = read(name)
    sides = table(
        ["side", "training step, s", "training, images/s", "inference, images/s", "one image, ms", "peak memory, MB"],
        (
            (
                side,
                f"{seconds['median']:.3f} ({seconds['quartile_low']:.3f} to {seconds['quartile_high']:.3f})",
                f"{result['train_images_per_second'][side]:,.0f}",
                f"{result['inference_images_per_second'][side]:,.0f}",
                f"{1e3 * result['single_image_seconds'][side]['median']:.1f}",
                f"{result['peak_mb'][side]:,}",
            )
            for side, seconds in result["train_seconds"].items()
        ),
    )
    ratios = table(
        ["times as fast", "", "measured"],
        ((what, f"`{key}`", f"{result[key]:.2f}") for key, what in RATIOS.items() if key in result),
    )
    where = result["certificate"]
    return f"{result['case']}; {where['cpu']}, {where['machine']}, torch {where['torch']}\n\n{sides}\n{ratios}"


def bench_twice() -> str:
    """The ratios of the last two runs of the same code: how far a shared machine moves them."""
    last, before = read("bench"), read("bench-before")
    rows = [(what, f"{last[k]:.2f}", f"{before[k]:.2f}") for k, what in RATIOS.items() if k in last and k in before]
    return table(["times as fast", "last run", "run before"], rows)


def breakdown() -> str:
    """Where a training step's time goes."""
    result = read("bench")
    parts = result["breakdown_ms"]
    rows = [(part, f"{parts['plain'][part]:.0f}", f"{parts['fast'][part]:.0f}") for part in parts["plain"]]
    share = result["share_of_gemm_peak"]
    return table(["forward + backward, ms", "plain", "fast"], rows) + (
        f"\nThe machine's own best float32 matrix product in the same run: {result['gemm_gflops']:.0f} GFLOP/s. "
        f"Counted by the arithmetic of the paper's equations, the plain step uses {100 * share['plain']:.0f} % of it "
        f"and the fast one {100 * share['fast']:.0f} %.\n"
    )


def presets() -> str:
    """What the fast path means for an epoch, and for reading digits, of the quick and the best preset."""
    rows = []
    for name in ("quick", "best"):
        result = read(f"bench-{name}")
        steps = 60_000 // result["batch"]
        for side, seconds in result["train_seconds"].items():
            step, images = seconds["median"], f"{result['inference_images_per_second'][side]:,.0f}"
            single = f"{1e3 * result['single_image_seconds'][side]['median']:.1f} ms"
            rows.append((f"`{name}`", f"`{side}`", f"{1e3 * step:.0f} ms", f"{steps * step:.0f} s", images, single))
    columns = ["preset", "side", "a step of 128 images", f"an epoch, {steps} steps", "images/s read", "one image"]
    return f"{result['certificate']['cpu']}, {result['certificate']['machine']}\n\n" + table(columns, rows)


def sweep() -> str:
    """How cost grows, one quantity at a time."""
    rows = []
    for row in read("sweep")["sweep"]:
        plain, fast = row["seconds"]["plain"], row["seconds"]["fast"]
        memory = f"{row['peak_mb']['plain']:,} → {row['peak_mb']['fast']:,}"
        rows.append((row["quantity"], row["value"], f"{plain:.3f}", f"{fast:.3f}", f"{plain / fast:.2f}", memory))
    return table(["quantity", "value", "plain, s", "fast, s", "ratio", "peak MB"], rows)


def precision() -> str:
    """Short trainings in float32 and bfloat16, seed by seed, on validation."""
    runs = read("precision")
    rows = []
    for kind in ("fp32", "bf16"):
        errors, mean, std = (runs[kind][key] for key in ("errors", "mean", "std"))
        rows.append((kind, ", ".join(f"{error:.2f}" for error in errors), f"{mean:.3f} ± {std:.3f}"))
    how = "emulated, on a processor without it" if runs["emulated"] else "in hardware"
    note = f"{runs['epochs']} epoch, {runs['data']}; bfloat16 {how}.\n\n"
    return note + table(["precision", "validation error of each seed, %", "mean ± std, %"], rows)


def tried() -> str:
    """What did not help, as it was written down."""
    notes = read("tried")
    rows = [(row["what"], row["measured"], row["why_not"]) for row in notes["tried"]]
    return f"{notes['note']}\n\n{table(['what', 'measured', 'why it is not here'], rows)}"


def cards() -> list[dict[str, Any]]:
    """What docs/ship.py wrote about each model that comes with the package."""
    return [json.loads(path.read_text()) for path in sorted((ROOT / "results" / "models").glob("*.json"))]


def error_of(found: dict[str, Any]) -> str:
    low, high = found["error_percent_interval_95"]
    return f"{found['error_percent']:.2f} % ({found['errors']:,} of {found['n']:,}; {low:.2f} to {high:.2f} %)"


def models(page: str = "") -> str:
    """The models that come with the package, one a row; each links to its card on a page."""
    rows = [
        (
            f"[`{card['name']}`]({page}#{card['name']})",
            card["title"].rstrip("."),
            f"{card['parameters']:,}",
            error_of(card["test"]),
            f"{card['weights']['bytes'] / 1e6:.1f} MB",
        )
        for card in cards()
    ]
    return table(["name", "what", "parameters", "test error (95 % interval)", "size"], rows)


def model_cards() -> str:
    """A section for each model."""
    return "\n".join(map(model_card, cards()))


def model_card(card: dict[str, Any]) -> str:
    """What it is, how it came about, how good it is and what it is not good at."""
    channels, height, width = card["image_shape"]
    birth, weights, trained = card["certificate"], card["weights"], by_its_preset(card["config"])
    held_back = error_of(card["validation"]) if card["validation"] else "none held back: it was trained on all of them"
    facts = {
        "data": f"{card['data']}, {card['training_images']:,} training images",
        "input": f"{height}×{width}, {'grey' if channels == 1 else 'colour'}",
        "classes": ", ".join(card["classes"]),
        "parameters": f"{card['parameters']:,}",
        "training": f"preset `{trained.preset}`, {card['epochs']} epochs{in_legs(card)}, "
        f"{card['training_seconds']:,.0f} s ({birth['machine']}), torch {birth['torch']}",
        "validation error": held_back,
        "test error": error_of(card["test"]),
        "seed": f"{card['seed']} ({card['chosen_by']})",
        **({} if card["legs"] else {"command": f"`{command(trained)}`"}),
        "weights": f"{PRECISIONS[weights['precision']]}, {weights['bytes'] / 1e6:.1f} MB",
        "sha256": f"`{weights['sha256']}`",
    }
    listed = "".join(f"- {weakness}\n" for weakness in card["weaknesses"])
    return (
        f"## {card['name']}\n\n{card['title']}\n\n```\ncapsnet predict {card['name']} photo.png\n```\n\n"
        f"{table(['', ''], facts.items())}\nWhat it is not good at:\n\n{listed}\n{seeds_table(card['seeds'])}"
    )


def by_its_preset(config: dict[str, Any]) -> Config:
    """A training's config under the name of the preset that it equals, where one does."""
    trained = from_dict(config)
    alike = (name for name in PRESETS if same_training(config, replace(get_preset(name), seed=trained.seed)))
    return replace(trained, preset=next(alike, trained.preset))


def in_legs(card: dict[str, Any]) -> str:
    """How the epochs were divided, where a training went on from another's weights."""
    epochs = [str(leg["epochs"]) for leg in card["legs"]]
    return f" in legs of {' + '.join(epochs)}, each with fresh optimiser moments" if epochs else ""


def fine_tuning() -> str:
    """Sixty images of one's own, with a trained model as their beginning and without."""
    found = read("fine-tuning")
    rows = []
    for row in found["rows"]:
        errors = [", ".join(f"{error:.1f}" for error in row[side]) for side in ("fresh", "begun")]
        means = [f"{sum(row[side]) / len(row[side]):.1f} %" for side in ("fresh", "begun")]
        rows.append((row["what"], *(f"{mean} ({each})" for mean, each in zip(means, errors, strict=True))))
    note = (
        f"Measured on {found['images']} images, equally many of each of six classes (or as the row says), tested on "
        f"{found['test_images']} others: mean test error (and that of each seed), by "
        f"[docs/finetune.py](finetune.py).\n\n"
    )
    return note + table(["images", "from the beginning", f"`--init {found['init']}`"], rows)


def seeds_table(seeds: list[dict[str, Any]]) -> str:
    """Every seed that was trained, the one that is shipped among them."""
    rows = []
    for row in seeds:
        held_back = row["validation_error_percent"]
        judged = "–" if held_back is None else f"{held_back:.2f} %"
        shipped = "shipped" if row["shipped"] else ""
        rows.append(
            (str(row["seed"]), judged, f"{row['test_error_percent']:.2f} %", f"{row['seconds']:,.0f} s", shipped)
        )
    return table(["seed", "validation error", "test error", "training time", ""], rows)


def minutes_alone(epochs: int) -> float:
    """How long the best preset trains with two cores of its own, by the time of a step."""
    steps = epochs * (60_000 // get_preset("best").batch_size)
    return float(steps * read("search/best-stems")["seconds_a_step"]["branches"] / 60)


def best() -> str:
    """Every seed of the best preset, and their mean."""
    card, before = read("models/best-mnist"), read("best-before")[-1]
    mean, deviation = mean_and_std([row["test_error_percent"] for row in card["seeds"]])
    former, _ = mean_and_std([row["test_error_percent"] for row in before["seeds"]])
    return seeds_table(card["seeds"]) + (
        f"\nMean test error of {len(card['seeds'])} seeds: {mean:.3f} %, deviation {deviation:.3f} (the paper reports "
        f"0.25 % for its own network, with shifts alone, over three trials). They were trained "
        f"at the same time, each on one thread of two cores; one alone on both takes about "
        f"{minutes_alone(card['epochs']):.0f} minutes, by the time of a step. The `best` before had {former:.3f} %.\n"
    )


def best_before() -> str:
    """The trainings that were the best preset's before, each by what it has other than today's."""
    rows = []
    for card in read("best-before"):
        flags = train_flags(from_dict(card["config"]), get_preset("best"))
        held_back = "–" if card["validation"] is None else f"{card['validation']['error_percent']:.2f} %"
        errors = [row["test_error_percent"] for row in card["seeds"]]
        each, mean = ", ".join(f"{error:.2f}" for error in errors), mean_and_std(errors)[0]
        rows.append((f"`{' '.join(flags)}`", held_back, f"{mean:.3f} % ({each})" if errors[1:] else f"{each} %"))
    return table(["settings", "validation error", "test error, each seed's in brackets"], rows)


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


def stems() -> str:
    """What a step takes with each of the stems that the best preset has had."""
    steps = read("search/best-stems")["seconds_a_step"]
    five, smaller, seven, branches = (steps[name] for name in ("five", "smaller-first", "seven", "branches"))
    return (
        f"A step with 16 channels takes {100 * smaller / five:.0f} % of the time that it takes with 32; one with seven "
        f"convolutions (below) takes {100 * seven / smaller:.0f} % of that with 16 channels and five, and one with "
        f"three branches ([further below](#branches)) {branches / seven:.1f} times as long as that "
        f"(`python docs/stems.py`, two cores).\n"
    )


def between() -> str:
    """What bfloat16 between the layers of a stem saves."""
    steps = read("search/best-stems")["seconds_a_step"]
    half, full = steps["branches"], steps["branches-float32"]
    return (
        f"A training step of `best` takes {1000 * half:.0f} ms with bfloat16 between the layers of its stem and "
        f"{1000 * full:.0f} ms with float32, {full / half:.2f} times as long (`python docs/stems.py`, two cores).\n"
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


def lab() -> str:
    """How fast the Lab's page answers, measured in the browser."""
    result = read("lab")
    rows = [
        (what, f"{result[key]['median']:.1f} ms", f"{result[key]['p95']:.1f} ms", str(result[key]["n"]))
        for what, key in (
            ("a pose slider moves until the reconstruction is painted", "slider_to_painted_ms"),
            ("the input changes until the network's answer is there", "input_to_answer_ms"),
        )
    ]
    return table([f"`{result['model']}`, from", "median", "95 % within", "times"], rows)


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


def spaces() -> str:
    """What each name of a space stands for."""
    return table(["name", "fields and values"], [(f"`{n}`", ", ".join(f"`{w}`" for w in s)) for n, s in SPACES.items()])


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


def paper_legs() -> str:
    """A training of the paper's network that was carried on in other ways."""
    found = read("legs")
    columns = ["training", "epochs", "validation error", "test error", "of the first layer's output, zero"]
    rows = [
        (
            row["what"],
            str(row["epochs"]),
            f"{row['validation']['error_percent']:.2f} %",
            error_of(row["test"]),
            f"{row['stem_zero_percent']:.0f} %",
        )
        for row in found["rows"]
    ]
    return f"{found['note']}\n\n{table(columns, rows)}"


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


TABLES: dict[str, Callable[[], str]] = {
    "summary": summary,
    "demo": demo,
    "bench": lambda: bench("bench"),
    "bench-twice": bench_twice,
    "bench-36": lambda: bench("bench-36"),
    "bench-bf16": lambda: bench("bench-bf16"),
    "breakdown": breakdown,
    "presets": presets,
    "sweep": sweep,
    "precision": precision,
    "precision-paper": precision_paper,
    "ablation-paper": lambda: ablation("paper"),
    "spaces": spaces,
    "ablation-quick": lambda: ablation("quick"),
    "search-minute": lambda: search("minute"),
    "search-hour": lambda: search("hour"),
    "search-hour-two-cores": lambda: search("hour-two-cores"),
    "search-hour-branches": lambda: search("hour-branches") + on_two_cores("hour-branches"),
    "minute-best": lambda: demo("search/minute-best"),
    "search-five-minutes": lambda: search("five-minutes"),
    "best-candidates": candidates,
    "best-design": design,
    "best-hard": hard,
    "best-stems": stems,
    "best-branches": branches,
    "between": between,
    "likeness": likeness,
    "writers": writers,
    "legs": paper_legs,
    "best": best,
    "best-before": best_before,
    "tried": tried,
    "models": models,
    "models-linked": lambda: models("docs/models.md"),
    "model-cards": model_cards,
    "fine-tuning": fine_tuning,
    "lab": lab,
}


def filled(text: str) -> str:
    """A page with every block written anew."""
    return BLOCK.sub(lambda block: block[1] + TABLES[block[2]]() + block[3], text)


def main(check: bool) -> int:
    stale = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        before = page.read_text()
        after = filled(before)
        if after != before:
            stale.append(page.name)
            if not check:
                page.write_text(after)
    if stale:
        print(f"{'not up to date' if check else 'written'}: {', '.join(stale)}")
    return 1 if stale and check else 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv))
