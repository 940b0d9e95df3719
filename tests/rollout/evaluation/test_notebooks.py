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


def test_a_failed_episode_says_why() -> None:
    assert "it &lt;broke&gt;" in episode(turn("a", 0), error="it <broke>")._repr_html_()


def test_results_say_what_they_are_the_mean_of() -> None:
    after = Evaluation(10, 0.5, (0.2, 0.8), {"a<b": 0.5}, 12.0, 0, 10)
    page = after._repr_html_()
    assert str(after) in page
    assert "return of a&lt;b" in page
    whole = Summary(7, None, after, 130)._repr_html_()
    assert str(after) in whole
    assert "exit code 130" in whole
    assert "before" not in whole


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


def test_a_summary_of_nothing_says_so() -> None:
    assert str(Summary(0, None, None, 130)) == (
        "steps      0, stopped, exit code 130, 0.0 s\n"
        "before     not measured\n"
        "after      not measured\n"
        "last step  none taken\n"
        "run        not kept: name a `run_dir` to keep it"
    )
