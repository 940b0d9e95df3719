"""Steps of decoding that are recorded once and replayed, as CUDA graphs.

A step of a small model is hundreds of kernels of a few microseconds each, and starting one from Python takes longer
than running it. A recorded step starts all of them in one call. What is recorded must not change: the same shapes, the
same memory, no number that Python reads or writes. That holds for the cache between two of its blocks
(models/fast/kv_cache.py), so a recording serves one *window*: the steps until some rows need a new block, join or leave.

Each window begins with a step that is not recorded, on a stream of its own: it does one-time work (copies of
weights, kernels, workspaces) that cannot be recorded. If enough steps are left, the second one is recorded and replayed
from then on.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from kapelle.errors import EngineError

LEAST = 4
"""Steps that must be left in a window for a recording: it takes about as long as two steps that are not recorded."""


class GraphRecorder:
    """Records a step so that it can be run again."""

    def warm(self, step: Callable[[], Tensor]) -> Tensor:
        """Run a step as it is, so that the next one like it can be recorded."""
        return step()

    def record(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Return the step, recorded: each call runs it and returns its one output, overwritten by the next call.

        A new recording ends the use of the one before.
        """
        raise NotImplementedError

    def forget(self) -> None:
        """Free the memory of all recordings; only new ones run afterwards."""


class Window:
    """The steps between two changes of the rows in flight or their blocks."""

    def __init__(self, recorder: GraphRecorder | None) -> None:
        """Record with this, or nothing."""
        self._recorder = recorder
        self.close()

    def close(self) -> None:
        """Forget the recording: rows or blocks change here."""
        self._warm = False
        self._replay: Callable[[], Tensor] | None = None
        self._token_R: Tensor | None = None

    def run(self, step: Callable[[Tensor], Tensor], token_R: Tensor, left: int) -> Tensor:
        """Return a step's logits `_RV`, after which `left` steps are left; the next call may overwrite them."""
        if self._recorder is None:
            return step(token_R)
        if self._replay is not None and self._token_R is not None:
            self._token_R.copy_(token_R)
            return self._replay()
        if not self._warm or left + 1 < LEAST:
            self._warm = True
            return self._recorder.warm(lambda: step(token_R))
        held_R = self._token_R = token_R.clone()
        self._replay = self._recorder.record(lambda: step(held_R))
        return self._replay()


class CudaRecorder(GraphRecorder):
    """Records steps as CUDA graphs that share one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        """Record on a stream of its own on this device."""
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._last: torch.cuda.CUDAGraph | None = None
        """The newest graph; the pool lives as long as one of its graphs."""

    def warm(self, step: Callable[[], Tensor]) -> Tensor:
        """See `GraphRecorder`."""
        here = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            logits_RV = step()
        here.wait_stream(self._stream)
        logits_RV.record_stream(here)
        return logits_RV

    def record(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """See `GraphRecorder`; EngineError where the step does something that a graph cannot hold."""
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            # Not `torch.cuda.graph`: that empties the allocator's cache at every recording.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                logits_RV = step()
            except RuntimeError as error:
                with suppress(RuntimeError):
                    graph.capture_end()
                raise EngineError(
                    "A step of sampling cannot be recorded as a CUDA graph "
                    f"({' '.join(str(error).split())[:300]}). Set `engine: {{name: local, graphs: off}}`."
                ) from error
            graph.capture_end()
        self._last = graph  # the graph before may be freed only now

        def replay() -> Tensor:
            graph.replay()
            return logits_RV

        return replay

    def forget(self) -> None:
        """See `GraphRecorder`."""
        self._last = None
        self._pool = torch.cuda.graph_pool_handle()  # a pool that has lost its last graph takes no other


def on_cuda(device: torch.device) -> GraphRecorder | None:
    """Return a recorder of steps for a CUDA device; None for others, where starting a kernel costs nothing."""
    return CudaRecorder(device) if device.type == "cuda" else None


def nowhere(_device: torch.device) -> GraphRecorder | None:
    """Record no steps, on any device."""
    return None
