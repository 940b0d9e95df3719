"""`kapelle validate` reports every faulty environment in one message: what is wrong, where, and a fix."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from kapelle.cli import main
from kapelle.cli.new import skeleton

WORLD = """
class Round:
    def __init__(self, task, agents):
        self.agents, self.done = tuple(agents), False
    def observe(self, agent):
        return "say 1"
    def movers(self):
        return () if self.done else self.agents
    async def step(self, actions, final=None):
        self.done = True
        return {agent: float(text == "1") for agent, text in actions.items()}
    def outcome(self):
        return Outcome({}, 1.0)
    async def close(self):
        pass
"""
ENVIRONMENT = """
class Env(Settings):
    name: str = "wrong:Env"
    reward_range: tuple[float, float] = (0.0, 1.0)
    @property
    def sources(self):
        return {"train": "a", "test": "b"}
    def check(self, agents):
        pass
    def size(self, split):
        return 40
    def task(self, split, index):
        return Task(f"{split}-{index}", f"{split} {index}")
    def start(self, task, agents, seed):
        return Round(task, agents)
"""
HEAD = "import asyncio, random, sys\nfrom kapelle import Settings, Outcome, Task\nfrom kapelle.environment import *\n"


def written(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Write the module and return the arguments of `kapelle validate` for it."""
    file = folder / "wrong.py"
    file.write_text(text, encoding="utf-8")
    monkeypatch.chdir(folder)
    return ["validate", f"{file}:Env"]


def changed(source: str, method: str, body: str) -> str:
    """Return the class with another body of a method; without the method if the body is empty."""
    found = re.search(
        rf"    (?:async )?def {method}\(.*?(?=\n    (?:async )?def |\n    @|\Z)", source, re.DOTALL
    )
    assert found, method
    new = textwrap.indent(textwrap.dedent(body).strip(), "    ") if body else ""
    return source[: found.start()] + new + source[found.end() :]


WORLDS = {
    "no close": ("close", "", "has no `close`"),
    "no step": ("step", "", "has no `step`"),
    "sync step": (
        "step",
        "def step(self, actions, final=None):\n    self.done = True\n    return {}",
        "async def step",
    ),
    "async outcome": (
        "outcome",
        "async def outcome(self):\n    return Outcome({}, 1.0)",
        "Write `def outcome`",
    ),
    "no view": ("observe", "def observe(self, agent):\n    return None", "`observe('agent_0')` is None"),
    "no movers' list": ("movers", "def movers(self):\n    return None", "`movers` returns None"),
    "a stranger moves": ("movers", "def movers(self):\n    return ('bob',)", "bob"),
    "it never ends": (
        "movers",
        "def movers(self):\n    return self.agents",
        "2,000 steps",
    ),
    "pays a list": (
        "step",
        "async def step(self, actions, final=None):\n    self.done = True\n    return [1.0]",
        "[1.0]",
    ),
    "pays no number": (
        "step",
        "async def step(self, actions, final=None):\n    self.done = True\n    return dict.fromkeys(actions, float('nan'))",
        "outside [0.0, 1.0]",
    ),
    "pays a stranger": (
        "step",
        "async def step(self, actions, final=None):\n    self.done = True\n    return {'bob': 1.0}",
        "bob",
    ),
    "another signature": (
        "step",
        "async def step(self, actions):\n    self.done = True\n    return {}",
        "`step` raises TypeError",
    ),
    "step raises": (
        "step",
        "async def step(self, actions, final=None):\n    raise KeyError('x')",
        "`step` raises KeyError: 'x' (wrong.py, line",
    ),
    "step exits": (
        "step",
        "async def step(self, actions, final=None):\n    sys.exit(3)",
        "`step` raises SystemExit: 3",
    ),
    "step stops the loop": (
        "step",
        "async def step(self, actions, final=None):\n    asyncio.get_running_loop().stop()\n    await asyncio.sleep(0)",
        "event loop",
    ),
    "no outcome's value": ("outcome", "def outcome(self):\n    return None", "kapelle.Outcome"),
    "success of seven": (
        "outcome",
        "def outcome(self):\n    return Outcome({}, 7.0)",
        "7.0",
    ),
    "an object in info": (
        "outcome",
        "def outcome(self):\n    return Outcome({}, 1.0, {'a': object()})",
        "JSON",
    ),
    "close raises": (
        "close",
        "async def close(self):\n    raise OSError('disk')",
        "`close` raises OSError: disk",
    ),
}

