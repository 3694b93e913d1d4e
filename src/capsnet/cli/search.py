"""capsnet search: hyper-parameter search on validation images, and ablations."""

from __future__ import annotations

import json
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from heapq import heapify, heapreplace
from importlib.util import find_spec
from typing import IO, TYPE_CHECKING, Annotated, Any

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text
from tyro.conf import arg

from capsnet import training
from capsnet.cli.flags import MaybeInt, MaybeStr, Switch, parse
from capsnet.cli.reproduce import RowBar, Shown
from capsnet.cli.train import defaults, take_preset
from capsnet.config import Config
from capsnet.data.datasets import DEFAULT_VALIDATION
from capsnet.errors import UserError
from capsnet.experiments.plan import Row
from capsnet.experiments.results import Results
from capsnet.search import ablation
from capsnet.search.space import combinations, read
from capsnet.terminal import LOG_SECONDS, clock, console, print_table, say

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial

    from capsnet.search.study import Budget, Task

Words = Annotated[tuple[str, ...], arg(metavar="FIELD=VALUES…", help_behavior_hint="")]
Suspects = Annotated[tuple[str, ...], arg(metavar="CHOICE…", help_behavior_hint="")]
INTERRUPTED = 130  # how a worker ends that was told to, by someone else than us
MOST_REPLACED = 20  # workers in place of killed ones: they may all be killed for the same reason
PARENT = "CAPSNET_SEARCH_PARENT"  # tells a worker which process to end with
UNTIL = "CAPSNET_SEARCH_UNTIL"  # and when, by the clock on the wall: one that is replaced gets no more time


@dataclass(frozen=True)
class Search:
    """Search for better settings by training many networks for a short time, or ablate choices one at a time.

    Everything is judged on validation images; the test set is never looked at. Interrupted or killed at any moment, the
    same command goes on; the same command on another machine with the same --storage helps. Results go to
    results/search and results/ablation; the best trial's network stays in runs/search.

    Examples:
      capsnet search --space training augmentation --epochs 2 --trials 40 --workers 2
      capsnet search --space compact lr=0.002..0.02:log --minutes 1 --hours 8 --study mine
      capsnet search --space model.iterations=1,2,3 stem=small,quick --train-limit 10000
      capsnet search --report --study mine                  what is known so far
      capsnet search --ablate suspects --preset paper --epochs 2 --train-limit 10000 --study short
      capsnet search --ablate lr=0.003 batch_size=64+epochs=3 --study mine   your own choices, over three seeds
    """

    space: Words = ()
    """What to search: FIELD=A,B,C or FIELD=LOW..HIGH or FIELD=LOW..HIGH:log, or compact, training, augmentation,
    routing, loss. The convolutions go together as stem=A,B of paper, small, quick, wide, deep, deeper, deepest, seven,
    branched."""
    study: MaybeStr = None
    """Its name (default: search; of an ablation, its preset)."""
    storage: MaybeStr = None
    """Where trials are kept: a file's name or any Optuna storage URL (default: runs/search/STUDY.db)."""
    trials: MaybeInt = None
    """Stop when the study has so many trials (default: 50, or any number with --hours). A space of 50 combinations or
    fewer is tried as a whole, each of them once."""
    hours: float = 0.0
    """Begin no trial after so many hours, nor one whose --minutes would end later; 0 for no limit."""
    minutes: float = 0.0
    """Training time of each trial: it measures a few of its steps, then takes as many epochs as fit. 0 trains for
    --epochs."""
    workers: int = 1
    """Trainings at a time; they share the cores."""
    pruner: str = "median"
    """End trials early that others have left behind: median (a trial in its second half, where half of the others were
    better at that point, of five at least), or none."""
    grace: int = 60
    """Seconds after which a silent worker counts as dead, and its trial goes to another."""
    report: Switch = False
    """Only report on a study that is there."""
    work: Switch = False
    """Only work, without table and report: what --workers starts."""
    ablate: Suspects = ()
    """Instead of a search: train the base and each of these choices, and where several are of the authors' code, those
    together. Your own as FIELD=VALUE, several at once as FIELD=VALUE+FIELD=VALUE; or by name: reconstruction,
    half-mean, primary-factor, init, bias, constant, exponential, one-cycle, detach, one-iteration, leaky, batch-norm,
    shift, bf16, no-decoder, and suspects for all of these."""
    seeds: MaybeInt = None
    """With --ablate: how often each is trained (default: 3)."""
    json: Switch = False
    """Print the outcome as JSON."""
    config: Annotated[Config, arg(name="")] = field(default_factory=Config)


