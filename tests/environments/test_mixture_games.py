"""Several games in one run: each fits the team, is unchanged, and is compared only with itself."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspiel")

from tests.cli.conftest import call
from tests.support.tiny import team_of as trained_team
from tests.workflows.stage import Say, team_of

from kapelle.algorithm import Credit, CreditMemory
from kapelle.algorithms.mars import MARS
from kapelle.algorithms.rae import RAE
from kapelle.engines.rollout.protocol import Request
from kapelle.engines.rollout.scripted import ScriptedEngine
from kapelle.environment import has_comparable_answers
from kapelle.environments.mixture import Mixture
from kapelle.environments.openspiel.environment import OpenSpiel
from kapelle.environments.openspiel.text import read_listed
from kapelle.errors import ConfigError
from kapelle.rollout.episodes import rollout
from kapelle.rollout.evaluation.evaluate import summarise
from kapelle.rollout.setup import RolloutSetup
from kapelle.rows import Signals, TurnKey
from kapelle.runs.definitions import describe, rollout_metrics
from kapelle.runs.reader import read_metrics
from kapelle.settings.checks import RunToCheck
from kapelle.setup.recipe import load_recipe
from kapelle.setup.validation import check_run
from kapelle.types import Group
from kapelle.workflows.play import PlayWorkflow

KUHN = {"environment": {"name": "openspiel", "game": "kuhn_poker"}}
CROSSES = {"environment": {"name": "openspiel", "game": "tic_tac_toe"}}
HANABI = {"environment": {"name": "openspiel", "game": "hanabi_very_small"}}
SUMS = {"environment": {"name": "arithmetic"}}
AGENTS = ("first", "second")


def games(**parts: Any) -> Mixture:
    return Mixture(parts=parts or {"kuhn": KUHN, "crosses": CROSSES, "hanabi": HANABI})


def wanderer(request: Request) -> str:
    return random.Random(request.seed).choice(read_listed(request.messages[-1].content))


async def played(environment: Mixture, say: Mapping[str, Say], tasks: int, samples: int = 1) -> list[Group]:
    """Return the groups of the first train tasks, with every turn trained."""
    workflow = PlayWorkflow()
    team = team_of(*say)
    environment.check(team.names)
    workflow.check(team.agents, environment)
    setup = RolloutSetup(team, environment, workflow, ScriptedEngine(say))
    groups = await rollout(setup, [environment.task("train", k) for k in range(tasks)], samples, 0)
    assert all(episode.error is None for group in groups for episode in group.episodes)
    return [
        Group(
            group.task,
            tuple(
                replace(e, turns=tuple(replace(turn, trained=True) for turn in e.turns))
                for e in group.episodes
            ),
        )
        for group in groups
    ]


async def test_every_game_is_unchanged() -> None:
    environment = games()
    assert not has_comparable_answers(environment)
    assert environment.reward_range[1] == 5.0
    groups = await played(environment, dict.fromkeys(AGENTS, wanderer), 30)
    assert {group.task.part for group in groups} == {"kuhn", "crosses", "hanabi"}
    for group in groups:
        part = environment.parts[group.task.part].environment
        assert isinstance(part, OpenSpiel)
        [episode] = group.episodes
        world = part.start(part.task("train", 0), AGENTS, episode.seed)
        for turn in episode.turns:
            assert turn.agent in world.movers()
            assert turn.new_messages[-1].content.split("\n")[-1] == world.observe(turn.agent).split("\n")[-1]
            await world.step({turn.agent: turn.text})
        assert world.movers() == ()
        assert world.state.returns() == episode.info["returns"]
    row = rollout_metrics(groups)
    assert row["return/kuhn/first"] == -row["return/kuhn/second"]
    assert row["return/hanabi/first"] == row["return/hanabi/second"]
    assert "success/hanabi" in row
    assert "success/kuhn" not in row
    found = describe("return/kuhn/first")
    assert found is not None
    assert found.pattern == "return/<part>/<agent>"
    result = summarise(groups).row()
    assert set(result["part_reward"]) == {"kuhn", "crosses", "hanabi"}
    assert result["part_reward"]["kuhn"]["first"] == row["return/kuhn/first"]


@pytest.mark.parametrize(
    ("parts", "agents", "says"),
    [
        ({"kuhn": KUHN, "sums": SUMS}, AGENTS, r"Part 'sums'.*part 'kuhn'"),
        (
            {"kuhn": KUHN, "hanabi": HANABI},
            ("a", "b", "c"),
            r"Part 'kuhn' of the mixture is invalid: .*2 players",
        ),
        (
            {"kuhn": KUHN, "three": {"environment": {"name": "openspiel", "game": "kuhn_poker(players=3)"}}},
            AGENTS,
            r"Part 'three' of the mixture is invalid: .*3 players",
        ),
        ({"crosses": CROSSES}, ("alone",), r"Part 'crosses'.*same reward"),
    ],
)
def test_an_unfit_part_is_an_error(parts: Any, agents: Sequence[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        games(**parts).check(agents)


def test_a_shared_reward_with_a_zero_sum_part_is_an_error() -> None:
    config = load_recipe("self_play_games", (), ("algorithm.team_reward=mean", "warmup=null")).config
    algorithm: Any = config.algorithm
    with pytest.raises(ConfigError, match="team_reward"):
        check_run(RunToCheck(config, algorithm.build(), trained_team(*AGENTS), given=("embedded",)))


# Two games of one move each, whose stakes differ by a hundred.
SMALL = {"AA": (1, 0), "AB": (0, 1), "BA": (0, 1), "BB": (1, 0)}
LARGE = {joint: tuple(100 * payoff for payoff in pays) for joint, pays in SMALL.items()}


def stakes() -> Mixture:
    def part(payoffs: Mapping[str, Any]) -> dict[str, Any]:
        return {"environment": {"name": "matrix", "game": "custom", "payoffs": payoffs, "rules": "none"}}

    return games(small=part(SMALL), large=part(LARGE))


def letters(texts: str) -> Say:
    """Return a policy that writes these letters, one per episode of the whole rollout."""
    waiting = iter(texts)
    return lambda request: next(waiting)


def memory_of(algorithm: RAE, agents: Sequence[str] = AGENTS) -> CreditMemory:
    row = algorithm.build()
    assert row.memory is not None
    return row.memory(trained_team(*agents), 0)


def advantages(
    credit: Mapping[TurnKey, Credit], groups: Sequence[Group]
) -> dict[tuple[str, str], list[float]]:
    found: dict[tuple[str, str], list[float]] = {}
    for key in sorted(credit):
        episode = groups[key.group].episodes[key.episode]
        place = (episode.task.part, episode.turns[key.turn].agent)
        found.setdefault(place, []).append(float(credit[key].advantage_T[0]))
    return found


async def two_of_each() -> list[Group]:
    """Return two games of each stake, in which `first` receives 1, 0 and 100, 0, and `second` the rest."""
    environment = stakes()
    parts = [environment.task("train", k).part for k in range(40)]
    assert {"small", "large"} <= set(parts)
    groups = await played(environment, {"first": lambda r: "A", "second": lambda r: "A"}, 40)
    chosen: list[Group] = []
    for part in ("small", "large"):
        won, lost = [group for group in groups if group.task.part == part][:2]
        [episode] = lost.episodes
        turns = tuple(
            replace(t, reward=1.0 * (part == "small") + 100.0 * (part == "large") - t.reward)
            for t in episode.turns
        )
        chosen += [won, Group(lost.task, (replace(episode, turns=turns),))]
    return chosen


async def test_rae_has_a_baseline_for_each_game() -> None:
    """b ← 0.9·b + 0.1·R, A = R − b, for each game and agent: by hand."""
    groups = await two_of_each()
    memory = memory_of(RAE(decay=0.9))
    given = advantages(memory(groups, Signals()), groups)
    # first, small: R = 1, 0: b = 0.1, 0.09. second, small: R = 0, 1: b = 0, 0.1. large: a hundred times that.
    assert given["small", "first"] == pytest.approx([0.9, -0.09])
    assert given["small", "second"] == pytest.approx([0.0, 0.9])
    assert given["large", "first"] == pytest.approx([90.0, -9.0])
    assert given["large", "second"] == pytest.approx([0.0, 90.0])
    assert memory.metrics() == pytest.approx(
        {
            "baseline/small/first": 0.09,
            "baseline/small/second": 0.1,
            "baseline/large/first": 9.0,
            "baseline/large/second": 10.0,
        }
    )


async def test_mars_normalises_each_player_in_each_game() -> None:
    """(G − mean) / (std + 1e-6) over the player's turns in one game: ±½ over √½, whatever the stakes."""
    groups = await two_of_each()
    given = advantages(MARS().credit(groups, Signals()), groups)
    one = 0.5 / (math.sqrt(0.5) + 1e-6)
    hundred = 50.0 / (50.0 * math.sqrt(2) + 1e-6)
    assert given["small", "first"] == pytest.approx([one, -one])
    assert given["small", "second"] == pytest.approx([-one, one])
    assert given["large", "first"] == pytest.approx([hundred, -hundred])
    assert given["large", "second"] == pytest.approx([-hundred, hundred])


