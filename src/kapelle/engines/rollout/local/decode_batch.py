"""Decode the current rows of one model. Each step samples one token per row; prompts join and finished rows leave between steps.

Rows of many policies share one batch, ordered by adapter. The sampled tokens of a row stay in tensors until the row
leaves the batch. Finished rows leave the batch together, as soon as they make up a quarter of all rows. The KV cache of
finished rows is kept for prompts that continue these rows.

In each step, `sample` draws a token from each row's logits (sampling.py), `Decoder._record` stores the tokens and marks
finished rows, and `Rows.read` computes the next logits (decode_strategies.py).

In tensor shapes, R is the number of rows, V the size of the vocabulary, and T the maximum number of tokens that a row
has generated.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from kapelle.engines.rollout.local.decode_pass import decode_pass_of
from kapelle.engines.rollout.local.decode_strategies import (
    FlatRows,
    Job,
    PaddedRows,
    PagedRows,
    RereadRows,
    RowOutput,
    Rows,
    decode_strategy,
)
from kapelle.engines.rollout.local.sampling import AllowedTokens, SamplingRows, adjusted, sample
from kapelle.engines.rollout.local.step_graphs import GraphRecorder, Recordings, on_cuda
from kapelle.errors import EngineError
from kapelle.models.devices import configure_memory
from kapelle.models.fast.fused import fused_of
from kapelle.models.fast.kv_cache import Prefixes
from kapelle.models.language_model import LanguageModel
from kapelle.models.token_masks import Walk

LOG = logging.getLogger(__name__)

SHARE = 0.4
"""The fraction of the free memory of a GPU that the KV cache may use. The rest of the memory is needed because growing
blocks exist twice for a short time."""

EXPECTED = 128
"""The number of tokens of a completion for which memory must be free when a row joins. If rows generate more tokens
than this, other rows may be preempted."""

IDLE_SHARE = 0.25
"""The fraction of rows that must be finished before finished rows leave the batch. Removing rows requires copying the
cache, whereas keeping finished rows wastes computation."""

LEAST_ROOM = 64
"""The initial capacity of each row, in tokens."""

STOP_MARGIN = 16
"""The number of characters that are kept before the earliest possible position of a stop string, because the next token
may change the last characters."""


class Decoder:
    """Generates completions of prompts on one model, and keeps prepared weights and KV caches for later prompts."""

    def __init__(
        self,
        model: LanguageModel,
        adapters: int = 1,
        kept_tokens: int = 0,
        recorder_on: Callable[[torch.device], GraphRecorder | None] = on_cuda,
        kv_bytes: int | None = None,
    ) -> None:
        """Create a decoder for about `adapters` adapters that keeps at most `kept_tokens` tokens of finished rows in the KV cache.

        The function `recorder_on` returns the recorder of decoding steps for a device, or None. The KV cache may use up
        to `kv_bytes` bytes, including the kept rows. If `kv_bytes` is None, the limit is 40 % of the memory of a GPU
        that is free while the batch is empty, and there is no limit on a CPU.
        """
        self._model = model
        self.recorder = recorder_on(model.device)
        self._prefixes = Prefixes(kept_tokens)
        self._decode = decode_pass_of(model, adapters)
        """The pass that decodes in few kernels, or None if the device or the model has none."""
        self._recordings = None if self.recorder is None else Recordings(self.recorder)
        fuses = model.flat is not None and not model.float_head and self._decode is None
        self._fused = fused_of(model.flat, adapters, model.dtype) if model.flat and fuses else None
        self.strategy, self._cache_of = decode_strategy(model)
        """The name of the model's decode strategy."""
        self._rows: Rows
        self.flying: list[_FlyingRow]
        self.preempted: list[_FlyingRow]
        """The preempted rows, oldest first. These rows rejoin the batch when there is enough memory."""
        self.most_bytes, self._measures = kv_bytes, kv_bytes is None
        self._most_rows: int | None = None
        """The maximum number of rows, which is set when memory runs out, or None if memory has not run out yet."""
        self._logits_RV: Tensor
        """The logits of the next token of each row."""
        self._position_R: Tensor
        """The position of the next token of each row in its completion."""
        self._most_R: Tensor
        """The maximum length of each row's completion, in tokens."""
        self._live_R: Tensor
        """The mask of the rows that are not finished."""
        self._tokens_RT: Tensor
        """The sampled tokens of each completion, by position. The next attribute contains their log-probs."""
        self._logps_RT: Tensor
        self._ends = torch.tensor(sorted(model.end_ids), device=model.device)
        self._sampling: SamplingRows
        self._stopping = False
        """Whether any row has stop strings."""
        self._constrained = self._adjusting = False
        """Whether any row has a constraint, and whether any row has adjusted logits."""
        self._longest = 0
        """The number of tokens of the longest completion in the batch."""
        self._finished = 0
        """The number of finished rows that have not left the batch."""
        self._steps = 0
        """The number of steps that this decoder has run."""
        self.drop()

    @property
    def kept_places(self) -> int:
        """The number of tokens of finished rows that are kept in the KV cache."""
        return self._prefixes.places

    @property
    def in_flight(self) -> int:
        """The number of rows, including finished rows in the batch and preempted rows."""
        return len(self.flying) + len(self.preempted)

    @property
    def open(self) -> bool:
        """Whether new prompts can join the batch now."""
        return not self.flying or self._rows.open

    def room(self, jobs: Sequence[Job]) -> int:
        """Return the number of jobs, from the first one on, that fit in memory. If no row is being decoded, the result is at least 1."""
        flying = len(self.flying)
        if self._measures and not flying:
            self.most_bytes = self._bytes_left()
        most = self._most_places
        count = len(jobs) if self._most_rows is None else min(len(jobs), max(0, self._most_rows - flying))
        used, text = self._rows.places_next, None
        for number, job in enumerate(jobs[:count]):
            # A prompt of several rows is stored once, and most rows end before their limit.
            prompt = 0 if text == (job.adapter, job.prompt) else len(job.prompt)
            used += prompt + min(job.sampling.max_tokens, EXPECTED)
            if most is not None and used > most:
                count = number
                break
            text = job.adapter, job.prompt
        return count if flying else max(1, count)

    @torch.inference_mode()
    def join(self, jobs: Sequence[Job]) -> list[RowOutput]:
        """Process prompts and return the outputs of their rows, which are empty until the rows leave during `advance`.

        If an error occurs, none of the prompts joins the batch, and the other rows continue.
        """
        rows = [_FlyingRow(self._model, job) for job in jobs]
        before = [*self.flying, *self.preempted]
        try:
            self._within_memory(lambda: self._enter(rows), rows)
        except Exception:
            self._take_out()
            self.preempted = [row for row in before if row.length is None]
            raise
        return [row.output for row in rows]

    def _enter(self, rows: Sequence[_FlyingRow]) -> None:
        """Process the prompts of these rows and add the rows to the batch."""
        configure_memory()
        joining = sorted(rows, key=lambda row: (row.job.adapter or "", len(row.job.prompt), row.job.prompt))
        device, before = self._model.device, self.flying
        logits_RV = self._rows.join([row.job for row in joining])
        for row in joining:
            row.joined = self._steps
        self.flying = [*before, *joining]
        begun_R = torch.tensor([row.job.begun for row in joining], device=device)
        most_R = torch.tensor([row.job.sampling.max_tokens for row in joining], device=device)
        if before:
            self._logits_RV = torch.cat((self._logits_RV, logits_RV))
            self._position_R = torch.cat((self._position_R, begun_R))
            self._most_R = torch.cat((self._most_R, most_R))
            self._live_R = torch.cat((self._live_R, torch.ones_like(most_R, dtype=torch.bool)))
        else:
            self._logits_RV, self._position_R, self._most_R = logits_RV, begun_R, most_R
            self._live_R = torch.ones_like(most_R, dtype=torch.bool)
            self._tokens_RT = torch.zeros(0, 0, dtype=torch.long, device=device)
            self._logps_RT = torch.zeros(0, 0, device=device)
        self._count()
        self._make_room(max(LEAST_ROOM, self._longest + 1))
        by_adapter = sorted(range(len(self.flying)), key=lambda row: self.flying[row].job.adapter or "")
        if by_adapter != list(range(len(self.flying))):
            self._rows.arrange(by_adapter)
            self._logits_RV = self._logits_RV[self._keep_rows(by_adapter)]
        self._sampling = self._settings()

    @property
    def steps(self) -> int:
        """The number of steps that this decoder has run."""
        return self._steps

    @torch.inference_mode()
    def advance(self, steps: int) -> None:
        """Sample up to `steps` tokens for each row. Sampling stops early when rows leave the batch."""
        self._resume()
        self._within_memory(lambda: self._advance(steps), ())

    def _advance(self, steps: int) -> None:
        for _ in range(steps if self.flying else 0):
            allowed = self._allowed() if self._constrained else None
            logits_RV = self._adjusted_logits(allowed) if self._adjusting else self._logits_RV
            token_R, logp_R = sample(logits_RV, self._sampling, self._position_R, allowed)
            self._record(token_R, logp_R)
            tight = self._tight()
            if self._finished < IDLE_SHARE * len(self.flying) and not (self._finished and tight):
                if tight:
                    token_R = token_R[self._preempt()]
                self._logits_RV = self._rows.read(token_R)
                continue
            # The finished rows leave; the remaining rows then read their newest tokens.
            finished = [number for number, row in enumerate(self.flying) if row.length is not None]
            self._fill(finished)
            self._rows.leave(finished, [self.flying[number].newest() for number in finished])
            staying = self._unfinished()
            staying_R = self._keep_rows(staying)
            if staying:
                self._sampling = self._settings()
                self._logits_RV = self._rows.read(token_R[staying_R])
            return

    def _adjusted_logits(self, allowed: AllowedTokens | None) -> Tensor:
        """Return the logits with the adjustments that callers requested."""
        logits_RV = self._logits_RV.clone() if allowed is None else allowed.cut(self._logits_RV)
        rows = [n for n, row in enumerate(self.flying) if row.job.sampling.adjusted and row.length is None]
        for number, (row, ids, _) in zip(rows, self._generated(rows), strict=True):
            logits_RV[number] = adjusted(
                logits_RV[number], row.job.sampling, row.first.prompt, ids, sorted(self._model.end_ids)
            )
        return logits_RV

    def _bytes_left(self) -> int | None:
        """Return the number of free bytes of a GPU for the KV cache, rounded coarsely so that runs are repeatable."""
        device = self._model.device
        if device.type != "cuda":
            return None
        free, total = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free += self._prefixes.places * self._rows.place_bytes
        step = total // 16
        return max(1, int(SHARE * free) // step) * step

    @property
    def _most_places(self) -> int | None:
        """The maximum number of tokens whose KV cache fits in memory, or None if unknown."""
        if self.most_bytes is None or not self._rows.place_bytes:
            return None
        return self.most_bytes // self._rows.place_bytes

    def _tight(self) -> bool:
        """Drop kept rows if memory is short, and return whether the next step still needs more memory than is available."""
        most = self._most_places
        if most is None:
            return False
        needed = self._rows.places_next
        self._prefixes.shrink(max(0, most - needed))
        return needed > most

    def _preempt(self) -> Tensor:
        """Preempt the newest rows and return the indices of the rows that stay in the batch."""
        excess = self._rows.places_next - (self._most_places or 0)
        staying = sorted(range(len(self.flying)), key=lambda number: self.flying[number].joined)
        going: list[int] = []
        while excess > 0 and len(staying) > 1:
            going.append(staying.pop())
            row = self.flying[going[-1]]
            excess -= len(row.job.prompt) + self._steps - row.joined
        for row, ids, logprobs in list(self._generated(sorted(going))):
            row.preempt(ids, logprobs)
            self.preempted.append(row)
        staying.sort()
        self._rows.arrange(staying)
        staying_R = self._keep_rows(staying)
        self._sampling = self._settings()
        return staying_R

    def _resume(self) -> None:
        """Return as many preempted rows to the batch as fit in memory."""
        if self.preempted and self.open:
            rows = self.preempted[: self.room([row.job for row in self.preempted])]
            if rows:
                self.preempted = [row for row in self.preempted if row not in rows]
                self._within_memory(lambda: self._enter(rows), rows)

    def _within_memory(self, work: Callable[[], None], joining: Sequence[_FlyingRow]) -> None:
        """Run `work`. If memory runs out, remove all rows (including `joining`) from the batch and continue with half as many rows."""
        try:
            work()
        except torch.OutOfMemoryError as error:
            message = str(error)
        else:
            return
        # The exception keeps the failed step's tensors alive, and is released here.
        tried = max(len(self.flying), len(joining))
        rows = list(dict.fromkeys((*self._take_out(), *joining)))
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()
        if tried <= 1:
            raise EngineError(
                f"A row of {len(rows[0].job.prompt)} tokens does not fit in memory by itself. Set a lower "
                "`sampling.max_tokens`, shorter prompts or `model.dtype: bfloat16` (`kapelle plan` shows what fits on a "
                f"device). The device reports: {message}"
            )
        self.preempted, self._most_rows = rows, tried // 2
        LOG.warning(
            "%d rows do not fit in memory: at most %d are in flight on '%s' from now on. Tokens do not change; set "
            "`engine.max_rows=%d` to use this limit from the start, or limit the KV cache with `engine.kv_gib`.",
            *(tried, tried // 2, self._model.name, tried // 2),
        )

    def _take_out(self) -> list[_FlyingRow]:
        """Empty the batch: fill in the outputs of finished rows, and return the unfinished rows with their tokens."""
        noted = self._unfinished()[: len(self._tokens_RT)]
        for row, ids, logprobs in list(self._generated(noted)):
            row.preempt(ids, logprobs)
        self._fill([number for number, row in enumerate(self.flying) if row.length is not None])
        unfinished = [self.flying[number] for number in self._unfinished()]
        rows = list(dict.fromkeys((*unfinished, *self.preempted)))
        self.drop()
        self._prefixes.forget(None)
        return rows

    def _allowed(self) -> AllowedTokens | None:
        """Return the allowed tokens of the unfinished rows that have a constraint, or None if there are no such rows."""
        # A GPU computes the logits in the meantime.
        own = {
            number: row.walk
            for number, row in enumerate(self.flying)
            if row.walk is not None and row.length is None
        }
        if not own:
            return None
        bits_CW = self._model.masks.next(list(own.values()))
        return AllowedTokens.of(list(own), bits_CW, self._model.device)

    def _record(self, token_R: Tensor, logp_R: Tensor) -> None:
        """Store the next token of each row, and mark the rows that are finished by this token."""
        if self._longest == self._tokens_RT.shape[1]:
            self._make_room(2 * self._longest)
        self._tokens_RT.scatter_(1, self._position_R[:, None], token_R[:, None])
        self._logps_RT.scatter_(1, self._position_R[:, None], logp_R[:, None])
        self._position_R += 1
        self._steps += 1
        self._longest += 1
        ended_R = torch.isin(token_R, self._ends).logical_or_(self._position_R >= self._most_R)
        ended_R &= self._live_R
        # The only synchronisation with a GPU in a step.
        if self._stopping or self._constrained:
            tokens, ends = torch.stack((token_R, ended_R.long())).tolist()
            early: list[int] = []
            for number, (row, token) in enumerate(zip(self.flying, tokens, strict=True)):
                if row.walk is not None and row.length is None:
                    row.walk.take(token)
                    if not ends[number] and row.stop is None and not self._rows.routes:
                        ending = self._model.masks.ending(row.walk)
                        if 0 < len(ending) <= row.room(self._steps):
                            row.ending = ending
                            early.append(number)
                if row.stop is not None and row.length is None:
                    row.output.text = row.stop.text_before_stop(token)
                    if row.output.text is not None:
                        early.append(number)
            if early:
                ended_R[early] = True
                for number in early:
                    ends[number] = 1
        else:
            ends = ended_R.tolist()
        if any(ends):
            self._live_R ^= ended_R
            for row, over in zip(self.flying, ends, strict=True):
                if over:
                    row.length = self._steps - row.joined
                    self._finished += 1

    def _make_room(self, places: int) -> None:
        """Allocate memory for `places` tokens in each row of the batch."""
        rows, held = self._tokens_RT.shape
        margins = (0, max(0, places - held), 0, len(self.flying) - rows)
        self._tokens_RT, self._logps_RT = pad(self._tokens_RT, margins), pad(self._logps_RT, margins)

    def _keep_rows(self, rows: Sequence[int]) -> Tensor:
        """Keep the state of the rows at these indices, in this order, and return the indices as a tensor."""
        index_R = torch.tensor(rows, dtype=torch.long, device=self._model.device)
        self.flying = [self.flying[row] for row in rows]
        self._position_R, self._most_R, self._live_R = (
            each[index_R] for each in (self._position_R, self._most_R, self._live_R)
        )
        self._tokens_RT, self._logps_RT = self._tokens_RT[index_R], self._logps_RT[index_R]
        self._count()
        return index_R

    def _count(self) -> None:
        """Recompute the values that summarise the rows of the batch."""
        self._longest = max((row.job.begun + self._steps - row.joined for row in self.flying), default=0)
        self._finished = sum(row.length is not None for row in self.flying)
        self._stopping = any(row.stop is not None for row in self.flying)
        walks = [row.walk for row in self.flying]
        self._constrained = walks.count(None) < len(walks)
        self._adjusting = any(row.job.sampling.adjusted for row in self.flying)

    def _settings(self) -> SamplingRows:
        jobs = [row.job for row in self.flying]
        return SamplingRows.of([job.sampling for job in jobs], [job.seed for job in jobs], self._model.device)

    @torch.inference_mode()
    def end(self, outputs: Sequence[RowOutput]) -> None:
        """Finish the rows of these outputs with the tokens sampled so far. The rows leave together with the next finished rows."""
        ended = {id(output) for output in outputs}
        for number, row in enumerate(self.flying):
            if id(row.output) in ended and row.length is None:
                row.length = self._steps - row.joined
                self._finished += 1
                self._live_R[number] = False
        for row in [row for row in self.preempted if id(row.output) in ended]:
            self.preempted.remove(row)
            row.output.ids, row.output.logprobs = row.ids, row.logprobs
            row.output.finish_reason = "length"

    @torch.inference_mode()
    def settle(self) -> None:
        """Fill in the outputs of finished rows that have not left the batch yet."""
        self._fill(
            [
                number
                for number, row in enumerate(self.flying)
                if row.length is not None and row.output.finish_reason is None
            ]
        )

    def _fill(self, rows: Sequence[int]) -> None:
        """Fill in the outputs of the finished rows at these indices."""
        place = {id(row): number for number, row in enumerate(self.flying)}
        for row, ids, logprobs in self._generated(rows):
            output = row.output
            output.ids, output.logprobs = ids, logprobs
            stopped = output.text is not None or not ids or ids[-1] in self._model.end_ids
            output.finish_reason = "stop" if stopped else "length"
            # The last token was sampled but not read; a row may have read further tokens since it finished.
            output.routing = self._rows.routing(place[id(row)], len(row.first.prompt) + len(ids) - 1)

    def _generated(self, rows: Sequence[int]) -> Iterator[tuple[_FlyingRow, list[int], list[float]]]:
        """Yield the rows at these indices with their tokens and log-probs."""
        if rows:
            index_R = torch.tensor(rows, device=self._model.device)
            generated = zip(self._tokens_RT[index_R].tolist(), self._logps_RT[index_R].tolist(), strict=True)
            for number, (ids, logprobs) in zip(rows, generated, strict=True):
                row = self.flying[number]
                count = self._steps - row.joined if row.length is None else row.length
                own = slice(row.job.begun, row.job.begun + count)
                ids_of_row, logprobs_of_row = [*row.ids, *ids[own]], [*row.logprobs, *logprobs[own]]
                if row.ending:
                    ids_of_row += row.ending
                    logprobs_of_row += [0.0] * len(row.ending)
                yield row, ids_of_row, logprobs_of_row

    def _unfinished(self) -> list[int]:
        return [number for number, row in enumerate(self.flying) if row.length is None]

    def new_tokens(self) -> Iterator[tuple[RowOutput, list[int], list[float]]]:
        """Yield the output of each unfinished row with the tokens sampled since the last call and their log-probs."""
        for row, ids, logprobs in self._generated(self._unfinished()):
            first, row.reported = row.reported, len(ids)
            if first < len(ids):
                yield row.output, ids[first:], logprobs[first:]

    def interrupt(self) -> None:
        """Fill in the outputs of all rows with the tokens sampled so far, leaving `finish_reason` at None, and drop the rows."""
        for row, ids, logprobs in self._generated(self._unfinished()):
            row.output.ids, row.output.logprobs = ids, logprobs
        for row in self.preempted:
            row.output.ids, row.output.logprobs = row.ids, row.logprobs
        self.drop()

    def drop(self) -> None:
        """Drop all rows of the batch and all preempted rows."""
        # Free all their tensors, because an update needs the memory.
        none = torch.empty(0)
        self.flying, self.preempted = [], []
        self._logits_RV = self._position_R = none
        self._most_R = self._live_R = self._tokens_RT = self._logps_RT = none
        self._sampling = SamplingRows(none, none, none, none)
        if self._decode is not None and self._model.flat is not None:
            self._rows = PagedRows(
                self._model, self._model.flat, self._decode, self._prefixes, self._recordings
            )
        elif self._model.flat is not None:
            self._rows = FlatRows(self._model, self._model.flat, self._fused, self._prefixes, self.recorder)
        elif self._cache_of is not None:
            self._rows = PaddedRows(self._model, self._cache_of)
        else:
            self._rows = RereadRows(self._model)

    def reads(self, adapter: str | None) -> bool:
        """Return whether a row in the batch reads the weights of an adapter. Every row reads those of the base model (None)."""
        return any(adapter in (None, row.job.adapter) for row in (*self.flying, *self.preempted))

    def forget(self, adapter: str | None) -> None:
        """Drop the prepared weights and the KV caches of an adapter. None stands for the base model and drops everything."""
        assert not self.reads(adapter), "weights change only between rows"
        if adapter is None:
            self.drop()  # also drops rounded weights
        self._prefixes.forget(adapter)
        if self._fused is not None:
            self._fused.forget(adapter)
        if self._decode is not None and adapter is not None:
            self._decode.adapters.forget(adapter)

    def forget_read(self) -> None:
        """Drop all rows and the kept KV caches, but keep the prepared weights."""
        self.drop()
        self._prefixes.forget(None)

    def release_caches(self) -> None:
        """Drop all rows and everything that can be recomputed."""
        self.drop()
        self.forget(None)
        if self.recorder is not None and self._decode is None:
            self.recorder.forget()


def decode(model: LanguageModel, jobs: Sequence[Job]) -> list[RowOutput]:
    """Continue every prompt until its end of turn, a stop string or its token limit, without keeping caches afterwards."""
    decoder = Decoder(model, adapters=len({job.adapter for job in jobs}))
    outputs = decoder.join(jobs)
    while decoder.in_flight:
        decoder.advance(1)
    return outputs


class _FlyingRow:
    """A row of the batch or a preempted row."""

    __slots__ = (
        "ending",
        "first",
        "ids",
        "job",
        "joined",
        "length",
        "logprobs",
        "model",
        "output",
        "reported",
        "stop",
        "walk",
    )

    def __init__(self, model: LanguageModel, job: Job) -> None:
        self.model = model
        self.job = self.first = job
        """The job of the row. After a preemption, the tokens that were generated before it are appended to the job's
        prompt."""
        self.ids: list[int] = []
        """The tokens that the row generated before it was preempted."""
        self.logprobs: list[float] = []
        self.output = RowOutput([], [])
        self.joined = 0
        """The number of steps of the decoder before the row joined the batch."""
        self.length: int | None = None
        """The number of tokens that the row generated after it joined, or None until the row is finished."""
        self.ending: tuple[int, ...] = ()
        """Tokens at the end of the completion that follow from the constraint. The model has not processed these
        tokens."""
        self.reported = 0
        """The number of tokens that `Decoder.new_tokens` has yielded for the row."""
        begun = job.prompt[len(job.prompt) - job.begun :]
        self.stop = StopSearch(model.tokenizer, job.sampling.stop, begun) if job.sampling.stop else None
        self.walk = None if job.sampling.constraint is None else self._walk(begun)
        """The state of the completion in the grammar of its constraint, or None without a constraint."""

    def _walk(self, begun: Sequence[int]) -> Walk | None:
        constraint = self.job.sampling.constraint
        return None if constraint is None else self.model.masks.begin(constraint, begun)

    def preempt(self, ids: list[int], logprobs: list[float]) -> None:
        """Preempt the row. When the row rejoins the batch, it continues after the tokens `ids`, which are all tokens generated so far."""
        self.ids, self.logprobs = ids, logprobs
        first = self.first
        self.job = job = first._replace(prompt=(*first.prompt, *ids), begun=first.begun + len(ids))
        self.walk = self._walk(job.prompt[len(job.prompt) - job.begun :])

    def room(self, steps: int) -> int:
        """Return how many tokens the completion of the row may still have after `steps` steps of the decoder."""
        return self.job.sampling.max_tokens - self.job.begun - (steps - self.joined)

    def newest(self) -> list[int]:
        """Return the tokens that a finished row sampled after it joined the batch."""
        ids = self.output.ids[len(self.ids) :]
        return ids[: -len(self.ending)] if self.ending else ids


class StopSearch:
    """Finds the first stop string in the text of a row, in time that is linear in the number of tokens.

    Any newly completed stop string includes some of the newest tokens. At each step, the search therefore decodes only
    as many of the last tokens as the longest stop string needs. When these tokens contain a stop string, the whole text
    is searched.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str], begun: Sequence[int]) -> None:
        """Create a search for the stop strings `stops`.

        The tokens `begun` are the text so far, which is searched when the first new token is added.
        """
        self._tokenizer, self._stops = tokenizer, stops
        self._ids = list(begun)
        self._first = 0
        """The index of the first token that is decoded at each step."""
        self._least = max(map(len, stops)) + STOP_MARGIN
        """The minimum number of characters that the decoded tokens must have."""

    def text_before_stop(self, token: int) -> str | None:
        """Add a token, and return the text before the first stop string, or None if there is no stop string."""
        self._ids.append(token)
        recent = self._text(self._first)
        if any(stop in recent for stop in self._stops):
            text = self._text(0)
            places = [place for place in map(text.find, self._stops) if place >= 0]
            if places:
                return text[: min(places)]
        if len(recent) > 2 * self._least:
            # Tokens that begin within a character, or whose first space the tokeniser strips, decode differently alone than
            # after other tokens; the stop string is then found in a later step.
            middle = (self._first + len(self._ids)) // 2
            later = self._text(middle)
            cut = later.startswith("\N{REPLACEMENT CHARACTER}")
            if len(later) >= self._least and recent.endswith(later) and not cut:
                self._first = middle
        return None

    def _text(self, first: int) -> str:
        return str(self._tokenizer.decode(self._ids[first:], skip_special_tokens=True))
