"""Stems of a capsule network: residual ones and given modules, trained or frozen, in every use of a model."""

from __future__ import annotations

import copy
import re
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor, nn

import capsnet
from capsnet.cli import main
from capsnet.data import Dataset, Splits
from capsnet.errors import UserError
from capsnet.io import checkpoint
from capsnet.io.records import Certificate
from capsnet.io.transfer import create_model
from capsnet.kernels import dispatch, plain
from capsnet.lab.models import Shelf
from capsnet.models.branched import BranchedConfig
from capsnet.models.capsnet import CapsNet
from capsnet.models.config import CapsNetConfig
from capsnet.models.efficient import EfficientConfig
from capsnet.models.registry import build
from capsnet.models.resnet import ResNet, ResNetConfig
from capsnet.models.stem import feature_shape
from capsnet.nn.layers import Conv2d
from capsnet.train import loop
from capsnet.train.config import Config

pytestmark = pytest.mark.usefixtures("one_thread")
RESIDUAL = CapsNetConfig(
    (3, 12, 12), 3, stem="residual", stem_channels=(4, 6), stem_kernels=(3, 3), stem_strides=(1, 2),
    primary_types=2, primary_dim=4, primary_kernel=3, primary_stride=1, class_dim=4, decoder=(8,),
)  # fmt: skip
PLAIN = replace(RESIDUAL, stem="conv", stem_channels=(), stem_kernels=(), stem_strides=())


class Backbone(nn.Module):
    """A network of somebody else: batch norm inside, feature maps of a quarter of the size."""

    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, 5, 4, 4)
        self.norm = nn.BatchNorm2d(5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.conv(x)))


def toys() -> Splits:
    """Pictures whose class is their colour."""

    def draw(n: int, seed: int) -> Dataset:
        labels = torch.arange(n) % 3
        images = torch.randint(0, 60, (n, 3, 12, 12), generator=torch.Generator().manual_seed(seed))
        images[torch.arange(n), labels] += 150
        return Dataset(images.to(torch.uint8), labels, ("red", "green", "blue"), "colours")

    return Splits(draw(48, 0), draw(12, 1), draw(12, 2))


@pytest.fixture
def colours(monkeypatch: pytest.MonkeyPatch) -> Splits:
    splits = toys()
    monkeypatch.setattr(loop, "load_data", lambda *_, **__: splits)
    return splits


def config_with(model: CapsNetConfig) -> Config:
    return Config(epochs=2, batch_size=8, lr=0.01, validation=12, model=model)


# --- Residual --------------------------------------------------------------------------------------------------


@given(
    st.tuples(st.integers(1, 4), st.integers(5, 17), st.integers(5, 17)),
    st.lists(st.tuples(st.integers(1, 5), st.sampled_from([1, 3, 5]), st.integers(1, 3)), min_size=1, max_size=3),
)
@settings(max_examples=25)
def test_the_feature_maps_have_the_shape_that_the_config_says(shape: tuple, blocks: list) -> None:
    channels, kernels, strides = zip(*blocks, strict=True)
    sizes = {"stem_channels": channels, "stem_kernels": kernels, "stem_strides": strides}
    config = replace(RESIDUAL, image_shape=shape, primary_kernel=1, **sizes)
    model = CapsNet(config)
    assert model.stem(torch.rand(2, *shape)).shape[1:] == feature_shape(config)
    assert model(torch.rand(2, *shape)).activations.shape == (2, 3)


