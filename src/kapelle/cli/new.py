"""`kapelle new`: a folder with a piece that works, its test, and a recipe that trains with it."""

from __future__ import annotations

import argparse
import importlib.util
import keyword
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from kapelle.cli.arguments import FRAMEWORKS, KINDS
from kapelle.errors import ConfigError, OutputError, did_you_mean
from kapelle.runtime.console import say

# -------- The files that `kapelle new` writes: `NAME_` stands for the name, `CLASS_` for the class

ENVIRONMENT = '''"""Questions with one answer: how a problem is drawn, and what kind of answer counts."""

import random

from kapelle.environments import Answers, Difficulty, Generated, Problem, numbers


class CLASS_(Generated):
    """Which of these digits is the largest? `difficulty` is how many there are."""

    name: str = "PIECE_:CLASS_"
    difficulty: Difficulty = (3, 4)
    seed: int = 0

    @property
    def answers(self) -> Answers:
        return numbers(("last_number",))

    def problem(self, draw: random.Random, level: int) -> Problem:
        digits = [draw.randint(0, 9) for _ in range(level)]
        question = " ".join(map(str, digits))
        return Problem(question, {"answer": max(digits)}, key=question)
'''

ENVIRONMENT_TEST = '''"""What the environment promises holds, and a team can be trained on it."""

import asyncio

import kapelle
from kapelle.algorithms import GRPO
from kapelle.rollout.conformance import conform
from kapelle.workflows import Solo

from IMPORT_ import CLASS_


def test_it_is_fit_for_training() -> None:
    findings = asyncio.run(conform(CLASS_()))
    assert [finding for finding in findings if finding.status == "failed"] == []


def test_the_largest_digit_is_right() -> None:
    environment = CLASS_()
    for index in range(20):
        task = environment.task("train", index)
        assert task.data["answer"] == max(map(int, task.question.split()))


def test_a_step_of_training() -> None:
    trainer = kapelle.Trainer(
        model={"embedded": {"hidden": 16, "layers": 1, "intermediate": 32}},
        team={"agents": 1, "sampling": {"max_tokens": 2}},
        environment=CLASS_(),
        workflow=Solo(),
        algorithm=GRPO(group_size=2),
        training={"tasks_per_step": 2},
    )
    with trainer:
        [step] = trainer.steps(1)
    assert step.metrics["failed_episodes"] == 0.0
'''

RECIPE = """name: NAME_
team: {agents: 1, sharing: lora, sampling: {max_tokens: 2}}
environment: {name: "PIECE_:CLASS_"}
workflow: {name: solo}
algorithm: {name: grpo, group_size: 8}
warmup: {steps: 5, demonstrations: 500}   # not to the end: something is left to learn
optimizer: {lr: 1.0e-3}       # of a pretrained model (model.path) rather 1.0e-5, and no warmup
training: {steps: 20, tasks_per_step: 8}
evaluation: {problems: 50}
"""

WORKFLOW = '''"""Who speaks when, who reads what, and which text is the team's answer."""

from collections.abc import Sequence
from typing import Literal

import kapelle
from kapelle.workflow import Scene, need_answers


class CLASS_(kapelle.Settings):
    """The first agent drafts, the second criticises, the first answers."""

    name: Literal["NAME_.py:CLASS_"] = "NAME_.py:CLASS_"

    def check(
        self, agents: Sequence[kapelle.Agent], environment: kapelle.Environment
    ) -> None:
        need_answers(self.name, "ends in one answer", environment)
        if len(agents) != 2:
            raise kapelle.ConfigError(f"It takes two agents, not {len(agents)}.")

    async def run(self, scene: Scene) -> None:
        writer, critic = scene.names
        question = scene.observe(writer)
        draft = await scene[writer].say(question)
        notes = await scene[critic].say(f"{question}\\n\\n{writer}: {draft.text}")
        answer = await scene[writer].say(notes.text)
        await scene.step({writer: answer.text}, final=answer.text)
'''

