"""Record decoding steps as CUDA graphs and replay them.

A decoding step of a small model consists of hundreds of kernels of a few microseconds each, and launching a kernel from
Python takes longer than running it. A recorded step launches all of its kernels in one call. A recording requires
constant shapes and memory addresses, and must not contain any number that Python reads or writes. The KV cache
therefore rounds its sizes up and keeps its tables at fixed addresses (models/fast/kv_cache.py), so that a recording
remains valid while rows join, fill blocks and leave.

The first step of each kind is run on a separate stream without recording, because it does one-time work (copies of
weights, compilation of kernels, allocation of workspaces) that cannot be recorded. The second step is recorded, and
later steps replay the recording.

In tensor shapes, S is the number of rows and idle slots between them, and V is the size of the vocabulary.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress

import torch
from torch import Tensor

from kapelle.errors import EngineError

MOST = 64
"""The maximum number of cached recordings. If there are more recordings, the least recently used recording is dropped."""


class GraphRecorder:
    """A recorder of decoding steps. The base class runs steps without recording them."""

    def warm(self, step: Callable[[], Tensor]) -> Tensor:
        """Run a step without recording, so that the next step of the same kind can be recorded."""
        return step()

    def record(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Record a step and return a function that replays the step and returns its output.

        The output is overwritten by the next call and by any other recording, because all recordings share memory.
        """
        raise NotImplementedError

    def forget(self) -> None:
        """Free the memory of all recordings. Only recordings made afterwards can be replayed."""


class Recordings:
    """A cache of recorded steps by kind. All steps of one kind execute the same operations on the same memory."""

    def __init__(self, recorder: GraphRecorder) -> None:
        """Create an empty cache that records steps with this recorder."""
        self._recorder = recorder
        self._warm: set[Hashable] = set()
        self._recorded: OrderedDict[Hashable, Callable[[], Tensor]] = OrderedDict()

    def run(self, kind: Hashable, step: Callable[[], Tensor]) -> Tensor:
        """Return the output of a step of this kind. The output may be overwritten by the next call."""
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
    """A recorder that records steps as CUDA graphs. All graphs share one memory pool."""

    def __init__(self, device: torch.device) -> None:
        """Create a recorder that records on a separate stream of this device."""
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._last: torch.cuda.CUDAGraph | None = None
        """The most recent graph, which keeps the memory pool alive."""

    def warm(self, step: Callable[[], Tensor]) -> Tensor:
        """Run a step on the recording stream without recording the step (see `GraphRecorder.warm`)."""
        here = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            logits_RV = step()
        here.wait_stream(self._stream)
        logits_RV.record_stream(here)
        return logits_RV

    def record(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Record a step (see `GraphRecorder.record`). Raises EngineError if a CUDA graph does not support an operation of the step."""
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
        """Free the memory of all recordings (see `GraphRecorder.forget`)."""
        self._last = None
        self._pool = torch.cuda.graph_pool_handle()  # a pool without graphs cannot be reused


def on_cuda(device: torch.device) -> GraphRecorder | None:
    """Return a recorder for a CUDA device, or None for any other device, because launching kernels is cheap on other devices."""
    return CudaRecorder(device) if device.type == "cuda" else None


def nowhere(_device: torch.device) -> GraphRecorder | None:
    """Return None on every device, so that no steps are recorded."""
    return None
