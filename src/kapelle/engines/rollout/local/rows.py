"""What is decoded: prompts, the outputs of their rows, and the protocol of a forward pass over rows.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from kapelle.types import FinishReason, Sampling


class Job(NamedTuple):
    """One prompt to continue."""

    adapter: str | None
    prompt: tuple[int, ...]
    sampling: Sampling
    seed: int
    begun: int = 0
    """How many of the last tokens of the prompt are the beginning of the completion, sampled before."""


@dataclass(slots=True)
class RowOutput:
    """What a row has generated, filled in once it is finished; `finish_reason` is None until then."""

    ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason | None = None
    text: str | None = None
    """Text up to a stop string, if one was found; with what was sampled before."""


class Rows(Protocol):
    """Rows in flight on one model: reads tokens and returns the logits of the next."""

    @property
    def open(self) -> bool:
        """True where prompts may join the rows in flight."""
        ...

    def join(self, jobs: Sequence[Job]) -> Tensor:
        """Add rows after the others and read their prompts; return logits `_RV` of their first tokens."""
        ...

    def read(self, token_R: Tensor) -> Tensor:
        """Read one more token of each row and return logits `_RV` of the next."""
        ...

    def leave(self, rows: Sequence[int], completions: Sequence[Sequence[int]]) -> None:
        """Drop the finished rows at these indices (ascending); `completions` are their token ids."""
        ...


def route_of(adapters: Sequence[str | None]) -> list[tuple[str | None, int, int]]:
    """Return the contiguous spans of equal adapters."""
    spans: list[tuple[str | None, int, int]] = []
    for row, adapter in enumerate(adapters):
        if spans and spans[-1][0] == adapter:
            spans[-1] = (adapter, spans[-1][1], row + 1)
        else:
            spans.append((adapter, row, row + 1))
    return spans
