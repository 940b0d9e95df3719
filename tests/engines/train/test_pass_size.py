"""How many tokens a pass has where that is left open: a fixed number on a CPU, on a GPU what fits."""

from __future__ import annotations

from typing import Any

import pytest

from kapelle.cluster.planning.planned_run import shape_of
from kapelle.cluster.planning.update_memory import Compute, Pass, SharedPrefix, activations, block_backward
from kapelle.engines.train.pass_size import FEWEST, MOST, SHARE, chosen_tokens, token_bytes
from kapelle.models.adapters import Layers
from kapelle.models.outline import outline_of_settings

TWO_BLOCKS = Layers(
    "Any",
    frozenset(),
    {
        "model.layers.0.up": (10, 30),
        "model.layers.0.down": (30, 10),
        "model.layers.1.up": (10, 30),
        "model.layers.1.mlp.experts.0.up": (10, 500),
        "lm_head": (10, 1000),
    },
    "lm_head",
)


def test_a_token_by_hand() -> None:
    # Blocks: 2·80 and 2·40 bytes of what layers read and write, 8·10 each of the stream; 160 + 80 again for the larger one
    # in its backward pass; 16·10 beside the blocks.
    assert token_bytes(TWO_BLOCKS, 10, 2, recompute=False) == 160 + 80 + 2 * 80 + (160 + 80) + 160
    # Under checkpointing 4·10 of each block, and the larger block once for its second forward pass, once for its backward.
    assert token_bytes(TWO_BLOCKS, 10, 2, recompute=True) == 2 * 40 + 2 * (160 + 80) + 160


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("family", "hidden", "inner", "heads"),
    [
        ("qwen3", 1024, 3072, 16),
        ("qwen3", 2560, 9728, 32),
        ("qwen2", 2048, 11008, 16),
        ("llama", 4096, 14336, 32),
    ],
)
def test_memory_is_between_one_and_two_plans(
    family: str, hidden: int, inner: int, heads: int, size: int, recompute: bool
) -> None:
    settings: dict[str, Any] = {
        "model_type": family,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": 28,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 150_000,
        "tie_word_embeddings": True,
    }
    outline = outline_of_settings(settings)
    assert outline is not None
    work = Pass((SharedPrefix(0, (1024,) * 4, (512,) * 4, low=7 * 32),))
    how = Compute(size, size, cpu=False, full=False, adapted_output=True, checkpointing=recompute)
    shape = shape_of(settings, outline)
    counted = max(activations(shape, work, how), block_backward(shape, work, how)) / work.tokens
    assert counted < token_bytes(outline.layers, hidden, size, recompute=recompute) < 2 * counted


def test_the_largest_power_of_two_that_fits_in_the_share() -> None:
    room = int(8192 * 1000 / SHARE) + 2
    assert chosen_tokens(room, 1000) == 8192
    assert chosen_tokens(2 * room - 2000, 1000) == 8192
    assert (chosen_tokens(0, 1000), chosen_tokens(-5, 1000)) == (FEWEST, FEWEST)
    assert chosen_tokens(1 << 50, 1000) == MOST
