"""The table in docs/models.md says what is so: every row is what the family does now."""

from __future__ import annotations

import pytest
from tests import model_table
from tests.support.families import FAMILIES

QUICK = ("llama", "gpt2", "granite", "bert")
WRITTEN = model_table.between_marks(model_table.PAGE.read_text("utf-8"))[1]


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=() if each in QUICK else pytest.mark.slow) for each in FAMILIES]
)
def test_a_row_is_what_the_family_does(family: str) -> None:
    assert model_table.row(family) in WRITTEN, "If that is meant: python -m tests.model_table"


def test_the_table_has_the_families_that_are_tried_and_no_others() -> None:
    rows = WRITTEN.removeprefix(model_table.HEAD).splitlines()
    assert [line.split(" | ")[0].removeprefix("| ") for line in rows] == list(FAMILIES)