def test_a_capsule_on_a_residual_stem_sees_what_its_receptive_field_says() -> None:
    torch.manual_seed(0)
    model = CapsNet(replace(RESIDUAL, image_shape=(1, 28, 28))).eval()
    for name, parameter in model.named_parameters():
        if "norm2.weight" in name:
            nn.init.ones_(parameter)
    field, (y, x) = model.shown()["receptive"], (5, 6)
    image = torch.rand(1, 1, 28, 28, requires_grad=True)
    capsules = model.primary(model.stem(image)).unflatten(1, (*model.grid, 2))
    (gradient,) = torch.autograd.grad(capsules[0, y, x].sum(), image)
    for axis, place in ((1, y), (0, x)):
        seen = gradient[0, 0].abs().sum(axis).nonzero().flatten()
        start = field["offset"] + field["stride"] * place
        assert (int(seen.min()), int(seen.max())) == (start, start + field["size"] - 1)


def test_fast_and_plain_residual_stems_agree_with_their_gradients() -> None:
    sizes = {"stem_channels": (16, 128), "stem_kernels": (3, 3), "stem_strides": (1, 2)}
    torch.manual_seed(0)
    model, images = (
        CapsNet(replace(RESIDUAL, image_shape=(3, 8, 8), primary_kernel=1, **sizes)),
        torch.rand(32, 3, 8, 8),
    )
    nn.init.ones_(model.get_parameter("stem.3.norm2.weight"))
    weight = model.get_parameter("stem.3.conv2.weight")
    assert dispatch.choose_tile(images, (32, 128, 6, 6), weight, 1)  # so that the kernel is compared
    outcomes = []
    for way in (nullcontext, plain):
        twin = copy.deepcopy(model)
        with way():
            output = twin(images)
            output.activations.square().sum().backward()
        outcomes.append([output.poses, *(p.grad for p in twin.stem.parameters())])
    for fast, slow in zip(*outcomes, strict=True):
        assert (fast - slow).abs().max() < 1e-4 * slow.abs().max()


def test_a_residual_network_is_described_block_by_block() -> None:
    said = CapsNet(RESIDUAL).describe()
    assert "12×12 RGB → convolution 3×3, 4 → residual block 3×3, 6, stride 2 → primary capsules" in said
    assert "residual block 3×3, 6, stride 2, frozen" in CapsNet(replace(RESIDUAL, freeze_stem=True)).describe()


def test_a_residual_network_trains_with_a_report_and_starts_others(colours: Splits, tmp_path: Path) -> None:
    from capsnet.cli.train import write_report

    result = loop.train(loop.start(replace(config_with(RESIDUAL), epochs=8), tmp_path / "run"))
    assert result.evaluation.error_percent == 0
    write_report(result)
    assert "residual block 3×3, 6, stride 2" in (tmp_path / "run" / "report.html").read_text()
    entry = Shelf([str(tmp_path / "run")]).entries["run"]
    assert entry.description["receptive"] == {"size": 13, "stride": 2, "offset": -4}
    grey = create_model(str(tmp_path / "run"), pretrained=True, channels=1, classes=["red", "mauve"])
    assert grey.loaded.adapted["stem.0.weight"] == "3 → 1 channels"
    assert "stem.3.conv2.weight" in grey.loaded.loaded
    assert grey.loaded.adapted["caps.0.weight"] == "of the classes red"


