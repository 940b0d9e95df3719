"""Decoding on one model: each step samples one token of each row in flight; prompts join between steps, finished rows leave.

Rows of many policies share a batch; those that join together are ordered by adapter and form a cohort. Tokens stay in
tensors, one column a step, until their row leaves. Finished rows leave together, as soon as they are a quarter of all, and
their part of the KV cache stays for prompts that continue them.

Shapes: R rows, V vocabulary, T generated tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor

from kapelle.engines.rollout.local.decode_strategies import (
    FlatRows,
    Job,
    PaddedRows,
    RereadRows,
    RowOutput,
    Rows,
    decode_strategy,
)
from kapelle.engines.rollout.local.sampling import SamplingRows, sample
from kapelle.engines.rollout.local.step_graphs import Recorder, on_cuda
from kapelle.models.devices import keep_freed_memory
from kapelle.models.fast.fused import fused_of
from kapelle.models.fast.kv_cache import Prefixes
from kapelle.models.language_model import LanguageModel

IDLE_SHARE = 0.25
"""Share of finished rows at which they leave: a copy of the cache against idle work."""


class Decoder:
    """Continues prompts on one model; prepared weights and KV caches are kept for later prompts."""

    def __init__(
        self,
        model: LanguageModel,
        adapters: int = 1,
        kept_tokens: int = 0,
        recorder_on: Callable[[torch.device], Recorder | None] = on_cuda,
    ) -> None:
        """Expect about `adapters` adapters, and keep at most `kept_tokens` token places of finished rows.

        `recorder_on` returns what records steps on a device, if anything.
        """
        self._model = model
        self._recorder = recorder_on(model.device)
        self._prefixes = Prefixes(kept_tokens)
        self._fused = None if model.flat is None else fused_of(model.flat, adapters, model.dtype)
        self._strategy = decode_strategy(model)
        self._rows: Rows
        self._cohorts: list[_Cohort]
        self._logits_RV: Tensor
        """Of each row's next token."""
        self._position_R: Tensor
        """Place of that token in its completion."""
        self._sampling: SamplingRows
        self.drop()

    @property
    def rereads(self) -> bool:
        """True if every token reads its whole text again, because no cache of the model can be trusted."""
        return self._strategy.name == "reread"

    @property
    def kept_places(self) -> int:
        """Token places of finished rows whose KV cache is kept."""
        return self._prefixes.places

    @property
    def in_flight(self) -> int:
        """Rows that still generate, or are finished and have not left the batch."""
        return sum(cohort.size for cohort in self._cohorts)

    @property
    def open(self) -> bool:
        """True if prompts may join now."""
        return not self._cohorts or self._rows.open

    @torch.inference_mode()
    def join(self, jobs: Sequence[Job]) -> list[RowOutput]:
        """Read prompts and return the outputs of their rows, empty until `advance` lets them leave."""
        keep_freed_memory()
        order = sorted(
            range(len(jobs)), key=lambda k: (jobs[k].adapter or "", len(jobs[k].prompt), jobs[k].prompt)
        )
        outputs = [RowOutput([], []) for _ in jobs]
        ordered = [jobs[k] for k in order]
        logits_RV = self._rows.join(ordered)
        self._logits_RV = torch.cat((self._logits_RV, logits_RV)) if self._cohorts else logits_RV
        self._cohorts.append(_Cohort(self._model, ordered, [outputs[k] for k in order]))
        self._join_cohorts()
        return outputs

    @torch.inference_mode()
    def advance(self, steps: int) -> None:
        """Sample `steps` tokens of each row; stop early when rows leave."""
        for _ in range(steps):
            token_R, logp_R = sample(self._logits_RV, self._sampling, self._position_R)
            self._position_R += 1
            for cohort, tokens_R, logps_R in zip(
                self._cohorts, token_R.split(self._sizes), logp_R.split(self._sizes), strict=True
            ):
                cohort.record(tokens_R, logps_R)
            if sum(cohort.idle for cohort in self._cohorts) >= IDLE_SHARE * self.in_flight:
                self._leave(token_R)
                return
            self._logits_RV = self._rows.read(token_R)

    def _leave(self, token_R: Tensor) -> None:
        """Let the finished rows leave, and read the newest tokens of the others."""
        finished_R = torch.cat([cohort.finished() for cohort in self._cohorts])
        completions = [ids for cohort in self._cohorts for ids in cohort.leave()]
        self._rows.leave(finished_R.nonzero().flatten().tolist(), completions)
        self._cohorts = [cohort for cohort in self._cohorts if cohort.size]
        if self._cohorts:
            self._join_cohorts()
            self._logits_RV = self._rows.read(token_R[~finished_R])

    def _join_cohorts(self) -> None:
        self._sizes = [cohort.size for cohort in self._cohorts]
        self._sampling = SamplingRows.joined(cohort.sampling for cohort in self._cohorts)
        self._position_R = torch.cat([cohort.positions for cohort in self._cohorts])

    @torch.inference_mode()
    def end(self, outputs: Sequence[RowOutput]) -> None:
        """End the rows of these outputs with what they have; they leave with the next rows that are finished."""
        ended = {id(output) for output in outputs}
        for cohort in self._cohorts:
            cohort.end(ended)

    @torch.inference_mode()
    def settle(self) -> None:
        """Fill in the outputs of finished rows that have not left yet."""
        for cohort in self._cohorts:
            cohort.settle()

    def new_tokens(self) -> Iterator[tuple[RowOutput, list[int], list[float]]]:
        """Yield the tokens that each unfinished row has generated since the last call, and their log-probs."""
        for cohort in self._cohorts:
            yield from cohort.new_tokens()

    def interrupt(self) -> None:
        """Fill in the outputs of the rows in flight with what they have, and drop them; their `finish_reason` stays None."""
        for cohort in self._cohorts:
            cohort.interrupt()
        self.drop()

    def drop(self) -> None:
        """Forget the rows in flight."""
        # No tensor of theirs stays: an update needs the memory.
        none = torch.empty(0)
        self._cohorts, self._logits_RV, self._position_R = [], none, none
        self._sampling = SamplingRows(none, none, none, none)
        if self._model.flat is not None:
            self._rows = FlatRows(self._model, self._model.flat, self._fused, self._prefixes, self._recorder)
        elif self._strategy.cache_of is not None:
            self._rows = PaddedRows(self._model, self._strategy.cache_of)
        else:
            self._rows = RereadRows(self._model)

    def forget(self, adapter: str | None) -> None:
        """Forget what was prepared and read with an adapter's weights; with None, the base's, everything."""
        assert not self.in_flight, "rows end with the weights that they began with"
        self._prefixes.forget(adapter)
        if self._fused is not None:
            self._fused.forget(adapter)

    def forget_read(self) -> None:
        """Forget the rows in flight and the kept KV caches; prepared weights stay."""
        self.drop()
        self._prefixes.forget(None)

    def release_caches(self) -> None:
        """Forget the rows in flight and everything that can be computed again."""
        self.drop()
        self.forget(None)
        if self._recorder is not None:
            self._recorder.forget()


def decode(model: LanguageModel, jobs: Sequence[Job]) -> list[RowOutput]:
    """Continue every prompt to its end of turn, a stop string or its token limit; keep nothing."""
    decoder = Decoder(model, adapters=len({job.adapter for job in jobs}))
    outputs = decoder.join(jobs)
    while decoder.in_flight:
        decoder.advance(1)
    return outputs


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
        self._reported = 0
        """Tokens of each row that `new_tokens` has yielded."""

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

    def new_tokens(self) -> Iterator[tuple[RowOutput, list[int], list[float]]]:
        """Yield the tokens of each unfinished row since the last call, and their log-probs."""
        if self._reported == self.step:
            return
        tokens = torch.stack(self._tokens[self._reported :]).t().tolist()
        logps = torch.stack(self._logps[self._reported :]).t().tolist()
        self._reported = self.step
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
