"""A user's own files beside a workflow file: environment classes, and functions around nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.workflows.stage import play
from tests.workflows.test_dag_turns import FILE, in_turn, sums, written

from kapelle import Trainer
from kapelle.errors import ConfigError
from kapelle.settings.schema import RunConfig
from kapelle.setup.recipe import load_recipe, resolve
from kapelle.types import Episode

SIIRLS = '''
class Judge:
    """Pays a tenth for each turn, and asks for a longer answer."""

    def __init__(self):
        self.turns = 0

    def reset(self):
        pass

    async def step(self, actions, ground_truth):
        self.turns += 1
        last = actions[-1]
        return [f"{text} [turn {self.turns}, {ground_truth}]" for text in actions], 0.1 * len(actions), "long" in last
'''

OURS = """
from collections.abc import Mapping, Sequence
from typing import Literal

from kapelle import Answerable, Settings, Outcome, Task


class CountState:
    def __init__(self, agents):
        self.agents, self.said = tuple(agents), []

    def observe(self, agent):
        return f"{agent} sees {len(self.said)}"

    def movers(self):
        return () if len(self.said) == 2 else self.agents

    async def step(self, actions, final=None):
        self.said.append(final)
        return {agent: 0.25 for agent in actions}

    def outcome(self):
        return Outcome({}, 1.0, {"said": self.said})

    async def close(self):
        pass


class Count(Settings, Answerable):
    name: Literal["count:Count"] = "count:Count"
    size_: int = 3

    @property
    def reward_range(self) -> tuple[float, float]:
        return (0.0, 1.0)

    @property
    def sources(self) -> Mapping[str, str]:
        return {"train": "numbers", "test": "others"}

    def check(self, agents: Sequence[str]) -> None: ...

    def size(self, split) -> int:
        return self.size_

    def task(self, split, index) -> Task:
        return Task(f"{split}-{index}", f"{split} {index}")

    def start(self, task, agents, seed) -> CountState:
        return CountState(agents)

    def extract(self, text):
        return text or None


NUMBER = 3


class Nothing:
    pass


class Static:
    def step(self, text):
        return text, 0.0, True


class Dear:
    def __init__(self, price):
        pass

    def step(self, actions, ground_truth):
        return [], 0.0, True
"""

CHAT = """
from string import Template


def pre_process(tokenizer, prompt_id, obs, **kwargs):
    words = Template(kwargs.get("pre_chat_template", "")).substitute(prompt=tokenizer.decode(prompt_id))
    said = [{"role": "system", "content": ""}, {"role": "user", "content": words}]
    return tokenizer.apply_chat_template(said, tokenize=True, add_generation_prompt=True, add_special_tokens=False)


def post_process(tokenizer, prompt_id, response_id, **kwargs):
    return prompt_id + tokenizer.encode(kwargs.get("post_chat_template", None)) + response_id
"""
"""What siiRL's public `process.py` does, with the same calls of the tokeniser."""


def laid(tmp_path: Path, file: dict[str, Any], **recipe: Any) -> RunConfig:
    recipe = {"environment": sums(tmp_path), "algorithm": {"name": "marft"}, **recipe}
    name, over = written(tmp_path, file, recipe)
    return load_recipe(name, [over]).config


def with_class(name: str, **top: Any) -> dict[str, Any]:
    file: dict[str, Any] = yaml.safe_load(FILE.replace("config/math_env.py:MathEnv", name))
    return {**file, **top}


async def episode_of(config: RunConfig, *answers: str) -> Episode:
    environment, workflow = config.environment, config.workflow
    agents = ("reasoner", "actor")
    environment.check(agents)
    scripts: dict[str, Any] = {"reasoner": in_turn("p", "q", "r"), "actor": in_turn(*answers)}
    task = environment.task("train", 0)
    [episode] = await play(environment, workflow, agents, scripts, task)
    return episode


