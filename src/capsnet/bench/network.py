"""The benchmark: variants of one network, each in its own process, measured alternately.

The variants alternate every few steps, so noise on the machine affects all of them alike. Medians and quartiles are
reported; compare the ratios, not the absolute times.

    public          the style of public implementations: nn.Conv2d, votes by a broadcast matrix product, every tensor
                    materialised, the system's default allocator; gradients flow through all routing iterations
    public-stopped  another public style: gradients flow through the last iteration only
    plain           this package's readable code; the allocator keeps freed memory
    fast            this package's default kernels, with the same allocator
    fast-bf16       the same with bfloat16 products if the processor supports them, otherwise a faster, less accurate
                    float32

Ratios to public code are relative to the faster of the two styles.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from capsnet import kernels, plugins
from capsnet.data import Batch, multi_hot
from capsnet.errors import UserError
from capsnet.evaluate import evaluate, mean_and_std
from capsnet.helper_process import Helper, serve
from capsnet.kernels.allocator import keep_memory
from capsnet.kernels.dispatch import has_bf16
from capsnet.kernels.products import mm
from capsnet.models.base import Model, Output
from capsnet.models.capsnet import CapsNet
from capsnet.models.config import CapsNetConfig, ModelConfig
from capsnet.models.registry import build, model_from_dict, model_to_dict
from capsnet.routing.options import DynamicOptions
from capsnet.timing import timed
from capsnet.train import loop, steps
from capsnet.train.config import Config
from capsnet.train.presets import get_preset

PUBLIC = ("public", "public-stopped")
SIDES = (*PUBLIC, "plain", "fast", "fast-bf16")
INFERENCE_BATCH = 128
GEMM_SIZE = 2048  # of the square matrices whose product is timed


class PublicStyle(Model):
    """The paper's network in the style of public implementations; for comparison only.

    `stopped` is the style that detaches the votes in all iterations but the last: less is kept for the backward pass.
    """

    def __init__(self, config: CapsNetConfig, stopped: bool = False) -> None:
        super().__init__(config)
        self.stopped = stopped
        ours = CapsNet(config)
        self.decoder = ours.decoder
        channels = config.stem_channels[-1]
        self.conv1 = nn.Conv2d(config.image_shape[0], channels, config.stem_kernels[0])
        self.primary = nn.Conv2d(channels, config.primary_types * config.primary_dim, config.primary_kernel, 2)
        self.W = nn.Parameter(cast(Tensor, ours.caps[0].weight).detach().clone())

    def squash(self, s: Tensor) -> Tensor:
        squared = (s**2).sum(-1, keepdim=True)
        return squared / (1 + squared) * s / torch.sqrt(squared + 1e-9)

    def forward(self, images: Tensor, trace: bool = False, routing: Mapping[str, Any] | None = None) -> Output:
        b, dim = len(images), self.config.primary_dim
        maps = self.primary(torch.relu(self.conv1(images)))
        u = self.squash(maps.view(b, -1, dim, *maps.shape[2:]).permute(0, 1, 3, 4, 2).reshape(b, -1, dim))
        u_hat = (self.W[None] @ u[:, :, None, :, None]).squeeze(-1)  # b i j q
        b_ij = torch.zeros(*u_hat.shape[:3], 1, device=u.device)
        iterations = getattr(self.config.routing, "iterations", 1)
        for t in range(iterations):
            last = t == iterations - 1
            vote = u_hat.detach() if self.stopped and not last else u_hat
            c_ij = torch.softmax(b_ij, dim=2)
            v = self.squash((c_ij * vote).sum(1, keepdim=True))
            if not last:
                b_ij = b_ij + (vote * v).sum(-1, keepdim=True)
        v = v.squeeze(1)
        return Output(torch.sqrt((v**2).sum(-1) + 1e-9), v)

    def reconstruct_set(self, poses: Tensor, targets: Tensor) -> Tensor:
        assert self.decoder is not None
        return self.decoder(poses * targets[:, :, None])


@dataclass(frozen=True)
class Case:
    """What is measured: a network and a batch size."""

    model: ModelConfig = field(default_factory=CapsNetConfig)
    batch: int = 128

    @property
    def sides(self) -> tuple[str, ...]:
        """The variants to measure; the public styles only exist for the paper's network."""
        return SIDES if self.is_paper else SIDES[len(PUBLIC) :]

    @property
    def is_paper(self) -> bool:
        """Whether this is the paper's network, for images of any size and any number of classes."""
        return self.model == CapsNetConfig(self.model.image_shape, self.model.num_classes)

    def described(self) -> str:
        c, h, w = self.model.image_shape
        routing = getattr(self.model, "routing", None)
        parts = [f"{c}×{h}×{w}", f"batch {self.batch}", f"{self.model.num_classes} classes"]
        return ", ".join(parts + ([routing.describe()] if routing else [self.model.kind]))


