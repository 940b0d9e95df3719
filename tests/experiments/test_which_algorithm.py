"""The table of what to take when rests on claims, and says of each what came of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from experiments.claim import claims, overall
from experiments.running import kept

PAGE = Path(__file__).parents[2] / "docs" / "explanations" / "which_algorithm.md"
LINKS = re.findall(r"\[([^\]]+)\]\(\.\./claims\.md#([a-z0-9_]+)\)", PAGE.read_text("utf-8"))


@pytest.mark.parametrize(("word", "name"), LINKS)
def test_a_verdict_is_the_claim_s(word: str, name: str) -> None:
    results = kept(name)
    assert results is not None
    verdict = overall(results.judge(claims()[name]))
    assert (word == "shown") <= (verdict == "shown")
    assert (verdict == "contradicted") == word.startswith("contradicted")
    assert (word in ("in part", "not shown")) <= (verdict == "not shown")
