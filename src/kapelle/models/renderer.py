"""Render conversations as token ids. The token ids of a conversation are extended and never retokenised.

The chat template renders a conversation with a placeholder for the agent's answer. The text after the placeholder
follows the sampled tokens. The next prompt therefore consists exactly of the previous prompt, the sampled ids and this
text. Training uses the tokens that were sampled, and a KV cache or a merged training row continues where the last turn
ended.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kapelle.errors import ConfigError, ContextError, ModelError, did_you_mean
from kapelle.models import embedded
from kapelle.models.chat_template import (
    PLAIN_END,
    PLAIN_TEMPLATE,
    WORDS,
    TemplateForm,
    ToolTemplate,
    check_template,
    named_template,
    rendering,
    template_variables,
)
from kapelle.models.control_tokens import ControlTokens
from kapelle.models.light_tokenizer import context_of, end_tokens, light_tokenizer, read_folder
from kapelle.models.paths import check_model_path, loading, local_only
from kapelle.models.pretrained import located, read_config, read_tokenizer
from kapelle.runtime.characters import replace_surrogates
from kapelle.runtime.thoughts import EVERY_PAIR, OPENINGS, THOUGHT_MARKS, split_thoughts
from kapelle.settings.schema import ModelConfig
from kapelle.types import Image, Json, Message, SampledMessage, images_in

if TYPE_CHECKING:
    from kapelle.models.vision import Vision

_SUBSTITUTE = "\u2e28said\u2e29"
"""The placeholder for the agent's answer. No template contains this string."""


_TWO_WORDS = "two words"
REMEMBERED = 64
"""The number of cached prompts of new conversations."""


class ChatTokenizer(Protocol):
    """The interface that a renderer needs from a tokeniser. Tokenisers of transformers have this interface."""

    name_or_path: Any
    chat_template: Any

    @property
    def added_tokens_decoder(self) -> Mapping[int, object]:
        """The tokens outside the vocabulary, including special tokens, by id."""
        ...

    @property
    def eos_token_id(self) -> Any:
        """The id of the token that ends a turn, or None."""
        ...

    def get_vocab(self) -> Mapping[str, int]:
        """Return all tokens with their ids."""
        ...

    def apply_chat_template(
        self,
        conversation: list[dict[str, Json]],
        tools: Any = ...,
        *,
        tokenize: bool = ...,
        add_generation_prompt: bool = ...,
        **arguments: Json,
    ) -> Any:
        """Return a conversation as a string, optionally with tools in OpenAI's format and `arguments` of the template."""
        ...

    def __call__(self, text: str, *, add_special_tokens: bool = ...) -> Mapping[str, Any]:
        """Return the token ids of a string under the key `input_ids`."""
        ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = ...) -> Any:
        """Return the string that the token ids stand for."""
        ...


