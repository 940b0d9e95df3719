"""Collects Prometheus metrics of a server: calls, tokens and durations by route and agent. The metrics contain no text from callers."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping

BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""The upper bounds of the histogram of call durations, in seconds."""
KIND = "text/plain; version=0.0.4; charset=utf-8"
"""The content type of the text format of Prometheus."""


class ServiceMetrics:
    """Counts the calls and tokens of a server since its start. The object may be used by only one thread."""

    def __init__(self) -> None:
        self._calls: Counter[tuple[str, str, int]] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._buckets: defaultdict[str, list[int]] = defaultdict(lambda: [0] * (len(BOUNDS) + 1))
        self._read: Counter[str] = Counter()
        self._written: Counter[str] = Counter()

    def called(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count a finished call including its stream. The status 499 means that the caller disconnected before the response."""
        self._calls[method, route, status] += 1
        self._seconds[route] += seconds
        self._buckets[route][bisect_left(BOUNDS, seconds)] += 1

    def answered(self, agent: str, read: int, written: int) -> None:
        """Count the tokens of one completion of an agent."""
        self._read[agent] += read
        self._written[agent] += written

    def text(self, gauges: Mapping[str, tuple[str, float]]) -> str:
        """Return all metrics in the text format of Prometheus. The argument `gauges` maps additional names to their meanings and values."""
        return "".join(f"{line}\n" for line in self._lines(gauges))

    def _lines(self, gauges: Mapping[str, tuple[str, float]]) -> Iterator[str]:
        yield from _head("kapelle_calls_total", "counter", "Finished calls by route and status.")
        for (method, route, status), count in sorted(self._calls.items()):
            yield _line("kapelle_calls_total", {"method": method, "route": route, "status": status}, count)
        yield from _head(
            "kapelle_call_seconds", "histogram", "Duration of calls, streams included, in seconds."
        )
        for route, counts in sorted(self._buckets.items()):
            below = 0
            for bound, count in zip((*BOUNDS, "+Inf"), counts, strict=True):
                below += count
                yield _line("kapelle_call_seconds_bucket", {"route": route, "le": bound}, below)
            yield _line("kapelle_call_seconds_sum", {"route": route}, self._seconds[route])
            yield _line("kapelle_call_seconds_count", {"route": route}, below)
        for name, meaning, counted in (
            ("kapelle_tokens_read_total", "Tokens of prompts that were answered, by agent.", self._read),
            (
                "kapelle_tokens_written_total",
                "Tokens that were sampled for answers, by agent.",
                self._written,
            ),
        ):
            yield from _head(name, "counter", meaning)
            for agent, count in sorted(counted.items()):
                yield _line(name, {"agent": agent}, count)
        for name, (meaning, value) in gauges.items():
            yield from _head(name, "gauge", meaning)
            yield _line(name, {}, value)


def _head(name: str, kind: str, meaning: str) -> Iterable[str]:
    return f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"


def _line(name: str, labels: Mapping[str, object], value: float) -> str:
    shown = ",".join(f'{label}="{_escaped(str(each))}"' for label, each in labels.items())
    return f"{name}{{{shown}}} {value}" if shown else f"{name} {value}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