WORKFLOW_TEST = '''"""Who reads whom, and which text counts: played from a script, without a model."""

import asyncio

import kapelle
import pytest
from kapelle.engines.rollout.protocol import Request
from kapelle.engines.rollout.scripted import ScriptedEngine
from kapelle.environments import Arithmetic
from kapelle.rollout.episodes import rollout
from kapelle.rollout.play import Play

from NAME_ import CLASS_

SAYS = {"ann": iter(["3", "4"]), "bob": iter(["one more"])}


def speak(request: Request) -> str:
    return next(SAYS[request.agent])


def team(*names: str) -> kapelle.Team:
    agents = tuple(kapelle.Agent(name) for name in names)
    policies = {name: kapelle.Policy(name, base="", trained=False) for name in names}
    return kapelle.Team(agents, policies, {name: name for name in names})


def test_the_last_word_of_the_writer_counts() -> None:
    task = kapelle.Task("2+2", "2+2", {"answer": 4})
    engine = ScriptedEngine(dict.fromkeys(SAYS, speak))
    play = Play(team("ann", "bob"), Arithmetic(), CLASS_(), engine)
    [group] = asyncio.run(rollout(play, [task], samples=1, seed=0))
    [episode] = group.episodes
    assert [turn.agent for turn in episode.turns] == ["ann", "bob", "ann"]
    assert episode.turns[1].heard[0].content == "2+2\\n\\nann: 3"
    assert episode.success == 1.0


def test_one_agent_alone_is_refused() -> None:
    with pytest.raises(kapelle.ConfigError, match="It takes two agents"):
        CLASS_().check(team("ann").agents, Arithmetic())
'''

WORKFLOW_RECIPE = """name: NAME_
team: {agents: 2, sharing: lora, sampling: {max_tokens: 4}}
environment: {name: arithmetic, digits: 1}
workflow: {name: "NAME_.py:CLASS_"}
algorithm: {name: grpo, group_size: 8}
warmup: {steps: 60, demonstrations: 500}
optimizer: {lr: 1.0e-3}
training: {steps: 20, tasks_per_step: 8}
evaluation: {problems: 50}
"""

ALGORITHM = '''"""What a turn is worth: an advantage for every token that is trained on.

Here the return less the mean of its group, not divided by anything (Dr.GRPO, arXiv 2503.20783).
"""

from collections.abc import Mapping, Sequence
from typing import Literal

from kapelle import Algorithm, Credit, Group
from kapelle.algorithms.shared.groups import CENTRED, Earlier, by_agent, compare
from kapelle.algorithms.shared.monte_carlo import MonteCarlo, spread
from kapelle.rows import Signals, TurnKey


class CLASS_(MonteCarlo):
    """Settings: those of every algorithm without a critic, and your own."""

    name: Literal["NAME_.py:CLASS_"] = "NAME_.py:CLASS_"

    def build(self) -> Algorithm:
        return self.row(self.name, judge=self.credit)

    def credit(
        self, groups: Sequence[Group], signals: Signals, earlier: Earlier | None = None
    ) -> Mapping[TurnKey, Credit]:
        attempts = by_agent(groups, self.rewards(groups, signals))
        return spread(self, groups, compare(attempts, CENTRED, earlier))
'''

ALGORITHM_TEST = '''"""Numbers by hand, and a step of training."""

import kapelle
from kapelle.environments import Arithmetic
from kapelle.rows import Signals, TurnKey
from kapelle.workflows import Solo

from NAME_ import CLASS_


def episode(reward: float) -> kapelle.Episode:
    task = kapelle.Task("1+1", "1+1")
    turn = kapelle.Turn(
        agent="ann",
        policy="ann",
        version=0,
        weights_hash="",
        index=0,
        seen=0,
        prompt_ids=(1,),
        completion_ids=(2, 3),
        logprobs=(-1.0, -1.0),
        finish_reason="stop",
        text="2",
    )
    return kapelle.Episode(task, 0, ("ann",), (turn,), {"ann": reward})


def test_an_advantage_is_the_return_less_the_groups_mean() -> None:
    episodes = (episode(1.0), episode(0.0), episode(0.5))
    group = kapelle.Group(episodes[0].task, episodes)
    credit = CLASS_().credit([group], Signals())
    assert credit[TurnKey(0, 0, 0)].advantage_T.tolist() == [0.5, 0.5]
    assert credit[TurnKey(0, 1, 0)].advantage_T.tolist() == [-0.5, -0.5]
    assert credit[TurnKey(0, 2, 0)].advantage_T.tolist() == [0.0, 0.0]


def test_a_step_of_training() -> None:
    trainer = kapelle.Trainer(
        model={"embedded": {"hidden": 16, "layers": 1, "intermediate": 32}},
        team={"agents": 1, "sampling": {"max_tokens": 2}},
        environment=Arithmetic(digits=1),
        workflow=Solo(),
        algorithm=CLASS_(group_size=2),
        training={"tasks_per_step": 2},
    )
    with trainer:
        [step] = trainer.steps(1)
    assert "advantage/agent_0" in step.metrics
'''