# ---------------------------------------------------------------------------------------- inside a worker process


class Worker:
    """One variant: builds its network once, then runs steps on request."""

    def __init__(self, side: str, case: Case) -> None:
        public = side in PUBLIC
        if not public:
            keep_memory()
        torch.manual_seed(0)
        self.side, self.case = side, case
        self.model: Any = (
            PublicStyle(cast(CapsNetConfig, case.model), side == "public-stopped") if public else build(case.model)
        )
        fused = {} if public else {"fused": True}
        self.optimizer = torch.optim.Adam(self.model.parameters(), **fused)  # type: ignore[arg-type]
        self.config = Config(model=case.model)
        self.batch = self.make_batch(case.batch)
        self.images = {size: torch.rand(size, *case.model.image_shape) for size in (1, INFERENCE_BATCH)}

    def make_batch(self, size: int) -> Batch:
        labels = torch.arange(size) % self.case.model.num_classes
        images = torch.rand(size, *self.case.model.image_shape)
        return Batch(images, multi_hot(labels, self.case.model.num_classes), labels, torch.arange(size))

    def path(self) -> Any:
        return kernels.plain() if self.side == "plain" else nullcontext()

    def precision(self) -> Any:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.side == "fast-bf16")

    def train(self) -> None:
        """One step: forward, loss, backward, Adam."""
        with self.path(), self.precision():
            loss = steps.compute_loss(self.model, self.batch, self.config).total
        self.optimizer.zero_grad(set_to_none=True)
        with self.path():
            loss.backward()
        self.optimizer.step()

    def infer(self, size: int) -> None:
        with self.path(), self.precision(), torch.inference_mode():
            self.model.eval()(self.images[size])

    def breakdown(self) -> dict[str, float]:
        """Milliseconds of forward and backward pass by part; each part runs alone on data of the right shape."""
        self.model.train()  # inference was measured before
        with self.path(), self.precision():
            parts = self.model.stages(self.batch.images, self.batch.targets) | {"Adam": self.optimizer.step}
            return {name: 1e3 * timed(part, 1)[0] for name, part in parts.items()}

    def answer(self, request: dict[str, Any]) -> Any:
        if request["do"] == "train":
            return timed(self.train, request["steps"])
        if request["do"] == "infer":
            return timed(lambda: self.infer(request["size"]), request["steps"])
        if request["do"] == "peak":
            return peak_megabytes()
        if request["do"] == "gemm":
            return {dtype: gemm_peak(getattr(torch, dtype)) for dtype in ("float32", "bfloat16")}
        return self.breakdown()


