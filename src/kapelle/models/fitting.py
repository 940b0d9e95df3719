"""Whether the weights in a model's files are those that its settings describe, before they are loaded."""

from __future__ import annotations

from pathlib import Path

from kapelle.errors import ModelError
from kapelle.models.architectures import read_settings
from kapelle.models.outline import Outline
from kapelle.models.weight_files import FLOATS, INDEX, WHOLE, shards_of, stored_weights


def folder_of(path: str) -> Path | None:
    """Return the folder that holds the weights of a model; None for the embedded one and one that was not downloaded."""
    folder = Path(path).expanduser()
    if path == "embedded":
        return None
    return folder if folder.is_dir() else _downloaded(path)


def check_files(path: str, outline: Outline) -> bool:
    """Raise ModelError for weights that are missing, cut off, or others than the outline's; False where this cannot be told.

    Files that fit by name and shape are enough. Others may be what another version or program has saved under other names,
    which transformers knows. True where nothing was downloaded yet.
    """
    folder = folder_of(path)
    if folder is None:
        return True
    try:
        found = stored_weights(folder)
    except ModelError as error:
        raise ModelError(f"Model '{path}' cannot be loaded. {error}") from None
    fits = {name: tensor.shape for name, tensor in found.items() if name in outline.weights}
    known = found.keys() <= outline.weights.keys() | outline.spare
    coded = read_settings(str(folder)).get(
        "quantization_config"
    )  # needs a library that transformers looks for
    if (
        not coded
        and known
        and fits == outline.weights
        and all(tensor.dtype in FLOATS for tensor in found.values())
    ):
        return True
    from kapelle.models.trial import check_names

    return check_names(path)


def _downloaded(name: str) -> Path | None:
    """Return the folder of a hub model of which all weights are here."""
    from huggingface_hub import try_to_load_from_cache

    for file in (WHOLE, INDEX):
        found = try_to_load_from_cache(name, file)
        if isinstance(found, str):
            folder = Path(found).parent
            shards = shards_of(Path(found)).values() if file == INDEX else ()
            return folder if all((folder / shard).is_file() for shard in shards) else None
    return None
