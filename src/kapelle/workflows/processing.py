"""Functions of the user's own before and after a node speaks: `pre_process` and `post_process` of a Python file.

Ours take texts:

    def pre_process(prompt: str, **kwargs) -> str         # what the node was handed → what it reads
    def post_process(prompt: str, response: str, **kwargs) -> str   # → what it hands on

siiRL's, whose first parameter is called `tokenizer`, take and return token ids; they are given a tokeniser
of characters, so that the same file runs here and there and models may have any tokeniser.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType

from kapelle.errors import ConfigError, EpisodeError
from kapelle.types import Json


class Characters:
    """A tokeniser whose ids are the code points of a text."""

    def encode(self, text: str, **_: object) -> list[int]:
        """Return the code points."""
        return [ord(character) for character in text]

    def decode(self, ids: Sequence[int], **_: object) -> str:
        """Return the text."""
        return "".join(map(chr, ids))


@dataclass(frozen=True, slots=True)
class Processing:
    """The two functions of one file; None for one that it does not define."""

    path: str
    pre: Callable[..., object] | None
    post: Callable[..., object] | None

    def before(self, prompt: str, observation: str, kwargs: Mapping[str, Json]) -> str:
        """Return what the node reads."""
        if self.pre is None:
            return prompt
        if not _takes_ids(self.pre):
            return self._text(self.pre(prompt, **kwargs), "pre_process")
        ids = Characters()
        observed = {"obs": ids.encode(observation)} if _takes(self.pre, "obs") else {}
        made = self.pre(ids, ids.encode(prompt), **observed, **kwargs)
        return self._decoded(made, "pre_process")

    def after(self, prompt: str, response: str, kwargs: Mapping[str, Json]) -> str:
        """Return what the node hands on; there must be a `post_process`."""
        assert self.post is not None
        if not _takes_ids(self.post):
            return self._text(self.post(prompt, response, **kwargs), "post_process")
        ids = Characters()
        made = self.post(ids, ids.encode(prompt), ids.encode(response), **kwargs)
        return self._decoded(made, "post_process")

    def _text(self, made: object, function: str) -> str:
        if not isinstance(made, str):
            raise EpisodeError(f"`{function}` of {self.path} returned {type(made).__name__}, not a text.")
        return made

    def _decoded(self, made: object, function: str) -> str:
        if not isinstance(made, list) or not all(isinstance(one, int) for one in made):
            raise EpisodeError(f"`{function}` of {self.path} returned {type(made).__name__}, not token ids.")
        return Characters().decode(made)


def _takes_ids(function: Callable[..., object]) -> bool:
    return next(iter(inspect.signature(function).parameters), "") == "tokenizer"


def _takes(function: Callable[..., object], name: str) -> bool:
    return name in inspect.signature(function).parameters


@lru_cache(maxsize=64)
def load_processing(path: str) -> Processing:
    """Return the functions of `folder/file.py` or `package.module`; ConfigError for one that has neither."""
    module = _from_file(path) if path.endswith(".py") else _imported(path)
    found = {name: vars(module).get(name) for name in ("pre_process", "post_process")}
    if not any(map(callable, found.values())):
        raise ConfigError(
            f"process_path: {path} defines neither `pre_process` nor `post_process`. Define one, or remove the key."
        )
    for name, function in found.items():
        if function is not None and not callable(function):
            raise ConfigError(f"process_path: `{name}` of {path} is no function.")
    return Processing(path, found["pre_process"], found["post_process"])


def _from_file(path: str) -> ModuleType:
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"process_path: there is no file '{path}'. Give a path from where kapelle runs.")
    spec = importlib.util.spec_from_file_location(f"kapelle_process_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (ImportError, SyntaxError) as error:
        raise ConfigError(f"process_path: {path} cannot be imported: {error}.") from error
    return module


def _imported(path: str) -> ModuleType:
    try:
        return importlib.import_module(path)
    except ImportError as error:
        raise ConfigError(
            f"process_path: '{path}' cannot be imported: {error}. Give a module, or a path that ends in .py."
        ) from error