def test_a_residual_stem_can_be_selected_by_a_flag(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for k in range(10):
            pixels = rng.integers(0, 255, (12, 12, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / name / f"{k}.png")
    words = ["train", "--data", f"folder:{tmp_path / 'images'}", "--out", str(tmp_path / "run"), "--epochs", "1"]
    words += ["--model.stem", "residual", "--model.stem-channels", "4", "6", "--model.stem-kernels", "3", "3"]
    words += ["--model.stem-strides", "1", "2", "--model.decoder", "--no-report", "--no-tensorboard"]
    assert main(words) == 0
    assert capsnet.load(tmp_path / "run").config.stem == "residual"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: replace(RESIDUAL, stem="residul"), "did you mean 'residual'"),
        (lambda: CapsNet(replace(RESIDUAL, stem_kernels=(3, 4))), "a kernel of 4 px cannot be padded"),
        (lambda: CapsNet(replace(RESIDUAL, stem_kernels=(3,))), "one number for each convolution"),
        (lambda: CapsNet(replace(PLAIN, stem="residual")), "needs at least one convolution"),
        (lambda: CapsNet(replace(RESIDUAL, stem="module")), "pass it again as stem=module"),
        (lambda: BranchedConfig(stem="residual"), "the model branched always trains a convolutional stem"),
        (lambda: EfficientConfig(freeze_stem=True), "the model efficient always trains a convolutional stem"),
        (lambda: build(ResNetConfig(), stem=Backbone()), "the model resnet takes no stem"),
    ],
)
def test_a_stem_that_cannot_be_is_refused_in_words(make: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        make()


# --- A module of somebody else -----------------------------------------------------------------------------------


def test_any_module_can_be_the_stem_and_is_not_changed_by_measuring_it() -> None:
    stem = Backbone().train()
    before = copy.deepcopy(stem.state_dict())
    model = CapsNet(PLAIN, stem=stem)
    assert model.grid == (1, 1)
    assert stem.training
    assert all(torch.equal(before[name], value) for name, value in stem.state_dict().items())
    assert "12×12 RGB → Backbone → primary capsules: 2 types of 4-D on 1×1" in model.describe()
    images = torch.rand(2, 3, 12, 12)
    model.eval()
    torch.testing.assert_close(model(images).primary, model.primary(stem(images)))


@pytest.mark.parametrize(
    ("stem", "said"),
    [
        (nn.Flatten(), r"Flatten gives a tensor of shape \(1, 432\): remove its pooling and its classifier"),
        (nn.LSTM(12, 4), "LSTM"),
        (nn.Conv2d(3, 4, 8, 8), r"feature maps of 1×1, too small for a primary_kernel of 3"),
    ],
)
def test_a_module_without_feature_maps_is_refused(stem: nn.Module, said: str) -> None:
    with pytest.raises((UserError, ValueError, RuntimeError), match=said):
        CapsNet(PLAIN, stem=stem)


@pytest.mark.parametrize("stem", ["residual", "module"])
def test_a_frozen_stem_keeps_weights_and_statistics(stem: str, colours: Splits, tmp_path: Path) -> None:
    given = Backbone() if stem == "module" else None
    base = PLAIN if given else RESIDUAL
    run = loop.start(config_with(replace(base, freeze_stem=True)), tmp_path / "run", stem=given)
    before = copy.deepcopy(run.model.stem.state_dict())
    caps = run.model.caps[0].weight.detach().clone()
    result = loop.train(run)
    after = result.model.stem.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not torch.equal(caps, result.model.caps[0].weight)
    result.model.train()
    assert result.model.training
    assert not any(module.training for module in result.model.stem.modules())


def test_what_the_caller_has_frozen_of_a_stem_stays_frozen() -> None:
    stem = Backbone()
    first, *others = stem.parameters()
    first.requires_grad_(False)
    CapsNet(PLAIN, stem=stem)
    assert not first.requires_grad
    assert all(parameter.requires_grad for parameter in others)


def test_a_stem_that_is_not_frozen_is_trained(colours: Splits, tmp_path: Path) -> None:
    stem = Backbone()
    before = copy.deepcopy(stem.state_dict())
    loop.train(loop.start(config_with(PLAIN), tmp_path / "run", stem=stem))
    assert not any(torch.equal(before[name], value) for name, value in stem.state_dict().items())


@pytest.mark.parametrize("frozen", [True, False])
def test_a_run_on_a_given_stem_resumes_to_the_same_weights(frozen: bool, colours: Splits, tmp_path: Path) -> None:
    config = config_with(replace(PLAIN, freeze_stem=frozen))
    torch.manual_seed(0)
    stem, twin = Backbone(), Backbone()
    twin.load_state_dict(stem.state_dict())
    whole = loop.train(loop.start(config, tmp_path / "whole", stem=stem)).model.state_dict()

    class Halt(loop.Watcher):
        def moved(self, run: loop.Run) -> None:
            if run.step == 7:
                run.save()
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loop.train(loop.start(config, tmp_path / "cut", stem=twin), [Halt()])
    with pytest.raises(UserError, match="pass it again as stem=module"):
        loop.resume(tmp_path / "cut")
    again = loop.train(loop.resume(tmp_path / "cut", stem=Backbone())).model.state_dict()
    assert all(torch.equal(whole[name], value) for name, value in again.items())


def test_a_checkpoint_says_which_stem_it_needs_and_takes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model, file = CapsNet(PLAIN, stem=Backbone()).eval(), tmp_path / "own.safetensors"
    checkpoint.save_model(file, model, Certificate())
    with pytest.raises(UserError, match=r"given in Python \(test_stem.Backbone\).*capsnet.load\(…, stem=module\)"):
        capsnet.load(file)
    with pytest.raises(UserError, match="given in Python"):
        Shelf([str(file)])
    assert main(["export", str(file)]) == 2
    assert "load it with capsnet.load(…, stem=module)" in capsys.readouterr().err
    images = torch.rand(3, 3, 12, 12)
    loaded = capsnet.load(file, stem=Backbone())
    assert torch.equal(loaded.predict(images).activations, model.predict(images).activations)
    with pytest.raises(UserError, match=r"stem\.bias is missing or unexpected"):
        capsnet.load(file, stem=nn.Conv2d(3, 5, 4, 4))


def test_the_fused_stem_is_not_taken_for_a_given_module(monkeypatch: pytest.MonkeyPatch) -> None:
    config = CapsNetConfig(stem_channels=(128,), primary_types=16, decoder=())
    stem, images = nn.Sequential(Conv2d(1, 128, 9), nn.ReLU()), torch.rand(32, 1, 28, 28)
    fused: list[int] = []
    monkeypatch.setattr(dispatch, "fused_stem", lambda *_: fused.append(1) or pytest.fail("fused"))
    with torch.no_grad():
        CapsNet(config, stem=stem)(images)
    assert not fused
    with pytest.raises(pytest.fail.Exception):
        CapsNet(config)(images)  # the paper's own stem does take it


@pytest.mark.parametrize(("hardware", "dtype"), [(False, torch.float32), (True, torch.bfloat16)])
def test_bfloat16_is_not_emulated_in_a_given_module(
    hardware: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "has_bf16", lambda: hardware)
    stem, seen = Backbone(), []
    stem.conv.register_forward_hook(lambda *parts: seen.append(parts[-1].dtype))
    model = CapsNet(PLAIN, stem=stem)
    seen.clear()
    with torch.autocast("cpu", torch.bfloat16):
        output = model(torch.rand(4, 3, 12, 12))
    assert seen == [dtype]
    assert output.activations.dtype == torch.float32


PLUGIN = '''
"""Capsules on somebody else's network, as a model of a plugin."""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from capsnet.models import CapsNet, CapsNetConfig, register
from capsnet.models.config import Stem


@dataclass(frozen=True)
class PooledConfig(CapsNetConfig):
    """Capsules on pooled pixels."""

    stem: Stem = "module"
    primary_kernel: int = 3
    pool: int = 4
    """Pixels that are pooled into one."""


@register("pooled")
class Pooled(CapsNet):
    Config = PooledConfig

    def make_stem(self, device, dtype):
        return nn.Sequential(nn.Conv2d(self.config.image_shape[0], 4, 1), nn.MaxPool2d(self.config.pool))
'''


@pytest.mark.usefixtures("forget_plugins")
def test_a_plugin_brings_a_stem_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "pooled.py").write_text(PLUGIN)
    words = ["--plugin", str(tmp_path / "pooled.py")]
    train = ["train", "--model", "pooled", "--out", str(tmp_path / "run"), "--epochs", "1", "--train-limit", "100"]
    train += ["--model.decoder", "--model.primary-types", "2", "--no-report", "--no-tensorboard"]
    assert main([*train, *words]) == 0
    loaded = capsnet.load(tmp_path / "run")
    assert loaded.config.kind == "pooled"
    assert "→ Sequential → primary capsules: 2 types of 8-D on 3×3" in loaded.describe()