async def test_a_siirl_class_beside_the_file_responds_to_every_turn(tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(SIIRLS)
    config = laid(tmp_path, with_class("judge.py:Judge"))
    episode = await episode_of(config, "#### 1", "long #### 132", "never")
    assert episode.error is None
    asked = "What is 47 + 85?"
    first = f"{asked}\n\nrollout_reasoner: p"
    answer = f"{first}\n\nrollout_actor: #### 1"
    assert [turn.new_messages[-1].content for turn in episode.turns] == [
        asked,
        first,
        f"{answer} [turn 1, 132]",
        f"{answer} [turn 1, 132]\n\nrollout_reasoner: q",
    ], "what the class shows begins the next turn, alone: it was handed the whole history"
    assert [turn.reward for turn in episode.turns] == [0.0, 0.2, 0.0, 0.2], (
        "paid turn by turn, to who acts last"
    )
    assert (episode.rewards, episode.success, episode.info["turns_answered"]) == ({}, 1.0, 2)
    assert resolve(yaml.safe_load(yaml.safe_dump(config.model_dump(mode="json")))) == config


@pytest.mark.parametrize(
    "reset",
    [
        "def reset(self):\n        return 'You have three turns.'",
        "async def reset(self):\n        await __import__('asyncio').sleep(0)\n        return ['You have three turns.'] * 2",
        "def reset(self):\n        return 'You have three turns.', {'seed': 1}",
    ],
)
async def test_reset_is_called_and_its_observation_is_in_the_first_prompt(tmp_path: Path, reset: str) -> None:
    (tmp_path / "judge.py").write_text(SIIRLS.replace("def reset(self):\n        pass", reset))
    config = laid(tmp_path, with_class("judge.py:Judge"))
    episode = await episode_of(config, "#### 1", "long #### 132", "never")
    assert episode.error is None
    new_messages = [turn.new_messages[-1].content for turn in episode.turns]
    assert new_messages[0] == "What is 47 + 85?\n\nYou have three turns."
    assert new_messages[1] == f"{new_messages[0]}\n\nrollout_reasoner: p"
    assert new_messages[2] == f"{new_messages[1]}\n\nrollout_actor: #### 1 [turn 1, 132]", (
        "later only what `step` showed is heard"
    )


def test_a_reset_with_unknown_arguments_raises_an_error_before_a_model_loads(tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(SIIRLS.replace("def reset(self)", "def reset(self, board)"))
    config = laid(tmp_path, with_class("judge.py:Judge"))
    with pytest.raises(ConfigError, match="missing a required argument: 'board'"):
        config.environment.check(["reasoner", "actor"])


def test_what_is_set_of_the_environment_is_set_of_its_questions(tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(SIIRLS)
    files = written(
        tmp_path,
        with_class("judge.py:Judge"),
        {"environment": {"name": "math"}, "algorithm": {"name": "cory", "base": {"name": "grpo"}}},
    )
    settings = ["environment.path=here", "environment.reward_range=[0, 3]", "algorithm.group_size=5"]
    config: Any = load_recipe(files[0], [files[1]], settings).config
    assert (config.environment.questions.path, config.environment.reward_range) == ("here", (0.0, 3.0))
    assert config.algorithm.base.group_size == 5
    assert config.algorithm.base.order.interval == 1


async def test_an_environment_of_kapelles_own_form_from_a_file_for_two_agents(tmp_path: Path) -> None:
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "count.py").write_text(OURS)
    config = laid(tmp_path, with_class("env/count.py:Count"))
    assert config.environment.name == f"{tmp_path}/env/count.py:Count"
    episode = await episode_of(config, "one", "two", "never")
    assert episode.error is None
    assert (len(episode.turns), episode.info["said"]) == (4, ["one", "two"])
    assert [turn.reward for turn in episode.by("actor")] == [0.25, 0.25]
    assert resolve(yaml.safe_load(yaml.safe_dump(config.model_dump(mode="json")))) == config


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return actions, 1.0", "Return `next_obs, reward, should_stop`"),
        ("return actions[:1], 1.0, False", "list of"),
        ("return actions, float('nan'), False", "not a finite number"),
        ("return actions, None, False", "not a finite number"),
    ],
)
async def test_an_invalid_response_of_a_class_fails_the_episode_with_the_reason(
    tmp_path: Path, body: str, says: str
) -> None:
    (tmp_path / "bad.py").write_text(
        f"class Bad:\n    def step(self, actions, ground_truth):\n        {body}\n"
    )
    episode = await episode_of(laid(tmp_path, with_class("bad.py:Bad")), "a", "b", "c")
    assert says in str(episode.error)


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("gone.py:Judge", "env_path: gone.py"),
        ("ours.py:Jude", "has no 'Jude'"),
        ("ours.py:NUMBER", "is int, not a class"),
        ("ours.py:Nothing", r"has neither `step\(self, actions, ground_truth\)`"),
        ("broken.py:Judge", "cannot be imported: NameError"),
    ],
)
def test_an_unusable_class_raises_an_error_with_its_name(tmp_path: Path, path: str, says: str) -> None:
    (tmp_path / "ours.py").write_text(OURS)
    (tmp_path / "broken.py").write_text("class Judge(Missing): ...")
    with pytest.raises(ConfigError, match=says):
        laid(tmp_path, with_class(path))