ENVIRONMENTS = {
    "start gives none": (
        "start",
        "def start(self, task, agents, seed):\n    return None",
        "returns a NoneType",
    ),
    "start is async": (
        "start",
        "async def start(self, task, agents, seed):\n    return Round(task, agents)",
        "Write `def start`",
    ),
    "task gives none": (
        "task",
        "def task(self, split, index):\n    return None",
        "kapelle.Task",
    ),
    "tasks without text": (
        "task",
        "def task(self, split, index):\n    return Task(index, 'x')",
        "the id 0",
    ),
    "tasks at random": (
        "task",
        "def task(self, split, index):\n    return Task(f'{split}{index}', str(random.random()))",
        "changed",
    ),
    "a set in a task": (
        "task",
        "def task(self, split, index):\n    return Task(f'{split}{index}', f'{split}{index}', {'a': {1}})",
        "JSON",
    ),
    "size is text": ("size", "def size(self, split):\n    return '40'", "`size('train')` returns '40'"),
    "nothing to play": ("size", "def size(self, split):\n    return 0", "no task"),
    "no task": ("task", "", "has no `task`"),
    "size has no end": (
        "size",
        "def size(self, split):\n    return 10**30",
        "`size('train')`",
    ),
    "sources raises": (
        "sources",
        "def sources(self):\n    raise KeyError('s')",
        "`sources` raises KeyError: 's' (wrong.py, line",
    ),
    "task is async": (
        "task",
        "async def task(self, split, index):\n    return Task('a', 'b')",
        "`task('train', 0)` is async. Write `def`",
    ),
    "task raises later": (
        "task",
        "def task(self, split, index):\n    return [Task(f'{split}0', f'{split}0')][index]",
        "`task('train', 1)` raises IndexError",
    ),
    "an error without a message": (
        "start",
        "def start(self, task, agents, seed):\n    class Odd(Exception):\n        __str__ = None\n    raise Odd",
        "`start` raises Odd: its message cannot be read, TypeError",
    ),
}


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the error message of a command."""
    assert main(words) == 2
    printed = capsys.readouterr()
    assert "Traceback" not in printed.out + printed.err
    assert len(printed.err.splitlines()) == 1
    return printed.out + printed.err


@pytest.mark.sample(9)
@pytest.mark.parametrize(("method", "body", "why"), WORLDS.values(), ids=WORLDS)
def test_a_faulty_episode_is_a_finding(
    method: str,
    body: str,
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = written(tmp_path, HEAD + changed(WORLD, method, body) + ENVIRONMENT, monkeypatch)
    assert why in refused(words, capsys)


@pytest.mark.sample(6)
@pytest.mark.parametrize(("method", "body", "why"), ENVIRONMENTS.values(), ids=ENVIRONMENTS)
def test_a_faulty_environment_is_a_finding(
    method: str,
    body: str,
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = written(tmp_path, HEAD + WORLD + changed(ENVIRONMENT, method, body), monkeypatch)
    assert why in refused(words, capsys)


RECIPE = """
name: wrong
team: {agents: 1}
environment: {name: "wrong.py:Env"}
workflow: {name: play}
algorithm: {name: grpo, group_size: 2}
"""
CAPABILITIES = {
    "alive": ("Alive", "@property\n    def alive(self): return None", "`alive` gives None"),
    "constant sum": (
        "Opposed",
        "@property\n    def constant_sum(self): raise KeyError('c')",
        "`constant_sum` raises KeyError: 'c' (wrong.py, line",
    ),
    "symmetric": ("Symmetric", "@property\n    def symmetric(self): return 'yes'", "`symmetric` gives 'yes'"),
    "descriptors": ("Holding", "def descriptors(self, agents): return None", "`descriptors` gives None"),
    "members": ("Mixed", "@property\n    def members(self): return []", "`members` gives []"),
    "skipped": ("Reporting", "def skipped(self): raise OSError('disk')", "`skipped` raises OSError: disk"),
    "extract": ("Answerable", "def extract(self, text): return 3", "`extract` gives 3"),
    "async extract": (
        "Answerable",
        "async def extract(self, text): return ''",
        "`extract` is async. Write `def`",
    ),
}


@pytest.mark.sample(6)
@pytest.mark.parametrize(("capability", "method", "why"), CAPABILITIES.values(), ids=CAPABILITIES)
@pytest.mark.parametrize("command", ["validate", "train"])
def test_a_faulty_capability_is_named(
    command: str,
    capability: str,
    method: str,
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = (
        ENVIRONMENT.replace("class Env(Settings)", f"class Env(Settings, {capability})") + f"    {method}\n"
    )
    words = written(tmp_path, HEAD + WORLD + text, monkeypatch)
    (tmp_path / "wrong.yaml").write_text(RECIPE, encoding="utf-8")
    assert main(words if command == "validate" else ["train", "wrong.yaml"]) == 2
    said = capsys.readouterr()
    assert why in said.out + said.err
    assert "Traceback" not in said.err


ONLY_VALIDATED = {"tasks at random", "a set in a task", "nothing to play", "no task"}
"""Faults that only `kapelle validate` finds, or reports in another way."""
BEFORE_A_MODEL = [
    name for name, case in ENVIRONMENTS.items() if case[0] != "start" and name not in ONLY_VALIDATED
]


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", BEFORE_A_MODEL)
def test_training_stops_at_a_faulty_environment(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    method, body, why = ENVIRONMENTS[name]
    written(tmp_path, HEAD + WORLD + changed(ENVIRONMENT, method, body), monkeypatch)
    (tmp_path / "wrong.yaml").write_text(RECIPE, encoding="utf-8")
    assert main(["train", "wrong.yaml"]) == 2
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    assert why in said.err.splitlines()[-1]
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("raise BaseException('odd')\n", "BaseException: odd"),
        ("import sys; sys.exit(4)\n", "SystemExit: 4"),
        ("def Env(): pass\n", "not a class"),
        ("class Env:\n    pass\n", "kapelle.Settings"),
        (
            HEAD + WORLD + ENVIRONMENT + "    def __init__(self, a, b): pass\n",
            "unexpected keyword argument",
        ),
        (
            HEAD + WORLD + ENVIRONMENT + "    def __init__(self, **given): raise OSError('disk')\n",
            "Env raises OSError: disk (wrong.py, line",
        ),
        (
            HEAD
            + WORLD
            + ENVIRONMENT.replace(
                'name: str = "wrong:Env"', "@property\n    def name(self): raise ValueError"
            ),
            "`name`",
        ),
    ],
    ids=["raises", "exits", "function", "no settings", "own init", "init raises", "property"],
)
def test_an_unusable_module_or_class_is_an_error(
    text: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert why in refused(written(tmp_path, text, monkeypatch), capsys)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('reward_range: str = "0..1"', "`reward_range` is '0..1'"),
        ("reward_range: tuple[float, ...] = (0.0,)", "`reward_range` is (0.0,)"),
        ("reward_range: tuple[float, float] = (1.0, 0.0)", "the smaller first"),
    ],
)
def test_an_impossible_range_is_a_finding(
    line: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = ENVIRONMENT.replace("reward_range: tuple[float, float] = (0.0, 1.0)", line)
    assert why in refused(written(tmp_path, HEAD + WORLD + text, monkeypatch), capsys)


@pytest.mark.parametrize("what", ["hang", "compute"])
def test_a_call_that_does_not_return_is_a_finding(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    body = {
        "hang": "async def step(self, actions, final=None):\n    await asyncio.sleep(1e6)",
        "compute": "async def step(self, actions, final=None):\n    while True: pass",
    }[what]
    words = written(tmp_path, HEAD + changed(WORLD, "step", body) + ENVIRONMENT, monkeypatch)
    assert "`step` of environment" in refused([*words, "environment.timeout=0.5"], capsys)


NAMES = (
    *("members", "skipped", "doubts", "connect", "script", "private", "contents", "descriptors", "alive"),
    *("constant_sum", "extract", "pay", "symmetric", "answers_per_task", "recorded", "open_world", "offered"),
    "blocking",
)


@pytest.mark.parametrize("kind", ["str = 'x'", "dict[str, int] = {'a': 1}"])
def test_a_setting_can_have_the_name_of_a_capabilitys_method(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = "".join(f"    {name}: {kind}\n" for name in NAMES)
    text = ENVIRONMENT.replace("    @property", f"{fields}    @property", 1)
    assert main(written(tmp_path, HEAD + WORLD + text, monkeypatch)) == 0
    assert "is fit for training" in capsys.readouterr().out


def test_a_method_that_is_not_declared_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = ENVIRONMENT + "    def extract(self, text):\n        return text\n"
    assert main(written(tmp_path, HEAD + WORLD + text, monkeypatch)) == 0
    assert "kapelle.environment.Answerable" in capsys.readouterr().out


def test_a_capability_without_its_method_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = ENVIRONMENT.replace("class Env(Settings)", "class Env(Settings, Scripted)")
    words = written(tmp_path, HEAD + WORLD + text, monkeypatch)
    assert "`script`" in refused(words, capsys)


@pytest.mark.sample(2)
@pytest.mark.parametrize("workers", [0, 1])
def test_training_names_the_line_that_raises(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world = changed(WORLD, "step", "async def step(self, actions, final=None):\n    return {'a': 1 / 0}")
    text = HEAD + world + ENVIRONMENT
    written(tmp_path, text, monkeypatch)
    (tmp_path / "wrong.yaml").write_text(RECIPE, encoding="utf-8")
    assert main(["train", "wrong.yaml", f"episode.environment_workers={workers}"]) != 0
    said = capsys.readouterr()
    line = text[: text.index("1 / 0")].count("\n") + 1
    assert f"ZeroDivisionError: division by zero (wrong.py, line {line})\n" in said.err
    assert "Traceback" not in said.err


PROBLEM = 'return Problem(question, {"answer": max(digits)}, key=question)'
QUESTIONS = {
    "no problem": (PROBLEM, "return question", "`problem` returns '"),
    "no answer": ('{"answer": max', '{"result": max', "Task train-0 has no answer"),
    "an answer of words": ("max(digits)}", "'many'}", "'many'"),
    "answers as a method": ("    @property\n", "", "numbers(…)"),
    "an unknown rule": ("last_number", "last_numbre", "Did you mean 'last_number'?"),
    "a rule without a tuple": ('("last_number",)', '"last_number"', "('last_number',)"),
    "a default of another type": ("(3, 4)", "3", "`difficulty`"),
}  # fmt: skip
"""A part of the environment of `kapelle new`, its replacement, and a part of the message."""


@pytest.mark.sample(3)
@pytest.mark.parametrize("wrong", QUESTIONS)
def test_a_mistake_in_an_environment_of_questions_is_one_message(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new, why = QUESTIONS[wrong]
    text = skeleton("environment", "largest")["largest.py"]
    assert old in text
    monkeypatch.chdir(tmp_path)
    Path("largest.py").write_text(text.replace(old, new), encoding="utf-8")
    assert why in refused(["validate", "largest.py:Largest"], capsys)
