"""The league in a run: who sits in the slots, who learns, and that a broken run goes on to the bit."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.resumed import resumed
from tests.support.tiny import frozen_copy, same_bits

from kapelle import Trainer
from kapelle.errors import ConfigError, ParityError
from kapelle.league.pool import MAIN
from kapelle.models.weights import read_adapter, weights_hash
from kapelle.setup.team_builder import exploiter_name, slot_name

ONE = {"adapter": "player"}
TINY = {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate": 32}


def game(**over: Any) -> dict[str, Any]:
    """Two agents with one adapter, in a league of two slots."""
    return {
        "model": {"embedded": TINY},
        "team": {
            "agents": [{"name": "first", "weights": ONE}, {"name": "second", "weights": ONE}],
            "sampling": {"max_tokens": 3},
        },
        "environment": {"name": "tests.support.plugins:Digest"},
        "workflow": {"name": "parallel"},
        "algorithm": {"name": "grpo", "group_size": 4, "team_reward": "individual"},
        "training": {"steps": 6, "tasks_per_step": 4},
        "optimizer": {"lr": 1e-2},
        "evaluation": {"before_and_after": False},
        "checkpoint": {"every": 2, "keep": 2},
        "league": {"population": "fictitious", "enter": {"every": 1}, "slots": 2, "keep": 3},
        **over,
    }


KUHN = {
    "environment": {"name": "openspiel", "game": "kuhn_poker", "wording": "short"},
    "workflow": {"name": "play"},
}


def test_members_speak_with_the_weights_with_which_they_entered(tmp_path: Path) -> None:
    entered: dict[str, str] = {}
    with Trainer(**game(), run_dir=tmp_path / "run") as trainer:
        for step in trainer.steps():
            for group in step.groups:
                for episode in group.episodes:
                    for turn in episode.turns:
                        cast = group.task.cast.get(turn.agent)
                        if cast is None:
                            assert turn.trained
                            continue
                        assert not turn.trained
                        assert entered.setdefault(cast.player, turn.weights_hash) == turn.weights_hash
    assert len(set(entered.values())) == len(entered) >= 4
    for name, found in entered.items():
        folder = tmp_path / "run" / "league" / name / "policies" / "player"
        if folder.exists():
            assert found.endswith(weights_hash(read_adapter(folder)[0])[-8:])


def test_a_sampler_that_plays_a_member_with_other_weights_stops_the_run() -> None:
    """Nobody trains on members' turns, so that no update would notice."""
    with Trainer(**game()) as trainer:
        assert all(step.metrics["league/parity"] <= 1e-4 for step in trainer.steps())
    with Trainer(**game()) as trainer:
        trainer._loop.league._loads = ()  # type: ignore[union-attr]
        with pytest.raises(ParityError, match="league:"):
            trainer.train()


def test_an_update_moves_no_slot() -> None:
    with Trainer(**game(league={"population": "fictitious", "enter": {"every": 100}, "slots": 2})) as trainer:
        before = None
        for _ in trainer.steps():
            now = frozen_copy(trainer.engine.weights(slot_name(0, "player")))
            assert before is None or same_bits(before, now)
            before = now


@pytest.mark.sample(2)
@pytest.mark.parametrize("population", ["fictitious", "pfsp", {"name": "psro", "games": 2}, "self_play"])
def test_a_run_resumes_bit_for_bit(tmp_path: Path, population: Any) -> None:
    settings = game(
        league={
            "population": population,
            "enter": {"every": 1},
            "slots": 2,
            "keep": 3,
            "in_memory": 1,
            "exploiter": {},
        }
    )
    with Trainer(**settings, run_dir=tmp_path / "whole") as whole:
        rows = [{k: v for k, v in step.metrics.items() if k.startswith("league/")} for step in whole.steps()]
        expected = frozen_copy(whole.engine.weights("player"))
        exploiter = frozen_copy(whole.engine.weights(exploiter_name("player")))
    with Trainer(**settings, run_dir=tmp_path / "again") as first:
        first.train(3)
    with Trainer(**settings, run_dir=tmp_path / "again", resume=True) as second:
        later = [
            {k: v for k, v in step.metrics.items() if k.startswith("league/")} for step in second.steps()
        ]
        assert same_bits(frozen_copy(second.engine.weights("player")), expected)
        assert same_bits(frozen_copy(second.engine.weights(exploiter_name("player"))), exploiter)
    assert later == rows[3:]


