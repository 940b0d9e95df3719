"""`kapelle validate` reports every faulty environment in one message: what is wrong, where, and a fix."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
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


RECIPE = """
name: wrong
team: {agents: 1}
environment: {name: "wrong.py:Env"}
workflow: {name: play}
algorithm: {name: grpo, group_size: 2}
"""
TRAIN = ("train", "wrong.yaml")
Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that writes `wrong.py`, runs a command, and returns its exit code and output."""
    monkeypatch.chdir(tmp_path)
    Path("wrong.yaml").write_text(RECIPE, encoding="utf-8")

    def run_with(text: str, *words: str) -> tuple[int, str]:
        Path("wrong.py").write_text(text, encoding="utf-8")
        code = main([*words] or ["validate", "wrong.py:Env"])
        printed = capsys.readouterr()
        assert "Traceback" not in printed.out + printed.err
        return code, printed.out + printed.err

    return run_with


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
    "sync step": (
        "step",
        "def step(self, actions, final=None):\n    self.done = True\n    return {}",
        "async def step",
    ),
    "no view": ("observe", "def observe(self, agent):\n    return None", "`observe('agent_0')` is None"),
    "a stranger moves": ("movers", "def movers(self):\n    return ('bob',)", "bob"),
    "it never ends": (
        "movers",
        "def movers(self):\n    return self.agents",
        "has not ended after 2,000 steps",
    ),
    "pays nothing at all": (
        "step",
        "async def step(self, actions, final=None):\n    self.done = True",
        "None as rewards",
    ),
    "pays a list": (
        "step",
        "async def step(self, actions, final=None):\n    self.done = True\n    return [1.0]",
        "[1.0] as rewards",
    ),
    "pays text": (
        "step",
        "async def step(self, actions, final=None):\n    self.done = True\n    return dict.fromkeys(actions, '1')",
        "The reward of 'agent_0' is '1'",
    ),
    "pays no number": (
        "step",
        "async def step(self, actions, final=None):\n    self.done = True\n    return dict.fromkeys(actions, float('nan'))",
        "outside [0.0, 1.0]",
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
    "success of seven": (
        "outcome",
        "def outcome(self):\n    return Outcome({}, 7.0)",
        "7.0",
    ),
    "an object in info": (
        "outcome",
        "def outcome(self):\n    return Outcome({}, 1.0, {'a': object()})",
        "which JSON cannot represent",
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
        "`start` raises Odd: its message cannot be read because of TypeError",
    ),
}


FAULTY = {
    **{name: (HEAD + changed(WORLD, *case[:2]) + ENVIRONMENT, case[2]) for name, case in WORLDS.items()},
    **{
        name: (HEAD + WORLD + changed(ENVIRONMENT, *case[:2]), case[2]) for name, case in ENVIRONMENTS.items()
    },
}


@pytest.mark.sample(12)
@pytest.mark.parametrize(("text", "why"), FAULTY.values(), ids=FAULTY)
def test_fault_is_a_finding(text: str, why: str, run: Run) -> None:
    code, message = run(text)
    assert code == 2
    assert why in message
    assert message.count("kapelle: ") == 1


CAPABILITIES = {
    "alive": ("Reporting", "@property\n    def alive(self): return None", "`alive` is None"),
    "constant sum": (
        "Reporting",
        "@property\n    def constant_sum(self): raise KeyError('c')",
        "`constant_sum` raises KeyError: 'c' (wrong.py, line",
    ),
    "symmetric": ("Reporting", "@property\n    def symmetric(self): return 'yes'", "`symmetric` is 'yes'"),
    "skipped": ("Reporting", "def skipped(self): raise OSError('disk')", "`skipped` raises OSError: disk"),
    "async extract": (
        "Answerable",
        "async def extract(self, text): return ''",
        "`extract` is async. Write `def`",
    ),
}


@pytest.mark.sample(6)
@pytest.mark.parametrize(("capability", "method", "why"), CAPABILITIES.values(), ids=CAPABILITIES)
@pytest.mark.parametrize("words", [(), TRAIN], ids=["validate", "train"])
def test_faulty_capability_is_named(
    words: tuple[str, ...], capability: str, method: str, why: str, run: Run
) -> None:
    text = ENVIRONMENT.replace("class Env(Settings)", f"class Env(Settings, {capability})")
    code, message = run(f"{HEAD}{WORLD}{text}    {method}\n", *words)
    assert code == 2
    assert why in message


