"""Problems whose tests a program could fool are excluded unless the settings allow them; both are reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.environments.code.test_environment import DOUBLE, RIGHT, WRONG
from tests.workflows.stage import lines, play

from kapelle.environments.code import Code
from kapelle.environments.sandbox.bubblewrap import Bubblewrap
from kapelle.errors import DataError
from kapelle.workflows.solo import Solo

FOOLABLE = {**DOUBLE, "test_list": ["import random\nx = random.randint(3, 9)\nassert double(x) == 2 * x"]}


@pytest.fixture
def path(sandbox: Bubblewrap, tmp_path: Path) -> str:
    rows = {
        "train": [{**DOUBLE, "task_id": 1}, {**FOOLABLE, "task_id": 2}, {**FOOLABLE, "task_id": 3}],
        "test": [{**FOOLABLE, "task_id": 4}, {**DOUBLE, "task_id": 5}],
    }
    for name, each in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in each))
    return str(tmp_path)


async def test_they_are_excluded_and_counted(path: str) -> None:
    environment = Code(path=path)
    environment.check(["coder"])
    assert {split: environment.size(split) for split in ("train", "test")} == {"train": 1, "test": 1}
    skipped = environment.skipped()
    assert skipped["train"].startswith("2 of 3")
    assert "environment.untrusted_tests: allow" in skipped["train"]
    assert skipped["test"].startswith("1 of 2")
    [episode] = await play(
        environment, Solo(), ["coder"], {"coder": lines(RIGHT)}, environment.task("test", 0)
    )
    assert episode.rewards == {"coder": 1.0}
    assert episode.info["problems_excluded"] == 1
    assert "trusted" not in episode.info


async def test_with_allow_their_verdicts_are_marked(path: str) -> None:
    environment = Code(path=path, untrusted_tests="allow")
    assert environment.size("train") == 3
    assert environment.skipped() == {}
    assert [remark[:13] for remark in environment.remarks()] == ["train: 2 of 3", "test: 1 of 2 "]
    found = {}
    for index in range(3):
        for says, reward in ((WRONG, 0.0), (RIGHT, 1.0)):
            scripts = {"coder": lines(says)}
            [episode] = await play(environment, Solo(), ["coder"], scripts, environment.task("train", index))
            assert episode.rewards == {"coder": reward}
            found[index] = episode.info["trusted"], episode.info["untrusted"]
    assert found == {0: (True, 0), 1: (False, 1), 2: (False, 1)}


def test_where_all_are_excluded_the_error_names_the_setting(path: str) -> None:
    (Path(path) / "train.jsonl").write_text(json.dumps(FOOLABLE) + "\n")
    environment = Code(path=path)
    with pytest.raises(DataError, match="untrusted_tests: allow"):
        environment.check(["coder"])


async def test_tests_of_whole_modules_run_with_allow(sandbox: Bubblewrap, tmp_path: Path) -> None:
    case: dict[str, Any] = {
        **DOUBLE,
        "test_list": [
            (
                "import os, tempfile, unittest\nfrom unittest.mock import patch\nfrom solution import double\n"
                "class TestCases(unittest.TestCase):\n"
                "    def setUp(self):\n        self.folder = tempfile.TemporaryDirectory()\n"
                "    def tearDown(self):\n        self.folder.cleanup()\n"
                "    def test_file(self):\n        name = os.path.join(self.folder.name, 'x')\n"
                "        with open(name, 'w') as file: file.write('4')\n"
                "        self.assertEqual(double(int(open(name).read())), 8)\n"
                "    @patch.dict(os.environ, {'N': '3'})\n"
                "    def test_env(self):\n        self.assertEqual(double(int(os.environ['N'])), 6)\n"
            )
        ],
    }
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({**case, "task_id": name}) + "\n")
    environment = Code(path=str(tmp_path), untrusted_tests="allow")
    for says, reward in ((RIGHT, 1.0), (WRONG, 0.0)):
        scripts = {"coder": lines(says)}
        [episode] = await play(environment, Solo(), ["coder"], scripts, environment.task("train", 0))
        assert episode.rewards == {"coder": reward}


async def test_a_row_of_big_code_bench(sandbox: Bubblewrap, tmp_path: Path) -> None:
    row = {
        "task_id": "BigCodeBench/0",
        "complete_prompt": 'import os\n\ndef task_func(name):\n    """Return an environment variable."""\n',
        "canonical_solution": "    return os.environ[name]\n",
        "test": "import unittest\nfrom unittest.mock import patch\nclass TestCases(unittest.TestCase):\n"
        "    @patch.dict('os.environ', {'A': 'b'})\n    def test_one(self):\n        self.assertEqual(task_func('A'), 'b')\n",
        "entry_point": "task_func",
    }
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({**row, "task_id": name}) + "\n")
    environment = Code(path=str(tmp_path), format="humaneval", untrusted_tests="allow")
    assert environment.task("train", 0).question == row["complete_prompt"]
    for says, reward in ((row["canonical_solution"], 1.0), ("    return 'a'\n", 0.0)):
        scripts = {"coder": lines(f"```python\n{says}```")}
        [episode] = await play(environment, Solo(), ["coder"], scripts, environment.task("train", 0))
        assert (episode.rewards, episode.info["trusted"]) == ({"coder": reward}, False)