async def test_baselines_of_every_game_are_in_the_checkpoint() -> None:
    groups = await two_of_each()
    one, other = memory_of(RAE()), memory_of(RAE())
    one(groups, Signals())
    other.load_state(one.state())
    assert advantages(one(groups, Signals()), groups) == advantages(other(groups, Signals()), groups)
    assert one.metrics() == other.metrics()


async def test_a_baseline_belongs_to_a_role() -> None:
    rotating = {"environment": {**KUHN["environment"], "rotate": True}}
    groups = await played(games(kuhn=rotating), dict.fromkeys(AGENTS, wanderer), 20)
    memory = memory_of(RAE())
    memory(groups, Signals())
    assert set(memory.metrics()) == {
        f"baseline/kuhn/{agent}/seat_{seat}" for agent in AGENTS for seat in (1, 2)
    }
    given = advantages(MARS().credit(groups, Signals()), groups)
    by_role: dict[tuple[str, str], list[float]] = {}
    for g, group in enumerate(groups):
        [episode] = group.episodes
        for turn in episode.turns:
            advantage = float(MARS().credit(groups, Signals())[TurnKey(g, 0, turn.index)].advantage_T[0])
            by_role.setdefault((turn.agent, episode.roles[turn.agent]), []).append(advantage)
    assert len(by_role) == 4
    assert all(abs(sum(values)) < 1e-6 for values in by_role.values())
    assert set(given) == {("kuhn", agent) for agent in AGENTS}


