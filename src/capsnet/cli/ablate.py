"""capsnet ablate: single changes against a base, paired by seed."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from typing import Annotated

from tyro.conf import Positional, arg

from capsnet import plugins
from capsnet.cli.flags import MaybeStr, Switch, parse
from capsnet.cli.reproduce import Shown
from capsnet.cli.search import validated
from capsnet.cli.train import defaults, take_preset
from capsnet.errors import UserError
from capsnet.experiments import ablation
from capsnet.experiments.core.results import Results
from capsnet.notice import say
from capsnet.terminal import print_table
from capsnet.train.config import Config

Variants = Annotated[Positional[tuple[str, ...]], arg(metavar="VARIANT…", help_behavior_hint="")]


@dataclass(frozen=True)
class Ablate:
    """Change one thing at a time against a base, and compare over several seeds.

    Every variant is trained with the same seeds as the base and compared on validation images; the test set is never
    used. The same command resumes an interrupted ablation, and one with more variants or seeds trains only what is
    new. Results are written to results/ablation.

    Examples:
      capsnet ablate lr=0.003 batch_size=64+epochs=3 --name mine
      capsnet ablate bias leaky one-iteration --preset paper --epochs 2 --train-limit 10000
      capsnet ablate all --preset paper --epochs 2 --train-limit 20000
    """

    variants: Variants = ()
    """Changes to compare: FIELD=VALUE, several at once as FIELD=VALUE+FIELD=VALUE, or a name: reconstruction,
    half-mean, primary-factor, init, bias, constant, exponential, one-cycle, detach, one-iteration, leaky, batch-norm,
    shift, bf16, no-decoder, or all for every name. The names that stand for the authors' code are also trained
    together."""
    name: MaybeStr = None
    """Name of the ablation (default: the preset's)."""
    seeds: int = 3
    """Repetitions per variant, with consecutive seeds."""
    json: Switch = False
    """Print the results as JSON."""
    config: Annotated[Config, arg(name="")] = field(default_factory=Config)


def ablate(argv: list[str]) -> int:
    preset, rest = take_preset(argv)
    flags = parse(Ablate, "ablate", rest, default=Ablate(config=validated(defaults(preset, rest))))
    chosen = ablation.chosen(flags.variants, flags.config)
    plan = ablation.Ablation(flags.name or flags.config.preset, flags.config, chosen, flags.seeds)
    if idle := [name for name in chosen if name not in plan.configs()]:
        say(f"these change nothing, or the same as another variant: {', '.join(idle)}")
    try:
        done = ablation.conduct(plan, Shown(plan, f"preset {plan.base.preset}"))
    except KeyboardInterrupt:
        say(f"stopped; resume with: {plugins.command('ablate', *argv)}")
        return 130
    show(plan, done.results, flags.json)
    if done.failed:
        failed = "; ".join(f"{name} failed: {why.rstrip('.')}" for name, why in done.failed.items())
        raise UserError(f"the other trainings are in {done.results.path}, but {failed}.")
    return 0


def show(plan: ablation.Ablation, results: Results, as_json: bool) -> None:
    """Print the table of an ablation, and draw it."""
    found = ablation.outcomes(results.rows)
    if as_json:
        rows = [row.to_json() for row in results.rows]
        print(json.dumps({"ablation": plan.name, "outcomes": [asdict(each) for each in found], "rows": rows}))
        return
    table = ablation.table(found)
    print_table(table.columns, table.rows, title=f"Variants of {plan.base.preset}, on validation images")
    print("\n".join([*table.notes, str(results.path)]))
    if found and find_spec("matplotlib"):
        print(ablation.draw(plan, found))
