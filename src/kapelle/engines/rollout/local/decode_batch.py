"""Rows in flight: one token for each of them a step; prompts join between steps, rows that are over leave.

Tokens stay in tensors, one column a step, until their row leaves. Rows that are over leave together, as soon as a
quarter of all is idle.

Shapes: R rows, V vocabulary, T tokens said.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kapelle.engines.rollout.local.rows import Job, Rows, Said
from kapelle.engines.rollout.local.sampling import SamplingRows, sample
from kapelle.models.language_model import LanguageModel

IDLE_SHARE = 0.25
"""Share of rows that are over at which they leave: a copy of the cache against idle work."""


class DecodeBatch:
    """The rows in flight on one model."""

    def __init__(self, model: LanguageModel, rows: Rows) -> None:
        self._model = model
        self._rows = rows
        self._cohorts: list[_Cohort] = []
        self._logits_RV: Tensor

    @property
    def size(self) -> int:
        """Rows in flight."""
        return sum(cohort.size for cohort in self._cohorts)

    @property
    def open(self) -> bool:
        """True where prompts may join."""
        return not self._cohorts or self._rows.open

    def join(self, jobs: Sequence[Job], said: Sequence[Said]) -> None:
        """Read prompts, whose rows say their first tokens in the next step."""
        logits_RV = self._rows.join(jobs)
        self._logits_RV = torch.cat((self._logits_RV, logits_RV)) if self._cohorts else logits_RV
        self._cohorts.append(_Cohort(self._model, jobs, said))
        self._line_up()

    def advance(self) -> bool:
        """Sample the next token of each row and read it; True when rows left."""
        token_R, logp_R = sample(self._logits_RV, self._limits, self._step_R)
        self._step_R += 1
        for cohort, tokens_R, logps_R in zip(
            self._cohorts, token_R.split(self._sizes), logp_R.split(self._sizes), strict=True
        ):
            cohort.record(tokens_R, logps_R)
        idle = sum(cohort.idle for cohort in self._cohorts)
        left = idle >= IDLE_SHARE * self.size
        if left:
            live_R = self._let_go()
            token_R = token_R[live_R]
        if self._cohorts:
            self._logits_RV = self._rows.read(token_R)
        return left

    def _let_go(self) -> Tensor:
        """Let rows that are over leave, and return the places of the others."""
        over_R = torch.cat([cohort.over() for cohort in self._cohorts])
        said = [ids for cohort in self._cohorts for ids in cohort.leave()]
        self._rows.leave(over_R.nonzero().flatten().tolist(), said)
        self._cohorts = [cohort for cohort in self._cohorts if cohort.size]
        if self._cohorts:
            self._line_up()
        return (~over_R).nonzero().flatten()

    def _line_up(self) -> None:
        self._sizes = [cohort.size for cohort in self._cohorts]
        self._limits = SamplingRows.joined(cohort.limits for cohort in self._cohorts)
        self._step_R = torch.cat([torch.full_like(c.limits.seed_R, c.step) for c in self._cohorts])


class _Cohort:
    """Rows that joined together, and what they have said."""

    def __init__(self, model: LanguageModel, jobs: Sequence[Job], said: Sequence[Said]) -> None:
        self._model = model
        self._jobs, self._said = list(jobs), list(said)
        device = model.device
        self.limits = SamplingRows(
            torch.tensor([job.sampling.temperature for job in jobs], device=device),
            torch.tensor([job.sampling.top_p for job in jobs], device=device),
            torch.tensor([job.sampling.top_k for job in jobs], device=device),
            torch.tensor([job.seed for job in jobs], device=device),
        )
        self._most_R = torch.tensor([job.sampling.max_tokens for job in jobs], device=device)
        self._ends = torch.tensor(sorted(model.end_ids), device=device)
        self._stopping = [row for row, job in enumerate(jobs) if job.sampling.stop]
        self._tokens: list[Tensor] = []
        self._logps: list[Tensor] = []
        self._length_R = torch.zeros_like(self._most_R)
        """Tokens of each row that is over; 0 while it speaks."""
        self.idle = 0
        """Rows that are over."""

    @property
    def size(self) -> int:
        """R."""
        return len(self._jobs)

    @property
    def step(self) -> int:
        """Tokens that each row has said."""
        return len(self._tokens)

    def over(self) -> Tensor:
        """Return which rows are over, `_R`."""
        return self._length_R > 0

    def record(self, token_R: Tensor, logp_R: Tensor) -> None:
        """Take each row's next token and see which rows it ends."""
        self._tokens.append(token_R)
        self._logps.append(logp_R)
        ended_R = torch.isin(token_R, self._ends).logical_or_(self._most_R <= self.step)
        for row in self._stopping:
            if self._length_R[row] == 0 and self._stopped(row):
                ended_R[row] = True
        ended_R &= self._length_R == 0
        if bool(ended_R.any()):
            self._length_R[ended_R] = self.step
            self.idle += int(ended_R.sum())

    def leave(self) -> list[list[int]]:
        """Tell what the rows that are over have said, drop them, and return their tokens."""
        if not self.idle:
            return []
        over, live = self.over().nonzero().flatten(), (~self.over()).nonzero().flatten()
        tokens_TR, logps_TR = torch.stack(self._tokens), torch.stack(self._logps)
        lengths = self._length_R[over].tolist()
        tokens, logps = tokens_TR[:, over].t().tolist(), logps_TR[:, over].t().tolist()
        leaving = [self._said[row] for row in over.tolist()]
        for said, length, ids, logprobs in zip(leaving, lengths, tokens, logps, strict=True):
            said.ids, said.logprobs = ids[:length], logprobs[:length]
            stopped = said.text is not None or said.ids[-1] in self._model.end_ids
            said.finish_reason = "stop" if stopped else "length"
        self._jobs = [self._jobs[row] for row in live.tolist()]
        self._said = [self._said[row] for row in live.tolist()]
        self._stopping = [row for row, job in enumerate(self._jobs) if job.sampling.stop]
        self.limits = self.limits.keep(live)
        self._most_R, self._length_R = self._most_R[live], self._length_R[live]
        self._tokens, self._logps = list(tokens_TR[:, live].unbind()), list(logps_TR[:, live].unbind())
        self.idle = 0
        return [said.ids for said in leaving]

    def _stopped(self, row: int) -> bool:
        ids = [int(column_R[row]) for column_R in self._tokens]
        text = str(self._model.tokenizer.decode(ids, skip_special_tokens=True))
        places = [text.find(stop) for stop in self._jobs[row].sampling.stop]
        found = [place for place in places if place >= 0]
        if found:
            self._said[row].text = text[: min(found)]
        return bool(found)
