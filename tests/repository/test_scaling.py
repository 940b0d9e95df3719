"""What bounds a run on many processors: formulae against published numbers, the simulator against arithmetic by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.scale_bounds import SHAPES, tables

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
