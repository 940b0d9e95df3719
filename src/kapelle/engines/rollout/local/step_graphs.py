"""Record decoding steps once and replay them, as CUDA graphs.

A step of a small model is hundreds of kernels of a few microseconds each, and launching one from Python takes longer
than running it. A recorded step launches all of them in one call. A recording needs constant shapes and memory, and must
contain no number that Python reads or writes. The cache therefore rounds its sizes up and keeps its tables in place
(models/fast/kv_cache.py), so that a recording still fits while rows join, fill blocks and leave.

The first step of a kind is not recorded and runs on its own stream: it does one-time work (copies of weights,
kernels, workspaces) that cannot be recorded. The second step is recorded, and later ones are replayed.

Shapes: S rows and idle places between them, V vocabulary.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress

import torch
from torch import Tensor

from kapelle.errors import EngineError

MOST = 64
"""Cached recordings; the least recently used one is dropped first."""


class GraphRecorder:
    """Records a step for replay."""

    def warm(self, step: Callable[[], Tensor]) -> Tensor:
        """Run a step without recording, so that the next one of its kind can be recorded."""
        return step()

    def record(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Record a step and return a function that replays it and returns its output.

        The next call overwrites the output, and so does any other recording, because they share memory.
        """
        raise NotImplementedError

    def forget(self) -> None:
        """Free the memory of all recordings; only new ones run afterwards."""


class Recordings:
    """The recordings of steps by kind; steps of one kind execute the same operations on the same memory."""

    def __init__(self, recorder: GraphRecorder) -> None:
        """Use this recorder."""
        self._recorder = recorder
        self._warm: set[Hashable] = set()
        self._recorded: OrderedDict[Hashable, Callable[[], Tensor]] = OrderedDict()

    def run(self, kind: Hashable, step: Callable[[], Tensor]) -> Tensor:
        """Return the output of a step of this kind; the next call may overwrite it."""
        replay = self._recorded.get(kind)
        if replay is None:
            if kind not in self._warm:
                self._warm.add(kind)
                return self._recorder.warm(step)
            replay = self._recorded[kind] = self._recorder.record(step)
            if len(self._recorded) > MOST:
                self._recorded.popitem(last=False)
        self._recorded.move_to_end(kind)
        return replay()


class CudaRecorder(GraphRecorder):
    """Records steps as CUDA graphs that share one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        """Record on a separate stream of this device."""
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._last: torch.cuda.CUDAGraph | None = None
        """The newest graph; the pool exists as long as one of its graphs."""

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
        """See `GraphRecorder`; EngineError if the step has an operation that a graph does not support."""
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            # `torch.cuda.graph` would empty the allocator's cache at every recording.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                logits_RV = step()
            except torch.OutOfMemoryError:
                with suppress(RuntimeError):
                    graph.capture_end()
                raise
            except RuntimeError as error:
                with suppress(RuntimeError):
                    graph.capture_end()
                raise EngineError(
                    f"A sampling step cannot be recorded as a CUDA graph ({' '.join(str(error).split())[:300]}). Set "
                    f"`engine: {{name: local, graphs: off}}`."
                ) from error
            graph.capture_end()
        self._last = graph  # the former graph may be freed only now

        def replay() -> Tensor:
            graph.replay()
            return logits_RV

        return replay

    def forget(self) -> None:
        """See `GraphRecorder`."""
        self._last = None
        self._pool = torch.cuda.graph_pool_handle()  # a pool without graphs cannot be reused


def on_cuda(device: torch.device) -> GraphRecorder | None:
    """Return a recorder of steps for a CUDA device; None for other devices, where launches are cheap."""
    return CudaRecorder(device) if device.type == "cuda" else None


def nowhere(_device: torch.device) -> GraphRecorder | None:
    """Record no steps, on any device."""
    return None
