"""What bounds a run on many processors: formulae against published numbers, the simulator against arithmetic by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.scale_bounds import SHAPES, tables
from benchmarks.scale_simulator import Costs, Plan, with_tails

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


def test_the_page_shows_what_the_formulae_give() -> None:
    page = PAGE.read_text("utf-8")
    for title, table in tables().items():
        assert f"### {title}\n" in page
        assert table in page


def test_steps_take_as_long_as_calculated_by_hand() -> None:
    plan = Plan(tasks=1, samples=2, agents=1, question=4, longest=8, mean=1e9, tail=0.1)
    costs = Costs(token=1.0, row=0.5, read=0.25, trained=1.0, step=3.0)
    sampling = 2 * 4 * 0.25 + 8 * (1.0 + 2 * 0.5)
    update = 3.0 + 2 * (8 + 4) * 1.0
    assert with_tails(plan, costs, 0.0) == pytest.approx((2 / (sampling + update), 0.0))
    apart = replace(plan, processes=2, samplers=1)
    for max_staleness, age in ((1, 1.0), (2, 1.0), (4, 2.0)):
        assert with_tails(apart, costs, 0.0, max_staleness) == pytest.approx((2 / update, age))
