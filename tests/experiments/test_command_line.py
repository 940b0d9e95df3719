"""What `python -m experiments` says and returns."""

from __future__ import annotations

import pytest
from experiments.__main__ import main
from experiments.claim import claims


def test_all_claims_are_listed_with_their_verdicts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == list(claims())
    assert all(line.endswith("shown") for line in lines)


def test_a_misspelt_claim_is_answered_with_the_one_meant(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "leave_one_ou"]) == 2
    assert "leave_one_out" in capsys.readouterr().err
