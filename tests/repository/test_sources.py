"""Every source file keeps the rules, and each rule catches what it is there for."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from pathlib import Path, PurePath

import pytest
from tests.repository import rules

from kapelle.environments import BUILTIN as ENVIRONMENTS
from kapelle.workflows import BUILTIN as WORKFLOWS

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for path in (ROOT / "src").rglob("*.py") if not rules.generated(path))
EVERYTHING = SOURCES + sorted(
    path for top in ("tests", "examples", "tools") for path in (ROOT / top).rglob("*.py")
)

Rule = Callable[[str], Iterable[str]]


def broken(rule: Rule, files: Iterable[Path]) -> list[str]:
    return [
        f"{file.relative_to(ROOT)}: {finding}"
        for file in files
        for finding in rule(file.read_text(encoding="utf-8"))
    ]


def test_the_sources_are_found() -> None:
    assert ROOT / "src/kapelle/errors.py" in SOURCES
    assert Path(__file__) in EVERYTHING


def test_names_say_what_lives_there() -> None:
    modules = [path.relative_to(ROOT / "src") for path in SOURCES]
    assert [f"{path}: {finding}" for path in modules for finding in rules.nameless(path)] == []


@pytest.mark.slow
def test_class_names_are_unique() -> None:
    places: dict[str, set[str]] = {}
    for file in SOURCES:
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, set()).add(str(file))
    # A piece of a recipe is called like the recipe's word for it, whoever else has that name.
    words = {path.rpartition(":")[2] for path in [*ENVIRONMENTS.values(), *WORKFLOWS.values()]}
    assert {name: files for name, files in places.items() if len(files) > 1 and name not in words} == {}


@pytest.mark.slow
def test_nothing_is_unfinished() -> None:
    assert broken(rules.unfinished, EVERYTHING) == []


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
        "import httpx\nhttpx.get('x')",
        "import httpx as h\nwith h.Client() as c: c.get('x')",
        "from httpx import AsyncClient\nAsyncClient()",
        "from httpx import stream as s\ns('GET', 'x')",
    ],
)
def test_a_request_without_bounds_is_found(planted: str) -> None:
    assert list(rules.unbounded(planted))
    assert not list(
        rules.unbounded("import httpx\ntry: pass\nexcept httpx.HTTPError: pass\nhttpx.Timeout(1)")
    )


def test_json_that_nobody_expects_to_be_deep_is_found() -> None:
    reads = "try:\n    x = f(json.loads(t))\nexcept ({}): pass"
    assert list(rules.shallow(reads.format("ValueError, KeyError")))
    assert not list(rules.shallow(reads.format("ValueError, RecursionError")))
    assert not list(rules.shallow(reads.format("OSError")))


@pytest.mark.parametrize(
    "planted",
    [
        "import pickle",
        "import pickle as p",
        "from pickle import loads",
        "import cloudpickle",
        "eval('1')",
        "exec('x = 1')",
        "f = eval",
        "__import__('os')",
        "import torch\ntorch.load('x')",
        "import torch as t\nt.load('x')",
        "from torch import load\nload('x')",
        "from torch import load as read\nread('x')",
        "import torch\ntorch.save({}, 'x')",
        "import numpy as np\nnp.load('x')",
        "import yaml\nyaml.load('x', Loader=yaml.Loader)",
        "from yaml import load\nload('x')",
        "import yaml\nread = yaml.load",
        "import yaml\nyaml.unsafe_load('x')",
        "import os\nos.system('ls')",
        "from os import system\nsystem('ls')",
        "import subprocess\nsubprocess.run('ls', shell=True)",
        "import subprocess\nsubprocess.run('ls', shell=flag)",
        "import subprocess\nsubprocess.getoutput('ls')",
        "load_model('x', trust_remote_code=True)",
        "load_model('x', trust_remote_code=trusted)",
        "load_model('x', **{'trust_remote_code': True})",
        "from transformers import AutoConfig\nAutoConfig.from_pretrained('x')",
        "import transformers as t\nt.AutoTokenizer.from_pretrained('x')",
        "from transformers import AutoModel as M\nM.from_pretrained('x', trust_remote_code=False)",
        "from transformers import AutoModel\nAutoModel.from_config(c)",
        "from transformers import LlamaForCausalLM as L\nL.from_pretrained('x', trust_remote_code=False)",
        "from peft import PeftModel\nPeftModel.from_pretrained(m, 'x', trust_remote_code=False)",
        "import transformers\ngetattr(transformers, n).from_pretrained('x')",
        "getattr(kind, 'from_pretrained')('x')",
        "from transformers import AutoProcessor\nread = AutoProcessor.from_pretrained",
        "from transformers import pipeline\npipeline('x')",
        "import joblib",
        "import torch\ntorch.hub.load('a', 'b')",
        "import yaml\nyaml.load('x', Loader=yaml.SafeLoader)",
        "import yaml\nyaml.safe_load('x')",
        "from yaml import UnsafeLoader\nUnsafeLoader('x')",
        "import requests",
        "from urllib import request\nrequest.urlopen('x')",
        "import urllib.request",
        "import tarfile\ntarfile.open('x').extractall('.')",
        "import tempfile\ntempfile.mktemp()",
        "async def f():\n    if True:\n        return [eval(x) for x in y]",
    ],
)
def test_a_planted_danger_is_found(planted: str) -> None:
    assert list(rules.forbidden(planted))


@pytest.mark.parametrize(
    "honest",
    [
        "model.eval()",
        "import re\nre.compile('x')",
        "import yaml\nyaml.safe_dump('x')",
        "import json\njson.load(file)",
        "import subprocess\nsubprocess.run(['ls'], shell=False)",
        "load_model('x', trust_remote_code=False)",
        "policy.load('x')",
        "from transformers import AutoModel\nAutoModel.from_pretrained(x, trust_remote_code=False, use_safetensors=True)",
        "'torch.load and pickle are named in a sentence'",
    ],
)
def test_honest_code_is_left_alone(honest: str) -> None:
    assert list(rules.forbidden(honest)) == []


def test_nameless_modules_are_found() -> None:
    assert list(rules.nameless(PurePath("kapelle/utils.py")))
    assert list(rules.nameless(PurePath("kapelle/helpers/__init__.py")))
    assert not list(rules.nameless(PurePath("kapelle/rollout/play.py")))


@pytest.mark.parametrize(
    "stub",
    ["raise NotImplementedError", "raise NotImplementedError('later')", f"x = 1  # {rules.UNFINISHED[0]}"],
)
def test_stubs_are_found(stub: str) -> None:
    assert list(rules.unfinished(stub))


def test_a_class_without_bases_may_declare_what_its_heirs_provide() -> None:
    code = "class CLASS:\n    def f(self):\n        BODY\n        raise NotImplementedError\n"
    declared = code.replace("BODY", '"""Return it."""')
    assert not list(rules.unfinished(declared))
    assert list(rules.unfinished(declared.replace("CLASS", "Done(Base)")))
    assert list(rules.unfinished(code.replace("BODY", "x = 1")))
