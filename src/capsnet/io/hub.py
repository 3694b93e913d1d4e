"""Models on the Hugging Face Hub by name, "hf-hub:user/name" or "hf-hub:user/name@revision". Needs the extra `hub`.

Only the safetensors file is downloaded, never a pickle, and only if it is not too large. `huggingface_hub` keeps it in
its cache.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from capsnet.errors import UserError

PREFIX = "hf-hub:"
WEIGHTS = "model.safetensors"
MOST_BYTES = 2_000_000_000


def is_hub_name(model: str | Path) -> bool:
    return isinstance(model, str) and model.startswith(PREFIX)


def library() -> ModuleType:
    try:
        import huggingface_hub
    except ImportError:
        raise UserError("models on a hub need huggingface_hub: pip install 'capsnet[hub]'.") from None
    return huggingface_hub


def download(name: str) -> Path:
    """The weight file of a model on the hub, from the cache or downloaded."""
    hub = library()
    repository, _, revision = name.removeprefix(PREFIX).partition("@")
    try:
        check_size(hub, repository, revision or None)
        return Path(hub.hf_hub_download(repository, WEIGHTS, revision=revision or None))
    except UserError:
        raise
    except hub.errors.HFValidationError:
        raise UserError(f"'{name}' is not a model on a hub: write {PREFIX}user/name.") from None
    except hub.errors.EntryNotFoundError:
        raise UserError(f"{name} has no {WEIGHTS}: it was not saved by capsnet.") from None
    except hub.errors.RepositoryNotFoundError:
        raise UserError(f"there is no {name} on the hub, or it is private: check the name, or log in.") from None
    except Exception as error:  # without a connection, that of whichever HTTP library huggingface_hub uses
        raise UserError(f"{name} cannot be downloaded ({first_line(error)}): check your connection.") from None


def check_size(hub: ModuleType, repository: str, revision: str | None) -> None:
    """Refuse a file that is too large before it is downloaded; a cached file needs no connection."""
    if isinstance(hub.try_to_load_from_cache(repository, WEIGHTS, revision=revision), str):
        return
    size = hub.get_hf_file_metadata(hub.hf_hub_url(repository, WEIGHTS, revision=revision)).size or 0
    if size > MOST_BYTES:
        raise UserError(f"the weights of {repository} have {size:,} bytes, more than the limit of {MOST_BYTES:,}.")


def first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
