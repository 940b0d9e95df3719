"""What bounds a run on many processors: formulae against published numbers, the simulator against arithmetic by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.scale_bounds import SHAPES, Machine, Work, parts, tables
from benchmarks.scale_simulator import Costs, Plan, Tale, at_steps, continue_forks, simulate

PAGE = Path(__file__).parents[2] / "docs" / "scaling.md"


@pytest.mark.parametrize(
    ("name", "billions", "without_embedding"),
    [("0.6B", 0.6, 0.44), ("4B", 4.0, 3.6), ("8B", 8.2, 6.95), ("32B", 32.8, 31.2), ("70B", 70.6, None)],
)
def test_models_have_their_published_sizes(
    name: str, billions: float, without_embedding: float | None
) -> None:
    shape = SHAPES[name]
    assert shape.weights / 1e9 == pytest.approx(billions, rel=0.01)
    if without_embedding is not None:
        inner = shape.read - shape.vocabulary * shape.hidden
        assert inner / 1e9 == pytest.approx(without_embedding, rel=0.01)


class TestBounds:
    def test_arithmetic_of_an_update_is_six_operations_a_weight_and_two_of_recomputation(self) -> None:
        work = Work(agents=1, turns=1, question=100, new=100, episodes=1000)
        found = parts(SHAPES["0.6B"], "one model", 1, work, Machine())
        assert found is not None
        assert found.update == pytest.approx(8 * SHAPES["0.6B"].read * 1000 * 300 / (0.4 * 989e12))
        assert (found.exchange, found.split) == (0.0, 1)


def test_the_page_shows_what_the_formulae_give() -> None:
    page = PAGE.read_text("utf-8")
    for title, table in tables().items():
        assert f"### {title}\n" in page
        assert table in page


COSTS = Costs(token=1.0, row=0.1, read=0.0, trained=0.01, step=3.0)
SURE = Plan(tasks=4, samples=2, agents=1, mean=1.0, tail=0.0, longest=10, question=0)


class TestSimulator:
    def test_one_process_by_hand(self) -> None:
        step = simulate(replace(SURE, mean=10.0), COSTS)
        # Ten tokens of eight rows, then an update on eighty tokens.
        assert step.sampling == pytest.approx(10 * (1.0 + 0.1 * 8))
        assert step.update == pytest.approx(3.0 + 0.01 * 80)
        assert step.seconds == pytest.approx(18.0 + 3.8)
        assert step.idle == pytest.approx(0.0)

    def test_sampling_ahead_hides_the_shorter_part(self) -> None:
        plan = replace(SURE, mean=10.0, processes=2, samplers=1)
        one_by_one = simulate(replace(plan, staleness=0), COSTS, steps=100)
        ahead = simulate(replace(plan, staleness=1), COSTS, steps=100)
        assert one_by_one.seconds == pytest.approx(21.8)
        assert one_by_one.staleness == 0
        assert ahead.seconds == pytest.approx(18.0, rel=0.01)
        assert ahead.staleness == pytest.approx(0.99)


class TestTails:
    def test_an_unfinished_episode_continues_at_its_turn(self) -> None:
        plan = replace(SURE, agents=2, question=5)
        tale = Tale((10, 20, 30))
        clock = continue_forks(plan, COSTS, [tale])
        assert (tale.turn, tale.over, tale.joins) == (3, 60, [0, 10, 30])
        assert at_steps(clock, [0, 5, 60, 99]) == pytest.approx([0.0, 5.5, 66.0, 66.0])
        tale.leave(25)
        assert (tale.turn, tale.begun) == (1, 15)
        assert tale.read(plan) == 5 + 10 + 15
        continue_forks(plan, COSTS, [tale])
        assert tale.over == 35  # five tokens of the second answer, and the third
        tale.leave(3)
        assert (tale.turn, tale.begun) == (1, 18)
        continue_forks(plan, COSTS, [tale])
        tale.leave(2)  # at the end of the second answer
        assert (tale.turn, tale.begun) == (2, 0)
        assert tale.read(plan) == 20
        continue_forks(plan, COSTS, [tale])
        tale.leave(30)
        assert (tale.turn, tale.over) == (3, 30)
