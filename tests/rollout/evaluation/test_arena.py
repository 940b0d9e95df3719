"""Who meets whom, what it says, and that luck is taken out of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.cli.conftest import TINY

import kapelle
from kapelle.comparison.contestants import enter, load
from kapelle.rollout.episodes import shared_rollout
from kapelle.rollout.evaluation.arena import Arena, Encounter, assigned_team, payoffs
from kapelle.setup.problems import choose_tasks
from kapelle.types import Episode, Task

KUHN = "kuhn_poker"


def made(*meetings: Encounter, opposed: bool = True) -> Arena:
    labels = tuple(dict.fromkeys(label for met in meetings for label in (met.one, met.other)))
    deals = len(meetings[0].games)
    return Arena("game", 2, deals, 0, labels, {}, {(m.one, m.other): m for m in meetings}, opposed)


def met(one: str, other: str, *games: tuple[tuple[float, float] | None, ...]) -> Encounter:
    return Encounter(one, other, ((0, 1), (1, 0)), games, (2 * len(games),) * 2, (1, None), (4, 4))


def test_a_deal_is_won_over_both_seats_and_payoffs_are_over_deals() -> None:
    """Whoever sits first wins 1, and in the last deal the one wins in both seats."""
    luck: tuple[tuple[float, float], ...] = ((1.0, -1.0), (-1.0, 1.0))
    arena = made(met("a", "b", luck, luck, luck, ((1.0, -1.0), (1.0, -1.0))))
    assert arena.results == {(0, 1): (1, 3, 0)}
    payoff, other = arena.payoff("a", "b"), arena.payoff("b", "a")
    assert payoff is not None
    assert other is not None
    assert payoff.mean == 0.25 == -other.mean
    assert payoff.low is not None
    assert payoff.low == pytest.approx(0.25 - 3.182446 * 0.5 / 2, abs=1e-5), (
        "Student's t of four deals: 0, 0, 0, 1"
    )


def test_a_deal_with_a_failed_episode_counts_nowhere() -> None:
    arena = made(met("a", "b", ((1.0, -1.0), None), ((0.5, -0.5), (0.5, -0.5))))
    payoff = arena.payoff("a", "b")
    assert payoff is not None
    assert (payoff.mean, payoff.deals, payoff.low) == (0.5, 1, None)
    assert arena.results == {(0, 1): (1, 0, 0)}


def test_the_gap_of_a_team_is_self_play_less_cross_play() -> None:
    def both(one: str, other: str, *paid: float) -> Encounter:
        return met(one, other, *(((each, each), (each, each)) for each in paid))

    arena = made(both("a", "a", 3, 5), both("b", "b", 1, 3), both("a", "b", 1, 1), opposed=False)
    assert arena.together
    assert arena.elo == {}
    gap, cross = arena.gap, arena.cross_play("b")
    assert gap is not None
    assert cross is not None
    assert (gap.mean, cross.mean) == (2.0, 1.0)
    assert arena.ranked == ("a", "b")
    assert "self-play minus cross-play: +2.000" in str(arena)


def test_a_team_is_paid_together_where_the_environment_pays_who_answers() -> None:
    names = ("reasoner", "actor", "critic")
    graded = Episode(Task("a", "1+1"), 0, names, rewards={"actor": 1.0, "critic": 0.5})
    assert payoffs(graded, names, graded=True) == {"reasoner": 0.75, "actor": 1.0, "critic": 0.5}
    assert payoffs(graded, names, graded=False) == {"reasoner": 0.0, "actor": 1.0, "critic": 0.5}, (
        "of a game, who won"
    )
    nobody = Episode(Task("a", "1+1"), 0, names)
    assert payoffs(nobody, names, graded=True) == dict.fromkeys(names, 0.0)


@pytest.mark.slow
def test_play_that_cycles_is_named_and_no_line_is_right_then() -> None:
    def beats(one: str, other: str) -> Encounter:
        return met(one, other, *[((1.0, -1.0), (1.0, -1.0))] * 25, ((0.0, 0.0), (1.0, -1.0)))

    arena = made(beats("rock", "scissors"), beats("scissors", "paper"), beats("paper", "rock"))
    assert arena.cycle == ("rock", "scissors", "paper")
    assert all(abs(rating) < 1 for rating, _, _ in arena.elo.values())
    assert list(arena.shares["nash_average"].values()) == pytest.approx([1 / 3] * 3, abs=1e-6)
    assert list(arena.shares["alpha_rank"].values()) == pytest.approx([1 / 3] * 3, abs=1e-6)
    assert "rock beats scissors beats paper beats rock" in str(arena)
    line = made(beats("rock", "scissors"), beats("scissors", "paper"), beats("rock", "paper"))
    assert line.cycle == ()
    assert "form a cycle" not in str(line)


def test_a_meeting_is_the_same_from_the_disk() -> None:
    meeting = met("a", "b", ((1.0, -1.0), None))
    assert Encounter.of(json.loads(json.dumps(meeting.row()))) == meeting


class TestGames:
    @pytest.mark.slow
    def test_payoffs_are_those_that_the_game_has(self) -> None:
        """An equilibrium of Kuhn poker against itself, and against random play, by enumeration."""
        import pyspiel

        from kapelle.environments.openspiel.games import equilibrium

        game = pyspiel.load_game(KUHN)
        nash = pyspiel.TabularPolicy({k: list(v.items()) for k, v in equilibrium(str(game), 0.01).items()})
        uniform = pyspiel.UniformRandomPolicy(game)
        root = game.new_initial_state()
        first = pyspiel.expected_returns(root, [nash, uniform], -1, True)[0]
        second = pyspiel.expected_returns(root, [uniform, nash], -1, True)[1]
        found = kapelle.arena("nash", "random", environment=KUHN, games=600).payoff("nash", "random")
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        assert found.low <= (first + second) / 2 <= found.high
        assert found.high - found.low < 0.15

    def test_the_same_player_by_two_names_has_the_same_luck(self) -> None:
        pytest.importorskip("pyspiel")
        result = kapelle.arena("one=random", "two=random", "nash", environment=KUHN, games=30)
        same = result.meeting("one", "two")
        assert same is not None
        assert all(deal is not None and deal[0] == deal[1] for deal in same.deals)
        one, two = result.meeting("one", "nash"), result.meeting("two", "nash")
        assert one is not None
        assert two is not None
        assert one.games == two.games

    @pytest.mark.slow
    def test_an_invalid_move_costs_its_player_nothing_but_the_game(self) -> None:
        """The game pays both together nothing; penalties stay out of it, and how often they were due is said."""
        result = kapelle.arena("model=embedded", "random", environment=KUHN, games=4)
        found = result.meeting("model", "random")
        assert found is not None
        assert all(pair is not None and sum(pair) == 0 for deal in found.games for pair in deal)
        assert result.invalid("model") == 1.0
        assert result.invalid("random") is None
        model, other = result.row()["players"]
        assert (model["invalid"], other["invalid"], other["turns"]) == (1.0, None, None)
        assert model["turns"] == found.turns[0], "the share is of so many turns"


class TestRuns:
    """Runs of recipes with tiny models: `a` and `b` share a base, `whole` trains all weights on a mixture of games."""

    @pytest.fixture(scope="class")
    def runs(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
        with pytest.MonkeyPatch.context() as patch:
            folder = tmp_path_factory.mktemp("arena")
            patch.setenv("KAPELLE_CACHE", str(folder / "cache"))
            for name, recipe in (("a", "kuhn"), ("b", "kuhn"), ("whole", "self_play_games")):
                own = [each for each in TINY if not each.startswith(("algorithm", "model.embedded.context"))]
                with kapelle.Trainer.from_recipe(
                    recipe, *own, "training.tasks_per_step=3", run_dir=folder / name
                ) as trainer:
                    trainer.train()
            yield folder

    @pytest.mark.slow
    def test_adapters_of_one_base_are_in_one_bank(self, runs: Path) -> None:
        words = [str(runs / "a"), f"start={runs / 'a'}@0", str(runs / "b")]
        loaded = load(enter(words, None, ()), lambda _: None)
        bases = {base for each in loaded.contestants.values() if each.team for base in each.team.bases}
        assert len(bases) == 1
        names = sorted(loaded.setup.engine.policies)
        assert names == ["a:first", "a:second", "b:first", "b:second", "start:first", "start:second"]
        result = kapelle.arena(*words, "nash", games=4)
        assert result.failed == 0
        assert [result.invalid(label) is not None for label in result.labels] == [True, True, True, False]

    @pytest.mark.slow
    def test_a_run_plays_with_the_weights_of_its_checkpoint(self, runs: Path) -> None:
        """The same episodes as `Trainer.from_run`'s, from adapters and from weights that were trained as a whole."""
        for name in ("a", "whole", "a@1"):
            entered = enter([f"x={runs / name}", "random"], None, ())
            loaded = load(entered, lambda _: None)
            team, _ = assigned_team(entered.names, (loaded.contestants["x"],) * 2, (0, 0))
            with kapelle.Trainer.from_run(f"{runs / name}") as trainer:
                tasks = choose_tasks(trainer.setup.environment, "test", 6)
                theirs, ours = (
                    [turn for group in shared_rollout(setup, tasks, 1, 3) for turn in group.episodes[0].turns]
                    for setup in (trainer.setup, replace(loaded.setup, team=team))
                )
                assert [turn.completion_ids for turn in ours] == [turn.completion_ids for turn in theirs]
                for one, other in zip(ours, theirs, strict=True):
                    assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
