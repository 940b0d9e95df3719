"""Read settings, tokenisers and models with `transformers`; code of their folders is never run, and nothing is unpickled."""

from __future__ import annotations

import copy
from collections.abc import Collection
from functools import lru_cache
from pathlib import Path
from typing import Any

from kapelle.errors import ModelError
from kapelle.models.paths import CONFIG, local_only


def read_config(path: str) -> Any:
    """Return a model's settings as `transformers` reads them; its folder's code is never run."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=local_only(path))


def read_tokenizer(path: str) -> Any:
    """Return a model's tokeniser as `transformers` reads it; its folder's code is never run.

    A process reads unchanged files once; each caller gets its own object, for a chat template of its own.
    """
    return copy.copy(_read_tokenizer(path, _files_of(path)))


def _files_of(path: str) -> tuple[tuple[str, int, int], ...]:
    """Return the files of a model's folder, or of a hub model's in the cache: path, size and time of change."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(path, CONFIG)
        if not isinstance(found, str):
            return ()
        folder = Path(found).parent
    files = [(file, file.stat()) for file in sorted(folder.iterdir()) if file.is_file()]
    return tuple((str(file), about.st_size, about.st_mtime_ns) for file, about in files)


@lru_cache(maxsize=2)
def _read_tokenizer(path: str, files: tuple[tuple[str, int, int], ...]) -> Any:
    """Read a tokeniser from these files."""
    from transformers import AutoTokenizer

    # Without `trust_remote_code=False` transformers prompts on the terminal, and a `y` from a pipe would run the folder's code.
    return AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=local_only(path))


def load_pretrained(kind: Any, path: str, **options: Any) -> Any:
    """Load a model of an `AutoModel` class from safetensors; its folder's code is never run.

    Raises ModelError unless the files hold exactly the model's weights, tied ones once or twice. `transformers` would draw
    missing weights at random and ignore unknown ones.
    """
    loaded: Any = kind.from_pretrained(
        path,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # reported below, by name
        use_safetensors=True,  # nothing is unpickled
        trust_remote_code=False,
        local_files_only=local_only(path),
        **options,
    )
    model, found = loaded
    architecture = type(model).__name__
    missing, unexpected = found["missing_keys"], found["unexpected_keys"]
    for key, there, here in sorted(found["mismatched_keys"]):
        raise ModelError(
            f"Model '{path}' has weights '{key}' of shape {tuple(there)}, where {architecture} needs {tuple(here)}. Does its "
            "config.json belong to these files? Fetch or save it again."
        )
    if missing:
        raise ModelError(
            f"Model '{path}' has no weights for '{min(missing)}'{_more(missing)} of {architecture}. Does its config.json belong "
            "to these files, and are all shards there? Fetch or save it again."
        )
    if unexpected:
        raise ModelError(
            f"Model '{path}' has weights '{min(unexpected)}'{_more(unexpected)} that {architecture} does not use. Does its "
            "config.json belong to these files? To drop weights such as a value head, load and save it with transformers."
        )
    return model


def _more(keys: Collection[str]) -> str:
    return f" and {len(keys) - 1} more" if len(keys) > 1 else ""
