"""What notebooks show of results."""

from __future__ import annotations

from tests.support.episodes import episode, turn

from kapelle.evaluation.evaluate import Evaluation
from kapelle.training.summary import Summary
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