@lru_cache(maxsize=1)
def _byte_letters() -> Mapping[str, int]:
    """Return the mapping from characters to the bytes that they stand for in byte-level tokenisers (GPT-2).

    Printable bytes are represented by themselves, and the other bytes by the characters after 255.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = sorted(set(range(256)).difference(printable))
    return {chr(byte): byte for byte in printable} | {chr(256 + k): byte for k, byte in enumerate(others)}


MOST_OTHERS = 64
"""The maximum number of cached renderers with other arguments for the chat template."""


class ChatRenderer:
    """A renderer that uses the chat template of a tokeniser."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        context: int,
        embeddings: int | None = None,
        vision: Vision | None = None,
        arguments: Mapping[str, Json] | None = None,
        ends: Iterable[int] = (),
    ) -> None:
        """Create a renderer for a model with a context of `context` tokens and with `embeddings` token embeddings.

        A model with `vision` also reads images. The chat template receives `arguments` in addition to the conversation.
        The tokens in `ends` end a turn according to the model's own settings. Raises ModelError if the tokeniser has
        more tokens than the model has embeddings.
        """
        self._ends = frozenset(ends)
        self._vision = vision
        self._arguments = dict(arguments or {})
        self._others: dict[str, ChatRenderer] = {}
        self._embeddings = sys.maxsize if embeddings is None else embeddings
        words = tokenizer.get_vocab()  # each call makes a new, large copy
        _check_vocabulary(tokenizer, words, self._embeddings)
        self._longest = max(map(len, words), default=1)
        """The maximum number of characters of one token."""
        check_template(str(tokenizer.name_or_path), tokenizer.chat_template)
        self._tokenizer = tokenizer
        _disable_word_cache(tokenizer)
        self.context = context
        """The maximum number of tokens of a prompt and its completion together."""
        self.template = str(tokenizer.chat_template)
        """The source text of the chat template."""
        self._form = TemplateForm(self._render)
        self._tools = ToolTemplate(self._render_with, self._special_end)
        # Gemma's added tokens include line breaks, which are ordinary text.
        added = {
            number: token for number, token in tokenizer.added_tokens_decoder.items() if str(token).strip()
        }
        self._special = {number: str(token) for number, token in added.items()}
        self._common = frozenset(str(each) for each in added.values() if not getattr(each, "special", True))
        """The added tokens that a message may contain, unless the template opens messages with them."""
        # The samples of a group share a prompt, which is rendered and tokenised once. A template that reads the time
        # renders a different text each time.
        dated = "strftime_now" in str(tokenizer.chat_template)
        self._start = lru_cache(0 if dated else REMEMBERED)(self._ids_of_start)
        self._openings = frozenset(number for number, mark in self._special.items() if mark in OPENINGS)
        self._opens_thoughts = lru_cache(REMEMBERED)(lambda ids: self.decode(ids).rstrip().endswith(OPENINGS))

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on conversations that the chat template does not support and how they are handled. The tuple is usually empty."""
        limits, name = self._form.limits, self._tokenizer.name_or_path
        if self.template == PLAIN_TEMPLATE:
            return (
                f"'{name}' is prompted by the plain chat template. Answers end at its end token or at {PLAIN_END!r}.",
            )
        found = [f"The chat template of '{name}' {'; it '.join(limits)}."] if limits else []
        end, own = self._written_end.strip(), self._tokenizer.eos_token_id
        token = next(
            (number for number, text in self._special.items() if text and end.startswith(text)), None
        )
        if token is None and end:
            found.append(
                f"The chat template of '{name}' ends answers with the text {end[:40]!r}, not with a token: sampling "
                "stops at the model's own end token or at `max_tokens`. Set `team.sampling.stop: "
                f"[{json.dumps(end[:40])}]`."
            )
        elif token is not None and token not in {*self._ends, own}:
            found.append(
                f"The chat template of '{name}' ends answers with '{self._special[token]}', which is missing from the "
                "model's `eos_token_id`: sampling also stops there."
            )
        return tuple(found)

    @property
    def end_ids(self) -> frozenset[int]:
        """The tokens that end a turn according to the model's settings, its tokeniser or the chat template."""
        own = self._tokenizer.eos_token_id
        return self._ends | frozenset(() if own is None else (int(own),)) | frozenset(self._closing)

    @property
    def takes_tools(self) -> bool:
        """Whether the template itself writes tools, tool calls and their results (`Message.structured`)."""
        return self._tools.known

    def called(self, name: str, arguments: Mapping[str, Json]) -> str:
        """Return the template's text of an answer with this tool call, without its end token, or an empty string if it is unknown."""
        return self._control.show(self._tools.called({"name": name, "arguments": dict(arguments)}))

    def answer(self, message: Message) -> str:
        """Return the template's text of an assistant message with thoughts and tool calls, without its end token."""
        row = {} if message.structured is None else json.loads(message.structured)
        calls = [call["function"] for call in row.get("tool_calls", ())]
        written = self._control.show(self._tools.called(*calls, content=row["content"])) if calls else ""
        thoughts, words = row.get("reasoning_content"), written or message.content
        marks = next((pair for pair in EVERY_PAIR if pair[0] in self.template), None)
        if not thoughts or marks is None:
            return words
        prompt = self._form.text([Message("user", "?")], speak=True)
        opening = "" if prompt.rstrip().endswith(marks[0]) else f"{marks[0]}\n"
        return f"{opening}{thoughts.strip()}\n{marks[1]}\n\n{words.lstrip()}"

    def with_arguments(self, arguments: Mapping[str, Json]) -> ChatRenderer:
        """Return a renderer that passes these arguments, such as `enable_thinking`, to the chat template.

        Raises ConfigError for an argument that the template does not read.
        """
        if not arguments:
            return self
        key = repr(sorted(arguments.items()))
        if key not in self._others:
            read = template_variables(self.template)
            for name in arguments:
                if read is not None and name not in read:
                    raise ConfigError(
                        f"`chat_template_kwargs` sets `{name}`, which the chat template of '{self._tokenizer.name_or_path}' does not "
                        f"read.{did_you_mean(name, read) or ' It reads none. Remove the setting.'}"
                    )
            size = None if self._embeddings == sys.maxsize else self._embeddings
            if len(self._others) >= MOST_OTHERS:  # callers of a server can set any values
                self._others.clear()
            self._others[key] = ChatRenderer(
                self._tokenizer, self.context, size, self._vision, arguments, self._ends
            )
        return self._others[key]

    @property
    def tokenizer(self) -> ChatTokenizer:
        """The tokeniser of the renderer, for direct use."""
        return self._tokenizer

    def same_tokens(self, other: ChatRenderer) -> bool:
        """Return whether this renderer and another renderer have the same vocabulary."""
        own, others = self._tokenizer.get_vocab(), other._tokenizer.get_vocab()
        return bool(own == others)

    def start(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the prompt token ids of a new conversation, ready for the agent's completion."""
        # The cache contains plain strings, so it keeps no messages of finished episodes alive.
        return self._start(*[(m.role, m.content, m.speaker, m.images, m.structured) for m in messages])

    def _ids_of_start(
        self, *fields: tuple[str, str, str | None, tuple[Image, ...], str | None]
    ) -> tuple[int, ...]:
        messages = [Message(*each) for each in fields]
        self._check_seen(messages)
        text = self._tools.start(messages) or self._form.text(messages, speak=True)
        return self._spread(text, messages)

    def _check_seen(self, messages: Sequence[Message]) -> None:
        """Raise ModelError if the messages contain images and the model reads only text."""
        if self._vision is None and (count := len(images_in(messages))):
            raise ModelError(
                f"The model '{self._tokenizer.name_or_path}' reads only text, but its input has {count} "
                f"image{'s' if count > 1 else ''}. Set `model.path` to a vision-language model of the Qwen2.5-VL or "
                "Qwen3-VL type."
            )

    def _spread(self, text: str, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the token ids of a rendered text, with all tokens of the images in these messages."""
        return self._spread_ids(self._ids(text), messages)

    def _spread_ids(self, ids: tuple[int, ...], messages: Sequence[Message]) -> tuple[int, ...]:
        return ids if self._vision is None else self._vision.spread(ids, images_in(messages))

    def whole(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the token ids of a finished conversation."""
        self._check_seen(messages)
        return self._spread(self._form.text(messages, speak=False), messages)

    def extend(
        self,
        prompt: Sequence[int],
        completion: Sequence[int],
        new_messages: Sequence[Message],
        before: Sequence[Message] = (),
    ) -> tuple[int, ...]:
        """Return the token ids of the previous prompt, the sampled completion and the new messages.

        If the template drops thoughts from `before` (the conversation up to this answer), the beginning of the prompt
        changes. In either case, the words of all answers keep their sampled token ids.
        """
        self._check_seen(new_messages)
        if (
            before
            and self._drops_thoughts
            and (other := self._without_thoughts(before, new_messages)) is not None
        ):
            return other
        tail = self._tools.after_calls(new_messages) or self._after_completion(new_messages, speak=True)
        if completion:
            # A model may end its turns with a special token other than the tokeniser's end of text.
            tail = tail.removeprefix(self._special.get(completion[-1], ""))
        return (*prompt, *completion, *self._spread(tail, new_messages))

    @cached_property
    def _drops_thoughts(self) -> bool:
        """Whether the template drops the thoughts of earlier answers, or opens new answers with thoughts."""
        question, thought = Message("user", WORDS[0]), f"<think>\n{WORDS[1]}\n</think>\n\n{WORDS[2]}"
        with suppress(ModelError):
            kept = WORDS[1] in self._form.text(
                [question, Message("assistant", thought), question], speak=False
            )
            begun = self._form.text([question], speak=True)
            return not kept or any(mark in begun for mark in THOUGHT_MARKS)
        return False

    def _without_thoughts(
        self, before: Sequence[Message], new_messages: Sequence[Message]
    ) -> tuple[int, ...] | None:
        """Return the token ids of the conversation as the template renders it after dropping thoughts.

        Returns None if the template continues the previous prompt and completion.
        """
        if not isinstance(before[-1], SampledMessage):
            return None
        known = "".join(message.content for message in (*before, *new_messages))
        free = next(f"\u2e28{k}." for k in itertools.count() if f"\u2e28{k}." not in known)
        conversation, answers = list(before), list[tuple[str, str, SampledMessage]]()
        for place, message in enumerate(before):
            if isinstance(message, SampledMessage):
                thought, words = f"{free}{place}t\u2e29", f"{free}{place}w\u2e29"
                text = f"<think>\n{thought}\n</think>\n\n{words}" if message.thoughts else words
                conversation[place] = Message("assistant", text, message.speaker)
                answers.append((thought, words, message))

        def written(messages: Sequence[Message]) -> str:
            return self._tools.start(messages) or self._form.text(messages, speak=True)

        try:
            begun, text = written(conversation[:-1]), written([*conversation, *new_messages])
        except ModelError:
            return None
        if text.startswith(begun) and (not answers[-1][2].thoughts or answers[-1][0] in text):
            return None
        ids: list[int] = []
        for thought, words, turn in answers:
            head, found, text = text.partition(words)
            if not found:
                return None
            kept = split_thoughts(self.decode(turn.ids[: turn.thoughts]), thinking=True)[0]
            head = head.replace(thought, self._control.hide(kept))
            ids += [*self._ids(head), *turn.ids[turn.thoughts :]]
            text = text.removeprefix(self._special.get(turn.ids[-1], "") if turn.ids else "")
        return self._spread_ids((*ids, *self._ids(text)), (*before, *new_messages))

    def thoughts(self, prompt: Sequence[int], completion: Sequence[int], text: str) -> tuple[int, int]:
        """Return the number of tokens and the number of characters at the start of a completion that are thoughts.

        If the thoughts were cut off by a limit, the whole completion counts as thoughts.
        """
        opened = self._opens_thoughts(tuple(prompt[-8:]))
        if (
            not opened
            and not text.lstrip().startswith(OPENINGS)
            and self._openings.isdisjoint(completion[:2])
        ):
            return 0, 0
        whole = self.decode(completion)  # marks may be special tokens, which `text` does not contain
        words = split_thoughts(whole, thinking=opened)[1]
        if not words:
            return len(completion), len(text)
        # Find the first position after all thoughts.
        places, length = range(len(completion)), len(whole) - len(words)
        count = bisect_left(places, length, key=lambda k: len(self.decode(completion[:k])))
        return count, len(text) - len(text[len(self.spoken(completion[:count])) :].lstrip()) if count else 0

    def plain(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        """Return the token ids of a plain prompt, with the tokeniser's own prefix, or check token ids that are given.

        Raises ContextError if the prompt is too long or contains ids without an embedding.
        """
        if isinstance(prompt, str):
            self._ids(prompt)  # raises if it is too long
            return tuple(self._tokenizer(replace_surrogates(prompt), add_special_tokens=True)["input_ids"])
        known = min(self._embeddings, 1 + max(self._tokenizer.get_vocab().values(), default=-1))
        if max(prompt, default=0) >= known:
            raise ContextError(
                f"The model has no token with the id {max(prompt):,}. Its ids range from 0 to {known - 1:,}."
            )
        return tuple(prompt)

    def completion(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a completion's text, followed by the ids that end the turn."""
        if (
            "<|channel|>" not in self.template
        ):  # an answer that consists of several messages contains their marks
            text = self._control.hide(text, self._of_answers)
        return (*self._ids(text), *self._closing)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the string that the token ids stand for, including special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def spoken(self, ids: Sequence[int]) -> str:
        """Return the text that an agent wrote with these tokens, without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token's text. A token may be a part of a character."""
        text = self.decode([token])
        written = self._written.get(token, text) if "\ufffd" in text else text
        if written is text:
            return text.encode("utf-8", "surrogatepass")
        if byte := re.fullmatch("<0x([0-9A-F]{2})>", written):  # sentencepiece's fallback
            return bytes.fromhex(byte[1])
        return bytes(_byte_letters()[letter] for letter in written if letter in _byte_letters())

    @cached_property
    def _written(self) -> Mapping[int, str]:
        return {number: token for token, number in self._tokenizer.get_vocab().items()}

    @cached_property
    def _closing(self) -> tuple[int, ...]:
        """The token with which the template ends a turn, or the tokeniser's end token if the template writes none."""
        written = self._ids(self._written_end)[:1]
        if written and written[0] in self._special:
            return written
        end = self._tokenizer.eos_token_id
        return () if end is None else (int(end),)

    @cached_property
    def _written_end(self) -> str:
        """The template's text after an answer that ends a conversation, or an empty string if the template writes no answers."""
        with suppress(ModelError):
            return self._after_completion((), speak=False)
        return ""

    def _after_completion(self, new_messages: Sequence[Message], *, speak: bool) -> str:
        """Return the template's text after an answer of the agent."""
        opening = [Message("user", "?"), Message("assistant", _SUBSTITUTE)]
        text = self._form.text([*opening, *new_messages], speak=speak)
        _, found, tail = text.partition(
            _SUBSTITUTE
        )  # the first occurrence, because messages may contain the same string
        if not found:
            raise ModelError(
                "The chat template drops earlier assistant messages, which agents need. Use a different model or chat "
                "template."
            )
        return tail

    def _render(self, turns: list[dict[str, Json]], speak: bool) -> str:
        return self._render_with(turns, speak, None)

    @cached_property
    def _control(self) -> ControlTokens:
        """The tokens that the content of messages must not produce: special tokens, and tokens that the template puts around messages."""
        user, answer, result = (
            Message(*each) for each in zip(("user", "assistant", "tool"), WORDS, strict=True)
        )
        written = ""
        for messages in [[user, answer, user], [user, answer, result, user]] if self._common else ():
            with suppress(ModelError):
                written += TemplateForm(self._rendered).text(messages, speak=False)
        words = {each for each in self._common if each in THOUGHT_MARKS or each not in written}
        tokens = {text: k for k, text in self._special.items() if text and text not in words}
        return ControlTokens(
            tokens, lambda text: self._tokenizer(text, add_special_tokens=False)["input_ids"]
        )

    @cached_property
    def _of_answers(self) -> frozenset[str]:
        """The special tokens that agents themselves write around thoughts and tool calls."""
        called = ToolTemplate(self._rendered, self._special_end).called(
            {"name": "kapelletool", "arguments": {}}
        )
        return frozenset(each for each in self._special.values() if each in called or each in THOUGHT_MARKS)

    def _render_with(self, turns: list[dict[str, Json]], speak: bool, tools: Json) -> str:
        turns = [
            self._control.hide(turn, self._of_answers if turn["role"] == "assistant" else ())
            for turn in turns
        ]
        return self._rendered(turns, speak, self._control.hide(tools))

    def _rendered(self, turns: list[dict[str, Json]], speak: bool, tools: Json = None) -> str:
        """Return the text that the template renders, without hiding control tokens in messages."""
        with rendering(str(self._tokenizer.name_or_path)):
            text = self._tokenizer.apply_chat_template(
                turns, tools, tokenize=False, add_generation_prompt=speak, **self._arguments
            )
        assert isinstance(text, str)
        return text

    def _special_end(self, text: str) -> str:
        """Return the special token at the end of a text and the spaces after this token, or an empty string if there is no such token."""
        last = text.rstrip()
        ends = [name for name in self._special.values() if name and last.endswith(name)]
        ends = [name for name in ends if not self.spoken(self._ids(name)).strip()]
        return text[len(last) - len(max(ends, key=len)) :] if ends else ""

    def _ids(self, text: str) -> tuple[int, ...]:
        # A string of this length has too many tokens, and tokenising it could take minutes.
        if len(text) > self.context * self._longest:
            raise ContextError(
                f"A prompt of {len(text):,} characters exceeds the model's context of {self.context:,} tokens. Shorten "
                "it, or use a model with a longer context."
            )
        ids = tuple(self._control.ids(replace_surrogates(text)))
        if max(ids, default=0) >= self._embeddings:
            unknown = self._tokenizer.decode([max(ids)], skip_special_tokens=False)
            raise ContextError(
                f"A prompt contains the token {unknown!r}, which has no embedding in the model: there are embeddings for "
                f"{self._embeddings:,} tokens. Remove the token from prompts and tasks."
            )
        return ids


def _check_vocabulary(tokenizer: ChatTokenizer, words: Mapping[str, int], embeddings: int) -> None:
    """Raise ModelError if a tokeniser has no vocabulary or has tokens without an embedding."""
    beside = tokenizer.added_tokens_decoder
    # For a folder without a tokeniser, transformers builds one with only special tokens.
    if not words.keys() - {str(token) for token in beside.values()}:
        raise ModelError(
            f"The folder '{tokenizer.name_or_path}' has no tokeniser: tokenizer.json, or the files of its family, "
            "are missing. Save the original model's tokeniser into it: "
            "`AutoTokenizer.from_pretrained(MODEL).save_pretrained(FOLDER)`."
        )
    # Tokens outside the vocabulary are checked when a prompt contains one.
    last = max((number for number in words.values() if number not in beside), default=0)
    if last >= embeddings:
        raise ModelError(
            f"The tokeniser of '{tokenizer.name_or_path}' has {last + 1:,} tokens, but the model has embeddings for "
            f"{embeddings:,}. Use both from the same model, or load the model with transformers, call "
            "`resize_token_embeddings` and save it again."
        )


def _disable_word_cache(tokenizer: ChatTokenizer) -> None:
    """Turn off the word cache of a tokeniser that does not split strings into words.

    The cache stores the tokens of 10,000 words. If every string is a single word, the cache stores 10,000 whole
    strings, which take tens of megabytes and cannot be used for later strings.
    """
    fast = getattr(tokenizer, "backend_tokenizer", None)
    resize = getattr(getattr(fast, "model", None), "_resize_cache", None)
    if fast is None or resize is None:
        return
    splits = fast.pre_tokenizer
    if splits is None or len(splits.pre_tokenize_str(_TWO_WORDS)) == 1:
        resize(0)


def byte_renderer() -> ChatRenderer:
    """Return a renderer with the byte tokeniser of the embedded model, for conversations of any length."""
    return ChatRenderer(embedded.build_tokenizer(sys.maxsize), sys.maxsize)


def load_renderer(path: str, config: ModelConfig) -> ChatRenderer:
    """Return the renderer of a model without loading the model's weights."""
    if path == "embedded":
        return ChatRenderer(light_tokenizer(sees=config.embedded.sees), config.embedded.context)
    check_model_path(path)
    template = named_template(config.chat_template) if path == config.path and config.chat_template else None
    path = located(path)
    local = local_only(path)
    from transformers import GenerationConfig

    with loading(path):
        generation: Any = GenerationConfig()
        with suppress(OSError):  # few models have no such file
            generation = GenerationConfig.from_pretrained(
                path, trust_remote_code=False, local_files_only=local
            )
        tokenizer, settings = read_tokenizer(path), read_config(path)
        tokenizer.chat_template = template or tokenizer.chat_template
        words = getattr(settings.get_text_config(), "vocab_size", None)
        ends = end_tokens(settings.to_dict(), settings.get_text_config().to_dict(), generation.to_dict())
        return ChatRenderer(tokenizer, context_of(settings, tokenizer), words, ends=ends)


def light_renderer(path: str, config: ModelConfig) -> ChatRenderer:
    """Return the renderer of a model, without torch if the files of its folder suffice. Use this renderer only to count tokens."""
    if path == "embedded":
        return load_renderer(path, config)
    check_model_path(path)
    folder = Path(located(path)).expanduser()
    if (folder / "tokenizer.json").is_file():
        template = (
            named_template(config.chat_template) if path == config.path and config.chat_template else None
        )
        found = read_folder(folder, template)
        if found is not None:
            tokenizer, context, words, ends = found
            return ChatRenderer(tokenizer, context, words, ends=ends)
    return load_renderer(path, config)


ReadRenderer = Callable[[str, ModelConfig], ChatRenderer]
"""The type of `load_renderer` and `light_renderer`."""
