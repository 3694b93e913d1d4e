"""capsnet search: hyperparameter search on validation images."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated

from tyro.conf import arg

from capsnet import plugins
from capsnet.cli.flags import MaybeInt, MaybeStr, Switch, parse
from capsnet.cli.train import defaults, take_preset
from capsnet.data.registry import DEFAULT_VALIDATION
from capsnet.errors import UserError
from capsnet.notice import say
from capsnet.search.space import combinations, read
from capsnet.search.workers import Crew, interruptible, worker_of
from capsnet.terminal import LOG_SECONDS, console, print_table
from capsnet.timing import clock
from capsnet.train.config import Config

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial

    from capsnet.search.study import Budget, Task

Words = Annotated[tuple[str, ...], arg(metavar="FIELD=VALUES…", help_behavior_hint="")]
UNLIMITED = 10**9  # trials, where only the time counts


@dataclass(frozen=True)
class Search:
    """Search for better settings by training many networks for a short time.

    Trials are compared on validation images; the test set is never used. The same command resumes an interrupted
    search, and joins it when run on another machine with the same --storage. Results are written to results/search;
    the network of the best trial is kept in runs/search. To compare single changes over several seeds, use
    capsnet ablate.

    Examples:
      capsnet search --space training augmentation --epochs 2 --trials 40 --workers 2
      capsnet search --space compact lr=0.002..0.02:log --minutes 1 --hours 8 --study mine
      capsnet search --space iterations=1,2,3 decoder=none,512-1024 --train-limit 10000
      capsnet search --report --study mine                    report on an existing study
    """

    space: Words = ()
    """What to search: FIELD=A,B,C, FIELD=LOW..HIGH or FIELD=LOW..HIGH:log, or the names compact, training,
    augmentation, routing and loss, each short for several fields."""
    study: MaybeStr = None
    """Name of the study (default: search)."""
    storage: MaybeStr = None
    """Where trials are stored: a file name or any Optuna storage URL (default: runs/search/STUDY.db)."""
    trials: MaybeInt = None
    """Stop when the study has this many trials (default: 50, or unlimited with --hours). A space of at most 50
    combinations is searched exhaustively."""
    hours: float = 0.0
    """Start no trial that would end after this many hours; 0 for no limit."""
    minutes: float = 0.0
    """Training time per trial, from which its epochs follow; 0 trains for --epochs."""
    workers: int = 1
    """Number of trials to train at the same time; they share the cores."""
    pruner: str = "median"
    """median: stop a trial in its second half if it is worse than the median of at least five others at the same
    point. none: train every trial to its end."""
    grace: int = 60
    """Seconds without a heartbeat after which a worker counts as dead and its trial is queued again."""
    report: Switch = False
    """Only report on an existing study."""
    json: Switch = False
    """Print the results as JSON."""
    config: Annotated[Config, arg(name="")] = field(default_factory=Config)


def search(argv: list[str]) -> int:
    preset, rest = take_preset(argv)
    flags = parse(Search, "search", rest, default=Search(config=validated(defaults(preset, rest))))
    try:
        import optuna  # noqa: F401
    except ImportError:
        raise UserError("a search needs Optuna: pip install 'capsnet[search]'.") from None
    return conduct(flags, argv)


def validated(base: Config) -> Config:
    """The preset with validation images, on which trainings are compared."""
    return replace(base, validation=base.validation or DEFAULT_VALIDATION, stop_at=0.0)


def conduct(flags: Search, argv: list[str]) -> int:
    """Open the study, let workers run its trials, and report."""
    from capsnet.search import report
    from capsnet.search.storage import storage_url, without_password
    from capsnet.search.study import Task, load_study, open_study, work

    name = flags.study or "search"
    url = storage_url(flags.storage or "", name)
    if flags.report:
        return show(load_study(name, url), url, flags.json)
    task = Task(read(flags.space, flags.config), flags.config, flags.minutes)
    budget = budget_of(flags, task)
    report.check_place(name, without_password(url))
    study = open_study(name, url, task, flags.pruner, flags.grace)
    with interruptible():
        if worker := worker_of():
            work(study, url, task, budget, flags.grace, stop=lambda: os.getppid() != worker[0])
            return 0
        manage(study, url, budget, flags, argv)
    return show(study, url, flags.json)


def budget_of(flags: Search, task: Task) -> Budget:
    """How many trials, and until when; a worker shares the deadline of its parent."""
    from capsnet.search.study import Budget

    trials = flags.trials if flags.trials is not None else UNLIMITED if flags.hours else 50
    for name, value, least in (("trials", trials, 1), ("workers", flags.workers, 1), ("hours", flags.hours, 0)):
        if not least <= value < math.inf:
            raise UserError(f"--{name} should be at least {least}, not {value}.")
    if flags.hours and 60 * flags.hours <= flags.minutes:
        raise UserError(f"no trial of {flags.minutes:g} minutes fits into {flags.hours:g} hours: raise --hours.")
    left = worker[1] - time.time() if (worker := worker_of()) else 3600 * flags.hours or math.inf
    return Budget(min(trials, len(combinations(task.space, task.base)) or trials), time.monotonic() + left)


def manage(study: Study, url: str, budget: Budget, flags: Search, argv: list[str]) -> None:
    """Start workers and show progress until the last one has ended."""
    from capsnet.search.storage import storage_errors, without_password

    again = plugins.command("search", *(without_password(word) if "://" in word else word for word in argv))
    crew = Crew(argv, min(flags.workers, budget.trials), budget.until, say)
    try:
        with storage_errors(url):
            follow(study, budget, crew)
            spent = budget.spent(study.get_trials(deepcopy=False), flags.minutes)
    except BaseException as stopped:
        with suppress(KeyboardInterrupt):  # `timeout` sends its signal twice at once
            say("stopping after the current step …")
        crew.stop()
        if isinstance(stopped, KeyboardInterrupt):
            say(f"stopped; resume with: {again}")
        raise
    if not spent:
        raise UserError(f"{crew.last_words or 'the workers were killed.'} When that is fixed, resume with: {again}")


def follow(study: Study, budget: Budget, crew: Crew) -> None:
    """Show progress until every worker has ended."""
    logged = time.monotonic()
    with console.status("starting") as live:
        while crew.look_after():
            time.sleep(0.5)
            due = time.monotonic() > logged + LOG_SECONDS
            if console.is_terminal or due:
                text = progress(study.get_trials(deepcopy=False), budget, len(crew.workers))
                live.update(text)
            if due and not console.is_terminal:
                logged = time.monotonic()
                say(text)


def progress(trials: Sequence[FrozenTrial], budget: Budget, workers: int) -> str:
    """A search on one line; the time left follows from the finished trials."""
    from capsnet.search.study import ended, leader

    done = ended(trials)
    best, states = leader(done), [trial.state.name for trial in done]
    took = [trial.duration.total_seconds() for trial in done if trial.duration]
    left = budget.until - time.monotonic()
    if took:
        left = min(left, (budget.trials - len(done)) * sum(took) / len(took) / max(workers, 1))
    return (
        f"{len(done)}{f' of {budget.trials}' if budget.trials < UNLIMITED else ''} trials "
        f"({states.count('PRUNED')} pruned, {states.count('FAIL')} failed)"
        f"{f', best {best.value:.2f} %' if best else ''}{f', about {clock(max(left, 0.0))} left' if left < 1e7 else ''}"
    )


def show(study: Study, url: str, as_json: bool) -> int:
    """Print the results, then write the report: if that fails, they have been seen."""
    from capsnet.search import report
    from capsnet.search.storage import storage_errors, without_password

    with storage_errors(url):
        found = report.summary(study, without_password(url))
    if as_json:
        print(json.dumps(found))
        report.write(found)
    else:
        for title, each in report.tables(found).items():
            print_table(each.columns, each.rows, title=title)
            print()
        print(report.counted(found))
        for what, command in report.next_steps(found).items():
            print(f"{what}:\n  {command}")
        print("\n".join(map(str, report.write(found))))
    return int(found["counts"]["fail"] > 0 and found["best"] is None)
