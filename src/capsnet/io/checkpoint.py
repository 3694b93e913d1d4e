"""Weights and training state on disk: safetensors with JSON in the header, and never a pickle.

Files are written atomically, so that a kill, a crash or a full disk leaves either the old file or the complete new one.
Everything that is read is validated before use.
"""

from __future__ import annotations

import json
import platform
import subprocess
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from capsnet import plugins
from capsnet.errors import UserError, unknown
from capsnet.files import write_bytes
from capsnet.io import hub, zoo
from capsnet.io.records import Certificate
from capsnet.models.base import Model
from capsnet.models.registry import MODELS, build, model_from_dict, model_to_dict, plugins_of
from capsnet.routing.base import ROUTINGS

FORMAT = "2"
MODEL_FILE = "model.safetensors"
STATE_FILE = "state.safetensors"


def write_json(path: Path, value: Any) -> None:
    write_bytes(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise UserError(f"there is no {path}: check the path.") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not readable JSON ({error}): restore it, or train again.") from None


def write_tensors(path: Path, tensors: dict[str, Tensor], record: dict[str, Any]) -> None:
    """Tensors and a JSON record as one safetensors file."""
    whole = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    metadata = {"capsnet": FORMAT, "record": json.dumps(record)}
    write_bytes(path, safetensors.torch.save(whole, metadata))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and record of a file; a damaged or foreign file is refused."""
    if not path.is_file():
        raise UserError(f"there is no checkpoint {path}; `capsnet models` lists the available models.")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        record = json.loads(metadata.get("record", "null"))
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        if path.suffix.lower() in (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp"):
            raise UserError(f"{path} is an image, not a model: give the model first, then the images.") from None
        raise UserError(f"{path} is damaged or incomplete ({error}): restore it, or train again.") from None
    if metadata.get("capsnet") != FORMAT or not isinstance(record, dict):
        raise UserError(f"{path} is not a checkpoint of format {FORMAT}, which this version of capsnet reads.")
    return tensors, record


def save_model(path: Path, model: Model, certificate: Certificate) -> None:
    """Weights with everything needed to use them: architecture, class names, birth certificate, required plugins."""
    record = {
        "model": model_to_dict(model.config),
        "classes": list(model.classes),
        "multi_label": model.multi_label,
        "certificate": certificate.to_json(),
        "plugins": plugins.needs(plugins_of(model.config)),
    }
    if model.given_stem:
        record["stem"] = model.given_stem
    write_tensors(path, model.state_dict(), record)


def load(path: str | Path, device: str | torch.device = "cpu", *, stem: nn.Module | None = None) -> Model:
    """A trained model in evaluation mode: a model name, a run folder, a .safetensors file or "hf-hub:user/name".

    A model with a stem that was given in Python needs such a module again as `stem`; its weights are replaced.

    >>> model = load("runs/demo")  # doctest: +SKIP
    >>> model.predict(images).labels  # doctest: +SKIP
    """
    file = model_file(path)
    tensors, record = read_tensors(file)
    if "model" not in record:
        raise UserError(f"{file} contains the state of a run, not a model: `capsnet train --resume` continues it.")
    require_parts(record, file, stem)
    try:
        # on the meta device, so that a damaged header cannot ask for memory and no random number is drawn
        model = build(model_from_dict(record["model"]), stem=stem, device=torch.device("meta"))
    except (ValueError, TypeError, RuntimeError, ArithmeticError, MemoryError) as error:
        raise UserError(f"{file} does not describe a network that can be built: {error}") from None
    check_record(record, model.config.num_classes, file)
    fitting = fit(tensors, model.state_dict(), file)
    model.load_state_dict(fitting, assign=True)
    if any(buffer.is_meta for buffer in model.buffers()):  # those that are computed, not stored
        with torch.random.fork_rng(devices=[]):
            model = build(model.config, stem=stem)
        model.load_state_dict(fitting, assign=True)
    model.classes = tuple(map(str, record["classes"]))
    model.multi_label = record["multi_label"]
    model.certificate = Certificate.of_header(record["certificate"])
    return model.to(device).eval()


def birth_of(model: str | Path) -> Certificate:
    """The birth certificate in the header of a model, without building the model."""
    return Certificate.of_header(read_tensors(model_file(model))[1].get("certificate"))


def require_parts(record: dict[str, Any], file: Path, stem: nn.Module | None = None) -> None:
    """Refuse a model whose plugins or whose stem is missing, and say which."""
    plugins.require(record.get("plugins", []), (MODELS, ROUTINGS), str(file))
    if stem is None and "stem" in record:
        raise UserError(
            f"{file} contains the weights of a stem that was given in Python ({record['stem']}), but not its code: "
            f"load it with capsnet.load(…, stem=module), where module is such a stem."
        )


def check_record(record: dict[str, Any], num_classes: int, file: Path) -> None:
    """Refuse a header without class names, the multi-label flag or the birth certificate."""
    classes = record.get("classes")
    if not isinstance(classes, list) or len(classes) != num_classes:
        raise UserError(f"{file} does not name its {num_classes} classes: its header is damaged.")
    for name, kind in (("multi_label", bool), ("certificate", dict)):
        if not isinstance(record.get(name), kind):
            raise UserError(f"{file} has {record.get(name)!r} as its {name}: its header is damaged.")


def model_file(path: str | Path) -> Path:
    """The weight file of a model name, a run folder, a path or a model on the hub."""
    if isinstance(path, str) and hub.is_hub_name(path):
        return hub.download(path)
    if isinstance(path, str) and zoo.is_shipped(path):
        return zoo.weight_file(path)
    is_name = isinstance(path, str) and path == Path(path).name and not Path(path).suffix
    path = Path(path)
    if is_name and not path.exists():
        raise UserError(f"{unknown('model', path.name, zoo.names())} Give a run by its folder, such as runs/demo.")
    if path.is_dir():
        if not (path / MODEL_FILE).exists() and (path / STATE_FILE).exists():
            resume = plugins.command("train", "--resume", str(path))
            raise UserError(f"the training in {path} has not finished: `{resume}` continues it.")
        return path / MODEL_FILE
    return path


def fit(tensors: dict[str, Tensor], expected: dict[str, Tensor], file: Path) -> dict[str, Tensor]:
    """Copies of the tensors in the expected dtypes, after checking names, shapes and that all values are finite."""
    if strange := set(expected) ^ set(tensors):
        raise UserError(f"{file} does not fit its own architecture: {min(strange)} is missing or unexpected.")
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            raise UserError(
                f"{file} does not fit: {name} is {tuple(tensor.shape)} in the file "
                f"and {tuple(expected[name].shape)} in the model."
            )
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise UserError(f"{file} has values in {name} that are not finite: use an earlier checkpoint.")
    return {name: tensor.to(expected[name].dtype, copy=True) for name, tensor in tensors.items()}


def certificate(config: dict[str, Any], seconds: float, **more: Any) -> Certificate:
    """The birth certificate of a result: config, versions, machine and duration."""
    import numpy

    from capsnet import __version__

    threads = torch.get_num_threads()
    return Certificate.from_json(
        {
            "config": config,
            "capsnet": __version__,
            "git": git_hash(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": numpy.__version__,
            "machine": f"{platform.system()} {platform.machine()}, {threads} thread{'s' if threads != 1 else ''}",
            "seconds": round(seconds, 1),
            **more,
        }
    )


def git_hash() -> str | None:
    """The commit of the source tree, with a + if it has changes; None for an installed package."""
    here = Path(__file__).resolve().parent
    command = ["git", "-C", str(here), "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    inside = "site-packages" not in str(here) and done.returncode == 0
    return done.stdout.strip() if inside else None
