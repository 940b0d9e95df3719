"""Decoding on one model: each step samples one token of each row in flight; prompts join between steps, finished rows leave.

Rows of many policies share a batch; those that join together are ordered by adapter and form a cohort. Tokens stay in
tensors, one column a step, until their row leaves. Finished rows leave together, as soon as they are a quarter of all, and
their part of the KV cache stays for prompts that continue them.

A step is: `sample` draws a token from each row's logits (sampling.py), `_Cohort.record` notes it and marks the rows that it ends,
`Rows.read` reads it and returns the logits of the next one (decode_strategies.py).

Shapes: R rows, V vocabulary, T generated tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

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
from kapelle.engines.rollout.local.step_graphs import GraphRecorder, on_cuda
from kapelle.models.devices import keep_freed_memory
from kapelle.models.fast.fused import fused_of
from kapelle.models.fast.kv_cache import Prefixes
from kapelle.models.language_model import LanguageModel

IDLE_SHARE = 0.25
"""Share of finished rows at which they leave: a copy of the cache against idle work."""

STOP_MARGIN = 16
"""Characters kept before the place where a stop string may begin: the next token may still change the last ones."""


class Decoder:
    """Continues prompts on one model; prepared weights and KV caches are kept for later prompts."""

    def __init__(
        self,
        model: LanguageModel,
        adapters: int = 1,
        kept_tokens: int = 0,
        recorder_on: Callable[[torch.device], GraphRecorder | None] = on_cuda,
    ) -> None:
        """Expect about `adapters` adapters, and keep at most `kept_tokens` token places of finished rows.

        `recorder_on` returns what records steps on a device, if anything.
        """
        self._model = model
        self._recorder = recorder_on(model.device)
        self._prefixes = Prefixes(kept_tokens)
        self._fused = None if model.flat is None else fused_of(model.flat, adapters, model.dtype)
        self.strategy, self._cache_of = decode_strategy(model)
        """How the model decodes: `reread` where no cache of it can be trusted."""
        self._rows: Rows
        self._cohorts: list[_Cohort]
        self._logits_RV: Tensor
        """Of each row's next token."""
        self._position_R: Tensor
        """Place of that token in its completion."""
        self._most_R: Tensor
        """Places of each row's completion."""
        self._length_R: Tensor
        """Tokens of each finished row; 0 while it generates. Cohorts have views of it."""
        self._ends = torch.tensor(sorted(model.end_ids), device=model.device)
        self._sampling: SamplingRows
        self.drop()

    @property
    def kept_places(self) -> int:
        """Token places of finished rows whose KV cache is kept."""
        return self._prefixes.places

    @property
    def in_flight(self) -> int:
        """Rows that still generate, or are finished and have not left the batch."""
        return sum(len(cohort.outputs) for cohort in self._cohorts)

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
            self._record(token_R, logp_R)
            if sum(cohort.finished for cohort in self._cohorts) < IDLE_SHARE * self.in_flight:
                self._logits_RV = self._rows.read(token_R)
                continue
            # The finished rows leave; the others read their newest tokens without them.
            finished_R = self._length_R > 0
            completions = [ids for cohort in self._cohorts for ids in cohort.leave()]
            self._rows.leave(finished_R.nonzero().flatten().tolist(), completions)
            self._cohorts = [cohort for cohort in self._cohorts if cohort.outputs]
            if self._cohorts:
                self._join_cohorts()
                self._logits_RV = self._rows.read(token_R[~finished_R])
            return

    def _record(self, token_R: Tensor, logp_R: Tensor) -> None:
        """Record each row's next token, and mark the rows that it ends."""
        ended_R = torch.isin(token_R, self._ends).logical_or_(self._position_R >= self._most_R)
        if any(cohort.stops for cohort in self._cohorts):
            tokens, lengths = token_R.tolist(), self._length_R.tolist()  # one copy from a GPU for all rows
            row = 0
            for cohort in self._cohorts:
                for k, output in enumerate(cohort.outputs):
                    if k in cohort.stops and lengths[row] == 0:
                        output.text = cohort.stops[k].text_before_stop(tokens[row])
                        if output.text is not None:
                            ended_R[row] = True
                    row += 1
        ended_R &= self._length_R == 0
        ended = ended_R.tolist()  # the only wait for a GPU in a step, however many cohorts there are
        if any(ended):
            begun_R = torch.cat([cohort.begun_R for cohort in self._cohorts])
            torch.where(ended_R, self._position_R - begun_R, self._length_R, out=self._length_R)
        first = 0
        for cohort, tokens_R, logps_R in zip(
            self._cohorts, token_R.split(self._sizes), logp_R.split(self._sizes), strict=True
        ):
            cohort.tokens.append(tokens_R)
            cohort.logps.append(logps_R)
            cohort.finished += sum(ended[first : first + len(cohort.outputs)])
            first += len(cohort.outputs)

    def _join_cohorts(self) -> None:
        """Lay the rows of all cohorts one after another."""
        self._sizes = [len(cohort.outputs) for cohort in self._cohorts]
        self._sampling = SamplingRows.joined(cohort.sampling for cohort in self._cohorts)
        self._position_R = torch.cat([cohort.begun_R + len(cohort.tokens) for cohort in self._cohorts])
        self._most_R = torch.cat([cohort.most_R for cohort in self._cohorts])
        self._length_R = torch.cat([cohort.length_R for cohort in self._cohorts])
        for cohort, length_R in zip(self._cohorts, self._length_R.split(self._sizes), strict=True):
            cohort.length_R = length_R

    @torch.inference_mode()
    def end(self, outputs: Sequence[RowOutput]) -> None:
        """End the rows of these outputs with what they have; they leave with the next rows that are finished."""
        ended = {id(output) for output in outputs}
        for cohort in self._cohorts:
            for row, output in enumerate(cohort.outputs):
                if id(output) in ended and cohort.length_R[row] == 0:
                    cohort.length_R[row] = len(cohort.tokens)
                    cohort.finished += 1

    @torch.inference_mode()
    def settle(self) -> None:
        """Fill in the outputs of finished rows that have not left yet."""
        for cohort in self._cohorts:
            if cohort.finished and any(output.finish_reason is None for output in cohort.outputs):
                cohort.fill(torch.stack(cohort.tokens), torch.stack(cohort.logps))

    def new_tokens(self) -> Iterator[tuple[RowOutput, list[int], list[float]]]:
        """Yield the tokens that each unfinished row has generated since the last call, and their log-probs."""
        for cohort in self._cohorts:
            first, cohort.reported = cohort.reported, len(cohort.tokens)
            if first < cohort.reported:
                yield from cohort.unfinished(first)

    def interrupt(self) -> None:
        """Fill in the outputs of the rows in flight with what they have, and drop them; their `finish_reason` stays None."""
        for cohort in self._cohorts:
            if cohort.tokens:
                for output, ids, logprobs in cohort.unfinished(0):
                    output.ids, output.logprobs = ids, logprobs
        self.drop()

    def drop(self) -> None:
        """Forget the rows in flight."""
        # No tensor of theirs stays: an update needs the memory.
        none = torch.empty(0)
        self._cohorts, self._logits_RV, self._position_R = [], none, none
        self._most_R = self._length_R = none
        self._sampling = SamplingRows(none, none, none, none)
        if self._model.flat is not None:
            self._rows = FlatRows(self._model, self._model.flat, self._fused, self._prefixes, self._recorder)
        elif self._cache_of is not None:
            self._rows = PaddedRows(self._model, self._cache_of)
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
        device = model.device
        self.outputs = list(outputs)
        self.sampling = SamplingRows(
            torch.tensor([job.sampling.temperature for job in jobs], device=device),
            torch.tensor([job.sampling.top_p for job in jobs], device=device),
            torch.tensor([job.sampling.top_k for job in jobs], device=device),
            torch.tensor([job.seed for job in jobs], device=device),
        )
        self.begun_R = torch.tensor([job.begun for job in jobs], device=device)
        """Tokens of each completion that were sampled before."""
        self.most_R = torch.tensor([job.sampling.max_tokens for job in jobs], device=device)
        """Most tokens of each completion."""
        self._end_ids = model.end_ids
        self.stops = {
            row: StopSearch(model.tokenizer, job.sampling.stop, job.prompt[len(job.prompt) - job.begun :])
            for row, job in enumerate(jobs)
            if job.sampling.stop
        }
        """By row, for those that have stop strings."""
        self.tokens: list[Tensor] = []
        """`token_R` of each step."""
        self.logps: list[Tensor] = []
        self.length_R = torch.zeros_like(self.most_R)
        """Tokens of each finished row that were sampled here; 0 while it generates."""
        self.finished = 0
        """Number of finished rows."""
        self.reported = 0
        """Tokens of each row that `Decoder.new_tokens` has yielded."""

    def leave(self) -> list[list[int]]:
        """Fill in the outputs of the finished rows, drop those rows, and return their token ids."""
        if not self.finished:
            return []
        tokens_TR, logps_TR = torch.stack(self.tokens), torch.stack(self.logps)
        leaving = self.fill(tokens_TR, logps_TR)
        live = (self.length_R == 0).nonzero().flatten()
        rows: list[int] = live.tolist()
        self.outputs = [self.outputs[row] for row in rows]
        self.stops = {new: self.stops[row] for new, row in enumerate(rows) if row in self.stops}
        self.sampling = self.sampling.keep(live)
        self.most_R, self.length_R = self.most_R[live], self.length_R[live]
        self.begun_R = self.begun_R[live]
        self.tokens, self.logps = list(tokens_TR[:, live].unbind()), list(logps_TR[:, live].unbind())
        self.finished = 0
        return [output.ids for output in leaving]

    def fill(self, tokens_TR: Tensor, logps_TR: Tensor) -> list[RowOutput]:
        """Fill in the outputs of the finished rows and return them."""
        finished = (self.length_R > 0).nonzero().flatten()
        lengths = self.length_R[finished].tolist()
        tokens, logps = tokens_TR[:, finished].t().tolist(), logps_TR[:, finished].t().tolist()
        outputs = [self.outputs[row] for row in finished.tolist()]
        for output, length, ids, logprobs in zip(outputs, lengths, tokens, logps, strict=True):
            output.ids, output.logprobs = ids[:length], logprobs[:length]
            stopped = output.text is not None or output.ids[-1] in self._end_ids
            output.finish_reason = "stop" if stopped else "length"
        return outputs

    def unfinished(self, first: int) -> Iterator[tuple[RowOutput, list[int], list[float]]]:
        """Yield the tokens of each unfinished row from step `first` on, and their log-probs."""
        tokens, logps = (torch.stack(each[first:]).t().tolist() for each in (self.tokens, self.logps))
        for row, length in enumerate(self.length_R.tolist()):
            if length == 0:
                yield self.outputs[row], tokens[row], logps[row]


