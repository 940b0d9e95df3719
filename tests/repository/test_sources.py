"""Every source file keeps the rules, and each rule catches what it is there for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from tests.repository import rules

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for path in (ROOT / "src").rglob("*.py") if not rules.generated(path))

Rule = Callable[[str], Iterable[str]]


def broken(rule: Rule, files: Iterable[Path]) -> list[str]:
    return [
        f"{file.relative_to(ROOT)}: {finding}"
        for file in files
        for finding in rule(file.read_text(encoding="utf-8"))
    ]


def test_names_say_what_lives_there() -> None:
    modules = [path.relative_to(ROOT / "src") for path in SOURCES]
    assert [f"{path}: {finding}" for path in modules for finding in rules.nameless(path)] == []


@pytest.mark.slow
def test_nothing_foreign_is_executed_or_unpickled() -> None:
    assert broken(rules.forbidden, SOURCES) == []


@pytest.mark.slow
def test_what_others_sent_is_bounded() -> None:
    client = ROOT / "src/kapelle/runtime/http.py"
    assert broken(rules.unbounded, [file for file in SOURCES if file != client]) == []
    assert broken(rules.unbounded, [client]) != []
    assert broken(rules.shallow, SOURCES) == []


def test_one_module_makes_the_header_of_a_token() -> None:
    made = [file.name for file in SOURCES if '"Authorization": f"Bearer' in file.read_text("utf-8")]
    assert made == ["credentials.py"], (
        "take `bearer` of runtime/credentials.py, which looks who could read it"
    )


@pytest.mark.parametrize(
    "planted",
    [
        "import pickle",
        "from pickle import loads",
        "eval('1')",
        "exec('x = 1')",
        "__import__('os')",
        "import torch\ntorch.load('x')",
        "from torch import load as read\nread('x')",
        "import numpy as np\nnp.load('x')",
        "import yaml\nyaml.load('x', Loader=yaml.Loader)",
        "from yaml import load\nload('x')",
        "import os\nos.system('ls')",
        "import subprocess\nsubprocess.run('ls', shell=True)",
        "load_model('x', trust_remote_code=True)",
        "load_model('x', **{'trust_remote_code': True})",
        "from transformers import AutoModel as M\nM.from_pretrained('x', trust_remote_code=False)",
        "import transformers\ngetattr(transformers, n).from_pretrained('x')",
        "getattr(kind, 'from_pretrained')('x')",
        "import torch\ntorch.hub.load('a', 'b')",
        "import requests",
        "from urllib import request\nrequest.urlopen('x')",
        "import tarfile\ntarfile.open('x').extractall('.')",
        "async def f():\n    if True:\n        return [eval(x) for x in y]",
    ],
)
def test_a_planted_danger_is_found(planted: str) -> None:
    assert list(rules.forbidden(planted))
