"""Makes `torch.cuda` speak of the twin, and counts launches, waits and copies by the line of kapelle that asked for them.

The device is to be loaded before torch, which asks once what devices there are.
"""

from __future__ import annotations

import ctypes
import sys
import types
from collections import Counter
from collections.abc import Iterator
from contextlib import ContextDecorator, contextmanager, nullcontext
from functools import partial
from typing import Any

from tests.twin import device

assert "torch" not in sys.modules or device.cache_info().currsize, (
    "the twin comes before torch: `python -m pytest -p tests.twin.plugin`"
)
_device = device()
for _name in ("bytes", "captured", "size"):
    getattr(_device, f"twin_{_name}").restype = ctypes.c_long
for _name in ("size", "forget", "replay"):
    getattr(_device, f"twin_{_name}").argtypes = [ctypes.c_long]
_device.twin_resize.argtypes = [ctypes.c_long, ctypes.c_long]
_device.twin_compute.argtypes = [ctypes.c_long]

import torch  # noqa: E402
from torch import distributed  # noqa: E402

DEVICES = 2
MEMORY = 140 << 30
EVENTS = ("launches", "free", "up", "down", "across", "waits", "scalars", "refused")


class Counts(Counter[str]):
    """Events by kind, with `replays` of graphs and the launches `replayed` in them; `lines` has (event, line) → number.

    `bytes` are those that launches read and write and copies move, `flops` those of products and attention.
    """

    def __init__(self) -> None:
        """Count from zero."""
        super().__init__()
        self.lines: Counter[tuple[str, str]] = Counter()
        self.operations: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.flops = 0

    def hear(self, operation: str, event: str, size: int = 0, flops: int = 0) -> None:
        """Count one event, at the innermost line of kapelle that runs."""
        self[event] += 1
        self.bytes[event] += size
        self.flops += flops
        self.operations[operation] += event == "launches"
        frame = sys._getframe(1)
        while frame.f_back and "/kapelle/" not in frame.f_code.co_filename:
            frame = frame.f_back
        place = frame.f_code.co_filename.rpartition("/kapelle/")[2]
        self.lines[event, f"{place}:{frame.f_lineno} {operation}"] += 1


_counting: list[Counts] = []


@contextmanager
def counted() -> Iterator[Counts]:
    """Count what the device is asked in this block."""
    counts = Counts()
    _counting.append(counts)
    try:
        yield counts
    finally:
        _counting.remove(counts)


def compute_at_most(size: int) -> None:
    """Leave results of more bytes than this as they are from now on: counts of models that are too large for a CPU."""
    _device.twin_compute(size)


def _hear(operation: str, event: str, size: int = 0, flops: int = 0) -> None:
    for counts in _counting:
        counts.hear(operation, event, size, flops)


@ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_int, ctypes.c_long, ctypes.c_long)
def _listener(operation: bytes, event: int, size: int, flops: int) -> None:
    if _counting and EVENTS[event] != "free":
        _hear(operation.decode(), EVENTS[event], size, flops)


_device.twin_listen(_listener)


def _index_of(device: Any) -> int:
    if isinstance(device, int):
        return device
    found: int | None = None if device is None else torch.device(device).index
    return -1 if found is None else found


class _Stream:
    """The only stream, whose work is always done."""

    def __init__(self, device: Any = None, **_: Any) -> None:
        self.device = torch.device("cuda", max(_index_of(device), 0))

    def wait_stream(self, other: _Stream) -> None: ...

    def wait_event(self, event: _Event) -> None: ...

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()

    def synchronize(self) -> None:
        _hear("synchronize", "waits")


