"""What docs/one_call.md shows runs as it stands, and prints what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tools.docs_site.howto import HOWTO, execute, train_in_one_call

PAGE = (Path(__file__).parents[2] / "docs" / "one_call.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.long
@pytest.mark.slow
def test_the_first_one_learns_and_prints_what_the_page_says(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(BLOCKS[0], "docs/one_call.md", "exec"), {})  # noqa: S102 - it is our own page
    said = capsys.readouterr().out.splitlines()
    played = r"played 15 of 15 \(all of its test split\)"
    shown = rf"return planner ([-\d.]+), coder \1, {played} → return planner ([-\d.]+), coder \2, {played}"
    found = re.fullmatch(shown, said[-1])
    assert found is not None
    assert float(found[1]) < 0.05
    assert float(found[2]) >= 0.1
    assert "step 10/10  return planner" in "\n".join(said)


@pytest.mark.slow
def test_a_run_that_functions_pay_is_read_as_the_how_to_reads_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    train_in_one_call("runs/mine")
    assert execute((HOWTO / "read_a_run.md").read_text(encoding="utf-8")) >= 3
    said = capsys.readouterr().out
    assert "1 None {'reward_function/brief': " in said
    assert "1 None None {'reasoner': " not in said
    assert "2 None None {'reasoner': " in said