def test_payoffs_that_were_played_say_in_how_many_games(tmp_path: Path) -> None:
    league = {"population": {"name": "psro", "games": 3}, "enter": {"every": 1}}
    with Trainer(**game(league=league), run_dir=tmp_path / "run") as trainer:
        trainer.train(2)
        pool = trainer._loop.league.pool  # type: ignore[union-attr]
        homes = len({agent for agent, _, _ in pool.payoffs})
        assert trainer._loop.league._payoff_games(*pool.names[:2]) == 3 * homes  # type: ignore[union-attr]
        counted = dict(pool.payoff_games)
        pool.payoff_games.clear()
        assert trainer._loop.league._payoff_games(*pool.names[:2]) is None, "as of an older checkpoint"  # type: ignore[union-attr]
    assert len(pool.payoffs) > 1
    assert counted == dict.fromkeys(pool.payoffs, 3)
    newest = max(
        (tmp_path / "run").rglob("standing.json"), key=lambda file: json.loads(file.read_text())["step"]
    )
    table = json.loads(newest.read_text())["payoffs"]
    assert {count for line in table["games"] for count in line} == {3 * homes}
    assert [len(line) for line in table["games"]] == [len(table["names"])] * len(table["names"])


def test_it_is_the_same_run_where_another_process_plays(tmp_path: Path) -> None:
    def trained(*, overlap: bool) -> tuple[Any, list[Any]]:
        settings = game(training={"steps": 4, "tasks_per_step": 4, "max_staleness": 1, "overlap": overlap})
        with Trainer(**settings, run_dir=tmp_path / str(overlap)) as trainer:
            casts = [[group.task.cast for group in step.groups] for step in trainer.steps()]
            return frozen_copy(trainer.engine.weights("player")), casts

    (here, casts), (there, others) = trained(overlap=False), trained(overlap=True)
    assert casts == others
    assert same_bits(here, there)


def test_a_broken_run_goes_on_from_members_on_the_disk(tmp_path: Path) -> None:
    settings = game(
        league={"population": "fictitious", "enter": {"every": 1}, "slots": 1, "keep": 3, "in_memory": 1}
    )
    with Trainer(**settings, run_dir=tmp_path / "whole") as whole:
        whole.train()
        expected = frozen_copy(whole.engine.weights("player"))
    with resumed(settings, tmp_path / "again", after=3) as second:
        assert same_bits(frozen_copy(second.engine.weights("player")), expected)


def test_weights_of_those_who_left_go_with_the_last_checkpoint_that_knew_them(tmp_path: Path) -> None:
    with Trainer(**game(), run_dir=tmp_path / "run") as trainer:
        trainer.train()
    names = {folder.name for folder in (tmp_path / "run" / "league").iterdir()}
    # Three are in the pool after step 6; of those who left, the checkpoint of step 4 knows some.
    assert {"start", f"{MAIN}@6", f"{MAIN}@5", f"{MAIN}@0"} <= names
    assert len(names) < 8


def test_the_exploiter_learns_against_the_learner_and_begins_anew() -> None:
    settings = game(league={"population": "fictitious", "enter": {"every": 3}, "exploiter": {"share": 0.5}})
    with Trainer(**settings) as trainer:
        own = exploiter_name("player")
        start = frozen_copy(trainer.engine.weights(own))
        moved = [not same_bits(start, frozen_copy(trainer.engine.weights(own))) for _ in trainer.steps()]
        assert moved == [True, True, False, True, True, False]
        assert [name for name in trainer._loop.league.pool.names if name.startswith("exploiter")] == [  # type: ignore[union-attr]
            "exploiter@3",
            "exploiter@6",
        ]


