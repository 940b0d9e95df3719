"""Decode steps of rows that joined at several times, against as many rows that joined at once.

A team that talks in turns has seven to fourteen such cohorts at a time. There is no peer: equal work, which is asserted, should
cost the same. Milliseconds are of CPU time for a step; ratio is that of one cohort over that of several, so 1 is what cohorts
should cost and less is what they do cost.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.measure import cpu_seconds, single_thread, summary
from benchmarks.subjects import prompt_ids, subject
from kapelle.engines.rollout.local.decode_batch import Decoder
from kapelle.engines.rollout.local.decode_strategies import Job
from kapelle.team import Lora
from kapelle.types import Sampling

ADAPTERS, PROMPT, STEPS = 4, 96, 48
APART = 2
"""Steps between two cohorts."""


def run() -> dict[str, Any]:
    """Return milliseconds of a step, and the ratio to one cohort."""
    single_thread()
    return {
        f"{size}, {dtype}, {rows} rows in {count} cohorts": cohorts(size, dtype, rows, count)
        for size, rows in (("1M", 64), ("10M", 32))
        for dtype in ("float32", "bfloat16")
        for count in (8, 16)
    }


def cohorts(size: str, dtype: str, rows: int, count: int, rounds: int = 5) -> dict[str, Any]:
    """Compare `count` cohorts with one, in turn, after a round that does not count."""
    model = subject(size, dtype)
    for number in range(ADAPTERS):
        model.bank.add(f"agent_{number}", Lora(), number)
    decoder = Decoder(model, ADAPTERS)

    def seconds(joins: int) -> float:
        with in_flight(decoder, rows, joins, count):
            return cpu_seconds(lambda: steps(decoder))

    pairs = [(seconds(count), seconds(1)) for _ in range(rounds + 1)]
    found = summary(pairs[1:])
    return {
        "ratio": found["ratio"],
        "ratio_min": found["ratio_min"],
        "ratio_max": found["ratio_max"],
        "ms, several": 1000 * found["ours_cpu_s"] / STEPS,
        "ms, one": 1000 * found["theirs_cpu_s"] / STEPS,
    }


@contextmanager
def in_flight(decoder: Decoder, rows: int, joins: int, count: int) -> Iterator[None]:
    """Let rows join in so many cohorts; those of one cohort have as many tokens as those of `count` have on average."""
    before = APART * (count + 1) // 2
    for number in range(joins):
        decoder.join(
            [
                Job(
                    f"agent_{row % ADAPTERS}",
                    prompt_ids(row, PROMPT),
                    Sampling(max_tokens=STEPS + APART * (count + 2)),
                    row,
                )
                for row in range(number, rows, joins)
            ]
        )
        decoder.advance(APART if joins > 1 else before)
    assert decoder.in_flight == rows
    yield
    assert decoder.in_flight == rows, "no row ends while it is timed"
    decoder.drop()


def steps(decoder: Decoder) -> None:
    """Take the steps that are timed."""
    for _ in range(STEPS):
        decoder.advance(1)
