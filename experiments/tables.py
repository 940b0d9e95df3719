"""Teams whose policies are tables: exact, fast, and trained by the library's own loop.

Only the decoder is replaced. The train engine packs, scores, masks, divides and steps as with any model; rollout, credit, collation,
loss and order are those of every run. A policy is one row of logits for everything that can stand before a token; a message is one token,
whatever it says. A token's row is found by all that the packing lets it attend to. To what embeds turns (VDN, QMIX), a letter is itself
and every message is nothing. A critic is a table too, which knows nothing of what it has not read word for word; an *additive* one is the
sum of what it thinks of every turn alone, as one that shares features between turns can be.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType, SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kapelle.engines.rollout.protocol import Completion, HeldRequest, Interruptible, Request, RolloutEngine
from kapelle.engines.rollout.request_queue import PendingRequest, RequestQueue, wait_for_requests
from kapelle.models.fast.attention import AttentionPlan
from kapelle.models.weights import weights_hash
from kapelle.rollout.continuous import ContinuousRollouts
from kapelle.rollout.partial import Exchange, Wanted
from kapelle.rollout.setup import RolloutSetup
from kapelle.runtime.batch_barrier import batch_barrier
from kapelle.team import Lora, Team
from kapelle.types import Message

Words = tuple[int, ...]
Start = Callable[[Words], Sequence[float]]
"""What stands before a token → the log-chances with which every policy starts."""


class TableBank:
    """The adapters: one table each, which is added to the start."""

    def __init__(self, rows: int, tokens: int) -> None:
        self._shape = (rows, tokens)
        self.adapters: dict[str, Lora] = {}
        self.tables: dict[str, nn.Parameter] = {}

    def add(self, name: str, lora: Lora, seed: int) -> None:
        """Add a table of zeros."""
        self.adapters[name] = lora
        self.tables[name] = nn.Parameter(torch.zeros(self._shape), requires_grad=False)

    def parameters(self, name: str) -> dict[str, nn.Parameter]:
        """Return the table of a name."""
        return {"table": self.tables[name]}

    def copy(self, source: str, target: str) -> None:
        """Make one table equal to another."""
        if target not in self.adapters:
            self.add(target, self.adapters[source], 0)
        with torch.no_grad():
            self.tables[target].copy_(self.tables[source])

    def train(self, *, on: bool) -> None:
        """Tables have no dropout."""
        assert not on, "tables have no dropout"


class TableModel:
    """What a train engine asks of a language model."""

    def __init__(self, start: Start, tokens: int, rows: int = 4096, *, additive: bool = False) -> None:
        """Take how policies start, the number of tokens that can be said, the most rows, and whether critics are additive."""
        self.name, self.dtype, self.device = "table", torch.float32, torch.device("cpu")
        self.flat, self.sharded_pass, self.float_head = object(), None, False
        """Not None: shared prefixes are laid out once."""
        self.masks = None
        """Nothing that tables say is constrained."""
        self.tokens = tokens
        self.bank = TableBank(rows, tokens)
        self.value_heads: dict[str, nn.Linear] = {}
        self.head = SimpleNamespace(weight_VD=torch.eye(tokens))
        self.renderer: Any = SimpleNamespace(context=1 << 20)
        self._start, self._additive = start, additive
        self.features: Callable[[Words], Words] = lambda prefix: prefix
        """What of all that stands before a token chooses the row that is learned; the start depends on everything."""
        self._rows: dict[Words, int] = {}
        self._chances = torch.zeros(rows, tokens, dtype=torch.float64)
        self._route: Sequence[tuple[str | None, int, int]] = ()

    def row(self, prefix: Words) -> int:
        """Return the number of the row that says what follows a prefix."""
        if prefix not in self._rows:
            chances = torch.tensor(list(self._start(prefix)), dtype=torch.float64)
            self._chances[len(self._rows)] = chances
            self._rows[prefix] = len(self._rows)
        return self._rows[prefix]

    @property
    def met(self) -> int:
        """How many rows there are so far."""
        return len(self._rows)

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
        """Say whose tokens come next."""
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
        """Return the row of every token, for policies with the start added, and behind it which letter the token is."""
        assert not images, "tables see nothing"
        prefixes = _prefixes(tokens_N, positions_N, plan)
        pieces = []
        for adapter, first, last in self._route:
            if adapter in self.value_heads and self._additive:
                table, parts = self.bank.tables[adapter].double(), map(self._turns, prefixes[first:last])
                pieces.append(torch.stack([table[list(map(self.row, turns))].sum(0) for turns in parts]))
                continue
            rows = torch.tensor([self.row(prefix) for prefix in prefixes[first:last]])
            starts = self._chances[rows]
            if adapter is None:
                pieces.append(starts)
            else:
                own = torch.tensor([self.row(self.features(prefix)) for prefix in prefixes[first:last]])
                learned = self.bank.tables[adapter].double()[own]
                pieces.append(learned if adapter in self.value_heads else learned + starts)
        letters_NV = torch.nn.functional.one_hot(tokens_N.clamp(max=self.tokens), self.tokens + 1)
        return torch.cat([torch.cat(pieces), letters_NV[:, : self.tokens].double()], 1)

    def _turns(self, prefix: Words) -> list[Words]:
        """Return every turn of a prefix, the message that it answers first."""
        begins = [k for k, token in enumerate(prefix) if token >= self.tokens]
        return [prefix[begin:end] for begin, end in pairwise([*begins, len(prefix)])]

    def logits(self, hidden_KD: Tensor) -> Tensor:
        """A row is its logits."""
        return hidden_KD[:, : self.tokens]

    def values(self, critic: str, hidden_KD: Tensor) -> Tensor:
        """Return a critic's values."""
        found: Tensor = self.value_heads[critic](hidden_KD[:, : self.tokens].float()).squeeze(-1)
        return found

    def add_value_head(self, critic: str) -> None:
        """Add a head whose value is the sum of the row."""
        self.value_heads[critic] = nn.Linear(self.tokens, 1)
        with torch.no_grad():
            self.value_heads[critic].weight.fill_(1.0)
            self.value_heads[critic].bias.zero_()

    def base_parameters(self) -> Mapping[str, Any]:
        """The start is not trained."""
        return {}