def peak_megabytes() -> float:
    """The peak memory of this process."""
    import resource  # not on Windows

    if Path("/proc/self/status").exists():  # getrusage would include the parent's peak
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 2**10
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def printed_by(module: str, *words: str) -> Any:
    """The JSON that a new process, `python -m module words`, prints. Plugins are passed on."""
    command = [sys.executable, "-m", module, *words, *plugins.flags()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        why = done.stderr.strip()[-300:] or "out of memory?"
        raise UserError(f"{' '.join(words)} could not be measured in a new process: {why}")
    return json.loads(done.stdout)


def gemm_peak(dtype: torch.dtype) -> float:
    """The machine's fastest matrix product, in GFLOP/s, by the library that the kernels use."""
    a, b = torch.randn(GEMM_SIZE, GEMM_SIZE).to(dtype), torch.randn(GEMM_SIZE, GEMM_SIZE).to(dtype)
    return 2 * GEMM_SIZE**3 / min(timed(lambda: mm(a, b), 8)) / 1e9


def cpu_name() -> str:
    """The name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def work() -> None:
    """The process of one variant."""
    side, case, *rest = sys.argv[1:]
    plugins.load_flags(rest)
    described = json.loads(case)
    serve(Worker(side, Case(model_from_dict(described["model"]), described["batch"])).answer)


# -------------------------------------------------------------------------------------------------- in the parent


class Side(Helper):
    """A worker process."""

    def __init__(self, name: str, case: Case) -> None:
        described = json.dumps({"model": model_to_dict(case.model), "batch": case.batch})
        super().__init__(
            name, "from capsnet.bench.network import work; work()", name, described, *plugins.flags(),
            env={k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_TUNABLES"))},
            advice="try a smaller --batch or --image-size",
        )  # fmt: skip


@contextmanager
def started(names: Sequence[str], case: Case) -> Iterator[list[Side]]:
    """One process per variant, terminated in any case."""
    sides: list[Side] = []
    try:
        for name in names:
            sides.append(Side(name, case))
        yield sides
    finally:
        for side in sides:
            side.close()


Tick = Callable[[int, int], None]


def take_turns(sides: Sequence[Side], repeats: int, tick: Callable[[], None], **request: Any) -> dict[str, list[float]]:
    """The seconds of each step by variant: the variants alternate, and the first round is a warm-up."""
    seconds: dict[str, list[float]] = {side.name: [] for side in sides}
    for turn in range(repeats + 1):
        for side in sides:
            answer = side.ask(**request)
            tick()
            if turn:
                seconds[side.name] += answer
    return seconds


def measure(case: Case, *, repeats: int, details: bool, on_tick: Tick) -> dict[str, Any]:
    """Measure one case: training, inference on a batch and on one image, memory and, with `details`, time by part."""
    build(case.model, device=torch.device("meta"))  # report an impossible network once, not in each variant
    total = (2 * (repeats + 1) + 3 * repeats + 1) * len(case.sides)
    done = 0

    def tick() -> None:
        nonlocal done
        done += 1
        on_tick(done, total)

    with started(case.sides, case) as sides:
        train = take_turns(sides, repeats, tick, do="train", steps=1)
        peaks = {side.name: side.ask(do="peak") for side in sides}
        infer = take_turns(sides, repeats, tick, do="infer", size=INFERENCE_BATCH, steps=2)
        single = take_turns(sides, 3 * repeats, tick, do="infer", size=1, steps=5)
        result = summarize(case, train, infer, single, peaks)
        if details:
            gemm = sides[-1].ask(do="gemm")
            result["gemm_gflops"], result["gemm_bf16_gflops"] = (round(gemm[k], 1) for k in ("float32", "bfloat16"))
            result["breakdown_ms"] = where_time_goes([side for side in sides if side.name not in PUBLIC])
            result["share_of_gemm_peak"] = share_of_peak(case, result)
        return result


def where_time_goes(sides: Sequence[Side]) -> dict[str, dict[str, float]]:
    """Median milliseconds by part and variant over five rounds after a warm-up; the variants alternate."""
    turns = [{side.name: side.ask(do="breakdown") for side in sides} for _ in range(6)][1:]
    return {
        side.name: {
            part: round(statistics.median(turn[side.name][part] for turn in turns), 1) for part in turns[0][side.name]
        }
        for side in sides
    }


def summarize(
    case: Case, train: dict[str, list[float]], infer: dict[str, list[float]], single: dict[str, list[float]],
    peaks: dict[str, float],
) -> dict[str, Any]:  # fmt: skip
    """Medians with quartiles, and the ratios between variants; `public` stands for the faster public style."""

    def median(seconds: dict[str, list[float]], side: str) -> float:
        sides = PUBLIC if side == "public" else (side,)
        return min(statistics.median(seconds[name]) for name in sides)

    wanted = {
        "train_ratio_fp32": (train, "public", "fast"),
        "train_ratio_bf16": (train, "public", "fast-bf16"),
        "train_ratio_fp32_same_allocator": (train, "plain", "fast"),
        "train_ratio_bf16_same_allocator": (train, "plain", "fast-bf16"),
        "inference_ratio_batch128": (infer, "public", "fast"),
        "inference_ratio_bf16": (infer, "public", "fast-bf16"),
        "inference_ratio_batch128_same_allocator": (infer, "plain", "fast"),
        "inference_ratio_batch1": (single, "plain", "fast"),
    }
    ratios = {
        name: round(median(seconds, slow) / median(seconds, quick), 3)
        for name, (seconds, slow, quick) in wanted.items()
        if slow in seconds
    }
    return {
        "case": case.described(),
        "batch": case.batch,
        **ratios,
        "peak_mb_fast": round(peaks["fast"]),
        "peak_mb_plain": round(peaks["plain"]),
        "peak_mb": {name: round(value) for name, value in peaks.items()},
        "train_seconds": {name: spread(values) for name, values in train.items()},
        "inference_seconds": {name: spread(values) for name, values in infer.items()},
        "single_image_seconds": {name: spread(values) for name, values in single.items()},
        "train_images_per_second": {n: round(case.batch / statistics.median(v), 1) for n, v in train.items()},
        "inference_images_per_second": {n: round(INFERENCE_BATCH / statistics.median(v), 1) for n, v in infer.items()},
    }


def spread(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return {"median": round(middle, 5), "quartile_low": round(low, 5), "quartile_high": round(high, 5)}


def multiply_adds(config: ModelConfig) -> int:
    """Multiply-adds of the forward pass of one image by the plain code: convolutions and matrix products."""
    model = build(config)
    with kernels.plain(), torch.no_grad(), FlopCounterMode(display=False) as counter:
        output = model.eval()(torch.zeros(1, *config.image_shape))
        if output.poses is not None:
            model.reconstruct_set(output.poses, torch.ones(1, config.num_classes))
    return counter.get_total_flops() // 2


def share_of_peak(case: Case, result: dict[str, Any]) -> dict[str, float]:
    """Operations per second (a training step counts as three forward passes) relative to the machine's GEMM peak.

    A value above 1 is faster than any direct convolution could be. The variant in bfloat16 has the peak of bfloat16.
    """
    flops = 2 * 3 * multiply_adds(case.model) * case.batch
    peaks = {name: result["gemm_bf16_gflops" if name == "fast-bf16" else "gemm_gflops"] for name in case.sides}
    return {n: round(flops / s["median"] / (1e9 * peaks[n]), 3) for n, s in result["train_seconds"].items()}


def sweep_cases() -> dict[str, list[tuple[str, Case]]]:
    """The cases of the sweep: one quantity at a time is varied around the paper's network with a batch of 32."""
    base = Case(batch=32)

    def vary(**changes: Any) -> Case:
        return Case(replace(base.model, **changes), base.batch)

    return {
        "batch": [(str(n), Case(base.model, n)) for n in (1, 8, 32, 128)],
        "image size": [(str(n), vary(image_shape=(1, n, n))) for n in (20, 28, 36, 48)],
        "capsule types": [(str(n), vary(primary_types=n)) for n in (8, 16, 32, 64)],
        "classes": [(str(n), vary(num_classes=n)) for n in (2, 10, 40)],
        "iterations": [(str(n), vary(routing=DynamicOptions(iterations=n))) for n in (1, 3, 5)],
    }


def sweep(repeats: int, on_tick: Tick) -> list[dict[str, Any]]:
    """Seconds of a training step of the variants plain and fast, for each case of the sweep."""
    cases = [(quantity, value, case) for quantity, rows in sweep_cases().items() for value, case in rows]
    rows = []
    for number, (quantity, value, case) in enumerate(cases):
        with started(("plain", "fast"), case) as sides:
            seconds = take_turns(sides, repeats, lambda: None, do="train", steps=1)
            peaks = {side.name: round(side.ask(do="peak")) for side in sides}
        median = {name: round(statistics.median(values), 5) for name, values in seconds.items()}
        rows.append({"quantity": quantity, "value": value, "seconds": median, "peak_mb": peaks})
        on_tick(number + 1, len(cases))
    return rows


@contextmanager
def told_to_emulate() -> Iterator[None]:
    """Emulate bfloat16 inside the context if the processor does not support it."""
    before = os.environ.get("CAPSNET_EMULATE_BF16")
    os.environ["CAPSNET_EMULATE_BF16"] = "1"
    try:
        yield
    finally:
        os.environ.pop("CAPSNET_EMULATE_BF16")
        if before is not None:
            os.environ["CAPSNET_EMULATE_BF16"] = before


def precision(on_tick: Tick) -> dict[str, Any]:
    """Validation error of the quick preset after an epoch in float32 and in bfloat16, with the same three seeds.

    Without hardware support bfloat16 is emulated, which is slow but gives the same numbers.
    """
    emulated = not has_bf16()
    errors: dict[str, list[float]] = {"fp32": [], "bf16": []}
    with told_to_emulate():
        for seed in range(3):
            for kind, found in errors.items():
                config = replace(get_preset("quick"), validation=10_000, epochs=1, seed=seed)
                config = replace(config, precision=kind)  # type: ignore[arg-type]
                run = loop.prepare(config, Path())
                while run.step < run.steps:
                    steps.train_step(run)
                    done = sum(map(len, errors.values())) * run.steps + run.step
                    on_tick(done, 2 * 3 * run.steps)
                found.append(evaluate(run.model, run.splits.validation).error_percent)
    summary = {kind: dict(zip(("mean", "std"), mean_and_std(found), strict=True)) for kind, found in errors.items()}
    return {kind: {"errors": errors[kind], **summary[kind]} for kind in errors} | {
        "emulated": emulated,
        "epochs": 1,
        "data": "mnist, with 10,000 training images held out for validation",
    }
