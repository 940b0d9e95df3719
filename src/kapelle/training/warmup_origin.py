"""On what a cached warmed-up model was made: `made.json` beside its weights, and what of it is different now.

Sums are added up in another order with another number of threads, on another processor or by another torch, and after
hundreds of steps that is another model. The cache gives the model that is there, since runs that began with it need the same
one again; but a run that begins with it shows other numbers than one that makes it anew, and says so.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kapelle.training.circumstances import machine, versions

FILE = "made.json"


def record_origin(folder: Path) -> None:
    """Write on what the model in a folder was made; OSError where it cannot be written."""
    (folder / FILE).write_text(json.dumps(_here(), indent=1) + "\n", "utf-8")


def origin_notes(folders: Iterable[str]) -> list[str]:
    """Return a line for each folder whose warmed-up model was made otherwise than it would be here."""
    return [note for folder in dict.fromkeys(folders) if (note := _origin_note(folder)) is not None]


def _origin_note(folder: str) -> str | None:
    """Return what is different here from where a warmed-up model was made; None for nothing, or where it is not recorded."""
    try:
        made = json.loads((Path(folder) / FILE).read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(made, Mapping):
        return None
    here = _here()
    differs = [
        f"{key} {made[key]}, here {here[key]}" for key in here if key in made and made[key] != here[key]
    ]
    if not differs:
        return None
    return (
        f"the warmed-up model in {folder} was made otherwise ({'; '.join(differs)}): the numbers before training, and so those "
        "after it, are not those of one that is made here. Name another folder as `KAPELLE_CACHE` to make one."
    )


def _here() -> dict[str, Any]:
    """Return what a model's last bits depend on besides its settings."""
    found = machine()
    features = found.pop("processor features", "")
    kernels = str(features).partition(":")[0]
    return {**found, "kernels": kernels, **{key: versions()[key] for key in ("torch", "transformers")}}
