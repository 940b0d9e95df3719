"""`kapelle validate` answers every wrong environment with one sentence: what is wrong, where, and what to write."""

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
    """Write the module and return the words that validate its environment, under a file's name of its own."""
    file = folder / "wrong.py"
    file.write_text(text, encoding="utf-8")
    monkeypatch.chdir(folder)
    return ["validate", f"{file}:Env"]


def changed(source: str, method: str, body: str) -> str:
    """Return the class with another body of a method; without the method where the body is empty."""
    found = re.search(
        rf"    (?:async )?def {method}\(.*?(?=\n    (?:async )?def |\n    @|\Z)", source, re.DOTALL
    )
    assert found, method
    new = textwrap.indent(textwrap.dedent(body).strip(), "    ") if body else ""
    return source[: found.start()] + new + source[found.end() :]


WORLDS = {
    "no close": ("close", "", "has no `close`"),
    "no step": ("step", "", "has no `step`"),
    "no observe": ("observe", "", "has no `observe`"),
    "no movers": ("movers", "", "has no `movers`"),
    "no outcome": ("outcome", "", "has no `outcome`"),
    "sync step": (
        "step",
        "def step(self, actions, final=None):\n    self.done = True\n    return {}",
        "Write `async def step`",
    ),
    "sync close": ("close", "def close(self):\n    pass", "Write `async def close`"),
    "async outcome": (
        "outcome",
        "async def outcome(self):\n    return Outcome({}, 1.0)",
        "Write `def outcome`",
    ),
    "async observe": ("observe", "async def observe(self, agent):\n    return 'x'", "Write `def observe`"),
    "async movers": ("movers", "async def movers(self):\n    return ()", "Write `def movers`"),
    "no view": ("observe", "def observe(self, agent):\n    return None", "`observe('agent_0')` is None"),
    "a number to see": ("observe", "def observe(self, agent):\n    return 3", "`observe('agent_0')` is 3"),
    "no movers' list": ("movers", "def movers(self):\n    return None", "`movers` returns None"),
    "one mover as text": ("movers", "def movers(self):\n    return 'agent_0'", "`movers` returns 'agent_0'"),
    "a stranger moves": ("movers", "def movers(self):\n    return ('bob',)", "'bob', who is not in the team"),
    "a number moves": ("movers", "def movers(self):\n    return (1,)", "1, who is not in the team"),
    "movers yields": (
        "movers",
        "def movers(self):\n    yield from self.agents",
        "return a tuple of agents' names",
    ),
    "it never ends": (
        "movers",
        "def movers(self):\n    return self.agents",
        "has not ended after 2,000 steps",
    ),
    "pays nothing at all": (
        "step",
        "async def step(self, actions, final=None):\n    self.done = True",
        "paid None; it must be a mapping",
    ),
    "pays a list": (
        "step",
        "async def step(self, actions, final=None):\n    self.done = True\n    return [1.0]",
        "paid [1.0]; it must be a mapping",
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
    "pays a stranger": (
        "step",
        "async def step(self, actions, final=None):\n    self.done = True\n    return {'bob': 1.0}",
        "paid 'bob', who is not in the team",
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
        "cancelled the checks or stopped their event loop",
    ),
    "step cancels": (
        "step",
        "async def step(self, actions, final=None):\n    asyncio.current_task().cancel()\n    await asyncio.sleep(0)",
        "cancelled the checks or stopped their event loop",
    ),
    "step raises the base": (
        "step",
        "async def step(self, actions, final=None):\n    raise BaseException('odd')",
        "`step` raises BaseException: odd",
    ),
    "no outcome's value": ("outcome", "def outcome(self):\n    return None", "return a kapelle.Outcome"),
    "a dict as outcome": ("outcome", "def outcome(self):\n    return {}", "return a kapelle.Outcome"),
    "success as text": ("outcome", "def outcome(self):\n    return Outcome({}, 'yes')", "success 'yes'"),
    "success of seven": (
        "outcome",
        "def outcome(self):\n    return Outcome({}, 7.0)",
        "success 7.0, outside [0, 1]",
    ),
    "no rewards": ("outcome", "def outcome(self):\n    return Outcome(None)", "whose `rewards` is None"),
    "an object in info": (
        "outcome",
        "def outcome(self):\n    return Outcome({}, 1.0, {'a': object()})",
        "which has no form in JSON",
    ),
    "close raises": (
        "close",
        "async def close(self):\n    raise OSError('disk')",
        "`close` raises OSError: disk",
    ),
    "it cannot be made": (
        "__init__",
        "def __init__(self, task, agents):\n    raise RuntimeError('no engine')",
        "`start` raises RuntimeError: no engine",
    ),
}

ENVIRONMENTS = {
    "start gives none": (
        "start",
        "def start(self, task, agents, seed):\n    return None",
        "returns a NoneType",
    ),
    "start gives the class": (
        "start",
        "def start(self, task, agents, seed):\n    return Round",
        "returns the class Round itself",
    ),
    "start is async": (
        "start",
        "async def start(self, task, agents, seed):\n    return Round(task, agents)",
        "Write `def start`",
    ),
    "start takes less": ("start", "def start(self, task):\n    return None", "`start` raises TypeError"),
    "task gives none": (
        "task",
        "def task(self, split, index):\n    return None",
        "returns None; return a kapelle.Task",
    ),
    "task gives a dict": (
        "task",
        "def task(self, split, index):\n    return {}",
        "returns {}; return a kapelle.Task",
    ),
    "tasks without text": (
        "task",
        "def task(self, split, index):\n    return Task(index, 'x')",
        "has the id 0, which is no text",
    ),
    "tasks at random": (
        "task",
        "def task(self, split, index):\n    return Task(f'{split}{index}', str(random.random()))",
        "has changed when it is asked for again",
    ),
    "a set in a task": (
        "task",
        "def task(self, split, index):\n    return Task(f'{split}{index}', f'{split}{index}', {'a': {1}})",
        "are not JSON",
    ),
    "size is text": ("size", "def size(self, split):\n    return '40'", "`size('train')` returns '40'"),
    "size is negative": ("size", "def size(self, split):\n    return -1", "`size('train')` returns -1"),
    "nothing to play": ("size", "def size(self, split):\n    return 0", "the train split has no task"),
    "size raises": (
        "size",
        "def size(self, split):\n    raise ValueError('x')",
        "`size` raises ValueError: x",
    ),
    "check raises": (
        "check",
        "def check(self, agents):\n    raise AttributeError('q')",
        "`check` raises AttributeError",
    ),
    "no task": ("task", "", "has no `task`"),
    "check is async": ("check", "async def check(self, agents):\n    pass", "`check` is async. Write `def`"),
    "size is async": ("size", "async def size(self, split):\n    return 4", "`size` is async. Write `def`"),
    "size is a fraction": ("size", "def size(self, split):\n    return 4.0", "`size('train')` returns 4.0"),
    "size has no end": (
        "size",
        "def size(self, split):\n    return 10**30",
        "or None where they come without end",
    ),
    "sources raises": (
        "sources",
        "def sources(self):\n    raise KeyError('s')",
        "`sources` raises KeyError: 's' (wrong.py, line",
    ),
    "sources of one split": (
        "sources",
        "def sources(self):\n    return {'train': 'x'}",
        "`sources` is {'train'",
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
    "task exits": (
        "task",
        "def task(self, split, index):\n    sys.exit('t')",
        "raises SystemExit: t (wrong.py",
    ),
    "bytes to ask": (
        "task",
        "def task(self, split, index):\n    return Task(f'{split}{index}', b'x')",
        "has the question b'x', which is no text",
    ),
    "start cancels": (
        "start",
        "def start(self, task, agents, seed):\n    raise asyncio.CancelledError",
        "`start` raises CancelledError",
    ),
    "an error without a message": (
        "start",
        "def start(self, task, agents, seed):\n    class Odd(Exception):\n        __str__ = None\n    raise Odd",
        "`start` raises Odd: its message cannot be read, TypeError",
    ),
    "start recurs": (
        "start",
        "def start(self, task, agents, seed):\n    return self.start(task, agents, seed)",
        "`start` raises RecursionError",
    ),
}


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return what the command says in refusing."""
    assert main(words) == 2
    said = capsys.readouterr()
    assert "Traceback" not in said.out + said.err
    assert len(said.err.splitlines()) == 1
    return said.out + said.err


@pytest.mark.sample(9)
@pytest.mark.parametrize(("method", "body", "why"), WORLDS.values(), ids=WORLDS)
def test_a_wrong_world_is_a_finding(
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
def test_a_wrong_environment_is_a_finding(
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
def test_a_capability_that_answers_wrongly_is_named(
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
"""What only `kapelle validate` looks for, or says in other words."""
BEFORE_A_MODEL = [
    name for name, case in ENVIRONMENTS.items() if case[0] != "start" and name not in ONLY_VALIDATED
]


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", BEFORE_A_MODEL)
def test_training_refuses_a_wrong_environment_before_a_model_is_loaded(
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
        ("raise BaseException('odd')\n", "wrong.py cannot be imported: BaseException: odd"),
        ("import sys; sys.exit(4)\n", "wrong.py cannot be imported: SystemExit: 4"),
        ("def Env(): pass\n", "is function, not a class"),
        ("class Env:\n    pass\n", "must be a subclass of kapelle.Settings"),
        (
            HEAD + WORLD + ENVIRONMENT + "    def __init__(self, a, b): pass\n",
            "Env raises TypeError: Env.__init__() got an unexpected keyword argument 'name'. Settings are made of their fields",
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
            "has a property `name`; recipes set it",
        ),
    ],
    ids=["raises", "exits", "function", "no settings", "own init", "init raises", "property"],
)
def test_a_module_or_class_that_is_none_is_named(
    text: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert why in refused(written(tmp_path, text, monkeypatch), capsys)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ('reward_range: str = "0..1"', "`reward_range` is '0..1'"),
        ("reward_range: tuple[float, ...] = (0.0,)", "`reward_range` is (0.0,)"),
        ("reward_range: tuple[float, float] = (1.0, 0.0)", "the smaller first"),
    ],
)
def test_a_range_that_is_none_is_a_finding(
    said: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = ENVIRONMENT.replace("reward_range: tuple[float, float] = (0.0, 1.0)", said)
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


@pytest.mark.sample(16)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["str = 'x'", "dict[str, int] = {'a': 1}", "int = 3"])
def test_a_setting_may_have_the_name_of_a_capabilitys_method(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = ENVIRONMENT.replace("    @property", f"    {name}: {kind}\n    @property", 1)
    assert main(written(tmp_path, HEAD + WORLD + text, monkeypatch)) == 0
    assert "is fit for training" in capsys.readouterr().out


def test_a_method_that_is_not_declared_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = ENVIRONMENT + "    def extract(self, text):\n        return text\n"
    assert main(written(tmp_path, HEAD + WORLD + text, monkeypatch)) == 0
    assert "`extract` (`kapelle.environment.Answerable`) is there but not declared" in capsys.readouterr().out


def test_a_capability_without_its_method_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = ENVIRONMENT.replace("class Env(Settings)", "class Env(Settings, Scripted)")
    words = written(tmp_path, HEAD + WORLD + text, monkeypatch)
    assert "it declares `Scripted` and has no `script`" in refused(words, capsys)


@pytest.mark.parametrize("where", ["validate", "train"])
def test_what_is_said_of_a_method_that_raises_ends_with_a_full_stop(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = written(
        tmp_path,
        HEAD + WORLD + changed(ENVIRONMENT, "size", "def size(self, split):\n    return 1 / 0"),
        monkeypatch,
    )
    name = words[1]
    if where == "train":
        words = ["validate", "demo", f"environment={{name: '{name}'}}", "workflow={name: parallel}"]
    said = refused(words, capsys)
    assert "`size` raises ZeroDivisionError: division by zero (wrong.py, line" in said
    ends = ").\n" if where == "validate" else f"). `kapelle validate {name}` checks all of it.\n"
    assert ends in said


@pytest.mark.sample(2)
@pytest.mark.parametrize("workers", [0, 1])
def test_training_names_the_line_of_a_world_that_raises(
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
    "no answer": ('{"answer": max', '{"result": max', 'Task train-0 has no answer. Put it into its data: `{"answer": …}`.'),
    "an answer of words": ("max(digits)}", "'many'}", "The answer of task train-0 is 'many', no number. Let `answers` return `words(…)`"),
    "answers as a method": ("    @property\n", "", "Write it as a property that returns `numbers(…)`"),
    "an unknown rule": ("last_number", "last_numbre", "are 'last_numbre'. Give a tuple such as ('last_number',). Did you mean 'last_number'?"),
    "a rule without a tuple": ('("last_number",)', '"last_number"', "are 'last_number'. Give a tuple such as ('last_number',)."),
    "a default of another type": ("(3, 4)", "3", "The default of `difficulty` in the class Largest cannot be 3: write a list"),
}  # fmt: skip
"""What is written in the environment that `kapelle new` writes, in place of what, and what is said of it."""


@pytest.mark.sample(3)
@pytest.mark.parametrize("wrong", QUESTIONS)
def test_a_mistake_in_an_environment_of_questions_is_one_sentence(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new, why = QUESTIONS[wrong]
    text = skeleton("environment", "largest")["largest.py"]
    assert old in text
    monkeypatch.chdir(tmp_path)
    Path("largest.py").write_text(text.replace(old, new), encoding="utf-8")
    assert why in refused(["validate", "largest.py:Largest"], capsys)
