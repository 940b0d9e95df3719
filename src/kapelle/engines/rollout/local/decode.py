"""Decoding on one model: many prompts of many policies at once, with a KV cache that stays when its rows are finished.

Rows that join together are ordered by adapter. `flat_rows.py` runs the forward pass where the architecture is
known, else what `ways.py` finds to be right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from kapelle.engines.rollout.local.decode_batch import DecodeBatch
from kapelle.engines.rollout.local.rows import Job, RowOutput, Rows
from kapelle.engines.rollout.local.step_graphs import Recorder, on_cuda
from kapelle.engines.rollout.local.ways import Way, way_of
from kapelle.models.allocator import keep_freed_memory
from kapelle.models.fast.fused import fused_of
from kapelle.models.fast.prefixes import Prefixes
from kapelle.models.language_model import LanguageModel


class Decoder:
    """Continues prompts on one model; prepared weights, keys and values are kept for later prompts."""

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
        self._way: Way | None = None
        self._fused = None if model.flat is None else fused_of(model.flat, adapters, model.dtype)
        self.drop()

    @property
    def rereads(self) -> bool:
        """True if every token reads its whole text again, because no cache of the model can be trusted."""
        return self._way is not None and self._way.name == "reread"

    @property
    def kept_places(self) -> int:
        """Token places of finished rows whose keys and values are kept."""
        return self._prefixes.places

    @property
    def in_flight(self) -> int:
        """Rows that still generate, or are finished and have not left the batch."""
        return self._batch.size

    @property
    def open(self) -> bool:
        """True if prompts may join now."""
        return self._batch.open

    @torch.inference_mode()
    def join(self, jobs: Sequence[Job]) -> list[RowOutput]:
        """Read prompts and return the outputs of their rows, empty until `advance` lets them leave."""
        keep_freed_memory()
        order = sorted(
            range(len(jobs)), key=lambda k: (jobs[k].adapter or "", len(jobs[k].prompt), jobs[k].prompt)
        )
        outputs = [RowOutput([], []) for _ in jobs]
        self._batch.join([jobs[k] for k in order], [outputs[k] for k in order])
        return outputs

    @torch.inference_mode()
    def advance(self, steps: int) -> None:
        """Sample `steps` tokens of each row; stop early when rows leave."""
        for _ in range(steps):
            if self._batch.advance():
                return

    @torch.inference_mode()
    def end(self, outputs: Sequence[RowOutput]) -> None:
        """End the rows of these outputs with what they have; they leave with the next rows that are finished."""
        self._batch.end(outputs)

    @torch.inference_mode()
    def settle(self) -> None:
        """Fill in the outputs of finished rows that have not left yet."""
        self._batch.settle()

    def news(self) -> Iterator[tuple[RowOutput, list[int], list[float]]]:
        """Yield the tokens that each unfinished row has generated since the last call, and their log-probs."""
        return self._batch.news()

    def interrupt(self) -> None:
        """Fill in the outputs of the rows in flight with what they have, and drop them; their `finish_reason` stays None."""
        self._batch.interrupt()
        self.drop()

    def drop(self) -> None:
        """Forget the rows in flight."""
        self._batch = DecodeBatch(self._model, self._open_rows())

    def forget(self, adapter: str | None) -> None:
        """Forget what was prepared and read with an adapter's weights; with None, the base's, everything."""
        assert not self.in_flight, "rows end with the weights that they began with"
        self._prefixes.forget(adapter)
        if self._fused is not None:
            self._fused.forget(adapter)

    def forget_read(self) -> None:
        """Forget the rows in flight and the kept keys and values; prepared weights stay."""
        self.drop()
        self._prefixes.forget(None)

    def release_caches(self) -> None:
        """Forget the rows in flight and everything that can be computed again."""
        self.drop()
        self.forget(None)
        if self._recorder is not None:
            self._recorder.forget()

    def _open_rows(self) -> Rows:
        if self._model.flat is None:
            self._way = self._way or way_of(self._model)
            return self._way.rows(self._model)
        from kapelle.engines.rollout.local.flat_rows import FlatRows

        return FlatRows(self._model, self._model.flat, self._fused, self._prefixes, self._recorder)


def decode(model: LanguageModel, jobs: Sequence[Job]) -> list[RowOutput]:
    """Continue every prompt to its end of turn, a stop string or its token limit; keep nothing."""
    decoder = Decoder(model, adapters=len({job.adapter for job in jobs}))
    outputs = decoder.join(jobs)
    while decoder.in_flight:
        decoder.advance(1)
    return outputs
