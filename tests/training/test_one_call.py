"""`kapelle.train`: a model, rows, functions and agents in one call are the run that a `Trainer` of the same settings is."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.tiny import tiny_model

import kapelle
from kapelle.algorithms import GRPO
from kapelle.cli import main
from kapelle.environments import Rewarded
from kapelle.errors import ConfigError, DataError, RunDirectoryError, TrainingHalted
from kapelle.one_call import Function, Trained
from kapelle.runs.reader import read_config, read_episodes, read_status
from kapelle.runs.summary import own_settings
from kapelle.settings.overlays import parse_yaml
from kapelle.settings.schema import TeamConfig
from kapelle.setup.recipe import load_recipe, resolve
from kapelle.types import Episode

ROWS = [{"question": str(k), "answer": "ab"[k % 2]} for k in range(12)]
EMPTY = [*ROWS[:6], {"question": " ", "answer": "a"}]
ENDLESS: Mapping[str, Any] = {
    "model": {"path": "embedded"},
    "environment": {"name": "arithmetic"},
    "workflow": {"name": "solo"},
    "algorithm": {"name": "grpo"},
}
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


@pytest.mark.parametrize(
    ("algorithm", "kept"),
    [
        (GRPO(group_size=2), "individual"),
        ({"name": "rloo", "group_size": 2}, "individual"),
        (GRPO(group_size=2, team_reward="mean"), "mean"),
        ({"name": "rloo", "group_size": 2, "team_reward": "sum"}, "sum"),
    ],
)
def test_rewards_by_agent_stay_with_them_however_the_algorithm_is_given(algorithm: Any, kept: str) -> None:
    rewards = {"a": lambda agent: 1.0, "b": length}
    given = {**SMALL, "steps": 0, "algorithm": algorithm, "run_dir": None}
    with kapelle.train(tiny_model(), ROWS, rewards, ["a", "b"], **given) as run:
        assert run.trainer.config.algorithm.model_dump()["team_reward"] == kept


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
    with pytest.raises(ConfigError, match="`rewarded` has no tasks of the split 'test' to play"):
        run.trainer.evaluate()
    assert read_status(tmp_path / "run").state == "finished"
    run.trainer.close()
    with pytest.raises(ConfigError, match="The reward function `lambda` was in the memory of the program"):
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
        assert "Multiply" in episode.turns[0].heard[0].content or tool is not multiply
        assert episode.turns[0].heard[0].content.endswith(episode.task.question)
    config = parse_yaml(read_config(tmp_path / "run"))
    assert config["workflow"]["name"] == "tool_use"
    assert config["environment"]["max_turns"] == 3
    assert [each["tool"] for each in config["environment"]["tools"]] == ["calculator", "functions"]
    prompts, completions, answer = judged[0]
    assert prompts[0] == [{"role": "user", "content": f"{int(answer[0]) // 2}*2"}]
    assert completions[0][-1]["role"] == "assistant"


def test_an_episode_to_which_no_function_applies_leaves_its_group() -> None:
    calls = iter(range(100))
    with train(
        ROWS,
        lambda completion: None if next(calls) % 2 else 1.0,
        algorithm=GRPO(group_size=4),
        tasks_per_step=1,
        training={},
    ) as run:
        [step] = run.trainer.steps(1)
        assert step.metrics["unscored"] == 2.0
        assert step.metrics["dead_groups"] == 1.0
        assert step.idle, "all that is left of the group earned the same"


def test_a_function_that_raises_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(TrainingHalted, match=r"The reward function `broken` raised KeyError: 'gone'"):
        train(ROWS, broken, run_dir=tmp_path / "run")
    assert read_status(tmp_path / "run").state == "failed"


def broken(completion: str) -> float:
    return {"there": 1.0}["gone"]


@pytest.mark.parametrize(
    ("given", "options", "said"),
    [
        ((ROWS, vowel, "planner"), {}, r"Give a list of names: `agents=\['planner'\]`"),
        ((ROWS, vowel, []), {}, "`agents` is empty"),
        ((ROWS, {"a": vowel}, ["a", "b"]), {}, "`reward` has no function for 'b'"),
        (
            (ROWS, {"aa": vowel, "team": vowel}, ["a"]),
            {},
            "unknown agent 'aa'. Did you mean 'a'?|unknown agent 'aa'",
        ),
        (
            (ROWS, [vowel, brief]),
            {"reward_weights": [1]},
            "There are 1 `reward_weights` for 2 reward functions",
        ),
        ((ROWS, {"a": vowel}, ["a"]), {"reward_weights": [1]}, "`reward_weights` are for a list"),
        ((ROWS, [vowel]), {"reward_weights": [float("nan")]}, "Give one finite number for each"),
        ((ROWS, vowel), {"reward_weights": ["1"]}, "Give one finite number for each"),
        ((ROWS, []), {}, "`reward` has no function"),
        ((ROWS, {}), {}, "`reward` has no function"),
        ((ROWS, vowel, [1, 2]), {}, r"`agents` is \[1, 2\]. Give a number of agents"),
        (
            (ROWS, vowel, ["a"]),
            {"team": {"agents": [{"name": "b"}]}},
            "`agents` and `team=.'agents': ….` both say who plays",
        ),
        ((ROWS, vowel), {"eval_dataset": 1}, "`eval_dataset` is 1. Give a share"),
        ((ROWS, vowel), {"eval_dataset": float("nan")}, "`eval_dataset` is nan. Give a share"),
        ((ROWS[0], vowel), {}, "`dataset` is dict. Give a list of rows"),
        ((ROWS, vowel), {"environment": Rewarded}, "makes the environment from its data set"),
        ((ROWS, lambda anwser: 0.0), {}, "Did you mean 'answer'"),
        ((ROWS, vowel), {"stepz": 3}, "`kapelle.train` has no keyword 'stepz'. Did you mean 'steps'"),
        ((ROWS,), {"rewards": vowel}, "no keyword 'rewards'. Did you mean 'reward'"),
        (
            (ROWS, vowel),
            {"reward_funcs": vowel},
            "`reward_funcs` is read as `reward`, and both are given. Leave one",
        ),
        ((), {"train_dataset": "nowhere.jsonl", "reward_fn": vowel}, "there is no /.*/nowhere.jsonl"),
        ((), {"dataset_name": "nowhere.jsonl", "reward_fn": vowel}, "there is no /.*/nowhere.jsonl"),
        (
            (ROWS, vowel),
            {"steps": 3, "max_steps": 4},
            "`max_steps: 4` is read as `steps: 4`, and `steps` is 3",
        ),
        (
            (ROWS, vowel),
            {"steps": 3, "epochs": 2},
            "`steps` and `epochs` both say how long to train. Leave one out",
        ),
        (
            (ROWS, vowel),
            {"learning_rate": -1},
            r"'optimizer.lr' cannot be -1: .* \(`learning_rate` is read as `optimizer.lr`.\)",
        ),
        ((ROWS, vowel), {"args": {}}, r"no keyword 'args'. The fields of a GRPOConfig are settings here, "),
        ((ROWS, vowel), {"lr": 1.0}, r"Did you mean `optimizer=\{'lr': …\}`"),
        (
            (ROWS, vowel),
            {"num_generations": 8},
            "`num_generations: 8` is read as `algorithm.group_size: 8`, and `algorithm.group_size` is 2",
        ),
        ((ROWS, vowel), {"training": {"task_per_step": 2}}, "Did you mean 'tasks_per_step'"),
        ((ROWS, vowel), {"training": "fast"}, "`training` is 'fast'. It is a section"),
        ((ROWS, vowel), {"team": None}, "`team` is None. It is a section"),
        ((ROWS, vowel), {"steps": True}, "`steps` is True"),
        ((ROWS, vowel), {"tasks_per_step": True}, "`tasks_per_step` is True. Give a number of tasks"),
        (
            (ROWS, vowel),
            {"tasks_per_step": 0, "training": {}},
            "'tasks_per_step' cannot be 0: it must be greater than or equal to 1",
        ),
        (
            (ROWS, vowel),
            {"tasks_per_step": 3},
            r"`tasks_per_step` is 3, and `training=\{'tasks_per_step': 2\}`. Leave one out",
        ),
        ((ROWS, vowel), {"question_field": 3}, "`question_field` is 3. Name the column"),
        ((ROWS, vowel), {"success": float("inf")}, "`success` is inf. Give a finite number"),
        (
            (ROWS, vowel),
            {"dataset_config": "main"},
            "configuration of a data set on the hub, and `dataset` is rows",
        ),
        (
            (ROWS, [vowel]),
            {"reward_weights": [True]},
            r"`reward_weights` is \[True\]. Give one finite number",
        ),
        ((ROWS, vowel), {"algorithm": None}, "`algorithm` is None. Name one, such as 'grpo'"),
        ((ROWS, vowel), {"run_dir": ""}, "`run_dir` is an empty text"),
        ((ROWS, vowel), {"observer": "x"}, "Give what `kapelle.training.observer` describes"),
        ((ROWS, vowel, ["a", "a"]), {}, "^`agents` names 'a' twice"),
        ((ROWS, vowel, True), {}, "`agents` is True"),
        ((), {"reward": vowel}, "`dataset` has no rows. Give at least one"),
        (("nowhere.jsonl", vowel), {}, "`dataset` names 'nowhere.jsonl', but there is no /.*/nowhere.jsonl"),
        ((ROWS, vowel), {"eval_dataset": "a/b/c"}, "`eval_dataset` names 'a/b/c', but there is no"),
        ((ROWS,), {}, "`reward` has no function"),
        ((ROWS, "exact"), {}, "`reward` is the text 'exact'. Name a function as `module:function`"),
        ((ROWS, None), {}, "`reward` is None. Give a function"),
        ((lambda: ROWS, vowel), {}, r"`dataset` is function. Give the rows that it returns: dataset\(\)"),
        (({"question": ["a"]}, vowel), {}, "`dataset` is dict. Give a list of rows"),
        ((type("DataFrame", (list,), {})(), vowel), {}, r"`dataset` is DataFrame. .*\.to_dict\('records'\)"),
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
            {"eval_dataset": EMPTY},
            "^`eval_dataset`: 1 of 7 rows cannot be used, .*: Row 7 of `eval_dataset`: the field",
        ),
        (
            (ROWS, vowel),
            {"eval_dataset": ROWS},
            "^Every train row of `dataset` is a test row too. Set `dataset` and `eval_dataset` to different data",
        ),
        ((ROWS[:1], vowel), {"eval_dataset": 0.1}, "^Of 1 rows of `dataset` none is left to test on"),
        ((ROWS, vowel), {"max_unusable": 2}, "^'max_unusable' cannot be 2: it must be less than 1"),
        (("a/b", vowel), {"dataset_config": 3}, "^'dataset_config' cannot be 3"),
        (
            (ROWS, vowel),
            {"evaluation": {"every": 1}},
            "plays unseen rows, and there are none. Give `eval_dataset`",
        ),
        ((ROWS, vowel), {"learnin_rate": 1}, "Did you mean 'learning_rate'"),
        ((ROWS,), {"reward_funcs": {"b": vowel}}, "^`reward` pays the unknown agent 'b'"),
        ((ROWS, vowel), {"output_dir": 3}, "^`run_dir` is 3. Give the path of a folder"),
        ((["2+2"], vowel), {}, r"Row 1 of `dataset` is str, not a mapping.*\{'question': …\}"),
        ((ROWS, vowel), {"run_dir": 3}, "`run_dir` is 3. Give the path of a folder"),
        (
            (ROWS, vowel),
            {"trackers": [{"name": "tensorboard"}]},
            "Trackers show .* `run_dir=None` asks for none",
        ),
        ((ROWS, vowel), {"checkpoint": {"every": 2}}, "Leave out `checkpoint`, or `run_dir=None`"),
        ((ROWS, vowel), {"success": True}, "`success` is True. Give a function"),
        ((ROWS, vowel), {"success": "exact"}, "`success` is 'exact'. Give a function"),
        ((ROWS, vowel), {"resume": True}, "`resume` goes on with a run. Name its directory"),
        ((ROWS, vowel), {"resume": "runs/a/checkpoints/1"}, "Give True to go on with the run in `run_dir`"),
        ((ROWS, vowel), {"algorithm": 3}, "`algorithm` is 3. It is a section"),
        ((ROWS, vowel), {"observer": 3}, "`observer` is int, which has no `phase`"),
        ((ROWS, vowel), {"engine": 3}, "`engine` is int, which samples nothing"),
        ((ROWS, vowel), {"engine": {"name": "locl"}}, "Did you mean 'local'"),
        (
            (ROWS, vowel),
            {"training": {"overlap": True, "max_staleness": 1}},
            "training.overlap",
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


def test_steps_that_epochs_make_are_recorded_as_counted_and_defaults_as_such(tmp_path: Path) -> None:
    given = {**SMALL, "steps": None, "epochs": 1, "algorithm": "grpo", "eval_dataset": ROWS[:3], "success": 1}
    given |= {"reward_fn": vowel, "train_dataset": ROWS}
    kapelle.train(tiny_model(), run_dir=tmp_path / "run", **given).trainer.close()
    found = {key: source for key, (_, source) in own_settings(tmp_path / "run").items()}
    assert found["training.steps"] == "counted from training.epochs"
    assert found["training.epochs"] == "argument epochs"
    assert found["environment.rewards.0.function"] == "argument reward_fn"
    assert found["environment.path"] == "argument train_dataset"
    assert found["environment.eval_path"] == "argument eval_dataset"
    assert found["environment.success"] == "argument success"
    assert not found.keys() & {
        "algorithm.name",
        "algorithm.group_size",
        "team.agents",
        "evaluation.before_and_after",
    }


def test_a_run_is_kept_in_a_new_folder_by_default_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="Did you mean 'answer'"):
        kapelle.train(tiny_model(), ROWS, lambda anwser: 0.0, **SMALL)
    assert list(tmp_path.iterdir()) == [], "a run that never began leaves nothing"
    with kapelle.train(tiny_model(), ROWS, vowel, name="words", **SMALL) as run:
        kept = run.summary.run_dir
    assert kept is not None
    assert re.fullmatch(r"runs/words-\d{8}-\d{6}", str(kept))
    assert read_status(kept).state == "finished"
    assert capsys.readouterr().out.count(f"the run is kept in {kept}\n") == 1
    with pytest.raises(ConfigError, match="`resume` goes on with a run"):
        kapelle.train(tiny_model(), ROWS, vowel, resume=True, **SMALL)
    with pytest.raises(
        RunDirectoryError, match=r"There is no run at other to resume\. Leave out `resume=True`"
    ):
        kapelle.train(tiny_model(), ROWS, vowel, run_dir="other", resume=True, **SMALL)


@pytest.mark.parametrize("success", [lambda completion, answer: completion[:1] == answer, 1])
def test_what_is_solved_is_measured_on_unseen_rows(success: Any) -> None:
    with train(ROWS, vowel, eval_dataset=0.4, success=success, observer=Quiet()) as run:
        assert run.summary.after is not None
        assert run.summary.after.scored == run.summary.after.problems
        assert run.summary.after.success is not None
        assert "success" in run.summary.last


def test_what_a_share_holds_out_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with train(ROWS, vowel, eval_dataset=0.4) as run:
        environment = run.trainer.config.environment
        trained, held = environment.size("train"), environment.size("test")
    assert trained is not None
    assert held is not None
    assert trained + held == len(ROWS)
    said = f"data: {trained} rows to train on, {held} held out: about 40% of the distinct questions, by a hash of each"
    assert said in capsys.readouterr().out


def test_what_keeps_nothing_saves_no_checkpoint_and_has_no_tracker() -> None:
    with train(ROWS, vowel, observer=Quiet()) as run, pytest.raises(ConfigError, match="save_policies"):
        run.trainer.save()
    settings = {**run.trainer.config.model_dump(), "trackers": [{"name": "tensorboard"}]}
    with pytest.raises(ConfigError, match="The tracker 'tensorboard' needs a run directory"):
        kapelle.Trainer(**settings)


@pytest.mark.parametrize(
    ("given", "sections", "said"),
    [
        (
            (),
            {"reward": vowel},
            r"`Trainer` has no keyword 'reward'. `kapelle.train\(model, dataset, reward\)` takes",
        ),
        ((), {"steps": 3}, r"takes it, or `training=\{'steps': …\}`"),
        ((), {"enviroment": {}}, "`Trainer` has no keyword 'enviroment'. Did you mean 'environment'"),
        ((), {"rundir": "x"}, "Did you mean 'run_dir'"),
        (({"environment": {}},), {}, "not dict. Sections are keywords"),
        ((resolve({**ENDLESS, "training": {"epochs": 1}}),), {}, "^`training.epochs` counts tasks"),
        ((), {"model": None}, "`model` is None. Name a folder"),
        ((), {"model": object()}, r"kapelle.LanguageModel\(model, tokenizer\)"),
    ],
)
def test_a_trainer_says_which_keyword_was_meant(given: Any, sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        kapelle.Trainer(*given, **sections)


def test_an_engine_may_be_given_by_its_settings() -> None:
    run = train(ROWS, vowel, engine={"name": "local"}, observer=Quiet())
    assert run.trainer.config.engine.name == "local"
    run.trainer.close()


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


def test_rendered_prompts_are_for_agents_without_prompts() -> None:
    with pytest.raises(ConfigError, match="rendered_prompts"):
        kapelle.Trainer(
            model=tiny_model(),
            team={"agents": [{"name": "solver", "prompt": "Solve {question}"}]},
            environment={
                "name": "rewarded",
                "path": str(Path(__file__)),
                "rendered_prompts": True,
                "rewards": [{"function": "tests.training.test_one_call:vowel"}],
            },
            workflow={"name": "solo"},
            algorithm={"name": "grpo"},
        )


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
    heard: list[str] = []

    class Hearing(Quiet):
        def phase(self, name: str, detail: str) -> None:
            heard.append(f"{name} {detail}")

    given = {"team": {"sampling": {"max_tokens": 2}}, **options, "observer": Hearing()}
    if isinstance(given["team"], dict):
        given["team"] = {"sampling": {"max_tokens": 2}, **given["team"]}
    with train(ROWS, vowel, **given) as run:
        assert list(run.trainer.team.names) == names
        assert run.trainer.config.workflow.name == ("solo" if len(names) == 1 else "chain")
        assert run.trainer.config.algorithm.name == (
            "rloo" if "algorithm.adv_estimator" in options else "grpo"
        )
    (trained,) = [line for line in heard if line.startswith("weights ")]
    assert "adapters of rank" in trained
    assert "at lr 1e-05" in trained
    assert ("b" in trained.partition("(")[2]) == (names == ["a", "b"] and "frozen" not in str(options))


def test_peft_s_object_and_none_say_what_trains() -> None:
    lora = SimpleNamespace(
        r=3, lora_alpha=6, lora_dropout=0.0, target_modules={"v_proj", "q_proj"}, use_dora=False
    )
    with train(ROWS, vowel, peft_config=lora, team={"sampling": {"max_tokens": 2}}) as run:
        assert run.trainer.config.team.lora.rank == 3
        assert run.trainer.config.team.lora.targets == ("q_proj", "v_proj")
    with train(ROWS, vowel, peft_config=None, team={"sampling": {"max_tokens": 2}}) as run:
        assert run.trainer.config.team.sharing == "shared"


def test_one_call_takes_prompts_that_are_rendered_already() -> None:
    text, prompts = "<|im_start|>user\n1+1<|im_end|>\n", []

    def paid(episode: Episode) -> float:
        prompts.append(episode.turns[0].prompt_ids)
        return 0.0

    train([{"prompt": text}], paid, rendered_prompts=True)
    assert tiny_model().renderer.decode(prompts[0]) == text