ONLY_VALIDATED = {"tasks at random", "a set in a task", "nothing to play"}
"""Faults that only `kapelle validate` finds, or reports in another way."""
BEFORE_A_MODEL = [
    name for name, case in ENVIRONMENTS.items() if case[0] != "start" and name not in ONLY_VALIDATED
]


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", BEFORE_A_MODEL)
def test_training_stops_at_faulty_environment(name: str, run: Run) -> None:
    text, why = FAULTY[name]
    code, message = run(text, *TRAIN)
    assert code == 2
    assert why in message.splitlines()[-1]
    assert not Path("runs").exists()


GOOD = HEAD + WORLD + ENVIRONMENT
RANGE = "reward_range: tuple[float, float] = (0.0, 1.0)"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("raise BaseException('odd')\n", "BaseException: odd"),
        ("import sys; sys.exit(4)\n", "SystemExit: 4"),
        ("def Env(): pass\n", "not a class"),
        ("class Env:\n    pass\n", "kapelle.Settings"),
        (GOOD + "    def __init__(self, a, b): pass\n", "unexpected keyword argument"),
        (GOOD + "    def __init__(self, **given): raise OSError('disk')\n", "OSError: disk (wrong.py, line"),
        (GOOD.replace('name: str = "wrong:Env"', "@property\n    def name(self): raise ValueError"), "`name`"),
        (GOOD.replace(RANGE, 'reward_range: str = "0..1"'), "'0..1'"),
        (GOOD.replace(RANGE, "reward_range: tuple[float, ...] = (0.0,)"), "(0.0,)"),
        (GOOD.replace(RANGE, "reward_range: tuple[float, float] = (1.0, 0.0)"), "smaller first"),
        (GOOD.replace("class Env(Settings)", "class Env(Settings, Scripted)"), "`script`"),
    ],
)  # fmt: skip
def test_unusable_class_is_an_error(text: str, why: str, run: Run) -> None:
    code, message = run(text)
    assert code == 2
    assert why in message


@pytest.mark.parametrize("line", ["await asyncio.sleep(1e6)", "while True: pass"])
def test_call_that_does_not_return_is_a_finding(line: str, run: Run) -> None:
    body = f"async def step(self, actions, final=None):\n    {line}"
    text = HEAD + changed(WORLD, "step", body) + ENVIRONMENT
    code, message = run(text, "validate", "wrong.py:Env", "environment.timeout=0.5")
    assert code == 2
    assert "`step`" in message


NAMES = (
    *("members", "skipped", "doubts", "connect", "script", "private", "contents", "descriptors", "alive"),
    *("constant_sum", "extract", "pay", "symmetric", "answers_per_task", "recorded", "open_state", "offered"),
    "blocking",
)


@pytest.mark.parametrize("kind", ["str = 'x'", "dict[str, int] = {'a': 1}"])
def test_setting_can_have_the_name_of_a_capability_method(kind: str, run: Run) -> None:
    fields = "".join(f"    {name}: {kind}\n" for name in NAMES)
    code, message = run(HEAD + WORLD + ENVIRONMENT.replace("    @property", f"{fields}    @property", 1))
    assert code == 0
    assert "is fit for training" in message


def test_method_without_its_capability_is_named(run: Run) -> None:
    code, message = run(GOOD + "    def extract(self, text):\n        return text\n")
    assert code == 0
    assert "kapelle.environment.Answerable" in message


@pytest.mark.sample(2)
@pytest.mark.parametrize("workers", [0, 1])
def test_training_names_the_line_that_raises(workers: int, run: Run) -> None:
    world = changed(WORLD, "step", "async def step(self, actions, final=None):\n    return {'a': 1 / 0}")
    text = HEAD + world + ENVIRONMENT
    code, message = run(text, *TRAIN, f"episode.environment_workers={workers}")
    assert code != 0
    line = text[: text.index("1 / 0")].count("\n") + 1
    assert f"ZeroDivisionError: division by zero (wrong.py, line {line})\n" in message


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
def test_mistake_in_question_environment_is_one_message(wrong: str, run: Run) -> None:
    old, new, why = QUESTIONS[wrong]
    text = skeleton("environment", "largest")["largest.py"]
    assert old in text
    code, message = run(text.replace(old, new), "validate", "wrong.py:Largest")
    assert code == 2
    assert why in message
