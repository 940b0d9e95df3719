"""Text can be read: WCAG AA's 4.5 to 1 in both themes, for every colour that text has on either ground."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CSS = Path(__file__).parents[2] / "src" / "kapelle" / "viewer" / "static" / "viewer.css"
COLORS = {
    name: (light, dark)
    for name, light, dark in re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)", CSS.read_text())
}
TEXT = ["ink", "quiet", "link", "bad", "good", *(f"c{k}" for k in range(1, 8))]


def luminance(color: str) -> float:
    parts = [int(color[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_that_of_wcag() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21.0)
    assert contrast("#767676", "#ffffff") == pytest.approx(4.54, abs=0.01)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_every_text_colour_has_enough_contrast_on_every_background(theme: int) -> None:
    pairs = [(name, ground) for name in TEXT for ground in ("paper", "sheet", "mark")]
    assert all(contrast(COLORS[name][theme], COLORS[ground][theme]) >= 4.5 for name, ground in pairs)