ALGORITHM_RECIPE = """name: NAME_
team: {agents: 1, sharing: lora, sampling: {max_tokens: 4}}
environment: {name: arithmetic, digits: 1}
workflow: {name: solo}
algorithm: {name: "NAME_.py:CLASS_", group_size: 8}
warmup: {steps: 60, demonstrations: 500}
optimizer: {lr: 1.0e-3}
training: {steps: 20, tasks_per_step: 8}
evaluation: {problems: 50}
"""

PYPROJECT = """[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "NAME_"
version = "0.1.0"
requires-python = ">=3.11"
dependencies = ["kapelle"]

[project.entry-points."kapelle.environments"]
NAME_ = "NAME_.environment:CLASS_"

[tool.setuptools]
packages = ["NAME_"]

[tool.pytest.ini_options]
pythonpath = ["."]
testpaths = ["tests"]
"""

README = """# NAME_

An environment for kapelle, a recipe that trains on it, and its test.

```sh
pip install pytest                                # if it is not there yet
python -m pytest
kapelle validate NAME_/environment.py:CLASS_      # is it fit for training?
kapelle train NAME_.yaml                          # metrics, episodes and checkpoints go to runs/
```

After `pip install -e .` recipes anywhere on this machine name it `NAME_`.
"""

APP_RECIPE = """name: NAME_
description: Two agents of a program, which kapelle starts once for each episode.
model: {embedded: {hidden: 64, layers: 2, heads: 2, kv_heads: 1, intermediate: 128, context: 4096}}
team:
  agents: [{name: planner}, {name: solver}]   # the program calls them team/planner and team/solver
  sharing: lora
  lora: {rank: 8, alpha: 16.0}
  sampling: {max_tokens: 96}
environment:
  name: external
  command: [python, NAME_.py]
  teacher: "teacher.py:say"   # what a model that has never spoken learns to say first; a pretrained one needs no teacher and no warmup
  port: 0
  tasks: 24
workflow: {name: external}
warmup: {WARMUP_, demonstrations: 24}
algorithm: {name: m_grpo, group_size: 8}
optimizer: {lr: 1.0e-3}       # of a pretrained model (model.path) rather 1.0e-5
training: {steps: 10, tasks_per_step: 4}
evaluation: {problems: 4, before_and_after: false}
"""

APP_TEST = '''"""Episodes of the program end with a reward, from which its agents learn."""

import sys

import kapelle
import pytest


def test_a_step_of_training() -> None:
    pytest.importorskip("MODULE_", reason="install PACKAGES_")
    command = f"environment.command=[{sys.executable}, NAME_.py]"
    few = ("training.tasks_per_step=1", "algorithm.group_size=2")
    with kapelle.Trainer.from_recipe("NAME_.yaml", command, *few) as trainer:
        [step] = trainer.steps(1)
    assert step.metrics["failed_episodes"] == 0.0
    assert "reward/planner" in step.metrics
'''

PROGRAMS: Mapping[str, tuple[str, str]] = {
    "openai": ("openai", "openai"),
    "openai_agents": ("openai-agents", "agents"),
    "langgraph": ("langgraph langchain-openai openai", "langgraph"),
    "pydantic_ai": ("'pydantic-ai-slim[openai]'", "pydantic_ai"),
    "autogen": ("autogen-agentchat 'autogen-ext[openai]'", "autogen_agentchat"),
    "smolagents": ("'smolagents[openai]'", "smolagents"),
    "crewai": ("crewai", "crewai"),
}
"""Framework → what to install for it, and the module that it brings."""

WARMUPS: Mapping[str, str] = dict.fromkeys(("pydantic_ai", "smolagents"), "steps: 200, batch: 24")
"""Framework → its warm-up, where it differs from `examples/apps/recipe.yaml`, as the command in its program says: as many turns, in smaller steps."""


def app(framework: str) -> Mapping[str, str]:
    """Return the files of a program in a framework, path → text; those of `examples/apps` by other names."""
    here = resources.files("kapelle.cli") / "programs"
    packages, module = PROGRAMS[framework]
    test = APP_TEST.replace("MODULE_", module).replace("PACKAGES_", packages.replace("'", ""))
    return {
        "NAME_.py": (here / f"{framework}.txt").read_text("utf-8"),
        "teacher.py": (here / "teacher.txt").read_text("utf-8"),
        "test_NAME_.py": test,
        "NAME_.yaml": APP_RECIPE.replace("WARMUP_", WARMUPS.get(framework, "steps: 100")),
    }


