"""A model as a folder with its weights, its config and a model card, and that folder on the Hugging Face Hub.

These are `Model.save_pretrained`, `Model.from_pretrained` and `Model.push_to_hub`. A folder needs nothing but capsnet;
the hub needs the extra `hub`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

from capsnet.data.registry import find
from capsnet.errors import UserError
from capsnet.files import write_bytes
from capsnet.io import checkpoint, hub
from capsnet.io.records import Certificate
from capsnet.models.base import Model, describe_image
from capsnet.models.registry import model_to_dict
from capsnet.timing import clock

Kind = TypeVar("Kind", bound=Model)
CARD_FILE = "README.md"
CONFIG_FILE = "config.json"
PAPER = "https://arxiv.org/abs/1710.09829"


def save_folder(model: Model, folder: str | Path, **card: Any) -> Path:
    """Write model.safetensors, config.json and README.md, the card; a card that exists is kept."""
    folder = Path(folder)
    checkpoint.save_model(folder / checkpoint.MODEL_FILE, model, certificate_of(model))
    config = {"library_name": "capsnet", "model": model_to_dict(model.config), "classes": model.classes}
    checkpoint.write_json(folder / CONFIG_FILE, config | {"multi_label": model.multi_label})
    if not (folder / CARD_FILE).exists():
        write_bytes(folder / CARD_FILE, card_text(model, **card).encode())
    return folder


def open_folder(kind: type[Kind], name: str | Path) -> Kind:
    """A model from a folder, or from the hub if there is no such folder."""
    local = Path(name).exists() or hub.is_hub_name(name) or isinstance(name, Path)
    model = checkpoint.load(name if local else f"{hub.PREFIX}{name}")
    if not isinstance(model, kind):
        raise UserError(
            f"{name} is a {type(model).__name__}, not a {kind.__name__}: use {type(model).__name__} or Model."
        )
    return model


def push(model: Model, repo_id: str, **options: Any) -> str:
    """Upload a model by `huggingface_hub.ModelHubMixin.push_to_hub`, which describes the options; the commit's URL."""
    library = hub.library()
    card = options.pop("card", {})

    class Published(library.ModelHubMixin):  # type: ignore[name-defined]
        def save_pretrained(self, save_directory: str | Path, **_: Any) -> None:
            save_folder(model, save_directory, **card)

    try:
        return str(Published().push_to_hub(repo_id, **options))
    except library.errors.HFValidationError:
        raise UserError(f"'{repo_id}' is not a name on a hub: write user/name.") from None
    except UserError:
        raise
    except Exception as error:  # without a connection, that of whichever HTTP library huggingface_hub uses
        raise UserError(
            f"{repo_id} cannot be uploaded ({hub.first_line(error)}): log in with `hf auth login`."
        ) from None


def certificate_of(model: Model) -> Certificate:
    """The birth certificate that the model was loaded with, or an empty one of this version."""
    return model.certificate if isinstance(model.certificate, Certificate) else checkpoint.certificate({}, 0.0)


# --- The card --------------------------------------------------------------------------------------------------------


def card_text(model: Model, title: str = "", license: str = "") -> str:
    """The model card: YAML for the hub, then Markdown for readers."""
    birth = certificate_of(model)
    title = title or f"{type(model).__name__} for {describe_image(model.config.image_shape)} images"
    lines = [
        f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in card_data(model, title, license).items()
    ]
    rows = "".join(f"| {key} | {value} |\n" for key, value in facts(model, birth).items())
    return CARD.format(data="\n".join(lines), title=title, description=model.describe(), rows=rows, paper=PAPER)


def card_data(model: Model, title: str, license: str) -> dict[str, Any]:
    """The metadata that the hub reads; JSON values are YAML values too."""
    birth, routing = certificate_of(model), getattr(model.config, "routing", None)
    data = str(birth.config.get("data", ""))
    info = find(data)
    tags = ["capsule-network", "image-classification", *([f"{routing.algorithm}-routing"] if routing else [])]
    return {
        **({"license": license} if license else {}),
        "library_name": "capsnet",
        "pipeline_tag": "image-classification",
        "tags": tags,
        **({"datasets": [info.name]} if info and not info.takes_path else {}),
        **({"model-index": [validated(birth, title, data)]} if birth.validation_error_percent is not None else {}),
    }


def validated(birth: Certificate, title: str, data: str) -> dict[str, Any]:
    """The validation accuracy in the form of the hub's model index."""
    accuracy = round(1 - (birth.validation_error_percent or 0) / 100, 6)
    result = {
        "task": {"type": "image-classification"},
        "dataset": {"type": data, "name": data, "split": "validation"},
        "metrics": [{"type": "accuracy", "value": accuracy}],
    }
    return {"name": title, "results": [result]}


def facts(model: Model, birth: Certificate) -> dict[str, str]:
    """The table of the card; what is not known is left out."""
    error, images = birth.validation_error_percent, birth.training_images
    known = {
        "input": describe_image(model.config.image_shape),
        "classes": ", ".join(model.classes),
        "labels per image": "any number" if model.multi_label else "one",
        "parameters": f"{sum(p.numel() for p in model.parameters()):,}",
        "training data": f"{birth.config['data']}, {images:,} images" if birth.config.get("data") and images else "",
        "training": f"{birth.epochs} epochs in {clock(birth.seconds)}, seed {birth.config.get('seed')}"
        if birth.epochs
        else "",
        "validation error": "" if error is None else f"{error:.2f} %",
        "versions": f"capsnet {birth.capsnet}, torch {birth.torch}" if birth.capsnet else "",
    }
    return {key: value for key, value in known.items() if value}


CARD = """---
{data}
---

# {title}

{description}

| | |
|---|---|
{rows}
## Use

```python
import capsnet

model = capsnet.load("hf-hub:user/name")  # or the path of this folder
seen = model.predict(images)  # uint8 or float images of shape (b, h, w) or (b, c, h, w)
[model.classes[label] for label in seen.labels]
```

Activations are not calibrated probabilities. The network was trained on images like those of its training data and
names one of its classes for any other image, too. Capsule networks: [Sabour, Frosst and Hinton, 2017]({paper}).
"""
