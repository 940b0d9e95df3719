from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.support.episode_lines import write_steps
from tests.support.viewed_runs import write_run

from kapelle.errors import RunDirectoryError
from kapelle.viewer.export import exported
from kapelle.viewer.library import Library


def test_an_exported_page_has_no_links_and_no_foreign_scripts(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=2)
    row = b'{"turns": [{"agent": "</script><script>x()</script>", "text": "<b>"}]}\n'
    write_steps(run / "episodes" / "train", {2: [row]})
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "reward/</script><script>x()</script>": 1.0}\n')
    page = exported(Library([tmp_path])).decode()
    assert page.count("<script>") == 4, "the package's own"
    assert "<script>x()" not in page
    assert "<b>" not in re.sub(
        r"<b>[\d.,%– ]+|<b>[a-z]+</b>", "", page.split("</style>")[-1].split("<script>")[0]
    )
    assert "unsafe-inline" not in page
    assert not re.search(r"(?:src|href)=", page.split("<body>")[1].split("<script")[0])


def test_without_a_run_there_is_no_page(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="no run"):
        exported(Library([tmp_path]))
