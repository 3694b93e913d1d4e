"""The benchmark: what it reports, and that its variants compute the same."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
import torch

from capsnet import kernels, load_plugin
from capsnet.bench import data as bench_data
from capsnet.bench import grid as bench_grid
from capsnet.bench import network as bench
from capsnet.bench import processes as bench_processes
from capsnet.cli import main
from capsnet.cli.bench import network_of
from capsnet.errors import UserError
from capsnet.models.branched import BranchedConfig
from capsnet.models.capsnet import CapsNet
from capsnet.models.config import CapsNetConfig
from capsnet.models.registry import MODELS, build, parameters
from capsnet.routing.options import DynamicOptions
from capsnet.train.presets import get_preset

RATIOS = (
    "train_ratio_fp32",
    "train_ratio_bf16",
    "train_ratio_fp32_same_allocator",
    "train_ratio_bf16_same_allocator",
    "inference_ratio_batch128",
    "inference_ratio_bf16",
    "inference_ratio_batch128_same_allocator",
    "inference_ratio_batch1",
)
SMALL = CapsNetConfig(stem_channels=(8,), primary_types=2)
VARIED = {"positions": "side", "lower types": "types", "upper types": "upper", "classes": "upper"}


def test_the_benchmark_reports_every_ratio_and_the_memory_of_both_sides(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--quick", "--batch", "2", "--image-size", "20", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert all(result[name] > 0 for name in RATIOS)
    weights = 4 * parameters(CapsNetConfig((1, 20, 20))) / 2**20
    assert result["peak_mb_fast"] > 5 * weights  # with gradients, Adam's moments and PyTorch itself
    assert result["peak_mb_plain"] > 5 * weights
    assert result["certificate"]["cpu"]


@pytest.mark.parametrize("stopped", [False, True])
def test_the_public_styles_compute_the_same_as_ours(stopped: bool) -> None:
    ours, public = CapsNet(replace(SMALL, routing=DynamicOptions(detach=stopped))), bench.PublicStyle(SMALL, stopped)
    public.conv1.load_state_dict(ours.stem[0].state_dict())
    public.primary.load_state_dict(ours.primary.conv.state_dict())
    u_order = torch.arange(72).view(6, 6, 2).permute(2, 0, 1).flatten()  # ours is (h w type), theirs (type h w)
    public.W.data = ours.caps[0].weight.data[u_order]  # type: ignore[union-attr,index,operator]
    images = torch.rand(3, 1, 28, 28)
    with kernels.plain():
        both = [model(images).poses for model in (public, ours)]
    torch.testing.assert_close(*both)
    gradients = [
        torch.autograd.grad(poses.square().sum(), bias)[0]  # type: ignore[union-attr]
        for poses, bias in zip(both, (public.conv1.bias, ours.stem[0].bias), strict=True)
    ]
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5)


def test_ratios_are_relative_to_the_faster_public_style() -> None:
    case, second = bench.Case(SMALL, 4), {"plain": [2.0], "fast": [1.0], "fast-bf16": [0.5]}
    times = {"public": [8.0], "public-stopped": [6.0], **second}
    result = bench.summarize(case, times, times, times, dict.fromkeys(bench.SIDES, 1.0))
    assert (result["train_ratio_fp32"], result["inference_ratio_bf16"]) == (6, 12)


def test_a_training_step_of_each_side_changes_the_weights() -> None:
    for side in bench.SIDES:
        worker = bench.Worker(side, bench.Case(SMALL, 4))
        before = [p.detach().clone() for p in worker.model.parameters()]
        worker.train()
        assert all(not torch.equal(a, b) for a, b in zip(before, worker.model.parameters(), strict=True))


def test_only_the_bfloat16_side_asks_for_bfloat16_in_training_and_inference() -> None:
    for side in bench.SIDES:
        worker, asked = bench.Worker(side, bench.Case(SMALL, 4)), list[bool]()
        worker.model.register_forward_pre_hook(lambda *_, a=asked: a.append(torch.is_autocast_enabled("cpu")))
        worker.train()
        worker.infer(1)
        assert asked == [side == "fast-bf16"] * 2


def test_the_paper_networks_multiply_adds_are_counted_as_known() -> None:
    conv1, primary, decoder = 20 * 20 * 256 * 81, 36 * 256 * 256 * 81, 160 * 512 + 512 * 1024 + 1024 * 784
    votes = 1152 * 10 * 16
    assert bench.multiply_adds(CapsNetConfig()) == conv1 + primary + decoder + votes * 8 + 5 * votes


def test_branches_multiply_what_they_see_and_no_more() -> None:
    config = BranchedConfig(
        (1, 10, 10), 3, stem_channels=(4, 6), stem_kernels=(3, 3), stem_strides=(1, 1), branches=2, trunk=1,
        primary_types=4, primary_dim=2, primary_kernel=3, primary_stride=1, class_dim=6, decoder=(),
        routing=DynamicOptions(iterations=1),
    )  # fmt: skip
    convolutions = 64 * 4 * 9 + 36 * 6 * 4 * 9 + 16 * 8 * 3 * 9
    votes = 16 * 4 * 3 * 3
    assert bench.multiply_adds(config) == convolutions + votes * 2 + votes
    assert "public" not in bench.Case(config, 1).sides


@pytest.mark.usefixtures("forget_plugins")
def test_a_model_of_a_plugin_is_measured_in_a_process_of_its_own() -> None:
    load_plugin(Path(__file__).parent / "plugins" / "my_model.py")
    case = bench.Case(replace(network_of("shallow"), types=2), 2)
    assert "public" not in case.sides
    assert bench.multiply_adds(case.model) > 0
    with bench.started(("plain",), case) as (worker,):
        (seconds,) = worker.ask(do="train", steps=1)
        parts = worker.ask(do="breakdown")
    assert seconds > 0
    assert parts.keys() == {"network", "Adam"}


@pytest.mark.parametrize("kind", ["capsnet", "efficient", "branched", "cnn"])
def test_a_step_is_divided_into_the_parts_that_a_model_names(kind: str) -> None:
    parts = bench.Worker("fast", bench.Case(MODELS.get(kind).Config().tiny(), 2)).breakdown()
    whole = kind in ("branched", "cnn")
    assert parts.keys() == ({"network", "Adam"} if whole else {"convolutions", "routing", "decoder", "Adam"})


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--network", "papr"], "there is no network 'papr'; did you mean 'paper'?"),
        (["--image-size", "5"], "too small"),
        (["--batch", "0"], "above 0"),
        (["--quick", "--plot", "a.png"], "leave one of the two out"),
        (["--sweep", "--plot", "a.bmp"], "should end in .png or .svg"),
        (["--large", "--batch", "4"], "--large does not use --batch"),
        (["--data", "--images", "100"], "--images should be at least 256"),
        (["--data", "--network", "best"], "--data does not use --network"),
        (["--grid", "--large"], "--grid does not use --large"),
        (["--processes", "1,2", "--network", "best"], "--processes does not use --network"),
        (["--processes", "one"], "--processes is 'one': give numbers of processes, such as 1,2"),
    ],
)
def test_impossible_benchmarks_are_refused_at_once(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *words]) == 2
    assert expected in capsys.readouterr().err


MANY_CLASSES = """
import resource, torch
from capsnet.train.config import CapsNetConfig, Config
from capsnet.data import Batch, multi_hot
from capsnet.models import CapsNet
from capsnet.train.steps import compute_loss