def search(argv: list[str]) -> int:
    name, rest = take_preset(argv)
    base = defaults(name, rest)
    base = replace(base, validation=base.validation or DEFAULT_VALIDATION, stop_at=0.0)
    flags = parse(Search, "search", rest, default=Search(config=base))
    if "--ablate" in rest and not flags.ablate:
        raise UserError("--ablate takes choices, such as lr=0.003 or bias, or suspects for all that have a name.")
    if flags.ablate:
        refuse_what_only_a_search_has(flags)
        return ablate(flags, argv)
    if flags.seeds is not None:
        raise UserError("--seeds belongs to --ablate: a search trains each trial once, with --seed.")
    need_optuna()
    return look_back(flags) if flags.report else look(flags, argv)


def refuse_what_only_a_search_has(flags: Search) -> None:
    """An ablation trains each choice once a seed, for --epochs: other limits would be silently without effect."""
    for name in ("space", "storage", "trials", "hours", "minutes", "report"):
        if getattr(flags, name):
            raise UserError(f"--{name} belongs to a search and not to --ablate: leave one of the two out.")
    for name in ("workers", "pruner", "grace"):
        if getattr(flags, name) != getattr(Search, name):
            raise UserError(f"an ablation trains one network after the other, each to its end: leave --{name} out.")


def need_optuna() -> None:
    try:
        import optuna  # noqa: F401
    except ImportError:
        raise UserError("a search needs Optuna: pip install 'capsnet[search]'.") from None


# --- Search ----------------------------------------------------------------------------------------------------


def look(flags: Search, argv: list[str]) -> int:
    """Open the study, work on it or have workers do so, and report."""
    from capsnet.search import report
    from capsnet.search.storage import shown, storage_url
    from capsnet.search.study import Budget, Task, open_study, work

    task = Task(read(flags.space, flags.config), flags.config, flags.minutes)
    trials, until = limits(flags)
    budget = Budget(min(trials, len(combinations(task.space)) or trials), until)
    url = storage_url(flags.storage or "", flags.study or "search")
    report.check_place(flags.study or "search", shown(url))
    study = open_study(flags.study or "search", url, task, flags.pruner, flags.grace)
    with interruptible():
        if flags.work:
            parent = os.environ.get(PARENT, "")
            work(study, url, task, budget, flags.grace, lambda: bool(parent) and str(os.getppid()) != parent)
            return 0
        watch(study, url, task, budget, flags, argv)
    return show(study, url, flags.json)


def limits(flags: Search) -> tuple[int, float]:
    """Trials, and the time to stop at."""
    trials = flags.trials if flags.trials is not None else 10**9 if flags.hours else 50
    for name, value, least in (("trials", trials, 1), ("workers", flags.workers, 1), ("hours", flags.hours, 0)):
        if not least <= value < math.inf:
            raise UserError(f"--{name} should be {least} or more and is {value}.")
    if flags.hours and 60 * flags.hours <= flags.minutes:
        raise UserError(f"not one trial of {flags.minutes:g} minutes fits into {flags.hours:g} hours: raise --hours.")
    left = float(os.environ.get(UNTIL, math.inf)) - time.time()
    return trials, time.monotonic() + min(left, 3600 * flags.hours or math.inf)


