"""How many tokens a model reads, from its settings and its tokeniser's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

LIMITS = ("max_position_embeddings", "n_positions", "max_seq_len")
"""Settings of `transformers` that say how many positions there are: rows of a table (GPT-2, OPT), or what was trained."""


def context_of(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the most tokens of prompt and completion together.

    A model whose angles of positions change for the whole batch with its longest text (`longrope`) reads as many as leave
    them alone: beyond, a token's log-prob would depend on its neighbours in a batch.
    """
    found = context_in(config.get_text_config().to_dict(), tokenizer.model_max_length)
    assert found is not None, "the tokeniser has a limit"
    return found


def context_in(settings: Mapping[str, Any], most: int, *, by_class: bool = False) -> int | None:
    """Return the same of settings as they are written, of a tokeniser that reads at most `most` tokens.

    None if they name no limit and one that is not written is known `by_class`, as in a `config.json`.
    """
    limits = [settings.get(key) for key in LIMITS]
    if by_class and not any(limits):
        return None
    limits += [rope.get("original_max_position_embeddings") for rope in _changing(settings)]
    return int(min(limit for limit in (*limits, most) if limit))


def _changing(settings: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the settings of rotary positions, of all layers or by kind of layer, whose angles change with the length."""
    found = settings.get("rope_parameters") or {}
    for rope in (found, *(each for each in found.values() if isinstance(each, Mapping))):
        if rope.get("rope_type") == "longrope":
            yield {
                "original_max_position_embeddings": settings.get("original_max_position_embeddings"),
                **rope,
            }
