"""Rows in flight: each step samples one token of each; prompts join between steps, finished rows leave.

Tokens stay in tensors, one column a step, until their row leaves. Finished rows leave together, as soon as they are
a quarter of all.

Shapes: R rows, V vocabulary, T generated tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from kapelle.engines.rollout.local.rows import Job, RowOutput, Rows
from kapelle.engines.rollout.local.sampling import SamplingRows, sample
from kapelle.models.language_model import LanguageModel

IDLE_SHARE = 0.25
"""Share of finished rows at which they leave: a copy of the cache against idle work."""


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
        """True if prompts may join."""
        return not self._cohorts or self._rows.open

    def join(self, jobs: Sequence[Job], outputs: Sequence[RowOutput]) -> None:
        """Read prompts; the next step samples the first tokens of their rows."""
        logits_RV = self._rows.join(jobs)
        self._logits_RV = torch.cat((self._logits_RV, logits_RV)) if self._cohorts else logits_RV
        self._cohorts.append(_Cohort(self._model, jobs, outputs))
        self._join_cohorts()

    def advance(self) -> bool:
        """Sample the next token of each row and read it; True when rows left."""
        token_R, logp_R = sample(self._logits_RV, self._sampling, self._step_R)
        self._step_R += 1
        for cohort, tokens_R, logps_R in zip(
            self._cohorts, token_R.split(self._sizes), logp_R.split(self._sizes), strict=True
        ):
            cohort.record(tokens_R, logps_R)
        idle = sum(cohort.idle for cohort in self._cohorts)
        left = idle >= IDLE_SHARE * self.size
        if left:
            live_R = self._drop_finished()
            token_R = token_R[live_R]
        if self._cohorts:
            self._logits_RV = self._rows.read(token_R)
        return left

    def end(self, outputs: Sequence[RowOutput]) -> None:
        """End the rows of these outputs with what they have."""
        ended = {id(output) for output in outputs}
        for cohort in self._cohorts:
            cohort.end(ended)

    def settle(self) -> None:
        """Fill in the outputs of finished rows that have not left yet."""
        for cohort in self._cohorts:
            cohort.settle()

    def news(self) -> Iterator[tuple[RowOutput, list[int], list[float]]]:
        """Yield the tokens that each unfinished row has generated since the last call, and their log-probs."""
        for cohort in self._cohorts:
            yield from cohort.news()

    def interrupt(self) -> None:
        """Fill in what the rows in flight have generated; those that are finished have it."""
        for cohort in self._cohorts:
            cohort.interrupt()

    def _drop_finished(self) -> Tensor:
        """Drop the finished rows and return the indices of the others."""
        finished_R = torch.cat([cohort.finished() for cohort in self._cohorts])
        completions = [ids for cohort in self._cohorts for ids in cohort.leave()]
        self._rows.leave(finished_R.nonzero().flatten().tolist(), completions)
        self._cohorts = [cohort for cohort in self._cohorts if cohort.size]
        if self._cohorts:
            self._join_cohorts()
        return (~finished_R).nonzero().flatten()

    def _join_cohorts(self) -> None:
        self._sizes = [cohort.size for cohort in self._cohorts]
        self._sampling = SamplingRows.joined(cohort.sampling for cohort in self._cohorts)
        self._step_R = torch.cat([cohort.positions for cohort in self._cohorts])


class _Cohort:
    """Rows that joined together, and what they have generated."""

    def __init__(self, model: LanguageModel, jobs: Sequence[Job], outputs: Sequence[RowOutput]) -> None:
        self._model = model
        self._jobs, self._outputs = list(jobs), list(outputs)
        device = model.device
        self.sampling = SamplingRows(
            torch.tensor([job.sampling.temperature for job in jobs], device=device),
            torch.tensor([job.sampling.top_p for job in jobs], device=device),
            torch.tensor([job.sampling.top_k for job in jobs], device=device),
            torch.tensor([job.seed for job in jobs], device=device),
        )
        self._begun_R = torch.tensor([job.begun for job in jobs], device=device)
        self._most_R = torch.tensor([job.sampling.max_tokens - job.begun for job in jobs], device=device)
        self._ends = torch.tensor(sorted(model.end_ids), device=device)
        self._stopping = [row for row, job in enumerate(jobs) if job.sampling.stop]
        self._tokens: list[Tensor] = []
        self._logps: list[Tensor] = []
        self._length_R = torch.zeros_like(self._most_R)
        """Tokens of each finished row; 0 while it generates."""
        self.idle = 0
        """Finished rows."""
        self._told = 0
        """Tokens of each row that `news` has yielded."""

    @property
    def size(self) -> int:
        """R."""
        return len(self._jobs)

    @property
    def step(self) -> int:
        """Tokens generated so far by each row."""
        return len(self._tokens)

    @property
    def positions(self) -> Tensor:
        """Place of each row's next token in its completion, `_R`."""
        return self._begun_R + self.step

    def finished(self) -> Tensor:
        """Return which rows are finished, `_R`."""
        return self._length_R > 0

    def record(self, token_R: Tensor, logp_R: Tensor) -> None:
        """Record each row's next token and mark the rows that it ends."""
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
        """Fill in the outputs of the finished rows, drop those rows, and return their token ids."""
        if not self.idle:
            return []
        finished, live = self.finished().nonzero().flatten(), (~self.finished()).nonzero().flatten()
        tokens_TR, logps_TR = torch.stack(self._tokens), torch.stack(self._logps)
        leaving = self._fill(finished, tokens_TR, logps_TR)
        self._jobs = [self._jobs[row] for row in live.tolist()]
        self._outputs = [self._outputs[row] for row in live.tolist()]
        self._stopping = [row for row, job in enumerate(self._jobs) if job.sampling.stop]
        self.sampling = self.sampling.keep(live)
        self._most_R, self._length_R = self._most_R[live], self._length_R[live]
        self._begun_R = self._begun_R[live]
        self._tokens, self._logps = list(tokens_TR[:, live].unbind()), list(logps_TR[:, live].unbind())
        self.idle = 0
        return [output.ids for output in leaving]

    def settle(self) -> None:
        """Fill in the outputs of the finished rows; the rows stay."""
        if self.idle and any(output.finish_reason is None for output in self._outputs):
            finished = self.finished().nonzero().flatten()
            self._fill(finished, torch.stack(self._tokens), torch.stack(self._logps))

    def _fill(self, finished: Tensor, tokens_TR: Tensor, logps_TR: Tensor) -> list[RowOutput]:
        """Fill in the outputs of finished rows and return them."""
        lengths = self._length_R[finished].tolist()
        tokens, logps = tokens_TR[:, finished].t().tolist(), logps_TR[:, finished].t().tolist()
        outputs = [self._outputs[row] for row in finished.tolist()]
        for output, length, ids, logprobs in zip(outputs, lengths, tokens, logps, strict=True):
            output.ids, output.logprobs = ids[:length], logprobs[:length]
            stopped = output.text is not None or output.ids[-1] in self._model.end_ids
            output.finish_reason = "stop" if stopped else "length"
        return outputs

    def end(self, outputs: Collection[int]) -> None:
        """End the unfinished rows of these outputs (by `id`) with what they have."""
        for row, output in enumerate(self._outputs):
            if id(output) in outputs and self._length_R[row] == 0:
                self._length_R[row] = self.step
                self.idle += 1

    def news(self) -> Iterator[tuple[RowOutput, list[int], list[float]]]:
        """Yield the tokens of each unfinished row since the last call, and their log-probs."""
        if self._told == self.step:
            return
        tokens = torch.stack(self._tokens[self._told :]).t().tolist()
        logps = torch.stack(self._logps[self._told :]).t().tolist()
        self._told = self.step
        for row, running in enumerate((~self.finished()).tolist()):
            if running:
                yield self._outputs[row], tokens[row], logps[row]

    def interrupt(self) -> None:
        """Fill in what each unfinished row has generated so far."""
        if self._tokens:
            tokens, logps = (torch.stack(each).t().tolist() for each in (self._tokens, self._logps))
            for row, running in enumerate((~self.finished()).tolist()):
                if running:
                    self._outputs[row].ids, self._outputs[row].logprobs = tokens[row], logps[row]

    def _stopped(self, row: int) -> bool:
        prompt, begun = self._jobs[row].prompt, self._jobs[row].begun
        ids = [*prompt[len(prompt) - begun :], *(int(column_R[row]) for column_R in self._tokens)]
        text = str(self._model.tokenizer.decode(ids, skip_special_tokens=True))
        places = [text.find(stop) for stop in self._jobs[row].sampling.stop]
        found = [place for place in places if place >= 0]
        if found:
            self._outputs[row].text = text[: min(found)]
        return bool(found)
