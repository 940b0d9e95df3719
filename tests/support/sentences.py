"""A substitute for the library sentence-transformers: its model `letters` counts letters of texts."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor


class Letters:
    """Counts a, b and x; a token is a letter."""

    device: str | None = None
    """What the last one was told."""
    max_seq_length: int | None = 8

    def __init__(self, name: str, device: str | None = None, *, local_files_only: bool) -> None:
        assert not local_files_only, "the hub answers"
        Letters.device = device
        if name != "letters":
            raise OSError(f"{name} is no known model")

    def encode(self, texts: Sequence[str], **options: Any) -> Tensor:
        assert options == {"convert_to_tensor": True, "show_progress_bar": False}
        return torch.tensor([[text.count(letter) for letter in "abx"] for text in texts], dtype=torch.float16)

    def tokenizer(self, texts: list[str], *, truncation: bool, max_length: int | None) -> dict[str, Any]:
        assert truncation == (max_length is not None)
        return {"input_ids": [list(map(ord, text[:max_length])) for text in texts]}


@contextmanager
def sentences() -> Iterator[None]:
    """Put the substitute where the library is imported from."""
    module = ModuleType("sentence_transformers")
    module.__spec__ = ModuleSpec("sentence_transformers", None)
    module.SentenceTransformer = Letters  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "sentence_transformers", module)
        patch.setattr("kapelle.models.paths.hub_fault", lambda name, **_: None)
        yield