# --- The same stem without capsules --------------------------------------------------------------------------------


def test_a_resnet_is_the_stem_the_mean_and_a_linear_layer() -> None:
    torch.manual_seed(0)
    model = ResNet(ResNetConfig((3, 9, 11), 4, (5, 6), (3, 3), (1, 2))).eval()
    images = torch.rand(2, 3, 9, 11)
    with plain():
        output = model(images)
        maps = model.stem(images)
    pooled = torch.stack([maps[:, :, y, x] for y in range(maps.shape[2]) for x in range(maps.shape[3])]).mean(0)
    logits = pooled @ model.head.weight.T + model.head.bias
    torch.testing.assert_close(output.logits, logits)
    torch.testing.assert_close(output.activations, logits.softmax(1))


def test_a_resnet_learns_and_loads_again(colours: Splits, tmp_path: Path) -> None:
    config = config_with(ResNetConfig(stem_channels=(4, 6), stem_kernels=(3, 3), stem_strides=(1, 2)))  # type: ignore[arg-type]
    result = loop.train(loop.start(replace(config, epochs=8), tmp_path / "run"))
    assert result.evaluation.error_percent == 0
    again = capsnet.load(tmp_path / "run")
    assert again.describe() == result.model.describe()
    assert "residual block 3×3, 6, stride 2 → average pooling → 3 outputs" in again.describe()


