"""Rows with rewards from functions: the reward of each agent, the splits, and errors before anything loads."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.workflows.stage import lines, play

from kapelle.cli.serve import named
from kapelle.environments import Mixture, Part, Rewarded
from kapelle.environments.rewarded import Reward, RowsInMemory, name_of, rows_in_memory
from kapelle.errors import ConfigError, DataError
from kapelle.settings.environments import check_rewards_kept
from kapelle.types import Episode
from kapelle.workflows import Chain, Parallel, Solo, ToolUse

ROWS = [{"question": f"{k}+{k}", "answer": str(2 * k)} for k in range(20)]


def exact(completion: str, answer: str) -> float:
    return float(completion == answer)


def brief(completion: str, agent: str) -> float:
    return -float(len(completion))


def turns(episode: Episode) -> float:
    return float(len(episode.turns))


@pytest.mark.parametrize("given", ["sums:exact", ["sums:exact"], [{"function": "sums:exact"}]])
def test_a_function_is_named_alone_or_in_a_list(given: Any) -> None:
    made = Rewarded.model_validate({"path": "rows.jsonl", "rewards": given})
    assert made.rewards == (Reward(function="sums:exact"),)


def paying(*rewards: Mapping[str, Any], rows: Any = ROWS, **settings: Any) -> Rewarded:
    functions: dict[str, Callable[..., Any]] = {
        "exact": exact,
        "brief": brief,
        "turns": turns,
        "fails": lambda: 1 / 0,
        "nothing": lambda: None,
    }
    own = [Reward.model_validate({**each, "function": f"in-memory:{each['function']}"}) for each in rewards]
    made = Rewarded.model_validate({"path": "in-memory", "eval_path": "none", "rewards": own, **settings})
    return made.holding(RowsInMemory(rows_in_memory(rows, "dataset"), (), functions))


async def earned(environment: Rewarded, workflow: Any, texts: Mapping[str, str]) -> Episode:
    environment.check(list(texts))
    task = environment.task("train", 3)
    [episode] = await play(
        environment, workflow, list(texts), {name: lines(text) for name, text in texts.items()}, task
    )
    return episode


async def test_a_function_of_the_team_rewards_every_agent_by_the_teams_answer() -> None:
    environment = paying({"function": "exact"}, {"function": "turns", "weight": 0.25})
    episode = await earned(environment, Chain(), {"planner": "double it", "coder": "6"})
    assert episode.rewards == {"planner": 1.5, "coder": 1.5}
    assert episode.info == {"answer": "6", "reward/exact": 1.0, "reward/turns": 2.0}
    assert episode.success is None


async def test_a_function_for_batches_gets_all_messages_of_an_agent_with_tools() -> None:
    seen: list[Any] = []

    def judge(completions: list[Any], **columns: Any) -> list[float]:
        seen.append((completions, columns["answer"]))
        return [float(completions[0][-1]["content"] == columns["answer"][0])]

    def double(n: int) -> int:
        return 2 * n

    environment = paying(
        {"function": "judge"}, tools=[{"tool": "functions", "functions": ["in-memory:double"]}]
    )
    environment.tools[0].holding({"double": double})  # type: ignore[union-attr]
    environment.holding(RowsInMemory(rows_in_memory(ROWS, "dataset"), (), {"judge": judge}))
    environment.check(["a"])
    call = '<tool_call>\n{"name": "double", "arguments": {"n": 3}}\n</tool_call>'
    texts = {"a": lines(f"I call.\n{call}", "6")}
    [episode] = await play(environment, ToolUse(), ["a"], texts, environment.task("train", 3))
    assert episode.rewards == {"a": 1.0}
    assert episode.info["calls_done"] == {"a": 1}
    assert seen == [
        (
            [
                [
                    {
                        "role": "assistant",
                        "content": "I call.",
                        "tool_calls": [
                            {"type": "function", "function": {"name": "double", "arguments": {"n": 3}}}
                        ],
                    },
                    {"role": "tool", "content": "6"},
                    {"role": "assistant", "content": "6"},
                ]
            ],
            ["6"],
        )
    ]


@pytest.mark.parametrize(
    ("rows", "completion"),
    [
        (ROWS, "6"),
        (
            [{"prompt": [{"role": "user", "content": each["question"]}], **each} for each in ROWS],
            [{"role": "assistant", "content": "6"}],
        ),
    ],
)
async def test_a_function_for_batches_is_called_with_a_batch_of_one(rows: Any, completion: Any) -> None:
    def theirs(
        prompts: list[Any], completions: list[Any], answer: list[str], **kwargs: Any
    ) -> list[float | None]:
        assert completions == [completion]
        assert answer == ["6"]
        assert len(kwargs["completion_ids"]) == 1
        return [0.5]

    field = None if rows is ROWS else "prompt"
    environment = paying({"function": "theirs"}, rows=rows, question_field=field)
    environment.holding(RowsInMemory(rows_in_memory(rows, "dataset"), (), {"theirs": theirs}))
    assert (await earned(environment, Solo(), {"a": "6"})).rewards == {"a": 0.5}


async def test_none_means_that_a_function_does_not_apply() -> None:
    both = await earned(paying({"function": "exact"}, {"function": "nothing"}), Solo(), {"a": "6"})
    assert both.rewards == {"a": 1.0}
    alone = await earned(paying({"function": "nothing"}), Solo(), {"a": "6"})
    assert (alone.error, alone.rewards) == (None, {})
    assert "unscored" in alone.info


async def test_a_function_of_one_agent_reads_its_own_text() -> None:
    environment = paying({"function": "exact", "agent": "b"}, {"function": "brief", "agent": "a"})
    episode = await earned(environment, Parallel(), {"a": "abc", "b": "6"})
    assert episode.rewards == {"a": -3.0, "b": 1.0}
    assert episode.info == {"reward/exact/b": 1.0, "reward/brief/a": -3.0}


@pytest.mark.parametrize(
    ("success", "texts", "found"),
    [
        (1.0, {"planner": "6", "coder": "6"}, 1.0),
        (1.0, {"planner": "6", "coder": "5"}, 0.0),  # the planner receives 0.2 for 6
        (0.1, {"planner": "6", "coder": "5"}, 1.0),  # 0.1 in the mean of both
        (0.11, {"planner": "6", "coder": "5"}, 0.0),
        ("in-memory:exact", {"planner": "5", "coder": "6"}, 1.0),
        ("in-memory:nothing", {"planner": "5", "coder": "6"}, None),
        (None, {"planner": "6", "coder": "6"}, None),
    ],
)
async def test_success_is_a_number_a_function_or_undefined(
    success: object, texts: Mapping[str, str], found: float | None
) -> None:
    # 0.7 + 0.2 + 0.1 is a little less than 1.
    thirds = [{"function": "exact", "weight": weight} for weight in (0.7, 0.2, 0.1)]
    own = {"function": "exact", "weight": 0.2, "agent": "planner"}
    environment = paying(*thirds, *([own] if success in (0.1, 0.11) else []), success=success)
    assert (await earned(environment, Chain(), texts)).success == found


async def test_a_function_that_is_reward_and_success_is_called_once() -> None:
    calls: list[str] = []

    def right(completion: str) -> bool:
        calls.append(completion)
        return completion == "6"

    settings = {
        "path": "in-memory",
        "rewards": [{"function": "in-memory:right"}],
        "success": "in-memory:right",
    }
    held = RowsInMemory(rows_in_memory(ROWS, "dataset"), (), {"right": right})
    environment = Rewarded.model_validate(settings).holding(held)
    assert (await earned(environment, Parallel(), {"a": "6"})).success == 1.0
    assert calls == ["6"]
    assert environment.in_memory == ["rows", "the reward function `right`"]


async def test_a_success_is_a_share_and_its_function_is_checked() -> None:
    episode = await earned(
        paying({"function": "exact"}, success="in-memory:turns"), Chain(), {"a": "6", "b": "6"}
    )
    assert episode.error is not None
    assert "`turns` returned 2" in episode.error
    with pytest.raises(ConfigError, match="`agent`"):
        paying({"function": "exact"}, success="in-memory:brief").check(["a"])


def test_labels_of_functions_with_one_name_differ(tmp_path: Path) -> None:
    for name in ("sums", "words"):
        (tmp_path / f"{name}.py").write_text("def exact(completion):\n    return 1.0\n")
    own = [{"function": f"{tmp_path / name}.py:exact", "weight": 0.5} for name in ("sums", "words")]
    held = RowsInMemory(rows_in_memory(ROWS, "dataset"), (), {"exact": exact})
    memory = {"function": "in-memory:exact"}
    made = Rewarded.model_validate({"path": "in-memory", "rewards": [*own, memory, memory]}).holding(held)
    assert made.labels == ("reward/sums.exact", "reward/words.exact", "reward/exact", "reward/exact_2")
    assert made.in_words().startswith(
        "sums.exact × 0.5 (sums.py, line 1), words.exact × 0.5 (words.py, line 1), exact ("
    )


async def test_a_function_that_raises_fails_its_episode() -> None:
    failed = await earned(paying({"function": "fails"}), Parallel(), {"a": "6"})
    assert failed.error is not None
    assert re.search(r"`fails` raised ZeroDivisionError: .*\.py, line \d+", failed.error)
    assert failed.info == {"reward/fails": "failed"}


async def test_a_function_may_take_the_question_where_its_column_has_that_name() -> None:
    def shown(question: str, completion: str) -> float:
        return float(question == "3+3" and completion == "6")

    environment = Rewarded.model_validate(
        {"path": "in-memory", "eval_path": "none", "rewards": [{"function": "in-memory:shown"}]}
    ).holding(RowsInMemory(rows_in_memory(ROWS, "dataset"), (), {"shown": shown}))
    assert (await earned(environment, Parallel(), {"a": "6"})).rewards == {"a": 1.0}


def test_no_question_is_in_both_splits(tmp_path: Path) -> None:
    whole = paying({"function": "exact"})
    assert (whole.size("train"), whole.size("test")) == (20, 0)
    held_out = paying({"function": "exact"}, eval_path="own", test_share=0.3)
    train, test = (
        {held_out.task(split, k).question for k in range(held_out.size(split) or 0)}
        for split in ("train", "test")
    )
    assert len(train) + len(test) == 20
    assert test
    assert not train & test
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "test.jsonl").write_text(json.dumps({"question": "elsewhere", "answer": "1"}) + "\n")
    share = paying({"function": "exact"}, path=str(tmp_path), eval_path="share", test_share=0.3)
    assert [share.task("test", k).question for k in range(share.size("test") or 0)] == [
        held_out.task("test", k).question for k in range(held_out.size("test") or 0)
    ]
    file = tmp_path / "test.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS[:5]))
    other = paying({"function": "exact"}, eval_path=str(file))
    assert (other.size("train"), other.size("test"), other.rows.duplicates) == (15, 5, 5)
    with pytest.raises(DataError, match="All train rows"):
        paying({"function": "exact"}, rows=ROWS[:5], eval_path=str(file)).check(["a"])


@pytest.mark.parametrize(
    ("rewards", "settings", "message"),
    [
        ([{"function": "exact"}], {"question_field": "ask"}, "'ask'"),
        ([{"function": "exact", "agent": "cody"}], {}, "Did you mean 'coder'?"),
        ([{"function": "gone"}], {}, "`gone`"),
        ([{"function": "exact"}], {"rows": [{"question": "1"}]}, "`answer`"),
        ([{"function": "exact"}], {"rows": [{"ask": "1"}]}, "columns prompt, question, problem"),
    ],
)
def test_unusable_settings_are_errors(
    rewards: list[dict[str, Any]], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises((ConfigError, DataError), match=re.escape(message)):
        paying(*rewards, **settings).check(["coder"])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "no rows"),
        (["what?"], "Row 1 .* mapping"),
        ([{"question": {1, 2}}], "Row 1 .* 'question'"),
        ([{3: "x"}], "Row 1 .* named 3"),
    ],
)
def test_rows_in_memory_are_mappings_of_json(rows: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        rows_in_memory(rows, "dataset")


def test_a_recipe_names_functions_of_modules_and_files(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "pay.py").write_text("def half(completion):\n    return 0.5\n")
    own = [{"function": f"{tmp_path}/pay.py:half"}, {"function": f"{__name__}:exact"}]
    environment = Rewarded.model_validate({"path": str(tmp_path / "rows.jsonl"), "rewards": own})
    if name_of(exact) is None:  # tests are imported by path
        environment = Rewarded.model_validate({"path": environment.path, "rewards": own[:1]})
    environment.check(["a"])
    assert environment.in_memory == []
    assert f"{tmp_path}/pay.py:half" in environment.contents()
    assert name_of(json.dumps) == "json:dumps"
    assert name_of(lambda: 0) is None


def test_it_cannot_be_inside_another_environment_or_served(tmp_path: Path) -> None:
    environment = paying({"function": "exact"})
    with pytest.raises(ConfigError, match=r"environment\.parts\.rows\.environment"):
        check_rewards_kept(Mixture(parts={"rows": Part(environment=environment)}))
    check_rewards_kept(environment)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    with pytest.raises(ConfigError, match="whole episodes"):
        named(
            "rewarded",
            [f"rewarded.path={tmp_path}/rows.jsonl", "rewarded.rewards=[{function: 'json:dumps'}]"],
        )


@pytest.mark.parametrize(
    "row", [{"reward_model": {"style": "rule", "ground_truth": "4"}}, {"ground_truth": "4"}]
)
async def test_a_function_written_for_verl_works_unchanged(row: Mapping[str, Any]) -> None:
    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> Any:
        return {"score": float(solution_str == ground_truth), "acc": True, "from": data_source}

    rows = [{"prompt": [{"role": "user", "content": str(k)}], "data_source": "sums", **row} for k in range(4)]
    made = Rewarded.model_validate(
        {"path": "in-memory", "eval_path": "none", "rewards": ["in-memory:compute_score"]}
    ).holding(RowsInMemory(rows_in_memory(rows, "dataset"), (), {"compute_score": compute_score}))
    for text, reward in (("4", 1.0), ("5", 0.0)):
        assert (await earned(made, Parallel(), {"a": text})).rewards == {"a": reward}
