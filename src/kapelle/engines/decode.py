"""One wave of decoding: many prompts of many policies on one base, with a KV cache.

Rows are ordered by adapter. Rows that finished leave the batch and the cache as soon as a quarter of it is
idle. Who reads the tokens is `lean_rows.py` where the architecture is known, else `padded_rows.py`.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kapelle.engines.sampling import SamplingRows, sample
from kapelle.models.fused import FusedPass, fused_of
from kapelle.models.language_model import LanguageModel
from kapelle.models.prefixes import Prefixes
from kapelle.types import FinishReason, Sampling

IDLE_SHARE = 0.25
"""Share of finished rows at which the batch is compacted: a copy of the cache against idle work."""


class Job(NamedTuple):
    """One prompt to continue."""

    adapter: str | None
    prompt: tuple[int, ...]
    sampling: Sampling
    seed: int


@dataclass(slots=True)
class Said:
    """What a row has said so far."""

    ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason | None = None
    text: str | None = None
    """Text up to a stop string, once one was found."""


class Rows(Protocol):
    """Prompts in flight on one model: reads tokens, says what may come next."""

    def read_prompts(self) -> Tensor:
        """Read every prompt and return logits `_RV` of its first new token."""
        ...

    def read(self, token_R: Tensor) -> Tensor:
        """Read one more token of each row and return logits `_RV` of the next."""
        ...

    def leave(self, rows: Sequence[int], said: Sequence[Sequence[int]]) -> None:
        """Hear what rows said that are over, before they are dropped or the wave ends."""
        ...

    def keep(self, rows: Sequence[int]) -> None:
        """Keep the rows at these indices alone."""
        ...


class Decoder:
    """Continues prompts on one model; what it prepared and what rows have read is kept from wave to wave."""

    def __init__(self, model: LanguageModel, kept_tokens: int = 0) -> None:
        """Keep at most so many token places of rows that are over."""
        self._model = model
        self._prefixes = Prefixes(kept_tokens)
        self._fused: dict[tuple[str | None, ...], FusedPass | None] = {}

    @torch.inference_mode()
    def decode(self, jobs: Sequence[Job]) -> list[Said]:
        """Continue every prompt until it ends its turn, meets a stop string or reaches its limit."""
        order = sorted(
            range(len(jobs)), key=lambda k: (jobs[k].adapter or "", len(jobs[k].prompt), jobs[k].prompt)
        )
        said = [Said([], []) for _ in jobs]
        sorted_jobs = [jobs[k] for k in order]
        wave = _Wave(self._model, self._open_rows(sorted_jobs), sorted_jobs, [said[k] for k in order])
        while wave.alive:
            wave.advance()
        return said

    @property
    def kept_places(self) -> int:
        """Token places of rows that are over whose keys and values are kept."""
        return self._prefixes.places

    def forget(self, adapter: str | None) -> None:
        """Forget what was prepared and read with an adapter's weights; everything for those of the base."""
        self._prefixes.forget(adapter)
        self._fused.clear()

    def _open_rows(self, jobs: Sequence[Job]) -> Rows:
        lean = self._model.lean
        if lean is None:
            from kapelle.engines.padded_rows import PaddedRows

            return PaddedRows(self._model, jobs)
        from kapelle.engines.lean_rows import LeanRows

        adapters = tuple(dict.fromkeys(job.adapter for job in jobs))
        if adapters not in self._fused:
            self._fused = {adapters: fused_of(lean, adapters, self._model.dtype)}
        return LeanRows(self._model, lean, self._fused[adapters], self._prefixes, jobs)


def decode(model: LanguageModel, jobs: Sequence[Job]) -> list[Said]:
    """Continue prompts once, keeping nothing; see `Decoder.decode`."""
    return Decoder(model).decode(jobs)


def route_of(adapters: Sequence[str | None]) -> list[tuple[str | None, int, int]]:
    """Return the contiguous spans of equal adapters."""
    spans: list[tuple[str | None, int, int]] = []
    for row, adapter in enumerate(adapters):
        if spans and spans[-1][0] == adapter:
            spans[-1] = (adapter, spans[-1][1], row + 1)
        else:
            spans.append((adapter, row, row + 1))
    return spans


