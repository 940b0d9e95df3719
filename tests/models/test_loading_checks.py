"""A small random model shows what kapelle would compute with a large one of the same settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.families import FAMILIES
from tests.support.tiny import tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, PreTrainedTokenizerFast

from kapelle.errors import ModelError
from kapelle.models.weight_files import check_architecture


def folder(place: Path, family: str, **settings: Any) -> str:
    AutoConfig.for_model(family, **settings).save_pretrained(place)
    words = {f"w{number}": number for number in range(2000)}  # more than a reduced model has embeddings for
    raw = Tokenizer(models.WordLevel(words, unk_token="w0"))  # noqa: S106 - a token of a vocabulary
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="w1")  # noqa: S106
    made.chat_template = tiny_model().tokenizer.chat_template
    made.save_pretrained(place)
    return str(place)


def test_a_head_that_is_a_linear_map_is_distinguished_from_others(tmp_path: Path) -> None:
    assert check_architecture(folder(tmp_path / "a", "gpt2", **{**FAMILIES["gpt2"], "vocab_size": 2000}))
    with pytest.raises(ModelError, match="BertLMHeadModel"):
        check_architecture(folder(tmp_path / "b", "bert", **{**FAMILIES["bert"], "vocab_size": 2000}))


def test_what_cannot_be_made_smaller_is_left_to_loading(tmp_path: Path) -> None:
    wide = {**FAMILIES["gpt2"], "n_embd": 40_000, "vocab_size": 2000}
    assert not check_architecture(folder(tmp_path, "gpt2", **wide))
