"""`kapelle.train`: a model, rows, functions and agents in one call are the run that a `Trainer` of the same settings is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.support.tiny import tiny_model

import kapelle
from kapelle.algorithms import GRPO
from kapelle.cli import main
from kapelle.environments import Rewarded
from kapelle.errors import ConfigError, DataError, TrainingHalted
from kapelle.one_call import Function, Trained
from kapelle.runs.reader import read_config, read_episodes, read_status
from kapelle.runs.summary import own_settings
from kapelle.settings.overlays import parse_yaml
from kapelle.settings.schema import TeamConfig
from kapelle.setup.recipe import load_recipe

ROWS = [{"question": str(k), "answer": "ab"[k % 2]} for k in range(12)]
EMPTY = [*ROWS[:6], {"question": " ", "answer": "a"}]
SMALL: Mapping[str, Any] = {
    "team": {"sampling": {"max_tokens": 2}, "lora": {"rank": 2}},
    "training": {"tasks_per_step": 2},
    "algorithm": GRPO(group_size=2),
    "steps": 1,
}


def vowel(completion: str, answer: str) -> float:
    return float(completion[:1] in "aeiou") + float(completion[:1] == answer)


def length(completion: str) -> int:
    return len(completion)


async def brief(completions: Mapping[str, str]) -> float:
    return -float(sum(map(len, completions.values())))


def train(*given: Any, **options: Any) -> Trained:
    return kapelle.train(tiny_model(), *given, **{"run_dir": None, **SMALL, **options})


def test_a_chain_learns_what_functions_pay_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    agents = {"planner": "Plan {question}", "coder": "{planner}"}
    with train(
        ROWS, [vowel, brief], agents, eval_dataset=0.4, reward_weights=[1, 0.5], run_dir=run_dir
    ) as run:
        assert run.summary.steps == 1
        assert run.summary.before is not None
        assert run.summary.after is not None
        assert run.summary.before.problems == run.summary.after.problems > 0
        episode = next(iter(read_episodes(run_dir, 1, "train")))
        expected = vowel(episode.turns[-1].text, "ab"[int(episode.task.question) % 2]) - 0.5 * sum(
            len(turn.text) for turn in episode.turns
        )
        assert episode.rewards == {"planner": pytest.approx(expected), "coder": pytest.approx(expected)}
        assert [step.number for step in run.trainer.steps(1)] == [2]
    shown = capsys.readouterr().out
    assert "step 1/1" in shown
    assert "unseen problems after step 1: return planner" in shown
    config = parse_yaml(read_config(run_dir))
    assert config["workflow"]["name"] == "chain"
    assert config["environment"]["path"] == "in-memory"
    assert [each["weight"] for each in config["environment"]["rewards"]] == [1.0, 0.5]


def test_each_agent_learns_from_its_own_function_and_nothing_is_evaluated_without_data_for_it(
    tmp_path: Path,
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    each = {"a": lambda agent: 1.0, "b": length}
    run = train(
        str(file),
        each,
        ["a", "b"],
        algorithm="grpo",
        run_dir=tmp_path / "run",
        workflow="parallel",
        observer=Quiet(),
    )
    assert isinstance(run.trainer.config.algorithm, GRPO)
    assert run.trainer.config.algorithm.team_reward == "individual"
    assert (run.summary.before, run.summary.after) == (None, None)
    with pytest.raises(ConfigError, match="no tasks in the split 'test'"):
        run.trainer.evaluate()
    assert read_status(tmp_path / "run").state == "finished"
    run.trainer.close()
    with pytest.raises(
        ConfigError, match="The reward function `lambda` existed only in the memory of the program"
    ):
        kapelle.Trainer.from_run(tmp_path / "run")


class Quiet:
    """An observer of the user's."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first number.
        b: The second one.
    """
    return a * b


@pytest.mark.slow
@pytest.mark.parametrize("tool", [multiply, "tests.training.test_one_call:multiply", lambda a, b: a * b])
def test_tools_and_a_reward_function_of_trl_in_one_call(tool: Any, tmp_path: Path) -> None:
    judged: list[Any] = []
    if callable(tool) and tool is not multiply:
        tool.__annotations__ = {"a": int, "b": int}
        tool.__name__ = "multiply"

    def last_answer(
        prompts: list[Any], completions: list[Any], answer: list[str], **kwargs: Any
    ) -> list[float]:
        judged.append((prompts, completions, answer))
        return [float(len(completion[-1]["content"])) for completion in completions]

    rows = [{"prompt": [{"role": "user", "content": f"{k}*2"}], "answer": str(2 * k)} for k in range(8)]
    options = {**SMALL, "team": {"sampling": {"max_tokens": 2}, "lora": {"rank": 2}}}
    with kapelle.train(
        tiny_model(context=2048),
        rows,
        reward_funcs=[last_answer],
        tools=[tool, {"tool": "calculator"}],
        max_tool_calling_iterations=2,
        run_dir=tmp_path / "run",
        **options,
    ) as run:
        assert run.summary.steps == 1
        [episode, *_] = read_episodes(tmp_path / "run", 1, "train")
        assert "Multiply" in episode.turns[0].new_messages[0].content or tool is not multiply
        assert episode.turns[0].new_messages[0].content.endswith(episode.task.question)
    config = parse_yaml(read_config(tmp_path / "run"))
    assert config["workflow"]["name"] == "tool_use"
    assert config["environment"]["max_turns"] == 3
    assert [each["tool"] for each in config["environment"]["tools"]] == ["calculator", "functions"]
    prompts, completions, answer = judged[0]
    assert prompts[0] == [{"role": "user", "content": f"{int(answer[0]) // 2}*2"}]
    assert completions[0][-1]["role"] == "assistant"


def test_a_function_that_raises_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(TrainingHalted, match=r"The reward function `broken` raised KeyError: 'gone'"):
        train(ROWS, broken, run_dir=tmp_path / "run")
    assert read_status(tmp_path / "run").state == "failed"


def broken(completion: str) -> float:
    return {"there": 1.0}["gone"]


@pytest.mark.parametrize(
    ("given", "options", "said"),
    [
        ((ROWS, vowel, []), {}, "`agents` is empty"),
        ((ROWS, {"a": vowel}, ["a", "b"]), {}, "`reward` has no function for 'b'"),
        (
            (ROWS, [vowel, brief]),
            {"reward_weights": [1]},
            "There are 1 `reward_weights` for 2 reward functions",
        ),
        ((ROWS, [vowel]), {"reward_weights": [float("nan")]}, "Give one finite number for each"),
        ((ROWS, vowel), {"reward_weights": ["1"]}, "Give one finite number for each"),
        (
            (ROWS, vowel, ["a"]),
            {"team": {"agents": [{"name": "b"}]}},
            "`agents` and `team=",
        ),
        ((ROWS, vowel), {"eval_dataset": float("nan")}, "`eval_dataset` is nan. Give a share"),
        ((ROWS[0], vowel), {}, "`dataset` is dict. Give a list of rows"),
        ((ROWS, vowel), {"environment": Rewarded}, "kapelle.Trainer"),
        ((ROWS, lambda anwser: 0.0), {}, "Did you mean 'answer'"),
        ((ROWS, vowel), {"stepz": 3}, "`kapelle.train` has no keyword 'stepz'. Did you mean 'steps'"),
        (
            (ROWS, vowel),
            {"reward_funcs": vowel},
            "`reward_funcs` is read as `reward`, but both are given",
        ),
        ((), {"train_dataset": "nowhere.jsonl", "reward_fn": vowel}, "/.*/nowhere.jsonl does not exist"),
        (
            (ROWS, vowel),
            {"steps": 3, "max_steps": 4},
            "`max_steps: 4` is read as `steps: 4`, and `steps` is 3",
        ),
        (
            (ROWS, vowel),
            {"steps": 3, "epochs": 2},
            "`steps` and `epochs`",
        ),
        (
            (ROWS, vowel),
            {"learning_rate": -1},
            r"'optimizer.lr' cannot be -1: .* \(`learning_rate` is read as `optimizer.lr`.\)",
        ),
        ((ROWS, vowel), {"args": {}}, r"fields of a GRPOConfig"),
        ((ROWS, vowel), {"lr": 1.0}, r"Did you mean `optimizer=\{'lr': …\}`"),
        (
            (ROWS, vowel),
            {"num_generations": 8},
            "`num_generations: 8` is read as `algorithm.group_size: 8`, and `algorithm.group_size` is 2",
        ),
        ((ROWS, vowel), {"training": {"task_per_step": 2}}, "Did you mean 'tasks_per_step'"),
        ((ROWS, vowel), {"training": "fast"}, "`training` is 'fast', .* section"),
        ((ROWS, vowel), {"team": None}, "`team` is None, .* section"),
        ((ROWS, vowel), {"steps": True}, "`steps` is True"),
        ((ROWS, vowel), {"tasks_per_step": True}, "`tasks_per_step` is True"),
        (
            (ROWS, vowel),
            {"tasks_per_step": 0, "training": {}},
            "'tasks_per_step' cannot be 0: it must be greater than or equal to 1",
        ),
        (
            (ROWS, vowel),
            {"tasks_per_step": 3},
            r"`tasks_per_step` is 3, but `training` contains",
        ),
        ((ROWS, vowel), {"question_field": 3}, "`question_field` is 3"),
        ((ROWS, vowel), {"success": float("inf")}, "`success` is inf"),
        (
            (ROWS, vowel),
            {"dataset_config": "main"},
            "`dataset_config`",
        ),
        (
            (ROWS, [vowel]),
            {"reward_weights": [True]},
            r"`reward_weights` is \[True\]. Give one finite number",
        ),
        (
            (ROWS, vowel),
            {"algorithm": None},
            "`algorithm` is None. Give the name of an algorithm, such as 'grpo'",
        ),
        ((ROWS, vowel), {"run_dir": ""}, "`run_dir` is an empty string"),
        ((ROWS, vowel, ["a", "a"]), {}, "^`agents` contains 'a' twice"),
        ((), {"reward": vowel}, "`dataset` has no rows. Give at least one"),
        (
            (EMPTY, vowel),
            {},
            r"^`dataset`: 1 of 7 rows cannot be used, more than `max_unusable` = 1.0%: Row 7 of `dataset`: the field 'question' is empty. Fix",
        ),
        (
            (),
            {"train_dataset": EMPTY, "reward_fn": vowel, "max_unusable": 0.1},
            "^`dataset`: 1 of 7 rows .* more than `max_unusable` = 10.0%: Row 7 of `dataset`: the field",
        ),
        (
            (ROWS, vowel),
            {"eval_dataset": ROWS},
            "^All train rows of `dataset`",
        ),
        ((ROWS[:1], vowel), {"eval_dataset": 0.1}, "test split of 1 rows of `dataset`"),
        (
            (ROWS, vowel),
            {"evaluation": {"every": 1}},
            "Give `eval_dataset`",
        ),
        ((ROWS, vowel), {"learnin_rate": 1}, "Did you mean 'learning_rate'"),
        ((ROWS,), {"reward_funcs": {"b": vowel}}, "unknown agent 'b'"),
        ((ROWS, vowel), {"output_dir": 3}, "^`run_dir` is 3. Give the path of a folder"),
        ((["2+2"], vowel), {}, r"Row 1 of `dataset` is str, not a mapping.*\{'question': …\}"),
        ((ROWS, vowel), {"run_dir": 3}, "`run_dir` is 3. Give the path of a folder"),
        (
            (ROWS, vowel),
            {"trackers": [{"name": "tensorboard"}]},
            "`trackers` needs a run directory",
        ),
        ((ROWS, vowel), {"checkpoint": {"every": 2}}, "`checkpoint` needs a run directory"),
        ((ROWS, vowel), {"success": True}, "`success` is True. Give a function"),
        ((ROWS, vowel), {"success": "exact"}, "`success` is 'exact'. Give a function"),
        ((ROWS, vowel), {"resume": True}, "`resume` continues a run. Give its directory"),
        ((ROWS, vowel), {"resume": "runs/a/checkpoints/1"}, "`resume` is"),
        ((ROWS, vowel), {"algorithm": 3}, "`algorithm` is 3, .* section"),
        ((ROWS, vowel), {"observer": 3}, "`observer` is int, which has no `phase`"),
        ((ROWS, vowel), {"engine": 3}, "`engine` is int, which has no `generate`"),
        ((ROWS, vowel), {"engine": {"name": "locl"}}, "Did you mean 'local'"),
        (
            (ROWS, vowel),
            {"training": {"asynchronous": True, "max_staleness": 1}},
            "rows in memory",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_is_built(
    given: tuple[Any, ...], options: dict[str, Any], said: str
) -> None:
    with pytest.raises((ConfigError, DataError), match=said):
        train(*given, **options)


def test_a_runs_record_says_which_argument_each_value_came_from(tmp_path: Path) -> None:
    rewards: Mapping[str, Function] = {"team": vowel, "b": length}
    given = {
        **SMALL,
        "algorithm": "rloo",
        "num_generations": 2,
        "team": TeamConfig(sampling={"max_tokens": 2}),
    }
    kapelle.train(tiny_model(), ROWS, rewards, ["a", "b"], run_dir=tmp_path / "run", **given).trainer.close()
    found = {key: source for key, (_, source) in own_settings(tmp_path / "run").items()}
    assert found == {
        "algorithm.group_size": "argument num_generations",
        "algorithm.name": "argument algorithm",
        "algorithm.team_reward": "rewards by agent",
        "environment.eval_path": "no eval_dataset",
        "environment.name": "kapelle.train",
        "environment.path": "argument dataset",
        "environment.rewards.0.function": "argument reward",
        "environment.rewards.1.agent": "argument reward",
        "environment.rewards.1.function": "argument reward",
        "evaluation.before_and_after": "no eval_dataset",
        "model.path": "argument model",
        "team.agents.0.name": "argument agents",
        "team.agents.1.name": "argument agents",
        "team.sampling.max_tokens": "argument team",
        "training.steps": "argument steps",
        "training.tasks_per_step": "argument training",
        "workflow.name": "number of agents",
    }


@pytest.mark.parametrize("success", [lambda completion, answer: completion[:1] == answer, 1])
def test_what_is_solved_is_measured_on_unseen_rows(success: Any) -> None:
    with train(ROWS, vowel, eval_dataset=0.4, success=success, observer=Quiet()) as run:
        assert run.summary.after is not None
        assert run.summary.after.scored == run.summary.after.problems
        assert run.summary.after.success is not None
        assert "success" in run.summary.last


@pytest.mark.parametrize(
    ("given", "sections", "said"),
    [
        (
            (),
            {"reward": vowel},
            r"`Trainer` has no keyword 'reward'. `kapelle.train\(model, dataset, reward\)` takes",
        ),
        ((), {"enviroment": {}}, "`Trainer` has no keyword 'enviroment'. Did you mean 'environment'"),
        (({"environment": {}},), {}, "not dict. Sections are keywords"),
        ((), {"model": None}, "`model` is None. Give a folder"),
    ],
)
def test_a_trainer_says_which_keyword_was_meant(given: Any, sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        kapelle.Trainer(*given, **sections)


@pytest.mark.slow
def test_a_run_on_a_list_of_rows_is_evaluated_and_exported_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, out = tmp_path / "run", tmp_path / "out"
    rows = [
        {"prompt": [{"role": "user", "content": each["question"]}], "answer": each["answer"]} for each in ROWS
    ]
    with kapelle.train("embedded", rows, vowel, eval_dataset=0.4, run_dir=run_dir, **SMALL) as run:
        trained = [run.trainer.config.environment.task("train", k) for k in range(4)]
    again = load_recipe(str(run_dir / "config.yaml")).config.environment
    assert [again.task("train", k) for k in range(4)] == trained
    assert main(["export", str(run_dir), "--out", str(out)]) == 0
    shutil.rmtree(run_dir / "rows")
    shutil.rmtree(out)
    assert main(["export", str(run_dir), "--out", str(out)]) == 0, capsys.readouterr().err
    assert (out / "team.yaml").is_file()


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"team": {"agents": [{"name": "a", "prompt": "A {question}"}, {"name": "b", "weights": "frozen"}]}}, ["a", "b"]),
        ({"team": TeamConfig(agents=2)}, ["agent_0", "agent_1"]),
        ({"num_agents": 2}, ["agent_0", "agent_1"]),
        ({"agents": 2, "team": {"agents": 2}}, ["agent_0", "agent_1"]),
        ({"max_prompt_length": 64, "algorithm": "grpo", "algorithm.adv_estimator": "rloo", "num_generations": 2}, ["agent_0"]),
        ({"tasks": {"max_prompt_tokens": "context"}, "peft_config": {"r": 2}}, ["agent_0"]),
    ],
)  # fmt: skip
def test_sections_and_names_of_other_libraries_count_beside_what_the_call_decides(
    options: dict[str, Any], names: list[str]
) -> None:
    """Of `agents`, `algorithm` and the like nothing was given, so that they contradict nothing."""
    new_messages: list[str] = []

    class Hearing(Quiet):
        def phase(self, name: str, detail: str) -> None:
            new_messages.append(f"{name} {detail}")

    given = {"team": {"sampling": {"max_tokens": 2}}, **options, "observer": Hearing()}
    if isinstance(given["team"], dict):
        given["team"] = {"sampling": {"max_tokens": 2}, **given["team"]}
    with train(ROWS, vowel, **given) as run:
        assert list(run.trainer.team.names) == names
        assert run.trainer.config.workflow.name == ("solo" if len(names) == 1 else "chain")
        assert run.trainer.config.algorithm.name == (
            "rloo" if "algorithm.adv_estimator" in options else "grpo"
        )
    (trained,) = [line for line in new_messages if line.startswith("weights ")]
    assert "adapters of rank" in trained
    assert "at lr 1e-05" in trained
    assert ("b" in trained.partition("(")[2]) == (names == ["a", "b"] and "frozen" not in str(options))
