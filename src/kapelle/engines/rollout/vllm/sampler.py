"""What the engine asks of vLLM, as a protocol: `in_process.py` asks it of vLLM's LLM engine, tests of a stand-in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kapelle.types import Sampling


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """One published adapter, under a name and number that no other weights ever had."""

    name: str
    number: int
    """From 1; vLLM knows adapters by it."""
    folder: Path
    """In PEFT's form."""


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt to continue."""

    id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    seed: int
    adapter: AdapterFile | None


@dataclass(frozen=True, slots=True)
class Sampled:
    """A finished row."""

    id: str
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Log-prob of each id under the distribution that was sampled from (nats)."""
    stopped: bool
    """True if an end of turn or a stop string ended it, False if a limit did."""
    error: str | None = None
    """Why there is no answer; the other rows go on."""


@dataclass(frozen=True, slots=True)
class BaseModel:
    """One base model as vLLM is told of it."""

    path: str
    """A folder in the form of `transformers`, or a name on the hub."""
    dtype: str
    context: int
    """Most tokens of prompt and completion together."""
    ends: tuple[int, ...]
    """Token ids that end a turn."""
    adapters: int
    """Most adapters in one batch; 0 for none."""
    rank: int
    """The largest rank among them."""


class Sampler(Protocol):
    """One base model in vLLM."""

    def add(self, row: Row) -> None:
        """Let a row join the batch; an error concerns this row alone."""
        ...

    def step(self) -> Sequence[Sampled]:
        """Sample a token of each row and return the rows that finished; after an error the sampler is of no more use."""
        ...

    def abort(self, rows: Sequence[str]) -> None:
        """Drop rows by id."""
        ...

    def forget_prefixes(self) -> None:
        """Empty the KV cache; no row is in flight."""
        ...

    def drop_adapter(self, adapter: AdapterFile) -> None:
        """Forget an adapter that no row will ask for again."""
        ...

    def sleep(self) -> None:
        """Give device memory back until the next row is added, where the device has memory of its own."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...


Start = Callable[[BaseModel], Sampler]
"""Starts vLLM on a base model."""