def watch(study: Study, url: str, task: Task, budget: Budget, flags: Search, argv: list[str]) -> None:
    """Start the workers and show how far they are until the last has ended."""
    from capsnet.search.storage import in_storage, shown
    from capsnet.search.study import ended, try_again

    secret = flags.storage or ""
    told = [word.replace(secret, shown(url)) if "://" in secret else word for word in argv]  # without a password
    again = f"go on with: capsnet search {shlex.join(told)}"
    if failed := try_again(study, url, budget.trials):
        which = f"the {failed} trials of this study have all failed; they are"
        say(f"{which if failed > 1 else 'the one trial of this study has failed; it is'} tried again")
    with in_storage(url):
        there = len(ended(study.get_trials(deepcopy=False)))
    if there >= budget.trials:
        say(f"the study has as many trials already as are asked for: {there}")
    crew = Crew(argv, flags.workers, budget.until, max(1, budget.trials - there))
    try:
        follow(study, url, task, budget, crew)
        with in_storage(url):
            spent = budget.spent(study.get_trials(deepcopy=False), task.minutes)
    except KeyboardInterrupt:
        with suppress(KeyboardInterrupt):  # `timeout` sends its signal twice in the same instant
            say("stopping after the step at hand …")
        crew.end()
        say(f"stopped; {again}")
        raise
    except BaseException:
        crew.end()
        raise
    if not spent:
        raise UserError(f"{crew.last_words or 'the workers were killed.'} When that is mended, {again}")


