"""What notebooks and `print` show of results."""

from __future__ import annotations

from pathlib import Path

from tests.support.episodes import episode, turn

from kapelle.rollout.evaluation.evaluate import Evaluation
from kapelle.training.trainer import Summary
from kapelle.types import Task


def test_a_conversation_is_a_table_in_which_words_are_text() -> None:
    said = turn("<i>a</i>", 0, text='<script>x()</script> & "quotes"', reward=0.5)
    page = episode(said, task=Task("t", "1<2?"))._repr_html_()
    assert "&lt;script&gt;x()&lt;/script&gt; &amp; &quot;quotes&quot;" in page
    assert "1&lt;2?" in page
    assert "&lt;i&gt;a&lt;/i&gt; 0.5" in page
    assert page.count("<tr>") == 3
    assert "<script" not in page


def test_a_printed_summary_is_five_lines_that_mislead_nobody() -> None:
    before = Evaluation(50, 0.5, (0.2, 0.8), {"a": 0.5}, 12.0, 3, 40, "EngineError: no answer")
    after = Evaluation(26, 0.5, (0.2, 0.8), {}, 12.0, 0, 26, fewer="50 asked, its test split has 26")
    last = {
        "step": 7,
        "samples": 64.0,
        "scored": 60.0,
        "failed_episodes": 0.0625,
        "success": 0.25,
        "nll/a": 1.5,
    }
    assert str(Summary(7, before, after, 0, seconds=65.04, run_dir=Path("runs/mine"), last=last)) == (
        "steps      7, done, 65.0 s\n"
        "before     50.0 % [20.0, 80.0], scored 40 of 50, 3 failed: EngineError: no answer\n"
        "after      50.0 % [20.0, 80.0], scored 26 of 26 (50 asked, its test split has 26)\n"
        "last step  success 0.25  scored 60 of 64, 4 of 64 episodes failed  nll/a 1.5\n"
        "run        runs/mine"
    )
