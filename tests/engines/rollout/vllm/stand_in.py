"""What vLLM does, as far as the engine asks for it, on kapelle's own decoder; with the mistakes that vLLM 0.32.0 makes on a CPU.

- A row without an adapter gets the weights of the last adapter of its batch.
- What was read once under an adapter's number is not read again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from kapelle.engines.rollout.local.decode_batch import Decoder
from kapelle.engines.rollout.local.decode_strategies import Job, RowOutput
from kapelle.engines.rollout.vllm.sampler import AdapterFile, BaseModel, FinishedRow, Row, VllmModel
from kapelle.engines.rollout.vllm.worker import WEIGHTS_FILE
from kapelle.models.language_model import LanguageModel, load_language_model
from kapelle.models.lora_bank import copy_weights
from kapelle.models.weights import read_adapter
from kapelle.runtime.tensors import load_tensors
from kapelle.settings.schema import ModelConfig


class Substitute(VllmModel):
    """One base model, read from its folder."""

    def __init__(self, about: BaseModel) -> None:
        self.about = about
        self.model: LanguageModel = load_language_model(ModelConfig(path=about.path))
        self.decoder = Decoder(self.model, 2)
        self.batches: list[set[str]] = []
        """Names of the adapters of the rows that were in flight at each step; empty for none."""
        self.read: dict[int, str] = {}
        """Number of an adapter → its name when it was read."""
        self.dropped: list[str] = []
        self.calls: list[str] = []
        self.broken = False
        self.rows: dict[str, tuple[Row, RowOutput]] = {}
        self.arrived: list[Row] = []

    def add(self, row: Row) -> None:
        if len(row.prompt) >= self.about.context:
            raise ValueError("The prompt is longer than the model's context.")
        self.arrived.append(row)

    def step(self) -> Sequence[FinishedRow]:
        if self.broken:
            raise RuntimeError("out of memory")
        with torch.inference_mode():
            self._join()
            self.batches.append({_name(row) for row, _ in self.rows.values()})
            self.decoder.advance(1)
        finished = [key for key, (_, output) in self.rows.items() if output.finish_reason is not None]
        return [self.leave(key) for key in finished]

    def _join(self) -> None:
        joining, self.arrived = self.arrived, []
        jobs = [Job(self._adapter(row, joining), row.prompt, row.sampling, row.seed) for row in joining]
        for row, output in zip(joining, self.decoder.join(jobs) if jobs else [], strict=True):
            self.rows[row.id] = row, output

    def _adapter(self, row: Row, joining: Sequence[Row]) -> str | None:
        """Return under which name in the bank a row is computed: usually its own."""
        beside = [other.adapter for other in (*joining, *(r for r, _ in self.rows.values())) if other.adapter]
        used = row.adapter or (beside[-1] if beside else None)
        if used is None:
            return None
        if used.number not in self.read:
            tensors, lora = read_adapter(used.folder)
            self.model.bank.add(used.name, lora, 0)
            self.model.bank.fill(used.name, tensors)
            self.read[used.number] = used.name
        return self.read[used.number]

    def leave(self, key: str) -> FinishedRow:
        _, output = self.rows.pop(key)
        stopped = output.finish_reason == "stop"
        return FinishedRow(key, tuple(output.ids), tuple(output.logprobs), stopped)

    def abort(self, rows: Sequence[str]) -> Mapping[str, FinishedRow]:
        self.arrived = [row for row in self.arrived if row.id not in rows]
        if set(rows) >= self.rows.keys():
            self.decoder.interrupt()
        found = {}
        for row in rows:
            about, output = self.rows.pop(row, (None, None))
            if about is not None and output is not None and about.followed:
                found[row] = FinishedRow(row, tuple(output.ids), tuple(output.logprobs), stopped=False)
        return found

    def overwrite(self, weights: Mapping[str, Tensor]) -> None:
        """Overwrite the base's weights, as a running vLLM does."""
        assert not self.rows, "rows are in flight"
        copy_weights(self.model.base_parameters(), weights, "the stand-in")
        self.decoder.forget(None)

    def forget_prefixes(self) -> None:
        assert not self.rows, "rows are in flight"
        self.calls.append("forget")
        self.decoder.forget_read()

    def drop_adapter(self, adapter: AdapterFile) -> None:
        self.dropped.append(adapter.name)

    def sleep(self) -> None:
        self.calls.append("sleep")

    def close(self) -> None:
        self.calls.append("close")


class TakesInPlace(Substitute):
    """One that continues with other weights of the base, from memory or, where it has several workers, from a file."""

    workers = 1
    fails = False

    def take(self, weights: Mapping[str, Tensor], write: Callable[[], Path]) -> bool:
        self.calls.append("take")
        if self.fails:
            raise RuntimeError("no such method")
        self.overwrite(weights if self.workers == 1 else load_tensors(write() / WEIGHTS_FILE))
        return True


def _name(row: Row) -> str:
    return row.adapter.name if row.adapter else ""