QUICK = (
    "model.embedded.hidden=16",
    "model.embedded.layers=1",
    "model.embedded.intermediate=32",
    "warmup.steps=2",
    "warmup.demonstrations=20",
    "training.tasks_per_step=9",
    "evaluation.before_and_after=false",
    "evaluation.every=50",
    "checkpoint.every=1",
)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["rae", pytest.param("mars", marks=pytest.mark.long)])
def test_the_recipe_trains_and_resumes_with_all_baselines(algorithm: str, tmp_path: Path) -> None:
    row = f"algorithm={{name: {algorithm}, group_size: 1, team_reward: individual}}"
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    result = call("train", "self_play_games", *QUICK, row, "training.steps=2", "--run-dir", str(whole))
    assert result.code == 0, result.err
    rows = read_metrics(whole)
    for agent in AGENTS:
        assert rows[0][f"samples/{agent}"] > 0
        assert f"return/hanabi/{agent}" in rows[1]
        assert (f"baseline/kuhn/{agent}" in rows[1]) == (algorithm == "rae")
    assert (
        call("train", "self_play_games", *QUICK, row, "training.steps=1", "--run-dir", str(halves)).code == 0
    )
    resumed = call("train", "--resume", str(halves), "training.steps=2")
    assert resumed.code == 0, resumed.err
    kept = ("baseline/", "return/", "advantage", "samples/")
    ends = [
        {name: value for name, value in read_metrics(run)[1].items() if name.startswith(kept)}
        for run in (whole, halves)
    ]
    assert ends[0] == ends[1]


@pytest.mark.long
def test_exact_values_of_small_games(tmp_path: Path) -> None:
    kuhn, hanabi = (
        f"{{environment: {{name: openspiel, wording: short, game: {game}}}}}"
        for game in ("kuhn_poker", "hanabi_very_small")
    )
    parts = f"environment.parts={{kuhn: {kuhn}, hanabi: {hanabi}}}"
    run = tmp_path / "run"
    result = call("train", "self_play_games", *QUICK, parts, "training.steps=1", "--run-dir", str(run))
    assert result.code == 0, result.err
    exact = call("play", str(run), "--exact")
    assert exact.code == 0, exact.err
    assert "kuhn\npolicy" in exact.out
    assert "uniform          0.917" in exact.out
    assert "hanabi: OpenSpiel has no information states for hanabi_very_small" in exact.out
