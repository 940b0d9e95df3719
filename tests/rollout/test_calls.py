"""What an episode and a training step cost in calls: counts that are exact where times are not."""

from __future__ import annotations

from benchmarks.calls import counted, of_a_step, of_an_episode

MOST_OF_AN_EPISODE = 880
"""Calls of an episode of two turns: 510 of Python and 369 of C with Python 3.11."""
MOST_OF_A_STEP = 150_000
"""Calls of a step of 64 such episodes with a model: 70,500 of Python and 75,600 of C with Python 3.11."""


def test_python_and_c_are_counted() -> None:
    def work() -> None:
        for word in ("one", "two"):
            len(word)

    assert counted(work) == {"python": 1, "c": 2}


def test_an_episode_of_two_turns_takes_few_calls() -> None:
    calls = of_an_episode()
    assert sum(calls.values()) <= MOST_OF_AN_EPISODE, calls


def test_a_whole_step_of_the_demo_takes_few_calls() -> None:
    calls = of_a_step(8)
    assert calls.total() <= MOST_OF_A_STEP, calls