class _Event:
    """A moment of the only stream, which is over."""

    def __init__(self, **_: Any) -> None: ...

    def record(self, stream: _Stream | None = None) -> None: ...

    def wait(self, stream: _Stream | None = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        _hear("synchronize", "waits")


class _Graph:
    """A captured graph, which is replayed on the same memory."""

    capturing = False

    def __init__(self, **_: Any) -> None:
        self.number = 0

    def capture_begin(self, **_: Any) -> None:
        _device.twin_capture()
        _Graph.capturing = True

    def capture_end(self) -> None:
        _Graph.capturing = False
        self.number = _device.twin_captured()

    def replay(self) -> None:
        for counts in _counting:
            counts["replays"] += 1
            counts["replayed"] += _device.twin_size(self.number)
        _device.twin_replay(self.number)

    def __del__(self) -> None:
        if self.number:
            _device.twin_forget(self.number)


class _On(ContextDecorator):
    """`torch.cuda.device`: makes a device the current one for a block."""

    def __init__(self, device: Any) -> None:
        self._index = _index_of(device)

    def __enter__(self) -> None:
        self.before = _device.twin_device(self._index)

    def __exit__(self, *_: object) -> None:
        _device.twin_device(self.before)


def _random_state(_device: Any = None) -> torch.Tensor:
    return torch.zeros(16, dtype=torch.uint8)  # draws are the CPU generator's


def install() -> None:
    """Make torch.cuda speak of the twin, in this process and for good."""
    # A function for each name: torch's compiler looks them up by identity.
    fixed: dict[str, Any] = {
        **dict.fromkeys(("is_available", "is_initialized", "is_bf16_supported"), True),
        **dict.fromkeys(("_lazy_init", "init", "empty_cache", "manual_seed", "manual_seed_all"), None),
        **dict.fromkeys(("set_rng_state", "set_rng_state_all"), None),
        "device_count": DEVICES,
        "get_device_capability": (9, 0),
        "get_device_name": "twin",
        "get_device_properties": types.SimpleNamespace(
            name="twin", major=9, minor=0, total_memory=MEMORY, multi_processor_count=132
        ),
        "graph_pool_handle": (0, 1),
    }
    answers: dict[str, Any] = {
        **{name: (lambda *_, answer=answer, **__: answer) for name, answer in fixed.items()},
        **{name: (lambda *_: _device.twin_bytes(0)) for name in ("memory_allocated", "memory_reserved")},
        **{
            name: (lambda *_: _device.twin_bytes(1))
            for name in ("max_memory_allocated", "max_memory_reserved")
        },
        **{name: partial(_Stream) for name in ("current_stream", "default_stream")},
        "Stream": _Stream,
        "Event": _Event,
        "current_device": lambda: _device.twin_device(-1),
        "set_device": lambda device: _device.twin_device(_index_of(device)),
        "device": _On,
        "mem_get_info": lambda *_: (MEMORY - _device.twin_bytes(0), MEMORY),
        "reset_peak_memory_stats": lambda *_: _device.twin_reset_most(),
        "synchronize": lambda *_: _hear("synchronize", "waits"),
        "get_rng_state": _random_state,
        "get_rng_state_all": lambda: [_random_state() for _ in range(DEVICES)],
        "stream": lambda _: nullcontext(),
        "CUDAGraph": _Graph,
        "is_current_stream_capturing": lambda: _Graph.capturing,
    }
    places: list[tuple[Any, dict[str, Any]]] = [
        (torch.cuda, answers),
        (torch.cuda.random, {"manual_seed_all": lambda _: None}),
        (torch.version, {"cuda": "13.0"}),
        (torch.Tensor, {"record_stream": lambda *_: None, "pin_memory": lambda own: own}),
        (torch.UntypedStorage, {"resize_": _resize_of(torch.UntypedStorage.resize_)}),
        (distributed, {"init_process_group": _by_gloo(distributed.init_process_group)}),
        *(
            (kind, {"__deepcopy__": _deepcopy_of(kind.__deepcopy__)})
            for kind in (torch.Tensor, torch.nn.Parameter)
        ),
    ]
    for place, named in places:
        for name, answer in named.items():
            setattr(place, name, answer)


def _by_gloo(plain: Any) -> Any:
    """Let gloo stand for NCCL, which the device's collectives reach through the CPU's (`device.cpp`)."""

    def joined(backend: str, **settings: Any) -> None:
        plain(backend.replace("nccl", "gloo"), **settings)

    return joined


def _resize_of(plain: Any) -> Any:
    """A CPU build cannot change the size of a CUDA storage in Python; the device can."""

    def resized(self: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        if self.device.type != "cuda":
            return plain(self, size)  # type: ignore[no-any-return]
        _device.twin_resize(self._cdata, size)
        return self

    return resized


def _deepcopy_of(plain: Any) -> Any:
    """A CPU build cannot copy the storage of a CUDA tensor in Python; the copy is made by an operation."""

    def copied(self: torch.Tensor, memo: dict[int, Any]) -> Any:
        if not self.is_cuda:
            return plain(self, memo)
        if id(self) not in memo:
            made = self.detach().clone()
            if isinstance(self, torch.nn.Parameter):
                memo[id(self)] = torch.nn.Parameter(made, self.requires_grad)
            else:
                memo[id(self)] = made.requires_grad_(self.requires_grad)
        return memo[id(self)]

    return copied
