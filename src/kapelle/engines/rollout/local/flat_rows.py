"""Rows in flight through the flat forward pass: prompts without padding, each distinct one read once, and our own cache.

Shapes: R rows, Q distinct prompts (per adapter), N their new tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableSequence, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from kapelle.engines.rollout.local.rows import Job, route_of
from kapelle.engines.rollout.local.step_graphs import Recorder, Window
from kapelle.models.fast.flat import Attend, FlatModel
from kapelle.models.fast.fused import FusedPass
from kapelle.models.fast.kv_cache import KVCache, PromptBlock
from kapelle.models.fast.prefixes import Prefixes, Text
from kapelle.models.language_model import LanguageModel
from kapelle.models.lora_bank import Route, route_at

CHUNK = 1024
"""Prompt tokens read in one pass (or one longer prompt), so that a pass stays in the processor's cache."""

STEM = 32
"""Minimum length of a common beginning of prompts that is read once for all of them."""


class FlatRows:
    """See `rows.Rows`."""

    def __init__(
        self,
        model: LanguageModel,
        flat: FlatModel,
        fused: FusedPass | None,
        prefixes: Prefixes,
        recorder: Recorder | None = None,
    ) -> None:
        self._model = model
        self._window = Window(recorder)
        self._recorded = recorder is not None
        self._flat = flat
        self._fused = fused
        self._prefixes = prefixes
        self._cohorts: list[_Cohort] = []

    @property
    def open(self) -> bool:
        """Prompts may always join."""
        return True

    def join(self, jobs: Sequence[Job]) -> Tensor:
        """Read the new tokens of every distinct prompt once; return logits `_RV` of each row's first token."""
        texts = [(job.adapter, job.prompt) for job in jobs]
        prompts = list(dict.fromkeys(texts))
        block = self._room(prompts)
        known = [0] * len(prompts)
        for number, (adapter, prompt) in enumerate(prompts):
            kv = self._prefixes.find(adapter, prompt)
            if kv is not None:
                known[number] = block.put(number, kv)
        stems = _stems(prompts, known)
        if stems:
            self._read_stems(block, stems, known)
        logits_QV = torch.cat([self._read(block, prompts, known, chunk) for chunk in _chunks(prompts, known)])
        number_of = {prompt: number for number, prompt in enumerate(prompts)}
        prompt_R = torch.tensor([number_of[text] for text in texts], device=self._model.device)
        self._cohorts.append(_Cohort(KVCache.seated(block, prompt_R, recorded=self._recorded), texts))
        self._join_cohorts()
        return logits_QV[prompt_R]

    def _room(self, prompts: Sequence[Text]) -> PromptBlock:
        lengths = [len(prompt) for _, prompt in prompts]
        return PromptBlock.empty(self._flat, lengths, self._model.device, self._model.dtype)

    def _read_stems(
        self, block: PromptBlock, stems: Mapping[Text, Sequence[int]], known: MutableSequence[int]
    ) -> None:
        """Read the common beginnings of prompts once and copy them to each prompt."""
        texts = list(stems)
        room = self._room(texts)
        for chunk in _chunks(texts, [0] * len(texts)):
            self._read(room, texts, [0] * len(texts), chunk)
        for number, text in enumerate(texts):
            for prompt in stems[text]:
                known[prompt] = block.put(prompt, room.of(number))

    def _read(
        self,
        block: PromptBlock,
        prompts: Sequence[Text],
        known: Sequence[int],
        chunk: range,
    ) -> Tensor:
        """Read the new tokens of a few prompts and return logits `_QV` of the tokens that follow."""
        device = self._model.device
        new = [len(prompts[q][1]) - known[q] for q in chunk]
        tokens_N = torch.tensor([token for q in chunk for token in prompts[q][1][known[q] :]], device=device)
        position_N = torch.cat([torch.arange(known[q], len(prompts[q][1]), device=device) for q in chunk])
        last_Q = torch.tensor(new, device=device).cumsum(0) - 1
        attend = block.attention(list(_alike(chunk.start, new)))
        route = route_of([prompts[q][0] for q, n in zip(chunk, new, strict=True) for _ in range(n)])

        return self._logits(tokens_N, position_N, route, attend, last_Q)

    def read(self, token_R: Tensor) -> Tensor:
        """Read one more token of each row and return logits `_RV` of the next token, valid until the next call."""
        fresh = [cohort.cache.open() for cohort in self._cohorts]
        if any(fresh):
            self._window.close()
        left = min(cohort.cache.left for cohort in self._cohorts)
        return self._window.run(self._step, token_R, left)

    def _step(self, token_R: Tensor) -> Tensor:
        """Read a token into free places, with tensor operations only: a replay runs no Python."""
        position_R = torch.cat([cohort.cache.advance() for cohort in self._cohorts])
        return self._logits(token_R, position_R, self._route, self._attend, None)

    def _attend(self, layer: int, q_RHE: Tensor, k_RJE: Tensor, v_RJE: Tensor) -> Tensor:
        if len(self._cohorts) == 1:
            return self._cohorts[0].cache.attend(layer, q_RHE, k_RJE, v_RJE)
        parts = zip(*(x.split(self._sizes) for x in (q_RHE, k_RJE, v_RJE)), strict=True)
        return torch.cat([c.cache.attend(layer, *part) for c, part in zip(self._cohorts, parts, strict=True)])

    def _logits(
        self, tokens_N: Tensor, positions_N: Tensor, route: Route, attend: Attend, last_Q: Tensor | None
    ) -> Tensor:
        if self._fused is not None:
            return self._fused.logits(tokens_N, positions_N, route, attend, last_Q)

        def scaled(layer: int, q_NHE: Tensor, k_NJE: Tensor, v_NJE: Tensor) -> Tensor:
            return attend(layer, q_NHE * self._flat.scale, k_NJE, v_NJE)

        with self._model.computing(route):
            hidden_ND = self._flat.hidden(tokens_N, positions_N, scaled)
        if last_Q is not None:
            hidden_ND, route = hidden_ND[last_Q], route_at(route, last_Q)
        with self._model.computing(route):
            return self._model.logits(hidden_ND)

    def leave(self, rows: Sequence[int], completions: Sequence[Sequence[int]]) -> None:
        """Drop rows; later prompts may continue what they read: the prompt and all but the last sampled token."""
        completion_of = dict(zip(rows, completions, strict=True))
        first, cohorts = 0, []
        for cache, texts in self._cohorts:
            leaving = [row for row in range(len(texts)) if first + row in completion_of]
            staying = [row for row in range(len(texts)) if first + row not in completion_of]
            read = [(texts[row][0], (*texts[row][1], *completion_of[first + row][:-1])) for row in leaving]
            self._prefixes.put(cache, leaving, read)
            if staying:
                kept = cache.kept(torch.tensor(staying, device=self._model.device)) if leaving else cache
                cohorts.append(_Cohort(kept, [texts[row] for row in staying]))
            first += len(texts)
        self._cohorts = cohorts
        self._join_cohorts()

    def _join_cohorts(self) -> None:
        self._window.close()
        self._sizes = [cohort.cache.rows for cohort in self._cohorts]
        self._route = route_of([adapter for cohort in self._cohorts for adapter, _ in cohort.texts])