@pytest.mark.parametrize(
    ("name", "says"),
    [("Static", "wrong arguments"), ("Dear", "cannot be constructed: TypeError")],
)
def test_a_class_of_another_form_raises_an_error_before_a_model_loads(
    tmp_path: Path, name: str, says: str
) -> None:
    (tmp_path / "ours.py").write_text(OURS)
    with pytest.raises(ConfigError, match=says):
        laid(tmp_path, with_class(f"ours.py:{name}")).environment.check(["a"])


def test_a_class_without_observations_raises_an_error(tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(SIIRLS)
    file = with_class("judge.py:Judge")
    file["nodes"][1]["agent_options"]["obs_with_env"] = False
    with pytest.raises(ConfigError, match="obs_with_env: true"):
        laid(tmp_path, file)
    file = with_class("judge.py:Judge")
    file["nodes"][0]["agent_options"]["env_path"] = file["nodes"][1]["agent_options"].pop("env_path")
    with pytest.raises(ConfigError, match="to 'rollout_actor'"):
        laid(tmp_path, file)


def chat(
    tmp_path: Path, process: str = CHAT, where: str = "config/process.py", **post: Any
) -> dict[str, Any]:
    """Return the file with siiRL's processing on both nodes, in a folder beside it."""
    (tmp_path / where).parent.mkdir(exist_ok=True, parents=True)
    (tmp_path / where).write_text(process)
    file: dict[str, Any] = yaml.safe_load(FILE)
    for number, role in enumerate(("reasoner", "actor")):
        file["nodes"][number]["agent_options"] |= {
            "process_path": where,
            "pre_process_kwargs": {"pre_chat_template": f"<|im_start|>{role}, read: ${{prompt}}"},
            "post_process_kwargs": {"post_chat_template": f" <|im_start|>{role}: ", **post},
        }
    return file


@pytest.mark.parametrize("where", ["process.py", "examples/experimental/marft/config/process.py"])
async def test_the_public_process_file_runs_as_it_is(tmp_path: Path, where: str) -> None:
    config = laid(tmp_path, chat(tmp_path, where=where))
    episode = await episode_of(config, "#### 1", "#### 132", "never")
    assert episode.error is None
    start, one = "What is 47 + 85?", "What is 47 + 85? <|im_start|>reasoner: p"
    two = f"{one} <|im_start|>actor: #### 1\n\nThis answer is wrong."
    assert [[(m.role, m.content) for m in turn.new_messages] for turn in episode.turns] == [
        [("system", ""), ("user", f"<|im_start|>reasoner, read: {start}")],
        [("system", ""), ("user", f"<|im_start|>actor, read: {one}")],
        [("system", ""), ("user", f"<|im_start|>reasoner, read: {two}")],
        [("system", ""), ("user", f"<|im_start|>actor, read: {two} <|im_start|>reasoner: q")],
    ]
    assert episode.rewards == {"actor": 1.0}


@pytest.mark.parametrize(
    ("change", "post", "says"),
    [
        (
            ("tokenize=True", "tokenize=False"),
            {},
            "`pre_process` of .* returned str, not a list",
        ),
        (("tokenizer.decode(prompt_id)", "tokenizer.eos_tokn"), {}, "has no attribute '?eos_tokn"),
        (
            ("return tokenizer.apply", "return [len(tokenizer)] + tokenizer.apply"),
            {},
            "returned the token id 262",
        ),
        (("prompt=tokenizer", "promt=tokenizer"), {}, "KeyError: 'prompt'"),
        (("", ""), {"post_chat_template": None}, "NoneType"),
        (
            ("(said, tokenize", "(said + [3], tokenize"),
            {},
            "`pre_process` of .* fails with the `pre_process_kwargs`",
        ),
    ],
)
def test_a_failing_process_file_raises_an_error_before_a_model_loads(
    tmp_path: Path, change: tuple[str, str], post: dict[str, Any], says: str
) -> None:
    config = laid(
        tmp_path, chat(tmp_path, CHAT.replace(*change), **post), model={"path": str(tmp_path / "no_model")}
    )
    with pytest.raises(ConfigError, match=says):
        Trainer(config)
