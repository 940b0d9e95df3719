"""Conversations as token ids, extended and never re-tokenised.

A chat template is asked twice for a stand-in conversation, with and without what was heard; the
difference is the text that has to follow the tokens which the agent sampled itself. So a next prompt is
exactly the last prompt, the sampled ids, and that text: no drift between what acted and what is trained,
and a KV cache or a merged training row can go on where the last turn ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from kapelle.errors import ContextError, ModelError
from kapelle.models.templates import check_template, rendering
from kapelle.runtime.characters import whole
from kapelle.types import Message, conversation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SAID = "\u2e28said\u2e29"
"""Stand-in for what the agent said; a string that no template contains."""


_TWO_WORDS = "two words"


class ChatRenderer:
    """Renders conversations with a tokeniser's chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, context: int) -> None:
        check_template(tokenizer)
        self._tokenizer = tokenizer
        _remember_no_texts(tokenizer)
        self._context = context
        self._special = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items()}

    @property
    def context(self) -> int:
        """Most tokens that prompt and completion may have together."""
        return self._context

    def same_tokens(self, other: ChatRenderer) -> bool:
        """Return whether the other one's token ids mean the same texts."""
        ours, theirs = self._tokenizer.get_vocab(), other._tokenizer.get_vocab()
        return bool(ours == theirs)

    def start(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the prompt ids of a new conversation, ready for the agent to speak."""
        return self._ids(self._text(messages, speak=True))

    def extend(
        self, prompt: Sequence[int], completion: Sequence[int], heard: Sequence[Message]
    ) -> tuple[int, ...]:
        """Return the last prompt, the very ids that were sampled, and what was heard since, as ids."""
        tail = self._after_said(heard, speak=True)
        if completion:
            # A model may end its turns with another special token than its tokeniser's end of text.
            tail = tail.removeprefix(self._special.get(completion[-1], ""))
        return (*prompt, *completion, *self._ids(tail))

    def completion(self, text: str) -> tuple[int, ...]:
        """Return the ids of a completion that is written by hand, end of turn included."""
        return (*self._ids(text), *self._closing)

    @cached_property
    def _closing(self) -> tuple[int, ...]:
        """The token that ends a turn, as the template writes it; the tokeniser's own where it writes none."""
        written = self._ids(self._after_said((), speak=False))[:1]
        if written and written[0] in self._special:
            return written
        end = self._tokenizer.eos_token_id
        return () if end is None else (int(end),)

    def _after_said(self, heard: Sequence[Message], *, speak: bool) -> str:
        """Return what the template writes behind something that the agent said."""
        opening = [Message("user", "?"), Message("assistant", _SAID)]
        text = self._text([*opening, *heard], speak=speak)
        _, found, tail = text.partition(_SAID)  # the first: what was heard may hold the same string
        if not found:
            raise ModelError(
                "The chat template drops earlier assistant messages; agents need their own words."
            )
        return tail

    def _text(self, messages: Sequence[Message], *, speak: bool) -> str:
        with rendering(str(self._tokenizer.name_or_path)):
            text = self._tokenizer.apply_chat_template(
                conversation(messages), tokenize=False, add_generation_prompt=speak
            )
        assert isinstance(text, str)
        return text

    def _ids(self, text: str) -> tuple[int, ...]:
        # No text of so many characters has few enough tokens; to count them might take minutes.
        if len(text) > self.context * self._longest:
            raise ContextError(
                f"A text of {len(text):,} characters has more tokens than the {self.context:,} that the model reads. Shorten "
                "it, or use a model with a longer context."
            )
        return tuple(self._tokenizer(whole(text), add_special_tokens=False)["input_ids"])

    @cached_property
    def _longest(self) -> int:
        """Most characters that one token stands for."""
        return max(map(len, self._tokenizer.get_vocab()), default=1)


def _remember_no_texts(tokenizer: PreTrainedTokenizerBase) -> None:
    """Turn off the memory for words of a tokeniser that does not split into words.

    It keeps the pieces of 10,000 words so as not to find them again; where every text is one word, these are 10,000
    whole texts, tens of megabytes that no text to come has use for.
    """
    fast = getattr(tokenizer, "backend_tokenizer", None)
    resize = getattr(getattr(fast, "model", None), "_resize_cache", None)
    if fast is None or resize is None:
        return
    splits = fast.pre_tokenizer
    if splits is None or len(splits.pre_tokenize_str(_TWO_WORDS)) == 1:
        resize(0)
