"""Locate a model and check its path without loading the model. Errors during loading are converted to `ModelError`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path

from kapelle.errors import AbsentModel, KapelleError, ModelError
from kapelle.models.checksums import verify_folder
from kapelle.models.gguf_file import check_gguf, gguf_file
from kapelle.runtime.hub import (
    MODELSCOPE,
    hub_fault,
    is_of_modelscope,
    modelscope_cache,
    modelscope_fault,
    modelscope_folder,
)
from kapelle.runtime.machine import refusal

CONFIG = "config.json"


@contextmanager
def loading(path: str, done: str = "loaded") -> Iterator[None]:
    """Convert any exception that `transformers` raises while it reads a model, its settings or its tokeniser into a ModelError."""
    try:
        yield
    except KapelleError:
        raise
    except Exception as error:
        # This is the boundary to third-party readers, which may raise any exception on damaged files.
        reason = refusal(error) or f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ModelError(
            f"Model '{path}' cannot be {done}: {reason} One of its files may be damaged or truncated; download or save "
            "the model again."
        ) from error


def has_weights(folder: Path) -> bool:
    """Return whether a folder contains all files of a model's weights."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        with loading(str(folder), "read"):
            shards = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
        return all((folder / shard).is_file() for shard in shards)
    return any(folder.glob("*.safetensors"))


def check_modelscope(path: str) -> None:
    """Raise ModelError if a model is missing from ModelScope's cache and cannot be downloaded."""
    name = path.removeprefix(MODELSCOPE)
    fault = modelscope_fault(name)
    if fault is not None:
        raise AbsentModel(
            f"Model '{path}' was not downloaded to {modelscope_cache()} (MODELSCOPE_CACHE), and {fault}. Or download it "
            f"elsewhere (`modelscope download --model {name} --local_dir FOLDER`) and set the folder as the model."
        )


def local_only(path: str, file: str = CONFIG) -> bool:
    """Return True if the hub does not answer and `from_pretrained` must use the local cache.

    The argument `file` names a file that every model of this kind has. Raises ModelError, within seconds, if the model
    is neither on the hub nor in the cache.
    """
    if Path(path).expanduser().is_dir():
        return False
    # `hub_fault` is cached by its arguments.
    fault = hub_fault(path) if file == CONFIG else hub_fault(path, file=file)
    if fault is None:
        return False
    from huggingface_hub import try_to_load_from_cache

    if isinstance(try_to_load_from_cache(path, file), str):
        return True
    if modelscope_folder(path) is not None:
        raise ModelError(
            f"Model '{path}' is not a folder here, and {fault}. ModelScope's cache contains it: use `{MODELSCOPE}{path}`."
        )
    if get_close_matches(path, ("embedded",), cutoff=0.8):
        raise ModelError(
            f"Model '{path}' is not a folder here. Did you mean 'embedded', the tiny model that kapelle makes?"
        )
    raise AbsentModel(
        f"Model '{path}' is not a folder here and was not downloaded, and {fault}. Check the name and the network; or "
        f"download it elsewhere (`hf download {path} --local-dir FOLDER`) and set the folder as the model."
    )


def check_model_path(path: str) -> None:
    """Raise ModelError if a path is neither the folder of a model nor the name of a model on the hub. No weights are loaded."""
    folder = Path(path)
    if path == "embedded":
        return
    if (file := gguf_file(path)) is not None:
        check_gguf(file)
        return
    if is_of_modelscope(path):
        known = modelscope_folder(path.removeprefix(MODELSCOPE))
        if known is None:
            check_modelscope(path)
        elif has_weights(known):
            check_model_path(str(known))
        return
    if not folder.exists():
        check_hub_name(path)
        return
    if not folder.is_dir():
        raise ModelError(f"'{path}' is a file. Use a GGUF file, or the folder that `save_pretrained` wrote.")
    if (folder / "config.yaml").is_file() and (folder / "lock").is_file():
        raise ModelError(_a_run(path))
    if (folder / "adapter_config.json").is_file():  # transformers would silently load its base and apply it
        raise ModelError(
            f"'{path}' is a PEFT adapter, not a model. Set its base as the model and `weights: {{past: {path}}}` for an "
            "agent, or merge both with PEFT (`merge_and_unload`)."
        )
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"Model folder '{path}' has no config.json. Use a folder that `save_pretrained` wrote."
        )
    if not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"Model folder '{path}' has no weights (*.safetensors). Save it again with `save_pretrained`, or convert a pickle "
            "checkpoint to safetensors."
        )
    verify_folder(folder, settings_only=True)


def check_hub_name(path: str) -> None:
    """Raise ModelError if a path is neither a folder nor a valid model name on the hub. The hub is not contacted."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    scheme, colon, rest = path.partition("://")
    if colon:
        on_the_hub = rest.removeprefix("huggingface.co/") if scheme in {"http", "https"} else rest
        if scheme == "hf" or on_the_hub != rest:
            owner_and_name = "/".join(on_the_hub.split("/")[:2])
            raise ModelError(f"'{path}' is a URL. Use only the model's name: `{owner_and_name}`.")
        raise ModelError(
            f"'{path}' cannot be downloaded: models come from folders, the Hugging Face hub and ModelScope. Download it "
            f"with a client for {scheme}:// and set the folder as the model."
        )
    run, at, _ = path.rpartition("@")
    if at and Path(run).is_dir():
        raise ModelError(_a_run(path))
    if path.startswith("~") and Path(path).expanduser().exists():
        raise ModelError(f"'{path}' was not expanded by the shell. Use {Path(path).expanduser()}.")
    if path.startswith((".", "/", "~")):
        raise AbsentModel(
            f"Model folder '{path}' does not exist. Use an existing folder, a model on the hub or `embedded`."
        )
    try:
        validate_repo_id(path)
    except HFValidationError:
        raise ModelError(
            f"Model folder '{path}' does not exist. Use an existing folder, a model on the hub as OWNER/NAME, or `embedded`."
        ) from None


def _a_run(path: str) -> str:
    return (
        f"'{path}' is a kapelle run, not a model. Set `start_from: {path}` to continue training from its weights, or "
        f"export a model (`kapelle export {path} --merge --format hf`) and use that folder."
    )