config = Config(model=CapsNetConfig(image_shape=(3, 96, 96), num_classes=200, shared=True))
model = CapsNet(config.model)
optimizer = torch.optim.Adam(model.parameters())
labels = torch.arange(16)
batch = Batch(torch.rand(16, 3, 96, 96), multi_hot(labels, 200), labels, labels)
loss = compute_loss(model, batch, config).total
loss.backward()
optimizer.step()
finite = all(p.grad.isfinite().all() and p.isfinite().all() for p in model.parameters())
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, finite)
"""


@pytest.mark.slow
def test_200_classes_on_96_pixels_train_at_batch_16_inside_8_gb() -> None:
    done = subprocess.run([sys.executable, "-c", MANY_CLASSES], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    gigabytes, finite = done.stdout.split()
    assert float(gigabytes) < 8
    assert finite == "True"


def test_an_interrupted_benchmark_ends_without_a_traceback() -> None:
    command = [sys.executable, "-m", "capsnet", "bench", "--quick"]
    listening = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # what a shell starts in the background does not
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=listening
    ) as process:
        time.sleep(8)  # the sides have started, and one of them computes
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--network", "quick", "--plot", "a.png"], "leave --plot out"),
        (["--precision", "--plot", "a.png"], "leave --plot out"),
        (["--precision", "--batch", "64"], "--precision does not use --batch"),
        (["--sweep", "--image-size", "36"], "--sweep does not use --image-size"),
    ],
)
def test_what_would_be_ignored_is_refused_before_anything_is_measured(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *words]) == 2
    assert said in capsys.readouterr().err


def test_routings_are_compared_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--routing", "uniform", "--batch", "8", "--repeats", "1", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["routings"]
    assert found["routing"] == "uniform"
    assert min(found["plain_seconds"], found["fast_seconds"], found["plain_mb"]) > 0
    assert found["ratio"] == pytest.approx(found["plain_seconds"] / found["fast_seconds"])
    assert found["step_seconds"] > found["fast_seconds"] * 0.5


@pytest.mark.parametrize("words", [["--routing", "unifrom"], ["--routing", "all", "--network", "quick"]])
def test_a_routing_that_cannot_be_measured_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_case_of_the_large_benchmark_tells_its_seconds_and_its_memory() -> None:
    cost = bench_grid.measured(bench_grid.Case("class", 4, 2, 3), 1)
    assert cost.seconds > 0
    assert 50 < cost.megabytes < 2000


def test_a_case_that_cannot_be_measured_is_reported() -> None:
    with pytest.raises(UserError, match="could not be measured"):
        bench_grid.measured(bench_grid.Case("conv", 2, 1, 1), 1)  # smaller than a window


def test_the_sweep_varies_one_quantity_at_a_time() -> None:
    for quantity, cases in bench_grid.SWEEP.items():
        values = [bench_grid.value_of(quantity, case) for case in cases]
        assert values == sorted(set(values))
        others = {
            (c.layer, *(getattr(c, name) for name in ("side", "types", "upper") if name != VARIED[quantity]))
            for c in cases
        }
        assert len(others) == 1


def test_the_large_benchmark_reports_growth(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The printed exponents are those of what was measured; the measuring itself is tested above."""
    monkeypatch.setattr(bench_grid, "measured", lambda case, _: bench_grid.Cost(case.upper * case.types + 1e-9, 1.0))
    assert main(["bench", "--large", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    growth = {row["quantity"]: row["exponent"] for row in result["growth"]}
    assert growth["positions"] == pytest.approx(0)  # the invented cost does not depend on it
    assert [growth[name] for name in ("lower types", "upper types", "classes")] == pytest.approx([1, 1, 1])
    assert result["certificate"]["cpu"]


def test_grids_are_compared_plain_and_fast(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--grid", "--batch", "2", "--repeats", "1", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [row["routing"] for row in result["grids"]] == ["em", "dynamic"]
    assert all(row["ratio"] > 0 for row in result["grids"])
    assert result["batch"] == 2


@pytest.mark.slow
def test_data_in_memory_and_on_disk_are_compared(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAPSNET_DATA", str(tmp_path / "cache"))
    monkeypatch.setattr(bench_data, "STEPS", 2)
    assert main(["bench", "--data", "--images", "300", "--batch", "8", "--repeats", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["data"]
    assert found["cache_gb"] == pytest.approx(300 * 3 * 64 * 64 / 1e9)
    memory, disk, cold = found["ways"]
    assert [way["way"] for way in found["ways"]] == ["memory", "disk", "cold"]
    assert memory["ratio"] == 1
    assert min(disk["ratio"], cold["ratio"], disk["batches"]) > 0
    assert disk["peak_mb"] - disk["above_network_mb"] == pytest.approx(memory["peak_mb"] - memory["above_network_mb"])
    assert not list((tmp_path / "cache").iterdir())  # it leaves nothing behind


def test_many_machines_wait_for_what_cannot_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten megabytes on four machines with links of 10 Gbit/s, by hand: 2 · 3 · (1e7 / (4 · 1.25e9) + 5 · 50e-6)."""
    monkeypatch.syspath_prepend(Path(__file__).resolve().parent.parent / "tools")
    expected = import_module("tables.scaling").expected
    step = {"gradient_bytes": 10**7, "buckets": 5, "last_bucket_bytes": 10**6, "other_bytes": 0, "other_exchanges": 2}
    found = expected(step, 0.012, 4, 10)
    assert found.exposed == pytest.approx(6 * (1e7 / 5e9 + 250e-6) - 0.008)  # backward hides two thirds of a step
    assert found.blocking == pytest.approx(6 * 2 * 50e-6)
    assert found.efficiency == pytest.approx(0.012 / (0.012 + found.exposed + found.blocking))
    slow = expected(step, 1.0, 4, 10)
    assert slow.exposed == pytest.approx(6 * (1e6 / 5e9 + 50e-6))  # the last bucket alone
    assert expected(step, 1.0, 1, 10).efficiency == 1


@pytest.mark.slow
def test_two_processes_tell_what_they_exchange() -> None:
    step = bench_processes.measured("quick", 2, 4, 1, 1)
    assert step.gradient_bytes == 4 * step.parameters
    assert step.other_exchanges == 1 + 2 * norms_of("quick")
    assert 0 < step.waiting_percent < 100
    with pytest.raises(UserError, match="papr cannot be measured in 2 processes: there is no preset 'papr'"):
        bench_processes.measured("papr", 2, 4, 1, 1)


def norms_of(preset: str) -> int:
    model = build(get_preset(preset).model)
    return sum(isinstance(module, torch.nn.BatchNorm2d) for module in model.modules())