class StopSearch:
    """Finds the first stop string in the text of one row, in time that is linear in its tokens.

    A string that is new in the text reaches into its newest tokens. So only the last tokens are decoded at each step, as many
    as the longest stop string needs; once they contain one, the whole text decides.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str], begun: Sequence[int]) -> None:
        """Search for `stops`; `begun` are the tokens of the text so far, which are searched with the first new one."""
        self._tokenizer, self._stops = tokenizer, stops
        self._ids = list(begun)
        self._first = 0
        """The first token of those that are decoded at each step."""
        self._least = max(map(len, stops)) + STOP_MARGIN
        """Characters that these tokens must have."""

    def text_before_stop(self, token: int) -> str | None:
        """Add a token; return the text before the first stop string, None if there is none."""
        self._ids.append(token)
        recent = self._text(self._first)
        if any(stop in recent for stop in self._stops):
            text = self._text(0)
            places = [place for place in map(text.find, self._stops) if place >= 0]
            if places:
                return text[: min(places)]
        if len(recent) > 2 * self._least:
            # Tokens that begin within a character, or whose first space the tokeniser strips, have another text alone than
            # after the others: then this waits for a later step.
            middle = (self._first + len(self._ids)) // 2
            later = self._text(middle)
            cut = later.startswith("\N{REPLACEMENT CHARACTER}")
            if len(later) >= self._least and recent.endswith(later) and not cut:
                self._first = middle
        return None

    def _text(self, first: int) -> str:
        return str(self._tokenizer.decode(self._ids[first:], skip_special_tokens=True))
