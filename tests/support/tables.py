"""A language model that is a table, for the real train engine: one row of logits for each prefix, as float32 weights.

The engine packs, scores, masks, divides and steps as with any model; only the decoder is replaced. A token's row is found by
all that the plan lets it attend to, so that a wrong prefix, position or route gives other numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from kapelle.models.fast.attention import AttentionPlan
from kapelle.team import Lora

Words = tuple[int, ...]
ROWS, TOKENS = 512, 3


class TableBank:
    """The adapters: one table each."""

    def __init__(self) -> None:
        self.adapters: dict[str, Lora] = {}
        self.tables: dict[str, nn.Parameter] = {}

    def add(self, name: str, lora: Lora, seed: int) -> None:
        self.adapters[name] = lora
        self.tables[name] = nn.Parameter(torch.zeros(ROWS, TOKENS), requires_grad=False)

    def parameters(self, name: str) -> dict[str, nn.Parameter]:
        return {"table": self.tables[name]}

    def copy(self, source: str, target: str) -> None:
        if target not in self.adapters:
            self.add(target, self.adapters[source], 0)
        with torch.no_grad():
            self.tables[target].copy_(self.tables[source])

    def train(self, *, on: bool) -> None:
        assert not on, "tables have no dropout"


class TableModel:
    """What the engine asks of a `LanguageModel`; policies start at `start`, the log-chances of the next token."""

    def __init__(self, start: Callable[[Words], Sequence[float]]) -> None:
        self.name, self.dtype, self.device = "table", torch.float32, torch.device("cpu")
        self.flat, self.sharded_pass = object(), None
        """Not None: shared prefixes are laid out once."""
        self.bank = TableBank()
        self.value_heads: dict[str, nn.Linear] = {}
        self.head = SimpleNamespace(weight_VD=torch.eye(TOKENS))
        self.renderer = SimpleNamespace(context=1 << 20)
        self._start = start
        self._rows: dict[Words, int] = {}
        self._chances = torch.zeros(ROWS, TOKENS, dtype=torch.float64)
        self._route: Sequence[tuple[str | None, int, int]] = ()

    def row(self, prefix: Words) -> int:
        """Return the number of the row that says what follows a prefix."""
        if prefix not in self._rows:
            chances = torch.tensor(list(self._start(prefix)), dtype=torch.float64)
            self._chances[len(self._rows)] = chances.clamp(min=1e-30).log()
            self._rows[prefix] = len(self._rows)
        return self._rows[prefix]

    def starts(self, rows: Sequence[int]) -> Tensor:
        """Return the log-chances that policies start with, float64."""
        return self._chances[list(rows)]

    @contextmanager
    def computing(
        self,
        route: Sequence[tuple[str | None, int, int]],
        keys_N: Tensor | None = None,
        experts_NLk: Tensor | None = None,
    ) -> Iterator[None]:
        assert keys_N is None, "tables have no dropout"
        assert experts_NLk is None, "tables have no experts"
        self._route = route
        yield

    def hidden(
        self,
        tokens_N: Tensor,
        positions_N: Tensor,
        plan: AttentionPlan,
        *,
        recompute: bool = False,
        images: Mapping[int, object] = MappingProxyType({}),
    ) -> Tensor:
        assert not images, "tables see nothing"
        rows = torch.tensor([self.row(prefix) for prefix in _prefixes(tokens_N, positions_N, plan)])
        pieces = []
        for adapter, first, last in self._route:
            if adapter is None:
                pieces.append(self._chances[rows[first:last]])
            else:
                learned = self.bank.tables[adapter].double()[rows[first:last]]
                pieces.append(
                    learned if adapter in self.value_heads else learned + self._chances[rows[first:last]]
                )
        return torch.cat(pieces)

    def logits(self, hidden_KD: Tensor) -> Tensor:
        return hidden_KD

    def values(self, critic: str, hidden_KD: Tensor) -> Tensor:
        found: Tensor = self.value_heads[critic](hidden_KD.float()).squeeze(-1)
        return found

    def add_value_head(self, critic: str) -> None:
        self.value_heads[critic] = nn.Linear(TOKENS, 1)
        with torch.no_grad():
            self.value_heads[critic].weight.fill_(1.0)
            self.value_heads[critic].bias.zero_()

    def base_parameters(self) -> Mapping[str, Any]:
        return {}


def _prefixes(tokens_N: Tensor, positions_N: Tensor, plan: AttentionPlan) -> list[Words]:
    """Return, for each flat token, the tokens that it attends to, in order, itself included."""
    tokens, positions = tokens_N.tolist(), positions_N.tolist()
    found: list[Words | None] = [None] * len(tokens)
    for bucket in plan.buckets:
        queries = bucket.query_BL.tolist()
        keys = queries if bucket.key_BM is None else bucket.key_BM.tolist()
        for b, places in enumerate(queries):
            for q, place in enumerate(places):
                if bucket.mask_BLM is None:
                    seen = keys[b][: q + 1]
                else:
                    seen = [
                        key for key, on in zip(keys[b], bucket.mask_BLM[b, q].tolist(), strict=True) if on
                    ]
                if found[place] is None:  # padding repeats a place
                    assert [positions[key] for key in seen] == list(range(len(seen))), (
                        "positions count from 0"
                    )
                    found[place] = tuple(tokens[key] for key in seen)
    assert None not in found, "the plan covers every token"
    return [prefix for prefix in found if prefix is not None]