class _Wave:
    """The rows in flight; `advance` samples one token for each.

    Tokens stay in tensors, one column a step, until their row leaves.
    """

    def __init__(self, model: LanguageModel, rows: Rows, jobs: Sequence[Job], said: Sequence[Said]) -> None:
        self._model = model
        self._jobs = list(jobs)
        self._said = list(said)
        self._limits = SamplingRows(
            torch.tensor([job.sampling.temperature for job in jobs], device=model.device),
            torch.tensor([job.sampling.top_p for job in jobs], device=model.device),
            torch.tensor([job.sampling.top_k for job in jobs], device=model.device),
            torch.tensor([job.seed for job in jobs], device=model.device),
        )
        self._most_R = torch.tensor([job.sampling.max_tokens for job in jobs], device=model.device)
        self._ends = torch.tensor(sorted(model.end_ids), device=model.device)
        self._stopping = [row for row, job in enumerate(jobs) if job.sampling.stop]
        self._tokens: list[Tensor] = []
        self._logps: list[Tensor] = []
        self._length_R = torch.zeros_like(self._most_R)
        """Tokens of each row that is over; 0 while it speaks."""
        self._rows = rows
        self._logits_RV = rows.read_prompts()

    @property
    def alive(self) -> bool:
        """True while a row still speaks."""
        return bool(self._jobs)

    def advance(self) -> None:
        """Sample the next token of each row, and read it while anybody still speaks."""
        step_R = torch.full_like(self._limits.seed_R, len(self._tokens))
        token_R, logp_R = sample(self._logits_RV, self._limits, step_R)
        self._tokens.append(token_R)
        self._logps.append(logp_R)
        if self._anybody_ended(token_R):
            over_R = self._length_R > 0
            over = int(over_R.sum())
            if over >= IDLE_SHARE * len(over_R):
                token_R = self._compact(over_R)
        if self._jobs:
            self._logits_RV = self._rows.read(token_R)

    def _anybody_ended(self, token_R: Tensor) -> bool:
        step = len(self._tokens)
        ended_R = torch.isin(token_R, self._ends).logical_or_(self._most_R <= step)
        for row in self._stopping:
            if self._length_R[row] == 0 and self._stopped(row):
                ended_R[row] = True
        ended_R &= self._length_R == 0
        self._length_R[ended_R] = step
        return bool(ended_R.any())

    def _stopped(self, row: int) -> bool:
        ids = [int(column_R[row]) for column_R in self._tokens]
        text = str(self._model.tokenizer.decode(ids, skip_special_tokens=True))
        places = [text.find(stop) for stop in self._jobs[row].sampling.stop]
        found = [place for place in places if place >= 0]
        if found:
            self._said[row].text = text[: min(found)]
        return bool(found)

    def _compact(self, over_R: Tensor) -> Tensor:
        """Let rows that are over leave, and return the last token of the others."""
        over, live = over_R.nonzero().flatten(), (~over_R).nonzero().flatten()
        tokens_TR, logps_TR = torch.stack(self._tokens), torch.stack(self._logps)
        leaving = over.tolist()
        for row, length, ids, logprobs in zip(
            leaving,
            self._length_R[over].tolist(),
            tokens_TR[:, over].t().tolist(),
            logps_TR[:, over].t().tolist(),
            strict=True,
        ):
            said = self._said[row]
            said.ids, said.logprobs = ids[:length], logprobs[:length]
            stopped = said.text is not None or said.ids[-1] in self._model.end_ids
            said.finish_reason = "stop" if stopped else "length"
        self._rows.leave(leaving, [self._said[row].ids for row in leaving])
        staying = live.tolist()
        self._jobs = [self._jobs[row] for row in staying]
        self._said = [self._said[row] for row in staying]
        if staying:
            self._rows.keep(staying)
        self._stopping = [row for row, job in enumerate(self._jobs) if job.sampling.stop]
        self._limits = self._limits.keep(live)
        self._most_R, self._length_R = self._most_R[live], self._length_R[live]
        self._tokens, self._logps = list(tokens_TR[:, live].unbind()), list(logps_TR[:, live].unbind())
        return tokens_TR[-1, live]
