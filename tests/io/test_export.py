"""Exported files agree with the model for any batch, and an error leaves no file behind."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from capsnet.cli import main
from capsnet.cli.export import default_file
from capsnet.errors import UserError
from capsnet.io import checkpoint, export
from capsnet.io.records import Certificate
from capsnet.models.base import Model
from capsnet.models.branched import BranchedConfig
from capsnet.models.config import CapsNetConfig, CNNConfig, ModelConfig
from capsnet.models.registry import build
from capsnet.models.resnet import ResNetConfig
from capsnet.routing.options import DynamicOptions

onnxruntime = pytest.importorskip("onnxruntime")
Capture = pytest.CaptureFixture[str]
DOC = Path(__file__).resolve().parent.parent.parent / "docs" / "export.md"
TINY = CapsNetConfig(
    image_shape=(1, 28, 28), num_classes=4, stem_channels=(6,), stem_kernels=(5,), stem_strides=(3,), stem_norm=True,
    primary_types=3, primary_dim=4, primary_kernel=3, class_dim=5, decoder=(12,),
)  # fmt: skip
BRANCHED = BranchedConfig(
    image_shape=(1, 28, 28), num_classes=4, stem_channels=(4, 6), stem_kernels=(3, 1), stem_strides=(1, 1),
    stem_norm=True, primary_types=4, primary_dim=4, primary_kernel=3, class_dim=6, decoder=(12,), branches=2, trunk=1,
    routing=DynamicOptions(bias=True),
)  # fmt: skip
STACKED = replace(
    TINY, shared=True, primary_factor=True, primary_squash=False, hidden_caps=((6, 7),), decoder=(),
    routing=DynamicOptions(leaky=True, detach=True),
)  # fmt: skip
ONCE = replace(
    TINY, shared=True, stem_norm=False, image_shape=(3, 20, 24), routing=DynamicOptions(iterations=1, leaky=True)
)
RESIDUAL = replace(
    TINY, image_shape=(3, 20, 24), stem="residual", stem_channels=(6, 8), stem_kernels=(5, 3), stem_strides=(1, 2)
)
NETWORKS: dict[str, tuple[ModelConfig, bool]] = {  # with whether the model is multi-label
    "norm": (replace(TINY, routing=DynamicOptions(bias=True)), False),
    "stacked": (STACKED, False),
    "once": (ONCE, True),
    "branched": (BRANCHED, False),
    "residual": (RESIDUAL, False),
    "resnet": (ResNetConfig((3, 20, 24), 4, (5, 6), (3, 3), (1, 2)), False),
    "cnn": (CNNConfig((1, 12, 12), 4, (5, 6), (3, 3), (2, 1), (8,)), False),
    "several": (CNNConfig((1, 12, 12), 4, (5,), (3,), (2,), (8,)), True),
}


def slow(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.slow)


def make(name: str) -> Model:
    """A small network with random weights and class names that need escaping in JSON."""
    config, multi_label = NETWORKS[name]
    torch.manual_seed(0)
    model = build(config).eval()
    model.classes, model.multi_label = ("null", 'a "b"', "ü", "3"), multi_label
    for parameter in model.parameters():  # no zero biases and no inactive capsules
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def save(name: str, folder: Path) -> Path:
    path = folder / "model.safetensors"
    checkpoint.save_model(path, make(name), Certificate())
    return path


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run and the files that the command line exports from it."""
    folder = tmp_path_factory.mktemp("desk")
    save("norm", folder / "runs" / "demo")
    for format, out in (("onnx", "demo.onnx"), ("torch", "digits.pt2")):
        words = ["export", str(folder / "runs" / "demo"), "--format", format, "--out", str(folder / out)]
        assert main([*words, "--skip-speed"]) == 0
    return folder


def images_for(model: Model, b: int) -> torch.Tensor:
    return torch.rand(b, *model.config.image_shape, generator=torch.Generator().manual_seed(b))


def fails(capsys: Capture, words: list[object], *expected: str) -> None:
    """The verb exits with 2 and an error that contains all of this."""
    assert main([str(word) for word in words]) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    for text in expected:
        assert text in error


# ------------------------------------------------------------------------------------------------- agreement


@pytest.mark.parametrize(
    "name", ["norm", "stacked", "once", "cnn", *map(slow, ["branched", "residual", "resnet", "several"])]
)
def test_an_onnx_file_gives_what_the_model_gives_for_any_batch(name: str, desk: Path) -> None:
    model = make(name)
    content = (desk / "demo.onnx").read_bytes() if name == "norm" else export.to_onnx(model)
    agree(model, export.load_onnx(content))


@pytest.mark.parametrize("name", ["norm", *map(slow, ["stacked", "branched", "cnn"])])
def test_a_torch_program_gives_what_the_model_gives_for_any_batch(name: str, desk: Path) -> None:
    model = make(name)
    content = (desk / "digits.pt2").read_bytes() if name == "norm" else export.to_torch(model)
    agree(model, export.load_torch(content))


