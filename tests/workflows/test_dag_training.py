"""Training with siiRL's workflow files: only the policies of the current train cycle change."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.tiny import frozen_copy, learners_of, same_bits

from kapelle import Trainer
from kapelle.algorithms import BUILTIN as ALGORITHMS
from kapelle.runs.reader import read_metrics
from kapelle.settings.schema import RunConfig
from kapelle.setup.recipe import lay_over, load_recipe
from kapelle.workflows.dag_file import read_workflow

NEED: dict[str, dict[str, Any]] = {
    "cory": {"swap_every": 0, "base": {"name": "rloo", "group_size": 4}},
    "grpo": {"group_size": 4, "order": {"name": "probability", "probability": 0.3}},
    "qmix": {"group_size": 4, "credit_warmup_steps": 0, "fit": {"min_fill": 2, "updates": 2}},
    "vdn": {"group_size": 4, "credit_warmup_steps": 0, "fit": {"min_fill": 2, "updates": 2}},
}
"""What an algorithm needs said beside its name; the others play groups of four."""
PLAYING = [
    name for name in ALGORITHMS if name not in {"sft", "distill", "self_distill", "dpo", "verifier", "rnad"}
]
"""Those that siiRL's files, in which a team is paid together, can name: `rnad` is for agents that are paid each for itself."""


BASE: dict[str, Any] = {
    "model": {
        "embedded": {
            "hidden": 16,
            "layers": 1,
            "heads": 2,
            "kv_heads": 1,
            "intermediate": 32,
            "context": 1024,
        }
    },
    "optimizer": {"lr": 1e-2},
    "evaluation": {"before_and_after": False},
    "checkpoint": {"every": 10},
    "training": {"steps": 3, "tasks_per_step": 4},
}


def siirl(agents: int = 2, cycle: int | None = 1, shared: int | None = None, **top: Any) -> dict[str, Any]:
    """A file in siiRL's form: a chain of agents, each with a node that trains it."""
    nodes: list[dict[str, Any]] = []
    obs = top.pop("obs", True)
    for k in range(agents):
        options: dict[str, Any] = {"obs_with_env": obs, "pre_process_kwargs": {}}
        node: dict[str, Any] = {"node_id": f"rollout_{'abc'[k]}", "node_type": "MODEL_INFERENCE"}
        node |= {"node_role": "ROLLOUT", "agent_group": k, "agent_options": options}
        node["dependencies"] = [f"rollout_{'abc'[k - 1]}"] if k else []
        nodes.append(node)
    for k in range(agents):
        critic: dict[str, Any] = {} if shared is None else {"share_instance": shared}
        nodes.append(
            {"node_id": f"value_{k}", "node_role": "CRITIC", "agent_group": k, "agent_options": critic}
        )
        options = {} if cycle is None else {"train_cycle": cycle}
        nodes.append(
            {"node_id": f"train_{k}", "node_role": "ACTOR", "agent_group": k, "agent_options": options}
        )
    return {"nodes": nodes, **top}


def config(algorithm: str, file: Mapping[str, Any]) -> RunConfig:
    """Lay a file over a recipe of noise that is paid for."""
    recipe = {
        **BASE,
        "environment": {"name": "tests.support.plugins:Digest"},
        "workflow": {"name": "debate", "score_rounds": True}
        if algorithm in ("maporl", "mada_rl")
        else {"name": "chain"},
        "team": {"sharing": "shared" if algorithm == "ppo" else "lora", "sampling": {"max_tokens": 3}},
        "algorithm": {"name": algorithm, **NEED.get(algorithm, {"group_size": 4})},
    }
    return lay_over([("recipe", recipe), ("file.yaml", read_workflow(file, "file.yaml").sections)]).config


def moved(trainer: Trainer, steps: int) -> list[list[str]]:
    """Return which agents' weights changed at each step; all others' are the same bitwise."""
    found = []
    learners = {name: learners_of(trainer.engine)[name] for name in trainer.team.trained}
    before = {name: frozen_copy(learner.parameters) for name, learner in learners.items()}
    for _ in trainer.steps(steps):
        after = {name: frozen_copy(learner.parameters) for name, learner in learners.items()}
        found.append([name for name in after if not same_bits(before[name], after[name])])
        before = after
    return found