def test_seats_with_adapters_of_their_own_are_played_by_their_own_past() -> None:
    team = {"agents": [{"name": "first"}, {"name": "second"}], "sampling": {"max_tokens": 3}}
    with Trainer(**game(team=team, league={"population": "fictitious", "enter": {"every": 2}})) as trainer:
        seen = {
            (turn.agent, turn.policy.rpartition(":")[2], turn.trained)
            for step in trainer.steps()
            for group in step.groups
            for episode in group.episodes
            for turn in episode.turns
        }
    assert seen == {(agent, agent, trained) for agent in ("first", "second") for trained in (True, False)}


def test_members_that_are_always_there(tmp_path: Path) -> None:
    pytest.importorskip("pyspiel")
    with Trainer(**game(**KUHN), run_dir=tmp_path / "old") as trainer:
        trainer.train(1)
    members = {"base": "frozen", "solver": "nash", "old": {"past": str(tmp_path / "old")}}
    settings = game(**KUHN, league={"population": "fictitious", "enter": None, "members": members})
    with Trainer(**settings) as trainer:
        played = {
            cast.player: cast.policy
            for step in trainer.steps()
            for group in step.groups
            for cast in group.task.cast.values()
        }
    assert played == {"base": "member:base", "nash": "", "old": "member:old:player"}


@pytest.mark.parametrize("each", ["nash", "psro"])
def test_small_games_are_measured_exactly(each: str) -> None:
    pytest.importorskip("pyspiel")
    league = {"population": "psro" if each == "psro" else "fictitious", "enter": {"every": 1}}
    with Trainer(**game(**KUHN, league=league)) as trainer:
        rows = [step.metrics for step in trainer.steps(2)]
        pool = trainer._loop.league.pool  # type: ignore[union-attr]
    assert all(0.0 < row["league/nash_conv"] < 4.0 for row in rows)
    if each == "psro":
        assert pool.payoff_games == dict.fromkeys(pool.payoffs, 0), "nothing was played for them"
        for one in pool.names:
            for other in pool.names:  # what one wins the other loses
                assert pool.payoffs["first", one, other] == pytest.approx(-pool.payoffs["second", other, one])


