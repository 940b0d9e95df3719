"""How the conversations of a model at a path become tokens, without its weights."""

from __future__ import annotations

from kapelle.models.context import context_of
from kapelle.models.embedded import LightTokenizer
from kapelle.models.paths import check_model_path, loading
from kapelle.models.renderer import ChatRenderer
from kapelle.settings.schema import ModelConfig


def load_renderer(path: str, config: ModelConfig) -> ChatRenderer:
    """Return how a model's conversations become tokens, without loading its weights."""
    if path == "embedded":
        return ChatRenderer(LightTokenizer(), config.embedded.context)
    check_model_path(path)
    from transformers import AutoConfig, AutoTokenizer

    with loading(path):
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        settings = AutoConfig.from_pretrained(path, trust_remote_code=False)
        return ChatRenderer(tokenizer, context_of(settings, tokenizer))