SKELETONS: Mapping[str, Mapping[str, str]] = {
    "environment": {
        "NAME_.py": ENVIRONMENT.replace("PIECE_", "NAME_.py"),
        "test_NAME_.py": ENVIRONMENT_TEST.replace("IMPORT_", "NAME_"),
        "NAME_.yaml": RECIPE.replace("PIECE_", "NAME_.py"),
    },
    "workflow": {"NAME_.py": WORKFLOW, "test_NAME_.py": WORKFLOW_TEST, "NAME_.yaml": WORKFLOW_RECIPE},
    "algorithm": {"NAME_.py": ALGORITHM, "test_NAME_.py": ALGORITHM_TEST, "NAME_.yaml": ALGORITHM_RECIPE},
    "project": {
        "README.md": README,
        "pyproject.toml": PYPROJECT,
        "NAME_/__init__.py": "",
        "NAME_/environment.py": ENVIRONMENT.replace("PIECE_", "NAME_/environment.py"),
        "tests/test_environment.py": ENVIRONMENT_TEST.replace("IMPORT_", "NAME_.environment"),
        "NAME_.yaml": RECIPE.replace("PIECE_", "NAME_/environment.py"),
    },
}
"""Kind → path → text."""


_WORD = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


def run(arguments: argparse.Namespace) -> int:
    """Write the files and say what to do with them."""
    kind, name = arguments.kind, arguments.name
    if kind not in KINDS:
        raise ConfigError(f"`kapelle new` cannot create '{kind}'.{did_you_mean(kind, KINDS)}")
    framework = arguments.framework
    if framework is not None and kind != "app":
        raise ConfigError(f"--framework is for `kapelle new app`; '{kind}' has none. Leave it out.")
    if framework is not None and framework not in FRAMEWORKS:
        raise ConfigError(
            f"`kapelle new app` knows no framework '{framework}'.{did_you_mean(framework, FRAMEWORKS)}"
        )
    framework = framework or FRAMEWORKS[0]
    files = skeleton(kind, name, framework)
    folder = Path(name)
    write(folder, files)
    for file in files:
        say(f"{folder / file}")
    piece = {
        "environment": f"{name}.py:{class_name(name)}",
        "project": f"{name}/environment.py:{class_name(name)}",
    }
    say("")
    say(f"cd {name}")
    if importlib.util.find_spec("pytest") is None:
        say("pip install pytest                     # for the test; it is not installed yet")
    if kind == "app":
        say(f"pip install {PROGRAMS[framework][0]} 'kapelle[serve]'")
    say("python -m pytest                       # its test passes")
    if kind in piece:
        say(f"kapelle validate {piece[kind]}     # is it fit for training?")
    say(f"kapelle validate {name}.yaml")
    say(f"kapelle train {name}.yaml")
    return 0


def skeleton(kind: str, name: str, framework: str = FRAMEWORKS[0]) -> Mapping[str, str]:
    """Return the files of a kind of piece, path → text; ConfigError for a name that cannot be used."""
    made = class_name(name) if _WORD.fullmatch(name) else ""
    if not made:
        proposed = "_".join(re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+", name)).lower()
        hint = f" '{proposed}' would do." if _WORD.fullmatch(proposed) else ""
        raise ConfigError(
            f"'{name}' cannot be a module's name. Use small letters, digits and _, a letter first.{hint}"
        )
    files = app(framework) if kind == "app" else SKELETONS[kind]
    words = set(re.findall(r"\w+", " ".join(files.values())))
    if keyword.iskeyword(name) or keyword.issoftkeyword(name) or made in words or _taken(name):
        raise ConfigError(
            f"'{name}' is already a name in Python, kapelle or an installed package. Choose another one."
        )
    return {_named(file, name, made): _named(text, name, made) for file, text in files.items()}


def _taken(name: str) -> bool:
    found = importlib.util.find_spec(name)
    return name == "tests" or (found is not None and (found.origin is not None or name == "kapelle"))


def class_name(name: str) -> str:
    """Return the class of a name: `word_count` → `WordCount`."""
    return "".join(part.capitalize() for part in name.split("_"))


def _named(text: str, name: str, made: str) -> str:
    return text.replace("NAME_", name).replace("CLASS_", made)


def write(folder: Path, files: Mapping[str, str]) -> None:
    """Write files into a new folder; OutputError if it exists already or cannot be written."""
    try:
        folder.mkdir()
        for file, text in files.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(text, encoding="utf-8")
    except FileExistsError:
        raise OutputError(
            f"There is a '{folder}' here already, which is kept as it is. Choose another name or folder."
        ) from None
    except OSError as error:
        raise OutputError(f"'{folder}' cannot be written: {error.strerror}.") from error
