"""How the conversations of a model at a path become tokens, without its weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kapelle.models.context import context_of
from kapelle.models.embedded import light_tokenizer
from kapelle.models.light_tokenizer import read_folder
from kapelle.models.paths import check_model_path, loading, local_only
from kapelle.models.renderer import ChatRenderer
from kapelle.settings.schema import ModelConfig


def load_renderer(path: str, config: ModelConfig) -> ChatRenderer:
    """Return how a model's conversations become tokens, without loading its weights."""
    if path == "embedded":
        return ChatRenderer(light_tokenizer(), config.embedded.context)
    check_model_path(path)
    local = local_only(path)
    from transformers import AutoConfig, AutoTokenizer

    with loading(path):
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=local)
        settings = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=local)
        words = getattr(settings.get_text_config(), "vocab_size", None)
        return ChatRenderer(tokenizer, context_of(settings, tokenizer), words)


def light_renderer(path: str, config: ModelConfig) -> ChatRenderer:
    """Return `load_renderer`'s, without torch where a folder's files allow that; its tokens are counted, not learned from."""
    folder = Path(path).expanduser()
    if path != "embedded" and (folder / "tokenizer.json").is_file():
        check_model_path(path)
        found = read_folder(folder)
        if found is not None:
            return ChatRenderer(*found)
    return load_renderer(path, config)


ReadRenderer = Callable[[str, ModelConfig], ChatRenderer]
"""`load_renderer` or `light_renderer`."""