@pytest.mark.parametrize(
    ("over", "said"),
    [
        ({"team": {"agents": 1}}, "one agent"),
        ({"team": {"sharing": "shared", "agents": 2}}, "weights: {adapter: player}"),
        ({"league": {"enter": None}}, "nobody is a member"),
        ({"league": {"members": {"x": "nash"}}}, "has none"),
        ({**KUHN, "league": {"members": {"x": "nahs"}}}, "no player 'nahs'"),
        ({"league": {"members": {"x": {"past": "runs/nowhere"}}}}, "runs/nowhere"),
        ({"league": {"population": "pfps"}}, "pfps"),
        (
            {"league": {"members": {"self": "frozen"}}},
            "'self': …}}` has a name that a learner of the league has",
        ),
        ({"league": {"members": {"exploiter": "frozen"}}}, "'exploiter': …}}` has a name"),
        ({"league": {"members": {"partner_0": "frozen"}}}, "'partner_0': …}}` has a name"),
        (
            {**KUHN, "league": {"members": {"x": "nash", "y": "nash"}}},
            "'nash'}}` is the same player as `league={'members': {'x': …}}`. Name it once",
        ),
        ({**KUHN, "league": {"members": {"x": "mcts(200)"}}}, r"Write mcts\(simulations=200\)"),
        (
            {"league": {"population": "psro", "slots": 1}},
            "`psro` plays pairs: set `league={'slots': …}` to at least 2",
        ),
        (
            {**KUHN, "league": {"population": "psro", "slots": 1, "exact": 0}},
            "`psro` plays pairs: set `league={'slots': …}` to at least 2",
        ),
        (
            {"league": {"enter": {"every": 5, "beats": 0.9, "at_latest": 2}}},
            r"`at_latest: 2` comes before `every: 5`",
        ),
        ({"league": {"slots": 10**9, "keep": 10**9}}, "'slots': …}` asks for 1000000000 adapters"),
        (
            {"league": {"population": {"name": "fcp", "partners": 10**9}}},
            "'partners': …}}` asks for 1000000000 adapters",
        ),
        (
            {"league": {"exploiter": {}}, "algorithm": {"name": "ippo", "team_reward": "individual"}},
            "critics",
        ),
    ],
)
def test_a_league_that_cannot_be_is_refused_before_a_model_loads(over: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Trainer(**game(**over))


@pytest.mark.parametrize("over", [{}, {"keep": 1, "exact": 0}])
def test_psro_needs_one_slot_where_no_two_past_selves_play(over: dict[str, Any]) -> None:
    """The table is computed from the policies, or holds one past self at a time."""
    pytest.importorskip("pyspiel")
    league = {"population": {"name": "psro", "games": 2}, "enter": {"every": 1}, "slots": 1, **over}
    with Trainer(**game(**KUHN, league=league)) as trainer:
        trainer.train(3)
        assert len(trainer._loop.league.pool.payoffs) == 2 * len(trainer._loop.league.pool.names) ** 2  # type: ignore[union-attr]


def test_a_model_is_not_booked_as_the_player_whose_name_it_has() -> None:
    """`nash` is the base here, and `x` the equilibrium: each has its own games."""
    pytest.importorskip("pyspiel")
    members = {"nash": "frozen", "x": "nash"}
    league = {"population": "fictitious", "enter": None, "members": members}
    with Trainer(**game(**KUHN, league=league)) as trainer:
        trainer.train(1)
        met = trainer._loop.league.pool.met  # type: ignore[union-attr]
    assert {member: score.games for (_, member), score in met.items()} == {"nash": 8.0, "x": 8.0}


def test_partners_learn_alone_and_then_the_learner_with_all_of_them() -> None:
    """Fictitious co-play: three steps of two partners, three of the learner."""
    population = {"name": "fcp", "partners": 2}
    with Trainer(**game(league={"population": population, "enter": {"every": 1}, "slots": 4})) as trainer:
        moved = []
        names = ("player", "partner:0:player", "partner:1:player")
        before = {name: frozen_copy(trainer.engine.weights(name)) for name in names}
        met = []
        for step in trainer.steps():
            now = {name: frozen_copy(trainer.engine.weights(name)) for name in names}
            moved.append([not same_bits(before[name], now[name]) for name in names])
            before = now
            met.append({each.player for group in step.groups for each in group.task.cast.values()})
        members = trainer._loop.league.pool.names  # type: ignore[union-attr]
    assert moved == [[False, True, True]] * 3 + [[True, False, False]] * 3
    assert met[:3] == [{"partner_0", "partner_1"}] * 3
    assert all(each <= set(members) and each for each in met[3:])
    assert members == ["self@0", *(f"partner_{k}@{step}" for step in (1, 2, 3) for k in (0, 1))]


def spread(by: float, **over: Any) -> dict[str, Any]:
    """Two partners of fictitious co-play who begin apart."""
    population = {"name": "fcp", "partners": 2, "spread": by}
    return game(league={"population": population, "enter": {"every": 1}, "slots": 4}, **over)


def test_a_spread_lets_partners_begin_apart_and_the_learner_as_its_base() -> None:
    names = ("player", "partner:0:player", "partner:1:player")
    starts = []
    for by in (0.0, 0.3, 0.3):
        with Trainer(**spread(by)) as trainer:
            starts.append({name: frozen_copy(trainer.engine.weights(name)) for name in names})
    same, apart, again = starts
    for name in names:
        assert same_bits(apart[name], again[name])
        moved = {key for key, own in apart[name].items() if not torch.equal(own, same[name][key])}
        assert moved == (set() if name == "player" else {key for key in same[name] if "lora_B" in key})
    drawn = torch.stack(
        [
            torch.cat([own.flatten() for key, own in apart[name].items() if "lora_B" in key])
            for name in names[1:]
        ]
    )
    assert drawn.std(dim=1).tolist() == pytest.approx([0.3, 0.3], rel=0.1)
    assert abs(torch.corrcoef(drawn)[0, 1].item()) < 0.2


@pytest.mark.parametrize("overlap", [False, True])
def test_a_spread_reaches_what_plays(overlap: bool) -> None:
    with Trainer(**spread(0.3, training={"overlap": overlap, "tasks_per_step": 4})) as trainer:
        assert next(iter(trainer.steps())).metrics["parity/max"] < 1e-4


def test_partners_that_could_not_enter_are_refused() -> None:
    with pytest.raises(ConfigError, match="lets partners enter"):
        Trainer(**game(league={"population": {"name": "fcp"}, "enter": None, "members": {"x": "frozen"}}))


def test_a_past_self_of_another_game_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("pyspiel")
    with Trainer(**game(), run_dir=tmp_path / "digest") as trainer:
        trainer.train(1)
    members = {"old": {"past": str(tmp_path / "digest")}}
    with pytest.raises(
        ConfigError, match=r"learned tests.support.plugins:Digest, and this run plays openspiel kuhn_poker"
    ):
        Trainer(**game(**KUHN, league={"members": members}))


def test_a_pool_that_would_not_fit_the_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"this machine has .* GiB"):
        Trainer(**game(league={"in_memory": 10**9}))