# --- The guide ---------------------------------------------------------------------------------------------------

GUIDE = Path(__file__).parents[2] / "docs" / "backbones.md"


class StandIn(Backbone):
    """What `timm.create_model` returns, as far as the guide uses it; ImageNet's colours."""

    default_cfg = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}  # noqa: RUF012


@pytest.mark.usefixtures("forget_plugins")
def test_the_code_of_the_guide_runs_with_a_stand_in_for_timm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    *scripts, plugin = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loop, "load_data", lambda *_, **__: of_size(toys(), 32))
    names: dict[str, Any] = {}
    for script in scripts:
        exec(script, names)
    assert names["model"].given_stem == "torch.nn.modules.container.Sequential"

    asked: list[bool] = []

    def create_model(name: str, pretrained: bool, num_classes: int, global_pool: str) -> nn.Module:
        assert (name, num_classes, global_pool) == ("resnet18", 0, "")
        asked.append(pretrained)
        return StandIn()

    monkeypatch.setitem(sys.modules, "timm", SimpleNamespace(create_model=create_model))
    (tmp_path / "timm_caps.py").write_text(plugin)
    words = ["--plugin", "timm_caps.py", "--model", "timm", "--model.decoder", "--no-report", "--no-tensorboard"]
    assert main(["train", *words, "--epochs", "1", "--batch-size", "8", "--out", "run"]) == 0
    assert True in asked
    asked.clear()
    model = capsnet.load("run")
    assert not any(asked)
    assert model.grid == (8, 8)
    assert not any(p.requires_grad for p in model.stem.parameters())
    black = model.stem[0](torch.zeros(1, 3, 1, 1)).flatten()
    torch.testing.assert_close(black, torch.tensor([-0.485 / 0.229, -0.456 / 0.224, -0.406 / 0.225]))


def of_size(splits: Splits, side: int) -> Splits:
    """The same images, enlarged by repetition and cut."""

    def larger(part: Dataset) -> Dataset:
        images = part.images.repeat_interleave(3, 2).repeat_interleave(3, 3)[..., :side, :side].contiguous()
        return replace(part, images=images)

    return Splits(*(larger(part) for part in (splits.train, splits.validation, splits.test)))
