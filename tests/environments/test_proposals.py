"""Proposed problems: accepted ones, rewards, and that no test problem is ever accepted or shown."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tests.cli.conftest import call
from tests.support.tiny import SIZE
from tests.workflows.stage import expert, lines, play

from kapelle.environments.arithmetic import Arithmetic
from kapelle.environments.grading.math.calculation import parse_expression
from kapelle.environments.proposals import FRONTIERS, Proposals, Proposed
from kapelle.errors import ConfigError, EpisodeError
from kapelle.runs.reader import read_episodes
from kapelle.types import Message, Task
from kapelle.workflows.propose import Propose

TEAM = ("proposer", "ada", "ben", "cleo", "dan")
GIVEN = Task("train-0", "47", {"given": 47})
SUMS = Proposals()
ALL = Proposals(problems=Arithmetic(operators=("+", "-", "*", "/"), operations=3, brackets=True))


class TestAccepted:
    @pytest.mark.parametrize(
        ("text", "question", "answer"),
        [
            ("47+85", "47+85", 132),
            (" 047 + 85.0 ", "47+85", 132),
            ("47+5", "47+5", 52),
            ("(47+85)", "47+85", 132),
        ],
    )
    def test_a_problem_has_the_spelling_of_the_tests(self, text: str, question: str, answer: int) -> None:
        assert SUMS.proposed(text, 47) == Proposed(question, answer)

    @pytest.mark.parametrize(
        ("text", "given", "why"),
        [
            ("", 47, "nothing"),
            ("forty-seven", 47, "not a problem of arithmetic"),
            ("47+85=132", 47, "not a problem of arithmetic"),
            ("47+85; print(1)", 47, "not a problem of arithmetic"),
            ("85+47", 47, "47"),
            ("47-5", 47, "operators"),
            ("47+100", 47, "100"),
            ("47+5.5", 47, "11/2"),
            ("47+1+2", 47, "2 operations"),
            ("9" * 4000, 47, "not a problem of arithmetic"),
        ],
    )
    def test_a_rejection_has_a_reason(self, text: str, given: int, why: str) -> None:
        found = SUMS.proposed(text, given)
        assert isinstance(found, str)
        assert why in found

    @pytest.mark.parametrize(
        ("text", "found"),
        [
            ("47×8", Proposed("47×8", 376)),
            ("(47-7)÷4+1", Proposed("(47-7)÷4+1", 11)),
            ("47÷2", "A division leaves a rest."),
            ("47÷2×2", "A division leaves a rest."),
            ("47÷(8-8)", "It divides by zero."),
            ("47-85", "Its answer is below zero."),
            ("1128÷24", "It does not begin with 47."),
        ],
    )
    def test_of_all_operators(self, text: str, found: Proposed | str) -> None:
        assert ALL.proposed(text, 47) == found

    def test_a_dividend_has_the_digits_of_a_product(self) -> None:
        assert ALL.proposed("1128÷24", 1128) == Proposed("1128÷24", 47)
        assert ALL.proposed("1128+24", 1128) == "1128 is not a whole number from 0 to 99."

    def test_brackets_need_the_setting(self) -> None:
        plain = Proposals(problems=Arithmetic(operators=("+", "*"), operations=2))
        assert plain.proposed("(4+8)*5", 4) == "It has brackets."
        assert isinstance(plain.proposed("4+8*5", 4), Proposed)


@pytest.mark.parametrize(
    "problems",
    [
        Arithmetic(),
        Arithmetic(operators=("+", "-", "*", "/")),
        Arithmetic(operators=("+", "-", "*", "/"), operations=3, brackets=True),
    ],
    ids=["sums", "columns", "expressions"],
)
def test_no_problem_of_the_test_split_is_accepted(problems: Arithmetic) -> None:
    environment = Proposals(problems=problems)
    for index in range(60):
        tested, trained = (environment.problems.task(split, index).question for split in ("test", "train"))
        for question in (tested, trained):
            first = int("".join(c if c.isdigit() else " " for c in question).split()[0])
            found = environment.proposed(question, first)
            if question == tested:
                assert found == "This problem is kept for tests."
            else:
                assert isinstance(found, Proposed), (question, found)


class TestRewards:
    # Shares of 0, ¼, ½, ¾ and 1, by hand.
    @pytest.mark.parametrize(
        ("pays", "rewards"),
        [
            ("uncertainty", [0.0, 0.5, 1.0, 0.5, 0.0]),
            ("variance", [0.0, 0.75, 1.0, 0.75, 0.0]),
            ("difficulty", [0.0, 0.75, 0.5, 0.25, 0.0]),
        ],
    )
    async def test_rewards_by_the_share_of_correct_answers(self, pays: Any, rewards: list[float]) -> None:
        assert [FRONTIERS[pays](k / 4) for k in range(5)] == rewards
        for right in range(5):
            says = {name: lines("132" if k < right else "122") for k, name in enumerate(TEAM[1:])}
            scripts = {"proposer": lines("47+85"), **says}
            [episode] = await play(Proposals(pays=pays), Propose(), TEAM, scripts, GIVEN)
            assert episode.rewards["proposer"] == rewards[right]
            assert [episode.rewards[name] for name in TEAM[1:]] == [1.0] * right + [0.0] * (4 - right)
            assert episode.success == right / 4
            assert episode.info["solved"] == right / 4
            assert episode.info["carry"] == 1.0

    async def test_a_rejected_problem_has_no_reward(self) -> None:
        [episode] = await play(SUMS, Propose(), TEAM, {"proposer": lines("85+47")}, GIVEN)
        assert [turn.agent for turn in episode.turns] == ["proposer"]
        assert episode.rewards == {"proposer": 0.0}
        assert episode.success == 0.0
        assert episode.info == {"refused": ["It does not begin with 47."], "accepted": 0.0}

    async def test_only_solvers_read_fixed_problems(self) -> None:
        task = SUMS.task("test", 0)
        scripts = {name: expert(SUMS) for name in TEAM}
        [episode] = await play(SUMS, Propose(), TEAM, scripts, task)
        assert [turn.agent for turn in episode.turns] == list(TEAM[1:])
        assert {turn.new_messages[0].content for turn in episode.turns} == {task.question}
        assert episode.rewards == dict.fromkeys(TEAM[1:], 1.0)
        assert SUMS.start(task, TEAM, 0).observe("proposer") == ""


class TestScript:
    def test_proposals_of_the_script_are_accepted(self) -> None:
        for environment in (SUMS, ALL):
            texts = []
            for index in range(40):
                task = environment.task("train", index)
                text = environment.script("proposer", task, [Message("user", task.question)], index)
                assert isinstance(environment.proposed(text, task.data["given"]), Proposed)
                texts.append(text)
            assert len(set(texts)) > 30

    def test_a_flawed_proposer_avoids_carries(self) -> None:
        easy = Proposals(problems=Arithmetic(flaws={"proposer": 1.0}))
        for index in range(40):
            task = easy.task("train", index)
            found = easy.proposed(easy.script("proposer", task, [], index), task.data["given"])
            assert isinstance(found, Proposed)
            assert easy.about(found) == {"carry": False}

    def test_solvers_answer_the_last_problem_with_their_own_flaws(self) -> None:
        flawed = Proposals(problems=Arithmetic(flaws={"ada": 1.0}))
        read = [Message("user", "Solve 47+85 please")]
        assert flawed.script("ada", GIVEN, read, 0) == "122"
        assert flawed.script("ben", GIVEN, read, 0) == "132"


@pytest.mark.parametrize(
    ("settings", "agents", "why"),
    [
        ({}, ("ada", "ben"), "proposer: proposer"),
        ({"proposer": "bem"}, ("ada", "ben"), r"Did you mean 'ben'"),
        ({"proposer": "ben"}, ("ada", "ben"), "Put 'ben' first"),
        ({}, ("proposer",), "the only agent"),
        ({"problems": {"flaws": {"adda": 0.5}}}, ("proposer", "ada"), "Did you mean 'ada'"),
    ],
)
def test_unfit_teams_are_errors(settings: Mapping[str, Any], agents: tuple[str, ...], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Proposals.model_validate(settings).check(agents)


def test_impossible_settings_are_errors() -> None:
    with pytest.raises(ValidationError, match="fractions"):
        Proposals(problems=Arithmetic(fractions=True))
    with pytest.raises(ValidationError, match="uncertainty"):
        Proposals.model_validate({"pays": "surprise"})


async def test_a_step_out_of_turn_is_an_error() -> None:
    world = SUMS.start(GIVEN, TEAM, 0)
    with pytest.raises(EpisodeError, match="turn"):
        await world.step({"ada": "132"})


@pytest.mark.slow
def test_a_run_trains_both_sides(tmp_path: Path) -> None:
    settings = [
        *(f"model.embedded.{key}={value}" for key, value in SIZE.items()),
        "environment.problems.digits=1",
        "warmup.steps=120",
        "warmup.demonstrations=200",
        "training.steps=2",
        "training.tasks_per_step=8",
        "evaluation.problems=4",
        "evaluation.every=0",
    ]
    result = call("train", "proposer_solver", *settings, "--run-dir", str(tmp_path / "run"))
    assert result.code == 0, result.err
    episodes = list(read_episodes(tmp_path / "run"))
    assert len(episodes) == 2 * 8 * 8
    accepted = [episode for episode in episodes if episode.info["accepted"]]
    assert accepted
    environment = Proposals(problems=Arithmetic(digits=1))
    for episode in accepted:
        assert [turn.policy for turn in episode.turns] == ["proposer", *["solver"] * 4]
        expression = parse_expression(episode.info["problem"])
        assert expression is not None
        assert environment.problems.belongs_to(expression) == "train"
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text("utf-8").splitlines()]
    for row in rows:
        assert row["grad_norm/solver"] > 0
        assert row["grad_norm/proposer"] > 0