def agree(model: Model, run: export.Runner) -> None:
    """Every output equals that of `predict` and its trace."""
    for b in (1, 2, 5, 17):
        images = images_for(model, b)
        found, own = run(images), model.predict(images, trace=True, top=2 if model.multi_label else 1)
        close(found["activations"], own.activations)
        if own.poses is None:
            expected = found["logits"].sigmoid() if model.multi_label else found["logits"].softmax(1)
            close(expected, own.activations)
            assert set(found) == {"activations", "logits"}
            continue
        assert own.trace is not None
        close(found["poses"], own.poses)
        close(found["couplings"], own.trace.couplings.transpose(0, 1))
        assert ("reconstruction" in found) == (own.reconstructions is not None)
        if own.reconstructions is not None:
            close(found["reconstruction"], own.reconstructions)
            assert found["reconstruction"].shape[1:-3] == ((2,) if model.multi_label else ())


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_couplings_in_the_file_sum_to_one_and_change_from_iteration_to_iteration(desk: Path) -> None:
    run = export.load_onnx((desk / "demo.onnx").read_bytes())
    couplings = run(images_for(make("norm"), 3))["couplings"]
    close(couplings.sum(-1), torch.ones(couplings.shape[:3]))
    close(couplings[:, 0], torch.full(couplings[:, 0].shape, 0.25))
    assert (couplings[:, 2] - couplings[:, 1]).abs().max() > 1e-3


def test_the_callers_model_stays_in_training_mode() -> None:
    model = make("norm").train()
    export.metadata(model)
    export.trace_program(model)
    assert model.training


