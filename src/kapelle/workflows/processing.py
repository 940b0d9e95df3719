"""Functions of the user's own before and after a node speaks: `pre_process` and `post_process` of a Python file.

Ours take texts:

    def pre_process(prompt: str, **kwargs) -> str         # what the node was handed → what it reads, or messages
    def post_process(prompt: str, response: str, **kwargs) -> str   # → what it hands on

siiRL's, whose first parameter is called `tokenizer`, take and return token ids; they are given a tokeniser
of characters, so that the same file runs here and there and models may have any tokeniser:

    def pre_process(tokenizer, prompt_id, obs, **kwargs) -> list[int]
    def post_process(tokenizer, prompt_id, response_id, **kwargs) -> list[int]

A `pre_process` of either form that has a parameter `obs` is given what the world has answered to the agent, as a
text, and None before the first answer. The messages of `tokenizer.apply_chat_template` are what the node reads; the
model's own chat template is put around them later. The file is the user's own code: it runs in this process, in no
sandbox, and is tried once with made-up texts before a model loads.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType

from kapelle.errors import ConfigError, EpisodeError
from kapelle.runtime.plugins import load_file
from kapelle.types import Json, Message

_ROLE, _CONTENT, _END = 0x110000, 0x110001, 0x110002
"""Ids beside those of all characters: no text can forge a message."""


class Characters:
    """A tokeniser whose ids are the code points of a text."""

    def encode(self, text: str, **_: object) -> list[int]:
        """Return the code points. TypeError for what is no text, as of a template that was not given."""
        if not isinstance(text, str):
            raise TypeError(f"tokenizer.encode takes a text and was given {type(text).__name__}")
        return [ord(character) for character in text]

    def decode(self, ids: Sequence[int], **_: object) -> str:
        """Return the text; what marks messages is no part of it."""
        return "".join(chr(one) for one in ids if one < _ROLE)

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, str]], tokenize: bool = True, **_: object
    ) -> list[int]:
        """Return ids that stand for messages; the model's own template is put around them when it reads them."""
        if not tokenize:
            raise TypeError("tokenizer.apply_chat_template gives ids here; leave `tokenize=True`")
        ids: list[int] = []
        for message in conversation:
            ids += [_ROLE, *self.encode(message["role"]), _CONTENT, *self.encode(message["content"]), _END]
        return ids


@dataclass(frozen=True, slots=True)
class Processing:
    """The two functions of one file; None for one that it does not define."""

    path: str
    pre: Callable[..., object] | None
    post: Callable[..., object] | None

    def before(self, prompt: str, observation: str | None, kwargs: Mapping[str, Json]) -> list[Message]:
        """Return what the node reads; `observation` is what the world has answered, None before it has."""
        if self.pre is None:
            return [Message("user", prompt)]
        observed = {"obs": observation} if _takes(self.pre, "obs") else {}
        if not _takes_ids(self.pre):
            made = self.pre(prompt, **observed, **kwargs)
            if isinstance(made, list) and made and all(isinstance(one, Mapping) for one in made):
                return [Message(str(one["role"]), str(one["content"])) for one in made]
            return [Message("user", self._text(made, "pre_process"))]
        ids = Characters()
        made = self.pre(ids, ids.encode(prompt), **observed, **kwargs)
        return self._messages(self._ids(made, "pre_process"))

    def after(self, prompt: str, response: str, kwargs: Mapping[str, Json]) -> str:
        """Return what the node hands on; there must be a `post_process`."""
        assert self.post is not None
        if not _takes_ids(self.post):
            return self._text(self.post(prompt, response, **kwargs), "post_process")
        ids = Characters()
        made = self.post(ids, ids.encode(prompt), ids.encode(response), **kwargs)
        return ids.decode(self._ids(made, "post_process"))

    def try_out(self, node: str, pre_kwargs: Mapping[str, Json], post_kwargs: Mapping[str, Json]) -> None:
        """Call both functions with made-up texts, before and after a first turn; ConfigError where one fails."""
        trials: list[tuple[str, Callable[[], object]]] = [
            ("pre_process", lambda: self.before("What is 1 + 1?", None, pre_kwargs)),
            ("pre_process", lambda: self.before("What is 1 + 1? 3", "This answer is wrong.", pre_kwargs)),
        ]
        if self.post is not None:
            trials.append(("post_process", lambda: self.after("What is 1 + 1?", "3", post_kwargs)))
        for function, call in trials:
            try:
                call()
            except Exception as error:
                raise ConfigError(
                    f"process_path: `{function}` of {self.path} fails with the `{function}_kwargs` of node '{node}': "
                    f"{type(error).__name__}: {str(error).rstrip('.')}. Fix the function or the keywords; its tokenizer is one of "
                    "characters, with `encode`, `decode` and `apply_chat_template`."
                ) from error

    def _text(self, made: object, function: str) -> str:
        if not isinstance(made, str):
            raise EpisodeError(f"`{function}` of {self.path} returned {type(made).__name__}, not a text.")
        return made

    def _ids(self, made: object, function: str) -> list[int]:
        if not isinstance(made, list) or not all(isinstance(one, int) for one in made):
            raise EpisodeError(f"`{function}` of {self.path} returned {type(made).__name__}, not token ids.")
        return made

    def _messages(self, ids: Sequence[int]) -> list[Message]:
        if not any(one >= _ROLE for one in ids):
            return [Message("user", Characters().decode(ids))]
        messages: list[Message] = []
        rest = list(ids)
        while rest:
            if rest[0] != _ROLE or _END not in rest:
                raise EpisodeError(
                    f"`pre_process` of {self.path} writes text around the messages of `apply_chat_template`. Write it "
                    "into a message."
                )
            middle, end = rest.index(_CONTENT), rest.index(_END)
            decode = Characters().decode
            messages.append(Message(decode(rest[1:middle]), decode(rest[middle + 1 : end])))
            rest = rest[end + 1 :]
        return messages


def _takes_ids(function: Callable[..., object]) -> bool:
    return next(iter(inspect.signature(function).parameters), "") == "tokenizer"


def _takes(function: Callable[..., object], name: str) -> bool:
    return name in inspect.signature(function).parameters


@lru_cache(maxsize=64)
def load_processing(path: str) -> Processing:
    """Return the functions of `folder/file.py` or `package.module`; ConfigError for one that has neither."""
    module = load_file(path, "process_path") if path.endswith(".py") else _imported(path)
    found = {name: vars(module).get(name) for name in ("pre_process", "post_process")}
    if not any(map(callable, found.values())):
        raise ConfigError(
            f"process_path: {path} defines neither `pre_process` nor `post_process`. Define one, or remove the key."
        )
    for name, function in found.items():
        if function is not None and not callable(function):
            raise ConfigError(f"process_path: `{name}` of {path} is no function.")
    return Processing(path, found["pre_process"], found["post_process"])


def _imported(path: str) -> ModuleType:
    try:
        return importlib.import_module(path)
    except ImportError as error:
        raise ConfigError(
            f"process_path: '{path}' cannot be imported: {error}. Give a module, or a path that ends in .py."
        ) from error