def _prefixes(tokens_N: Tensor, positions_N: Tensor, plan: AttentionPlan) -> list[Words]:
    """Return, for each flat token, the tokens that it attends to, in order, itself included."""
    tokens, positions = tokens_N.tolist(), positions_N.tolist()
    found: list[Words | None] = [None] * len(tokens)
    for bucket in plan.buckets:
        queries = bucket.query_BL.tolist()
        keys = queries if bucket.key_BM is None else bucket.key_BM.tolist()
        masks = None if bucket.mask_BLM is None else bucket.mask_BLM.tolist()
        for b, places in enumerate(queries):
            for q, place in enumerate(places):
                if found[place] is not None:  # padding repeats a place
                    continue
                if masks is None:
                    seen = keys[b][: q + 1]
                else:
                    seen = [key for key, on in zip(keys[b], masks[b][q], strict=True) if on]
                assert [positions[key] for key in seen] == list(range(len(seen))), "positions count from 0"
                found[place] = tuple(tokens[key] for key in seen)
    assert None not in found, "the plan covers every token"
    return [prefix for prefix in found if prefix is not None]


class TableRenderer:
    """Letters are tokens; so is a message, whatever it says."""

    context = 1 << 20

    def __init__(self, alphabet: Sequence[str], *, ends: bool) -> None:
        """Take the letters, or words that are answers by themselves; where an answer `ends` by choice, one more token says so."""
        self.alphabet = alphabet
        self.end = len(alphabet) if ends else None
        self.tokens = len(alphabet) + ends
        self._messages: dict[tuple[str, str], int] = {}
        self.said: dict[int, str] = {}
        """Token of a message → its text."""

    def start(self, messages: Sequence[Message]) -> Words:
        """Return one token for each message."""
        return tuple(self._token(message) for message in messages)

    def _token(self, message: Message) -> int:
        token = self._messages.setdefault((message.role, message.content), self.tokens + len(self._messages))
        self.said[token] = message.content
        return token

    def extend(
        self,
        prompt: Sequence[int],
        completion: Sequence[int],
        new_messages: Sequence[Message],
        before: Sequence[Message] = (),
    ) -> Words:
        """Return all that was read and said, and the messages heard since."""
        return (*prompt, *completion, *self.start(new_messages))

    def thoughts(self, prompt: Sequence[int], completion: Sequence[int], text: str) -> tuple[int, int]:
        """Return that there are none."""
        return 0, 0

    def completion(self, text: str) -> Words:
        """Return the token of a word, or the letters of a text, and its end."""
        if text in self.alphabet and self.end is None:
            return (self.alphabet.index(text),)
        return (*(self.alphabet.index(letter) for letter in text), *(() if self.end is None else (self.end,)))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the letters."""
        return "".join(self.alphabet[token] for token in ids if token < len(self.alphabet))


@dataclass(slots=True)
class _Row:
    """A request and what has been sampled for it."""

    request: Request
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: Literal["stop", "length"] | None = None
    draw: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.draw = random.Random(self.request.seed)
        for _ in self.request.begun:  # a letter's random number depends on its place
            self.draw.random()


class TableEngine(RolloutEngine):
    """Samples from tables: one letter, or letters until one is the end."""

    def __init__(self, model: TableModel, renderer: TableRenderer, team: Team) -> None:
        self._model, self._renderer, self._team = model, renderer, team
        self._version = dict.fromkeys(team.every, 0)
        self._hash = dict.fromkeys(team.every, "start")
        self._table: dict[str, Tensor | None] = dict.fromkeys(team.every)
        self._known: dict[tuple[str, Words, float], tuple[list[float], list[float]]] = {}

    @property
    def policies(self) -> Sequence[str]:
        """All of the team."""
        return tuple(self._version)

    def renderer(self, policy: str) -> TableRenderer:
        """The same for all."""
        return self._renderer

    def load(self, policy: str, weights: Mapping[str, Any], version: int) -> None:
        """Take a new table."""
        self._table[policy] = weights["table"].detach().double().clone()
        self._version[policy], self._hash[policy] = version, weights_hash(weights)
        self._known = {key: chances for key, chances in self._known.items() if key[0] != policy}

    def chances(
        self, policy: str, prefix: Words, temperature: float = 1.0
    ) -> tuple[list[float], list[float]]:
        """Return the chance and the log-chance of every token after a prefix."""
        key = (policy, prefix, temperature)
        if key not in self._known:
            row = self._model.row(prefix)
            table = self._table[policy]
            logits = self._model.starts([row])[0]
            logits = (
                logits if table is None else logits + table[self._model.row(self._model.features(prefix))]
            )
            logp = (logits / temperature).log_softmax(-1)
            self._known[key] = logp.exp().tolist(), logp.tolist()
        return self._known[key]

    def asked(self, policy: str) -> list[int]:
        """Return the rows of a policy that have been asked for since it was loaded."""
        return sorted({self._model.row(prefix) for name, prefix, _ in self._known if name == policy})

    async def generate(self, request: Request) -> Completion:
        """Sample letters."""
        row = _Row(request)
        while row.finish_reason is None:
            self._sample(row)
        return self._completion(row)

    def _sample(self, row: _Row) -> None:
        """Sample the next letter of a row."""
        request, sampling = row.request, row.request.sampling
        prefix = (*request.prompt_ids, *request.begun, *row.ids)
        if sampling.temperature == 0:
            shares, logp = self.chances(request.policy, prefix)
            token = max(range(len(shares)), key=shares.__getitem__)
        else:
            shares, logp = self.chances(request.policy, prefix, sampling.temperature)
            token = row.draw.choices(range(len(shares)), shares)[0]
        row.ids.append(token)
        row.logprobs.append(logp[token])
        if self._renderer.end is None or token == self._renderer.end:
            row.finish_reason = "stop"
        elif len(request.begun) + len(row.ids) >= sampling.max_tokens:
            row.finish_reason = "length"

    def _completion(self, row: _Row) -> Completion:
        assert row.finish_reason is not None, "it has ended"
        return Completion(
            tuple(row.ids),
            tuple(row.logprobs),
            row.finish_reason,
            self._renderer.decode([*row.request.begun, *row.ids]),
            self._version[row.request.policy],
            self._hash[row.request.policy],
        )

    def texts(self, policy: str, seen: str, most: int) -> dict[str, float]:
        """Return the chance of every answer of at most so many tokens to a message; longer ones are cut."""
        found: dict[str, float] = {}
        open_: list[tuple[Words, float]] = [((), 1.0)]
        begun = self._renderer.start([Message("user", seen)])
        end = self._renderer.end
        while open_:
            ids, chance = open_.pop()
            for token, share in enumerate(self.chances(policy, (*begun, *ids))[0]):
                now = (*ids, token)
                if end is None or token == end or len(now) == most:
                    text = self._renderer.decode(now)
                    found[text] = found.get(text, 0.0) + chance * share
                else:
                    open_.append((now, chance * share))
        return found


class SteppedTables(TableEngine, Interruptible):
    """Samples one letter of every request at a time, as an engine with a batch of rows does. It loads new weights between two steps."""

    def __init__(self, model: TableModel, renderer: TableRenderer, team: Team) -> None:
        super().__init__(model, renderer, team)
        self.steps = 0
        """Decode steps so far, each of one letter of every row."""
        self._queue: RequestQueue[_Row] = RequestQueue()
        self._rows: list[PendingRequest[_Row]] = []
        self._pump: asyncio.Task[None] | None = None

    async def generate(self, request: Request) -> Completion:
        """Sample letters, together with all other requests of this moment."""
        if self._pump is None or self._pump.done():
            self._rows.clear()
            self._queue.drop_cancelled()
            self._pump = asyncio.get_running_loop().create_task(self._drain())
        return await self._queue.answer_to(request)

    def run_freely(self) -> None:
        """Do nothing, because no episode waits for its environment here."""

    async def hold(self) -> list[HeldRequest]:
        """Return the requests. They need not be put on hold, because a step samples all letters at once."""
        return [pending.held() for pending in self._rows]

    def resume(self) -> None:
        """Do nothing; see `hold`."""

    async def _drain(self) -> None:
        queue = self._queue
        while queue.arrived or self._rows:
            await wait_for_requests(batch_barrier(), lambda: len(queue.arrived), patience=60.0)
            queue.enqueue_arrived()
            for pending in queue.waiting:
                pending.output = _Row(pending.request)
            self._rows += queue.waiting
            queue.waiting = []
            self.steps += bool(self._rows)
            left = []
            for pending in self._rows:
                row, policy = pending.output, pending.request.policy
                assert row is not None, "it has joined"
                self._sample(row)
                weights = self._version[policy], self._hash[policy]
                if row.finish_reason is None:
                    pending.sampled(row.ids[-1:], row.logprobs[-1:], *weights)
                    left.append(pending)
                else:
                    text = self._renderer.decode([*row.request.begun, *row.ids])
                    last = row.ids[-1:], row.logprobs[-1:]
                    pending.answer(pending.completion(*last, row.finish_reason, text, *weights))
            self._rows = left


class SteppedRollouts:
    """Rolls out groups without interruption in this process (`asynchronous.Sampler`). An update takes no decode step."""

    def __init__(self, setup: RolloutSetup, step: int) -> None:
        """Set the number of groups of a step."""
        self._loop = asyncio.new_event_loop()
        self._rollouts = ContinuousRollouts(setup, step)
        self.weights: dict[str, Mapping[str, Tensor]] = {}

    def load(self, policy: str, weights: Mapping[str, Tensor], version: int) -> None:
        """Keep the weights for comparisons. The engine of the setup is loaded by itself."""
        self.weights[policy] = {name: tensor.detach().clone() for name, tensor in weights.items()}

    def exchange(self, wanted: Wanted, *, unfinished: bool = False, seconds: float = 0.0) -> Exchange:
        """Roll out groups until one is finished, or return at once if `seconds` is 0."""
        work = self._rollouts.exchange(wanted, unfinished=unfinished, seconds=3600.0 if seconds else 0.0)
        return self._loop.run_until_complete(work)
