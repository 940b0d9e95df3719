"""Conversations as token ids, extended and never re-tokenised.

The chat template renders a conversation in which a stand-in text takes the place of the agent's answer; what follows the
stand-in is the text that has to follow the tokens that the agent sampled. So the next prompt is
exactly the last prompt, the sampled ids, and that text: training sees the very tokens that were sampled,
and a KV cache or a merged training row can continue where the last turn ended.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from kapelle.errors import ContextError, ModelError
from kapelle.models.embedded import light_tokenizer
from kapelle.models.light_tokenizer import context_of, read_folder
from kapelle.models.paths import check_model_path, loading, local_only
from kapelle.models.templates import TemplateForm, check_template, rendering
from kapelle.runtime.characters import replace_surrogates
from kapelle.settings.schema import ModelConfig
from kapelle.types import Json, Message

_STAND_IN = "\u2e28said\u2e29"
"""Stand-in for the agent's answer; a string that no template contains."""


_TWO_WORDS = "two words"


class ChatTokenizer(Protocol):
    """What a renderer asks of a tokeniser; those of transformers are such."""

    name_or_path: Any
    chat_template: Any

    @property
    def added_tokens_decoder(self) -> Mapping[int, object]:
        """Tokens beside the vocabulary, special ones among them, by id."""
        ...

    @property
    def eos_token_id(self) -> Any:
        """The token that ends a turn; None for none."""
        ...

    def get_vocab(self) -> Mapping[str, int]:
        """Return all tokens with their ids."""
        ...

    def apply_chat_template(
        self, conversation: list[dict[str, Json]], *, tokenize: bool = ..., add_generation_prompt: bool = ...
    ) -> Any:
        """Return a conversation as text."""
        ...

    def __call__(self, text: str, *, add_special_tokens: bool = ...) -> Mapping[str, Any]:
        """Return a text's token ids as `input_ids`."""
        ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = ...) -> Any:
        """Return tokens as text."""
        ...


