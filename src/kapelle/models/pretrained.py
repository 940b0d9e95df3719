"""Read settings, tokenisers and models with `transformers`, without running code from model folders or loading pickle files."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Collection
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from kapelle.errors import AbsentModel, ModelError
from kapelle.models.checksums import CHECKSUMS, write_checksums
from kapelle.models.gguf_file import check_gguf, gguf_file
from kapelle.models.paths import CONFIG, check_modelscope, has_weights, loading, local_only
from kapelle.runtime.files import cache_folder, sha256
from kapelle.runtime.hub import (
    MODELSCOPE,
    bars_for_people,
    fetch_modelscope,
    is_of_modelscope,
    modelscope_folder,
)


def read_config(path: str) -> Any:
    """Return the settings of a model as `transformers` reads them. Code in the folder is never run."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=local_only(path))


def read_tokenizer(path: str) -> Any:
    """Return the tokeniser of a model as `transformers` reads it. Code in the folder is never run.

    A process reads unchanged files only once. Each caller receives a separate object, which can have its own chat
    template.
    """
    return copy.copy(_read_tokenizer(path, _files_of(path)))


def _files_of(path: str) -> tuple[tuple[str, int, int], ...]:
    """Return the path, size and modification time of each file in a model's folder or in the cache of a hub model."""
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
    """Read a tokeniser. The result is cached for the same path and files."""
    from transformers import AutoTokenizer

    # Without `trust_remote_code=False` transformers prompts on the terminal, and a `y` from a pipe would run the folder's code.
    return AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=local_only(path))


def load_pretrained(kind: Any, path: str, **options: Any) -> Any:
    """Load a model of an `AutoModel` class from safetensors files. Code in the folder is never run.

    Raises ModelError unless the files contain exactly the weights of the model. Tied weights may be stored once or
    twice. By default, `transformers` would initialise missing weights at random and ignore unknown weights.
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
            f"Model '{path}' has weights '{key}' of shape {tuple(there)}, but {architecture} needs {tuple(here)}. Check "
            "that its config.json belongs to these files, or download or save the model again."
        )
    if missing:
        raise ModelError(
            f"Model '{path}' has no weights for '{min(missing)}'{_more(missing)} of {architecture}. Check that its "
            "config.json belongs to these files and that no shard is missing, or download or save the model again."
        )
    if unexpected:
        raise ModelError(
            f"Model '{path}' has weights '{min(unexpected)}'{_more(unexpected)} that {architecture} does not use. Check "
            "that its config.json belongs to these files. To drop weights such as a value head, load and save it with "
            "transformers."
        )
    return model


def _more(keys: Collection[str]) -> str:
    return f" and {len(keys) - 1} more" if len(keys) > 1 else ""


def located(path: str, *, weights: bool = False) -> str:
    """Return the folder of a ModelScope model (`modelscope:OWNER/NAME`) or of a converted GGUF file. Other paths are unchanged.

    Settings and tokeniser are downloaded if they are missing, and with `weights` also the weights. A new GGUF file is
    converted. Raises ModelError if the download or the conversion fails.
    """
    if not is_of_modelscope(path):
        file = gguf_file(path)
        return path if file is None else str(converted(file))
    name = path.removeprefix(MODELSCOPE)
    folder = modelscope_folder(name)
    if folder is not None and (not weights or has_weights(folder)):
        return str(folder)
    check_modelscope(path)
    try:
        return str(fetch_modelscope(name, weights=weights))
    except Exception as error:
        # This is the boundary to a third-party client.
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise AbsentModel(
            f"Model '{path}' cannot be downloaded from ModelScope: {reason}. Check the name and the network; or download "
            f"it elsewhere (`modelscope download --model {name} --local_dir FOLDER`) and set the folder as the model."
        ) from error


def converted(file: Path) -> Path:
    """Return the folder that contains the weights of a GGUF file in float32, its settings and its tokeniser.

    The file is converted at the first call. Raises ModelError if the conversion fails, or AbsentPackage if a package is
    missing.
    """
    check_gguf(file)
    about = file.stat()
    folder = cache_folder() / "gguf" / f"{file.stem}-{_hash(file, about.st_size, about.st_mtime_ns)[:16]}"
    if (folder / CHECKSUMS).is_file():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(mkdtemp(prefix=f".{file.stem}-", dir=folder.parent))
    except OSError as error:
        raise _unwritable(folder, error) from error
    try:
        _convert(file, made)
        write_checksums(made)
        with suppress(FileExistsError):  # another process was faster
            made.rename(folder)
    except OSError as error:
        if (folder / CHECKSUMS).is_file():
            return folder
        raise _unwritable(folder, error) from error
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


@lru_cache
def _hash(file: Path, size: int, changed_ns: int) -> str:
    """Return the hash of a file, which is computed once for each size and modification time."""
    return sha256(file)


def _convert(file: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with loading(str(file)), bars_for_people():
        place = str(file.parent)
        tokenizer = AutoTokenizer.from_pretrained(
            place, gguf_file=file.name, trust_remote_code=False, local_files_only=True
        )
        model = load_pretrained(AutoModelForCausalLM, place, dtype=torch.float32, gguf_file=file.name)
    # The weights are no longer quantised, and `save_pretrained` must write them as plain numbers.
    model.hf_quantizer = None
    del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _unwritable(folder: Path, error: OSError) -> ModelError:
    return ModelError(
        f"The converted model cannot be written to {folder}: {error.strerror}. Free space there, or set KAPELLE_CACHE to "
        "a different folder."
    )
