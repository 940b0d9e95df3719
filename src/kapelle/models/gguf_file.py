"""Models in GGUF files, converted once to a folder of safetensors in kapelle's cache.

transformers reads the file with the package `gguf` and turns its quantised weights into float32, which is exact. The folder's name
holds the file's hash, and its checksums are verified like those of every folder that kapelle writes.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp

from kapelle.errors import AbsentPackage, ModelError
from kapelle.models.checksums import CHECKSUMS, write_checksums
from kapelle.runtime.files import cache_folder, sha256

SUFFIX = ".gguf"


def gguf_file(path: str) -> Path | None:
    """Return the GGUF file at a path: the file itself, or the only one of a folder without `config.json`; None if there is none.

    Raises ModelError for a folder with several.
    """
    place = Path(path).expanduser()
    if place.is_file():
        return place if place.suffix == SUFFIX else None
    if not place.is_dir() or (place / "config.json").is_file():
        return None
    found = sorted(place.glob(f"*{SUFFIX}"))
    if len(found) > 1:
        raise ModelError(f"'{path}' holds {len(found)} GGUF files. Name one of them, such as '{found[0]}'.")
    return found[0] if found else None


def check_gguf(file: Path) -> None:
    """Raise an error if a GGUF file cannot be read here; neither weights nor the whole file are read."""
    with file.open("rb") as content:
        if content.read(4) != b"GGUF":
            raise ModelError(f"'{file}' is not a GGUF file: it does not begin with `GGUF`. Fetch it again.")
    if find_spec("gguf") is None:
        raise AbsentPackage(
            f"'{file}' is a GGUF file, which needs the package gguf: pip install 'kapelle[gguf]'."
        )


def converted(file: Path) -> Path:
    """Return the folder with a GGUF file's weights in float32, its settings and its tokeniser; converts it at the first call.

    Raises ModelError or AbsentPackage.
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
    """Return a file's hash, computed once for each size and time of change."""
    return sha256(file)


def _convert(file: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from kapelle.models.paths import loading
    from kapelle.models.pretrained import load_pretrained
    from kapelle.runtime.hub import bars_for_people

    with loading(str(file)), bars_for_people():
        place = str(file.parent)
        tokenizer = AutoTokenizer.from_pretrained(
            place, gguf_file=file.name, trust_remote_code=False, local_files_only=True
        )
        model = load_pretrained(AutoModelForCausalLM, place, dtype=torch.float32, gguf_file=file.name)
    # The weights are plain numbers now, and `save_pretrained` must write them as such.
    model.hf_quantizer = None
    del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _unwritable(folder: Path, error: OSError) -> ModelError:
    return ModelError(
        f"The converted model cannot be written to {folder}: {error.strerror}. Free space there, or set KAPELLE_CACHE to another "
        "folder."
    )