class ChatRenderer:
    """Renders conversations with a tokeniser's chat template."""

    def __init__(self, tokenizer: ChatTokenizer, context: int, embeddings: int | None = None) -> None:
        """Render for a model that reads `context` tokens and has so many `embeddings`; ModelError where they do not fit."""
        self._embeddings = sys.maxsize if embeddings is None else embeddings
        _check_vocabulary(tokenizer, self._embeddings)
        check_template(str(tokenizer.name_or_path), tokenizer.chat_template)
        self._tokenizer = tokenizer
        _disable_word_cache(tokenizer)
        self._context = context
        self._form = TemplateForm(self._render)
        self._special = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items()}

    @property
    def context(self) -> int:
        """Maximum number of tokens of prompt and completion together."""
        return self._context

    @property
    def notes(self) -> tuple[str, ...]:
        """A sentence on what the chat template does not take, and what is done about it; empty for most templates."""
        limits, name = self._form.limits, self._tokenizer.name_or_path
        return (f"The chat template of '{name}' {'; it '.join(limits)}.",) if limits else ()

    def same_tokens(self, other: ChatRenderer) -> bool:
        """Return whether both give the same tokens the same ids."""
        own, others = self._tokenizer.get_vocab(), other._tokenizer.get_vocab()
        return bool(own == others)

    def start(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the prompt ids of a new conversation, ready for the agent's completion."""
        return self._ids(self._form.text(messages, speak=True))

    def whole(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the ids of a finished conversation."""
        return self._ids(self._form.text(messages, speak=False))

    def extend(
        self, prompt: Sequence[int], completion: Sequence[int], heard: Sequence[Message]
    ) -> tuple[int, ...]:
        """Return the last prompt, the ids that were sampled, and the messages `heard` since, as ids."""
        tail = self._after_completion(heard, speak=True)
        if completion:
            # A model may end its turns with another special token than its tokeniser's end of text.
            tail = tail.removeprefix(self._special.get(completion[-1], ""))
        return (*prompt, *completion, *self._ids(tail))

    def completion(self, text: str) -> tuple[int, ...]:
        """Return the ids of a completion that is written by hand, end of turn included."""
        return (*self._ids(text), *self._closing)

    def decode(self, ids: Sequence[int]) -> str:
        """Return tokens as text, special ones as they are written."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def spoken(self, ids: Sequence[int]) -> str:
        """Return tokens as an agent's text: without special ones."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    @cached_property
    def _closing(self) -> tuple[int, ...]:
        """The token that ends a turn, as the template writes it; the tokeniser's own where it writes none."""
        written = self._ids(self._after_completion((), speak=False))[:1]
        if written and written[0] in self._special:
            return written
        end = self._tokenizer.eos_token_id
        return () if end is None else (int(end),)

    def _after_completion(self, heard: Sequence[Message], *, speak: bool) -> str:
        """Return what the template writes after an answer of the agent."""
        opening = [Message("user", "?"), Message("assistant", _STAND_IN)]
        text = self._form.text([*opening, *heard], speak=speak)
        _, found, tail = text.partition(_STAND_IN)  # the first one: messages may hold the same string
        if not found:
            raise ModelError(
                "The chat template drops earlier assistant messages; agents need their own earlier turns."
            )
        return tail

    def _render(self, turns: list[dict[str, Json]], speak: bool) -> str:
        with rendering(str(self._tokenizer.name_or_path)):
            text = self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=speak)
        assert isinstance(text, str)
        return text

    def _ids(self, text: str) -> tuple[int, ...]:
        # A text of so many characters has too many tokens; counting them might take minutes.
        if len(text) > self.context * self._longest:
            raise ContextError(
                f"A text of {len(text):,} characters has more tokens than the {self.context:,} that the model reads. Shorten "
                "it, or use a model with a longer context."
            )
        ids = tuple(self._tokenizer(replace_surrogates(text), add_special_tokens=False)["input_ids"])
        if max(ids, default=0) >= self._embeddings:
            unknown = self._tokenizer.decode([max(ids)], skip_special_tokens=False)
            raise ContextError(
                f"A text holds the token {unknown!r}, which the tokeniser has and the model does not: it has embeddings for "
                f"{self._embeddings:,} tokens. Leave it out of prompts and tasks."
            )
        return ids

    @cached_property
    def _longest(self) -> int:
        """Most characters of one token."""
        return max(map(len, self._tokenizer.get_vocab()), default=1)


def _check_vocabulary(tokenizer: ChatTokenizer, embeddings: int) -> None:
    """Raise ModelError for a tokeniser without words, or with words that have no embedding."""
    words, beside = tokenizer.get_vocab(), tokenizer.added_tokens_decoder
    # transformers makes a tokeniser of special tokens alone for a folder without one.
    if not words.keys() - {str(token) for token in beside.values()}:
        raise ModelError(
            f"The folder '{tokenizer.name_or_path}' has no tokeniser: tokenizer.json, or the files that its family uses instead, "
            "is missing. Save that of the model it was made from beside the weights: "
            "`AutoTokenizer.from_pretrained(MODEL).save_pretrained(FOLDER)`."
        )
    # Tokens beside the vocabulary may have no embedding until a text holds one.
    last = max((number for number in words.values() if number not in beside), default=0)
    if last >= embeddings:
        raise ModelError(
            f"The tokeniser of '{tokenizer.name_or_path}' has {last + 1:,} tokens, but the model has embeddings for "
            f"{embeddings:,}. Take both from the same model, or load it with transformers, `resize_token_embeddings` and save "
            "it again."
        )


def _disable_word_cache(tokenizer: ChatTokenizer) -> None:
    """Turn off the word cache of a tokeniser that does not split texts into words.

    It caches the tokens of 10,000 words. Where every text is one word, these are 10,000 whole texts: tens of
    megabytes that no later text can use.
    """
    fast = getattr(tokenizer, "backend_tokenizer", None)
    resize = getattr(getattr(fast, "model", None), "_resize_cache", None)
    if fast is None or resize is None:
        return
    splits = fast.pre_tokenizer
    if splits is None or len(splits.pre_tokenize_str(_TWO_WORDS)) == 1:
        resize(0)


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