def test_large_votes_are_checked_on_fewer_images(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("norm")
    assert export.fitting(model, (1, 2, 17)) == [1, 2, 17]
    layer = model.caps[0]  # type: ignore[union-attr, index]
    monkeypatch.setattr(export, "MOST_VOTES", 4 * 2 * layer.lower * layer.upper * layer.upper_dim)  # type: ignore[union-attr, operator]
    assert export.fitting(model, (1, 2, 17)) == [1, 2]
    monkeypatch.setattr(export, "MOST_VOTES", 1)
    assert export.fitting(model, (1, 2, 17)) == [1]


# ------------------------------------------------------------------------------------------ metadata


def test_an_onnx_file_is_complete_and_describes_itself(desk: Path) -> None:
    import onnx

    proto = onnx.load(desk / "demo.onnx", load_external_data=False)
    onnx.checker.check_model(proto, full_check=True)
    assert not any(weight.external_data for weight in proto.graph.initializer)
    session = onnxruntime.InferenceSession(desk / "demo.onnx", providers=["CPUExecutionProvider"])
    told = session.get_modelmeta().custom_metadata_map
    assert json.loads(told["classes"]) == ["null", 'a "b"', "ü", "3"]
    described = json.loads(told["outputs"])
    assert {o.name: o.shape for o in session.get_outputs()} == {k: v["shape"] for k, v in described.items()}
    assert [(i.name, i.shape) for i in session.get_inputs()] == [("images", ["b", 1, 28, 28])]


def test_every_described_shape_has_as_many_dimensions_as_letters() -> None:
    for name in NETWORKS:
        record = export.metadata(make(name))
        for told in (*record["inputs"].values(), *record["outputs"].values()):
            letters = told["meaning"].partition(")")[0].split(",")
            assert len(letters) == len(told["shape"]), (name, told)


def test_no_file_contains_paths_of_the_machine(desk: Path) -> None:
    import zipfile

    archive = zipfile.ZipFile(desk / "digits.pt2")
    contents = [(desk / "demo.onnx").read_bytes(), *map(archive.read, archive.namelist())]
    for folder in (Path(export.__file__).parent, Path(torch.__file__).parent, Path.home() / ".cache"):
        assert not any(str(folder).encode() in content for content in contents)


def test_a_torch_program_runs_without_this_package(desk: Path) -> None:
    code = (
        "import sys, json, torch; extra = {'capsnet.json': ''}; "
        "run = torch.export.load(sys.argv[1], extra_files=extra).module(); "
        "print(run(torch.zeros(3, 1, 28, 28))['couplings'].shape[0], json.loads(extra['capsnet.json'])['classes'][0]); "
        "assert not any(name.startswith('capsnet') for name in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, desk / "digits.pt2"], capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["3", "null"], done.stderr


def test_the_examples_of_the_page_run(desk: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.chdir(desk)
    digit = (images_for(make("norm"), 1)[0, 0].numpy() * 255).astype(np.uint8)
    Image.fromarray(digit).save("digit.png")
    blocks = re.findall(r"^```python\n(.*?)^```", DOC.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 2
    for block in blocks:
        names: dict[str, object] = {}
        exec(block, names)
        assert names["classes"] == list(make("norm").classes)
    seen = make("norm").predict(digit)
    assert capsys.readouterr().out.startswith(
        f"{make('norm').classes[int(seen.labels)]} {float(seen.activations.max()):.3f}"
    )


# -------------------------------------------------------------------------------------------- the command line


def test_export_prints_the_file_its_differences_and_its_speed(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save("cnn", tmp_path / "runs" / "small")
    assert main(["export", "runs/small", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["file"] == "small.onnx"
    assert told["bytes"] == (tmp_path / "small.onnx").stat().st_size
    assert set(told["outputs"]) == set(told["differences"]) == {"activations", "logits"}
    assert all(gap < 1e-4 for gap in told["differences"].values())
    assert told["images_per_second"].keys() == {"file", "model"}
    assert all(rate["1"] > 0 and rate["128"] > 0 for rate in told["images_per_second"].values())
    assert main(["export", "runs/small", "--force"]) == 0
    assert "batch 128" in capsys.readouterr().out


def test_a_file_is_named_after_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for model in ("runs/demo", "runs/demo/", "runs/demo/model.safetensors", "weights/demo.safetensors", "demo"):
        assert default_file(model, "onnx") == Path("demo.onnx")
    assert default_file("runs/v1.5", "torch") == Path("v1.5.pt2")
    assert default_file(".", "onnx") == Path(f"{tmp_path.name}.onnx")


def test_a_file_is_overwritten_only_when_asked(desk: Path, capsys: Capture) -> None:
    before = (desk / "demo.onnx").read_bytes()
    fails(capsys, ["export", desk / "runs" / "demo", "--out", desk / "demo.onnx"], "exists already", "--force")
    assert (desk / "demo.onnx").read_bytes() == before


def test_an_unwritable_target_gets_one_line_before_the_work(
    desk: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for format in export.WRITERS:
        monkeypatch.setitem(export.WRITERS, format, lambda model: pytest.fail("the work has started"))
    run = desk / "runs" / "demo"
    (tmp_path / "file").touch()
    (tmp_path / "folder.onnx").mkdir()
    words = ["export", run, "--format", "torch", "--out"]
    fails(capsys, [*words, tmp_path / "file" / "x.pt2"], "could not write", "Choose a place")
    fails(capsys, [*words, "/proc/nothing/x.pt2"], "could not write", "Choose a place")
    fails(capsys, [*words, tmp_path / "x.onnx"], "must end in .pt2")
    fails(capsys, ["export", run, "--out", tmp_path / "folder.onnx"], "is a folder")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder.onnx"]


def test_a_damaged_or_missing_model_gets_one_line(tmp_path: Path, capsys: Capture) -> None:
    path = save("cnn", tmp_path)
    path.write_bytes(path.read_bytes()[:-10])
    fails(capsys, ["export", path, "--out", tmp_path / "x.onnx"], "damaged")
    fails(capsys, ["export", tmp_path / "nothing.safetensors"], "nothing.safetensors")
    assert not (tmp_path / "x.onnx").exists()


@pytest.mark.parametrize("missing", ["onnx", "onnxscript", "onnxruntime"])
def test_a_missing_library_gets_its_install_command(
    missing: str, desk: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    words = ["export", desk / "runs" / "demo", "--out", tmp_path / "x.onnx"]
    fails(capsys, words, f"needs {missing},", "pip install 'capsnet[export]'")


def test_a_file_that_disagrees_is_not_written(
    desk: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(content: bytes) -> export.Runner:
        run = export.load_torch(content)
        return lambda images: {**run(images), "poses": run(images)["poses"] + 0.01}

    (tmp_path / "x.pt2").write_bytes(b"the old one")
    monkeypatch.setitem(export.READERS, "torch", wrong)
    words = ["export", desk / "runs" / "demo", "--format", "torch", "--out", tmp_path / "x.pt2", "--force"]
    fails(capsys, words, "differs from the model in poses by 0.01", "nothing was written")
    assert (tmp_path / "x.pt2").read_bytes() == b"the old one"


def test_a_nan_or_a_wrong_shape_counts_as_a_difference() -> None:
    model = make("cnn")
    own = export.Exportable(model)
    assert export.check(model, own) == {"activations": 0.0, "logits": 0.0}
    with pytest.raises(UserError, match="logits by nan"):
        export.check(model, lambda images: {**own(images), "logits": own(images)["logits"] * float("nan")})
    with pytest.raises(UserError, match="for a batch of 1"):
        export.check(model, lambda images: {"activations": own(images)["activations"]})


def test_an_unknown_format_lists_the_choices(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="did you mean 'onnx'"):
        export.export_model(make("cnn"), tmp_path / "x.onnx", "onx")  # type: ignore[arg-type]
