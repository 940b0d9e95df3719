"""Samples from saved adapters. Requests of all clients share the batch of the local rollout engine."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from kapelle.engines.rollout.local.engine import LocalEngine
from kapelle.engines.rollout.protocol import Request
from kapelle.models.language_model import LanguageModel
from kapelle.models.weights import read_adapter
from kapelle.runtime.randomness import derive_seed
from kapelle.services.request_errors import busy
from kapelle.team import Policy
from kapelle.types import Sampling, Task

BASE = "base"
"""The policy of the bare base model."""
NOTHING = Task("", "")

Sampled = tuple[list[int], list[float], bool]
"""The tokens of a sequence, their log-probs in nats, and whether the sequence stopped before its limit."""


@dataclass(slots=True)
class Loaded:
    """Saved weights that are in memory, and the number of requests that use them."""

    adapter: str
    uses: int = 0


class Samplers:
    """The rollout engine, and the saved weights in memory, of which unused ones are dropped."""

    def __init__(self, model: LanguageModel, most: int) -> None:
        """Sample on a base model, with at most `most` adapters in memory for sampling."""
        self.model, self._most = model, most
        self.engine = LocalEngine({BASE: model}, [Policy(BASE, BASE, trained=False)])
        self.engine.serve()
        self._loaded: OrderedDict[Path, Loaded] = OrderedDict()
        """The saved weights in memory by folder. The most recently used weights are last."""
        self._count = 0

    @asynccontextmanager
    async def using(self, folder: Path | None) -> AsyncIterator[str | None]:
        """Keep saved weights in memory during the context, and yield the name of their adapter. None stands for the base model."""
        if folder is None:
            yield None
            return
        if folder not in self._loaded:
            self._make_room()
            weights, lora = read_adapter(folder)
            self._count += 1
            name = f"sampled{self._count}"
            self.model.bank.add(name, lora, 0)
            self.model.bank.fill(name, weights)
            for parameter in self.model.bank.parameters(name).values():
                parameter.requires_grad_(False)
            self.engine.add(Policy(name, BASE, lora, trained=False), self.model)
            self._loaded[folder] = Loaded(name)
        loaded = self._loaded[folder]
        self._loaded.move_to_end(folder)
        loaded.uses += 1
        try:
            yield loaded.adapter
        finally:
            loaded.uses -= 1

    def _make_room(self) -> None:
        """Drop the least recently used weights if there are too many. Raises RequestError (429) if all of them are in use."""
        for folder, loaded in list(self._loaded.items()):
            if len(self._loaded) < self._most:
                return
            if not loaded.uses and self.engine.remove(loaded.adapter):
                self.model.bank.remove(loaded.adapter)
                del self._loaded[folder]
        if len(self._loaded) >= self._most:
            raise busy(f"All {self._most} adapters in memory are sampling. Try again later.")

    def forget(self, folder: Path) -> None:
        """Read weights from their folder again at the next use, because they have been replaced."""
        loaded = self._loaded.get(folder)
        if loaded is not None:
            # Requests in progress continue with the old weights, under a name that no request will find.
            del self._loaded[folder]
            self._loaded[folder / str(self._count)] = loaded
            self._loaded.move_to_end(folder / str(self._count), last=False)

    async def sample(
        self,
        adapter: str | None,
        prompt: Sequence[int],
        sampling: Sampling,
        ends: frozenset[int],
        seed: int,
        count: int,
    ) -> list[Sampled]:
        """Return the tokens, their log-probs and whether they stopped, for `count` sequences. The token ids `ends` end a sequence."""
        one = (
            self._one(adapter or BASE, tuple(prompt), sampling, ends, derive_seed(seed, k))
            for k in range(count)
        )
        return list(await asyncio.gather(*one))

    async def _one(
        self, policy: str, prompt: tuple[int, ...], sampling: Sampling, ends: frozenset[int], seed: int
    ) -> Sampled:
        request = Request(policy, "", (), prompt, sampling, seed, NOTHING)
        tokens: list[int] = []
        logprobs: list[float] = []
        ended = asyncio.Event()

        def listen(ids: Sequence[int], values: Sequence[float]) -> None:
            tokens.extend(ids)
            logprobs.extend(values)
            if not ends.isdisjoint(ids):
                ended.set()

        stopped = True
        if not ends:
            completion = await self.engine.generate(request)
            return list(completion.ids), list(completion.logprobs), completion.finish_reason == "stop"
        # The engine knows no further end tokens, so a row that has sampled one is cancelled.
        work = asyncio.ensure_future(self.engine.stream(request, listen))
        waiting = asyncio.ensure_future(ended.wait())
        try:
            await asyncio.wait((work, waiting), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                completion = work.result()
                tokens, logprobs = list(completion.ids), list(completion.logprobs)
                stopped = completion.finish_reason == "stop"
        finally:
            waiting.cancel()
            work.cancel()
        end = next((k for k, token in enumerate(tokens) if token in ends), None)
        return (tokens, logprobs, stopped) if end is None else (tokens[: end + 1], logprobs[: end + 1], True)
