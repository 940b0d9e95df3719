"""Find the GGUF file of a model without reading it. The function `pretrained.converted` converts such a file."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from kapelle.errors import AbsentPackage, ModelError

SUFFIX = ".gguf"


def gguf_file(path: str) -> Path | None:
    """Return the GGUF file at a path, or None if there is none.

    The path may be the file itself or a folder without `config.json` that contains one GGUF file. Raises ModelError if
    the folder contains several GGUF files.
    """
    place = Path(path).expanduser()
    if place.is_file():
        return place if place.suffix == SUFFIX else None
    if not place.is_dir() or (place / "config.json").is_file():
        return None
    found = sorted(place.glob(f"*{SUFFIX}"))
    if len(found) > 1:
        raise ModelError(
            f"'{path}' contains {len(found)} GGUF files. Give the path of one of them, such as '{found[0]}'."
        )
    return found[0] if found else None


def check_gguf(file: Path) -> None:
    """Raise an error if a GGUF file cannot be read on this machine. Only the beginning of the file is read."""
    with file.open("rb") as content:
        if content.read(4) != b"GGUF":
            raise ModelError(
                f"'{file}' is not a GGUF file: it does not begin with `GGUF`. Download it again."
            )
    if find_spec("gguf") is None:
        raise AbsentPackage(
            f"'{file}' is a GGUF file, which needs the package gguf: pip install 'kapelle[gguf]'."
        )