def test_actors_with_unequal_train_cycles_move_as_in_siirl_also_after_a_stop(tmp_path: Path) -> None:
    file = siirl(agents=2, cycle=None)
    for node in file["nodes"]:
        if node["node_role"] == "ACTOR":
            node["agent_options"] = {"train_cycle": 2 + node["agent_group"]}
    # Agent k of n moves at siiRL's step s, from 0, where s // its cycle % n == k.
    expected = [[name for k, name in enumerate("ab") if s // (2 + k) % 2 == k] for s in range(7)]
    assert expected == [["a"], ["a"], [], ["b"], ["a", "b"], ["a", "b"], []]
    settings = config("marft", file).model_copy(
        update={
            "training": RunConfig.model_fields["training"].default.model_copy(
                update={"steps": 7, "tasks_per_step": 2}
            )
        }
    )
    with Trainer(settings) as whole:
        assert moved(whole, 7) == expected
        last = {name: frozen_copy(each.parameters) for name, each in learners_of(whole.engine).items()}
    with Trainer(settings, run_dir=tmp_path / "run") as first:
        assert moved(first, 3) == expected[:3]
        first.save()
    with Trainer(settings, run_dir=tmp_path / "run", resume=True) as second:
        assert moved(second, 4) == expected[3:]
        assert same_bits(
            last, {name: frozen_copy(each.parameters) for name, each in learners_of(second.engine).items()}
        )


@pytest.mark.sample(15)
@pytest.mark.slow
@pytest.mark.parametrize("name", PLAYING)
def test_every_rollout_algorithm_supports_train_cycle(name: str) -> None:
    with Trainer(config(name, siirl(cycle=1, share_reward_in_agent=True))) as trainer:
        # PPO trains one policy, whose turn it always is.
        assert moved(trainer, 3) == ([["shared"]] * 3 if name == "ppo" else [["a"], ["b"], ["a"]])


NOISE = """
class Noise:
    async def step(self, actions, ground_truth):
        paid = sum(map(len, actions)) + sum(actions[-1].encode())
        return [f"{text} ..." for text in actions], (paid % 5) / 12, paid % 7 == 0
"""
"""Pays every turn of noise something or other, a third at most, and ends some episodes early."""


def three_turns(tmp_path: Path, env_path: str, file: dict[str, Any] | None = None) -> RunConfig:
    """Lay a file of three turns over a recipe of MARFT on `math`; its last agent answers and is answered."""
    (tmp_path / "noise.py").write_text(NOISE)
    file = siirl(cycle=None, shared=0) if file is None else file
    file["max_assistant_turns"] = 3
    speaking = [node for node in file["nodes"] if node["node_role"] == "ROLLOUT"]
    speaking[-1]["agent_options"] |= {"env_path": env_path, "obs_with_env": True}
    for name in ("train", "test"):
        rows = [{"question": f"{name} {k}", "answer": f"#### {k}"} for k in range(6)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "workflow.yaml").write_text(yaml.safe_dump(file))
    recipe = {
        **BASE,
        "environment": {"name": "math", "path": str(tmp_path)},
        "workflow": {"name": "chain"},
        "team": {"sharing": "lora", "sampling": {"max_tokens": 3}},
        "algorithm": {"name": "marft", "group_size": 4},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return load_recipe(str(tmp_path / "recipe.yaml"), [str(tmp_path / "workflow.yaml")]).config


@pytest.mark.long
@pytest.mark.slow
def test_three_turns_are_trained_on_and_a_resumed_run_is_bitwise_identical(tmp_path: Path) -> None:
    settings = three_turns(tmp_path, "noise.py:Noise")
    with Trainer(settings) as whole:
        assert all(moved(whole, 3))
        expected = {
            name: frozen_copy(learner.parameters) for name, learner in learners_of(whole.engine).items()
        }
    with Trainer(settings, run_dir=tmp_path / "run") as first:
        first.train(2)
    with Trainer(settings, run_dir=tmp_path / "run", resume=True) as second:
        second.train()
        reached = {
            name: frozen_copy(learner.parameters) for name, learner in learners_of(second.engine).items()
        }
    assert same_bits(reached, expected)
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [1, 2, 3]


@pytest.mark.slow
def test_use_all_traj_says_whether_earlier_turns_are_trained_on(tmp_path: Path) -> None:
    settings = three_turns(tmp_path, "config/math_env.py:MathEnv")
    last = settings.workflow.model_copy(update={"use_all_traj": False})
    for workflow, trained in ((settings.workflow, [True] * 6), (last, [False] * 4 + [True] * 2)):
        with Trainer(settings.model_copy(update={"workflow": workflow})) as trainer:
            [step] = trainer.steps(1)
        episodes = [episode for group in step.groups for episode in group.episodes]
        assert [[turn.trained for turn in episode.turns] for episode in episodes] == [trained] * len(episodes)
        assert all(episode.error is None for episode in episodes)


OWN = """
from json import dumps
from pathlib import Path

LOG = Path(__file__).with_suffix(".jsonl")


def note(**what):
    with LOG.open("a") as file:
        file.write(dumps(what) + "\\n")


def pre_process(tokenizer, prompt_id, obs, **kwargs):
    ids = [tokenizer.eos_token_id] + tokenizer.encode("asked: ") + prompt_id
    note(kind="pre", given=prompt_id, made=ids)
    return ids


def post_process(tokenizer, prompt_id, response_id, **kwargs):
    note(kind="post", given=prompt_id, response=response_id)
    return prompt_id + tokenizer.encode(" => ") + response_id
"""
"""Functions that write tokens of the model themselves, with no chat template around them."""


def test_process_functions_get_and_write_the_models_own_token_ids(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    file = siirl(cycle=None, shared=0)
    for node in file["nodes"][:2]:
        node["agent_options"] |= {"process_path": "own.py"}
    settings = three_turns(tmp_path, "noise.py:Noise", file)
    trained = settings.training.model_copy(update={"tasks_per_step": 1})
    with Trainer(settings.model_copy(update={"training": trained})) as trainer:
        tokenizer = trainer.models["base"].tokenizer
        (tmp_path / "own.jsonl").unlink()  # what the trial before noted
        [step] = trainer.steps(1)
        assert step.metrics["parity/max"] < 1e-4
    turns = [turn for episode in step.groups[0].episodes for turn in episode.turns]
    noted = [json.loads(line) for line in (tmp_path / "own.jsonl").read_text().splitlines()]
    written = {tuple(each["made"]) for each in noted if each["kind"] == "pre"}
    assert {turn.prompt_ids for turn in turns} == written, (
        "the model reads the ids as they are, without a template"
    )
    assert all(
        ids[0] == tokenizer.eos_token_id and ids[1:8] == tuple(tokenizer.encode("asked: ")) for ids in written
    )
    end = tokenizer.eos_token_id
    sampled = {tuple(each["response"]) for each in noted if each["kind"] == "post"}
    assert sampled == {tuple(k for k in turn.completion_ids if k != end) for turn in turns}
    question = tokenizer.encode(step.groups[0].task.question)
    assert question in [each["given"] for each in noted], "the prompt comes as ids, too"
