"""Pages made of templates: everything that goes in is text, escaped where it is put."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined

from kapelle import __version__

# -------- Text that somebody else wrote, made fit to be shown: what would act or hide in it becomes visible

LONGEST = 20_000
"""Characters of one text on a page; the rest is a click away."""
_RISKY = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e0fff]"
)


def shown(text: object) -> str:
    """Return a text in which every control, override and half character stands as a visible sign.

    Escape codes of terminals become `␛[31m`, a right-to-left override `⟨U+202E⟩`. It is not escaped for HTML.
    """
    return _RISKY.sub(_sign, str(text).replace("\r\n", "\n"))


def _sign(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "␡"
    return f"⟨U+{code:04X}⟩"


def cut(text: str, most: int = LONGEST) -> str:
    """Return the beginning of a text, with a word about how much was left out."""
    return text if len(text) <= most else f"{text[:most]} … {len(text) - most:,} more characters"


def one_line(text: object, most: int = 160) -> str:
    """Return a text as one short line."""
    whole = " ".join(shown(str(text)[: most * 4]).split())
    return whole if len(whole) <= most else f"{whole[: most - 1]}…"


@cache
def environment() -> Environment:
    """Return what renders the templates."""
    made = Environment(
        loader=PackageLoader("kapelle.viewer"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "shown": lambda text: cut(shown(text)),
        "line": one_line,
        "figure": figure,
        "percent": percent,
        "path": lambda text: quote(str(text), safe="~"),
        "spark": spark,
    }
    made.globals |= {"version": __version__}
    return made


def render(template: str, **values: Any) -> bytes:
    """Return a page as UTF-8; half characters of names become question marks."""
    return environment().get_template(template).render(**values).encode("utf-8", "replace")


def figure(value: object) -> str:
    """Return a number in four digits at most, a dash for none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "–" if value is None else one_line(value, 40)
    if value != value or abs(value) == float("inf"):  # noqa: PLR0124 - what a damaged file may hold
        return str(value)
    if isinstance(value, int) or (float(value).is_integer() and abs(value) < 1e6):
        return f"{value:,.0f}".replace("-", "−")
    return f"{value:.3g}".replace("-", "−")


def percent(value: object) -> str:
    """Return a share in per cent, a dash for none."""
    return f"{100 * value:.1f} %" if isinstance(value, int | float) else "–"


SPARK = (96, 22)
"""Width and height of a small curve in a list, in CSS pixels."""


def spark(values: Sequence[float]) -> str:
    """Return the points of a small curve, for an SVG polyline."""
    step = max(1, len(values) // SPARK[0])
    few = list(values[::step])
    if len(few) < 2:
        return ""
    low, high = min(few), max(few)
    width, height = SPARK[0] - 2, SPARK[1] - 4
    spread = (high - low) or 1.0
    return " ".join(
        f"{1 + k * width / (len(few) - 1):.1f},{2 + height - (v - low) / spread * height:.1f}"
        for k, v in enumerate(few)
    )
