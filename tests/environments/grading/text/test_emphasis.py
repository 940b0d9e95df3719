"""Models write numbers in bold: Markdown's marks are no part of an answer, and powers and products are no marks."""

from __future__ import annotations

import pytest

from kapelle.environments.grading.text.extraction import extract

BOLD = [
    ("**42**", "42"),
    ("*42*", "42"),
    ("***42***", "42"),
    ("__42__", "42"),
    ("So it is **42**.", "42"),
    ("**Final Answer:** 42", "42"),
    ("**Answer**: 42", "42"),
    ("**The answer is 42.**", "42"),
    ("The answer is: **-5**", "-5"),
    ("answer: **1,234**", "1,234"),
    ("That is **3/4** of it, and the answer is **3/4**.", "3/4"),
    ("### Final Answer\n**42**", "42"),
    ("**Final Answer**\n\n42", "42"),
    ("So, **x = 42**.", "42"),
    ("- **Total:** 42", "42"),
    ("<b>42</b>", "42"),
    ("# 42", "42"),
    ("~~41~~ **42**", "42"),
    ("**Total**: **42** miles", "42"),
    ("**Step 1:** 3+4=7\n**Step 2:** 7*6 = 42\n\n**Final answer: 42**", "42"),
]


@pytest.mark.parametrize("rule", ["last_number", "prose"])
@pytest.mark.parametrize(("text", "number"), BOLD)
def test_a_bold_number_is_read(text: str, number: str, rule: str) -> None:
    assert extract(text, [rule]).text == number  # type: ignore[list-item]


@pytest.mark.parametrize(
    "text", ["It is 2**3", "It is 2**3**2", "It is 2*3*4", "(1+2)*3*4", "x**2 + 3**2", "3 * **4**"]
)
def test_powers_and_products_are_no_emphasis(text: str) -> None:
    assert extract(text, ["last_number"]).text is None