class Crew:
    """The processes that work: one that is killed is replaced, one that ends in an error is heard."""

    def __init__(self, argv: list[str], size: int, until: float = math.inf, trials: int = 10**9) -> None:
        import torch

        self.until = time.time() + until - time.monotonic()
        self.command = [sys.executable, "-m", "capsnet.cli", "search", *argv, "--work"]
        self.threads = str(max(1, torch.get_num_threads() // size))
        self.last_words, self.replaced = "", 0
        self.at_work = [self.hire() for _ in range(min(size, trials))]

    def hire(self) -> tuple[subprocess.Popen[bytes], IO[str]]:
        """A worker with its share of the cores; in a session of its own, so that Ctrl-C reaches it once, through us."""
        log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (it lives as long as the worker)
        environment = {**os.environ, "OMP_NUM_THREADS": self.threads, PARENT: str(os.getpid()), UNTIL: str(self.until)}
        process = subprocess.Popen(
            self.command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        return process, log

    def look_after(self) -> bool:
        """See who has ended, and how; whether anyone is still at work."""
        for worker, log in [w for w in self.at_work if w[0].poll() is not None]:
            self.at_work.remove((worker, log))
            if worker.returncode < 0 or worker.returncode == INTERRUPTED:
                say("a worker was killed; its trial goes back into the queue")
                if self.replaced < MOST_REPLACED:
                    self.replaced += 1
                    self.at_work.append(self.hire())
            elif worker.returncode > 0:
                log.seek(0)
                lines = log.read().strip().splitlines() or [f"a worker ended with code {worker.returncode}."]
                self.last_words = lines[-1].removeprefix("capsnet: ").rstrip(".") + "."
                if self.at_work:  # else it is said at the end
                    say(f"a worker has given up: {self.last_words}")
            log.close()
        return bool(self.at_work)

    def end(self) -> None:
        """Let every worker save its training and put it back; a second Ctrl-C does not wait for that."""
        try:
            for worker, _ in self.at_work:
                if worker.poll() is None:
                    worker.send_signal(signal.SIGINT)
            for worker, _ in self.at_work:
                worker.wait()
        except KeyboardInterrupt:
            for worker, _ in self.at_work:
                worker.kill()


@contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C, SIGTERM and a terminal that is closed raise KeyboardInterrupt, also where a shell has them ignored."""
    numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# --- What one sees meanwhile -----------------------------------------------------------------------------------


def follow(study: Study, url: str, task: Task, budget: Budget, crew: Crew, every: float = 1.0) -> None:
    """A live table, or a line now and then, until every worker has ended."""
    from capsnet.search.storage import in_storage

    logged = time.monotonic()
    with Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else ExitStack() as live:
        while crew.look_after():
            time.sleep(every)
            with in_storage(url):
                trials = study.get_trials(deepcopy=False)
            if isinstance(live, Live):
                live.update(picture(trials, task, budget, len(crew.at_work)), refresh=True)
            elif time.monotonic() > logged + LOG_SECONDS:
                logged = time.monotonic()
                say(line(trials, task, budget, len(crew.at_work)))


def line(trials: Sequence[FrozenTrial], task: Task, budget: Budget, workers: int) -> str:
    """How far a search is, in a line."""
    from capsnet.search.report import best_first, row_of
    from capsnet.search.study import ended

    done = ended(trials)
    rows = [row_of(trial) for trial in done]
    count = {state: sum(row["state"] == state for row in rows) for state in ("complete", "pruned", "fail")}
    of = f" of {budget.trials}" if budget.trials < 10**9 else ""
    best = best_first(rows)
    said = f", best {best[0]['error_percent']:.2f} %" if best else ""
    left = budget.until - time.monotonic()
    took = [trial.duration.total_seconds() for trial in done if trial.duration]  # with its data and its looks
    typical = sum(took) / len(took) if took else 60 * task.minutes
    running = [trial.user_attrs for trial in trials if trial.state.name == "RUNNING"]
    under_way = [(said.get("now") or {}).get("left", typical) for said in running]
    if typical and budget.trials < 10**9:
        left = min(left, last_end(under_way, budget.trials - len(rows) - len(under_way), typical, workers))
    left = max(left, *under_way, 0.0)  # what has begun before its time is over is trained to its end
    rest = f", about {clock(left)} left" if left < math.inf else ""
    return f"{len(rows)}{of} trials ({count['pruned']} pruned, {count['fail']} failed){said}{rest}"


def last_end(under_way: Sequence[float], waiting: int, typical: float, workers: int) -> float:
    """When the last trial ends: those under way have so many seconds left, and who is free begins the next.

    >>> last_end([5, 50], 2, 60, 2)
    110
    """
    free = [*under_way, *[0.0] * (workers - len(under_way))] or [0.0]
    heapify(free)
    for _ in range(waiting):
        heapreplace(free, free[0] + typical)
    return max(free)


def picture(trials: Sequence[FrozenTrial], task: Task, budget: Budget, workers: int, most: int = 5) -> Group:
    """The line, the best trials, and those under way."""
    from capsnet.search.report import best_first, row_of, short

    best, running = grid("best", "error, %", "training", "values"), grid("under way", "epoch", "left", "values")
    for row in best_first([row_of(trial) for trial in trials])[:most]:
        cells = f"{row['number']}", f"{row['error_percent']:.2f}", clock(row["seconds"]), short(row["values"])
        best.add_row(*map(Text, cells))
    for trial in trials:
        if trial.state.name == "RUNNING":
            now, said = trial.user_attrs.get("now") or {}, trial.user_attrs
            epoch = f"{now.get('epoch', 0):.1f} of {said.get('epochs', '?')}"
            left = clock(now["left"]) if now else "…"
            running.add_row(*map(Text, (f"{trial.number}", epoch, left, short(trial.params))))
    shown = [table for table in (best, running) if table.row_count]
    return Group(Text(line(trials, task, budget, workers), style="bold"), *shown)


def grid(*columns: str) -> Table:
    made = Table(box=None, header_style="bold", pad_edge=False)
    for name in columns:
        made.add_column(name, overflow="ellipsis", no_wrap=True)
    return made


# --- What came out ---------------------------------------------------------------------------------------------


def look_back(flags: Search) -> int:
    from capsnet.search.storage import storage_url
    from capsnet.search.study import load_study

    url = storage_url(flags.storage or "", flags.study or "search")
    return show(load_study(flags.study or "search", url), url, flags.json)


def show(study: Study, url: str, as_json: bool) -> int:
    """Write the report and print what matters of it."""
    from capsnet.search import report
    from capsnet.search.storage import in_storage, shown

    with in_storage(url):
        found = report.summary(study, shown(url))
    if as_json:
        print(json.dumps(found))
    else:
        tell(found)
    paths = report.write(found)  # last: where that fails, the outcome has been seen
    if not as_json:
        print("\n".join(map(str, paths)))
    return int(found["counts"]["fail"] > 0 and found["best"] is None)


def tell(found: dict[str, Any]) -> None:
    """What matters of a study."""
    from capsnet.search import report

    for title, each in report.tables(found).items():
        print_table(each.columns, each.rows, title=title)
        print()
    counts = found["counts"]
    print(f"{counts['complete']} trained to the end, {counts['pruned']} pruned, {counts['fail']} failed")
    if found["command"]:
        print(f"train the best (another number of threads may change its errors a little):\n  {found['command']}")
    else:
        print("no trial has come to its end yet" + "; other settings need another --study" * (counts["fail"] > 0))
    if found["network"]:
        print(f"or test its network, which is kept:\n  capsnet evaluate {shlex.quote(found['network'])}")


# --- Ablation --------------------------------------------------------------------------------------------------


def ablate(flags: Search, argv: list[str]) -> int:
    """Train what is left of an ablation, then show its table."""
    name = flags.study or flags.config.preset
    plan = ablation.Plan(
        name, flags.config, ablation.chosen(flags.ablate, flags.config), 3 if flags.seeds is None else flags.seeds
    )
    if plan.idle():
        say(f"the base, or another choice, has these already: {', '.join(plan.idle())}")
    try:
        show_ablation(plan, ablation.conduct(plan, ShownAblation()), flags.json)
    except KeyboardInterrupt:
        say(f"stopped; go on with: capsnet search {shlex.join(argv)}")
        return 130
    except ablation.Incomplete as incomplete:
        show_ablation(plan, incomplete.results, flags.json)
        raise
    return 0


def show_ablation(plan: ablation.Plan, results: Results, as_json: bool) -> None:
    """The table of an ablation, and its picture."""
    told = ablation.outcomes(results.rows)
    if as_json:
        print(json.dumps({"ablation": plan.name, "outcomes": told, "rows": results.rows}))
        return
    table = ablation.table(told)
    print_table(table.columns, table.rows, title=f"Against {plan.base.preset}, on validation images")
    print("\n".join([*table.notes, str(results.path)]))
    if find_spec("matplotlib"):
        print(ablation.draw(plan, told))


class ShownAblation(Shown):
    """A line before and after each training, and a bar meanwhile."""

    def __init__(self) -> None:
        self.number, self.rows, self.expected = 0, 0, None
        self.took: list[float] = []

    def planned(self, rows: Sequence[Row], left: Sequence[Row], seconds: float | None) -> None:
        self.rows, self.number = len(rows), len(rows) - len(left)
        say(f"{len(rows)} training{'s' * (len(rows) > 1)}, {len(left)} of them to do")

    def started(self, row: Row) -> list[training.Watcher]:
        self.number += 1
        say(f"training {self.number} of {self.rows}: {row.name}{self.left()}")
        return [RowBar()]

    def left(self) -> str:
        """Time left in all, by what the trainings took so far."""
        if not self.took:
            return ""
        return f", {clock((self.rows - self.number + 1) * sum(self.took) / len(self.took))} left in all"

    def ended(self, row: Row, record: dict[str, Any]) -> None:
        error = record["outcome"]["error_percent"]
        self.took.append(record["seconds"])
        say(f"  {row.name}: validation error {error:.2f} % after {clock(record['seconds'])}")