class _Cohort(NamedTuple):
    """Rows that joined together: their cache, and each row's adapter and prompt."""

    cache: KVCache
    texts: list[Text]


def _stems(prompts: Sequence[Text], known: Sequence[int]) -> dict[Text, list[int]]:
    """Return the common beginnings of new prompts (an agent's instructions), each with the prompts that share it."""
    alike: dict[Text, list[int]] = {}
    for number, (adapter, prompt) in enumerate(prompts):
        if not known[number] and len(prompt) > STEM:
            alike.setdefault((adapter, prompt[:STEM]), []).append(number)
    stems: dict[Text, list[int]] = {}
    for (adapter, _), numbers in alike.items():
        texts = [prompts[number][1] for number in numbers]
        first, last = min(texts), max(texts)  # the two that differ earliest
        most = min(len(text) for text in texts) - 1  # at least one token of every prompt is left to read
        same = next((k for k in range(STEM, most) if first[k] != last[k]), most)
        if len(numbers) > 1:
            stems[adapter, first[:same]] = numbers
    return stems


def _chunks(prompts: Sequence[Text], known: Sequence[int]) -> Iterator[range]:
    """Split prompts into runs of at most `CHUNK` new tokens, or one prompt."""
    first, filled = 0, 0
    for number, (_, prompt) in enumerate(prompts):
        new = len(prompt) - known[number]
        if number > first and filled + new > CHUNK:
            yield range(first, number)
            first, filled = number, 0
        filled += new
    yield range(first, len(prompts))


def _alike(first: int, lengths: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Return runs of equal lengths: first prompt, prompt after the last, length."""
    for length, run in groupby(lengths):
        count = sum(1 for _ in run)
        yield first, first + count, length
        first += count
