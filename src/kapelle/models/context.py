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
    settings: Mapping[str, Any] = config.get_text_config().to_dict()
    limits = [settings.get(key) for key in LIMITS]
    limits += [rope.get("original_max_position_embeddings") for rope in _changing(settings)]
    return int(min(limit for limit in (*limits, tokenizer.model_max_length) if limit))


def _changing(settings: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the settings of rotary positions, of all layers or by kind of layer, whose angles change with the length."""
    found = settings.get("rope_parameters") or {}
    for rope in (found, *(each for each in found.values() if isinstance(each, Mapping))):
        if rope.get("rope_type") == "longrope":
            yield {
                "original_max_position_embeddings": settings.get("original_max_position_embeddings"),
                **rope,
            }
