"""Whether llama.cpp's `convert_hf_to_gguf.py` takes a model: asked before one is merged, and of what was written.

The converter knows a byte-level BPE by the ids that it gives one text, and holds them against a list of published tokenisers. So
one that was made for a tiny model is never taken, whatever the rest of the folder is like.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kapelle.errors import ModelError

SMALLEST = 30_000
"""Tokens: every byte-level BPE on the converter's list has more."""
UNKNOWN = frozenset({"GPTNeoForCausalLM", "HeliumForCausalLM", "OPTForCausalLM"})
"""Architectures that models here have and the converter does not; docs/export.md says which version was asked."""
_INSTEAD = "Export with `--format hf`, or train on a pretrained model"


def check_convertible(model: str | Path) -> None:
    """Raise ModelError for a base or a written folder that the converter would refuse; a name on a hub is not looked at."""
    if str(model) == "embedded":
        raise ModelError(
            f"llama.cpp's converter does not take the base 'embedded': its tokeniser is made here, and the converter takes a "
            f"byte-level BPE from its list of published ones alone. {_INSTEAD}."
        )
    place = Path(model).expanduser()
    if not place.is_dir():
        return
    config = _read(place / "config.json")
    named = config.get("architectures") or ()
    if not named:
        raise ModelError(
            f"llama.cpp's converter does not take {place}: its config.json names no `architectures`."
        )
    if named[0] in UNKNOWN:
        raise ModelError(
            f"llama.cpp's converter does not know the architecture {named[0]} of {place}. {_INSTEAD}."
        )
    if not (place / "tokenizer.model").is_file():  # of SentencePiece, which it reads itself
        _check_tokenizer(place)


def _check_tokenizer(place: Path) -> None:
    model = _read(place / "tokenizer.json").get("model")
    if not isinstance(model, Mapping):
        raise ModelError(
            f"llama.cpp's converter does not take {place}: it has neither `tokenizer.model` nor a `tokenizer.json`. Save the "
            "model with its tokeniser."
        )
    kind, tokens = model.get("type"), len(model.get("vocab") or ())
    if kind == "WordLevel" or (kind == "BPE" and not model.get("byte_fallback") and tokens < SMALLEST):
        raise ModelError(
            f"llama.cpp's converter does not take the tokeniser of {place}, a {kind} of {tokens:,} tokens: it takes published "
            f"ones from a list alone, each of more than {SMALLEST:,}. {_INSTEAD}."
        )


def _read(file: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