@pytest.mark.parametrize(
    ("over", "beside"),
    [
        ({"population": {"name": "fcp", "partners": 200}}, "200 partners and exploiters"),
        ({"exploiter": {}}, "1 partners and exploiters"),
    ],
)
def test_learners_beside_the_first_count_in_the_pools_memory(
    monkeypatch: pytest.MonkeyPatch, over: dict[str, Any], beside: str
) -> None:
    small = {"slots": 2, "keep": 2, "in_memory": 1}
    with Trainer(**game(league=small)) as trainer:
        one = sum(4 * own.numel() for own in trainer.engine.weights("player").values())
    real = os.sysconf
    memory = {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": int(3.5 * one)}  # of three past selves, not of four
    monkeypatch.setattr(os, "sysconf", lambda name: memory.get(name) or real(name))
    Trainer(**game(league=small)).close()
    with pytest.raises(ConfigError, match=f"keep 3 past selves, and {beside}"):
        Trainer(**game(league={**small, **over}))


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_what_a_team_loses_with_members_is_recorded_where_all_earn_alike(share: float) -> None:
    levers = {"name": "matrix", "game": "custom", "payoffs": {"AA": [1, 1], "AB": [0.5, 0.5], "BA": [0.5, 0.5], "BB": [2, 2]}}  # fmt: skip
    league = {"population": {"name": "fictitious", "share": share}, "enter": {"every": 1}, "slots": 2}
    with Trainer(**game(environment=levers, workflow={"name": "play"}, league=league)) as trainer:
        seen = 0
        for step in trainer.steps():
            returns: dict[bool, list[float]] = {False: [], True: []}
            for group in step.groups:
                returns[bool(group.task.cast)] += [episode.total("first") for episode in group.valid]
            found = step.metrics.get("league/cross_play_gap")
            if not (returns[True] and returns[False]):
                assert found is None
                continue
            seen += 1
            alone, with_members = (sum(own) / len(own) for own in (returns[False], returns[True]))
            assert found == pytest.approx(alone - with_members)
    assert bool(seen) is (share < 1.0)


def test_there_is_no_cross_play_gap_where_one_wins_what_the_other_loses() -> None:
    pytest.importorskip("pyspiel")
    league = {"population": {"name": "fictitious", "share": 0.5}, "enter": {"every": 1}, "slots": 2}
    with Trainer(**game(**KUHN, league=league)) as trainer:
        assert all("league/cross_play_gap" not in step.metrics for step in trainer.steps())
