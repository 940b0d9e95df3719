"""Joint rounds, their states and rewards, and the replay buffer."""

from __future__ import annotations

import pytest
import torch
from tests.support.episodes import episode, group, turn
from tests.support.tiny import same_bits

from kapelle.algorithms.value_decomposition.mixer_fit import (
    JointEpisode,
    Replay,
    Rounds,
    read_episode,
    read_groups,
)
from kapelle.rows import Embedding, Signals, TurnKey, turns_of
from kapelle.types import Episode

PLACE = (0, 0)


def seen(played: Episode) -> Signals:
    """Turn k saw (k, 0) and said (k, 1)."""
    return Signals(
        embedding={
            key: Embedding(torch.tensor([float(key.turn), 0.0]), torch.tensor([float(key.turn), 1.0]))
            for key, _ in turns_of([group(played)])
        }
    )


def read(played: Episode, agents: str = "ab", how: str = "mean") -> JointEpisode:
    found = read_episode(PLACE, played, seen(played), tuple(agents), how)  # type: ignore[arg-type]
    assert found is not None
    return found


class TestRounds:
    def test_rounds_have_each_agent_s_embeddings(self) -> None:
        rounds = read(
            episode(
                turn("a", 0, completed_before=0), turn("b", 1, completed_before=0), turn("a", 2), turn("b", 3)
            )
        ).rounds
        assert rounds.saw_BAD[:, :, 0].tolist() == [[0.0, 1.0], [2.0, 3.0]]
        assert rounds.said_BAD[:, :, 1].tolist() == [[1.0, 1.0], [1.0, 1.0]]

    def test_an_agent_without_a_turn_is_masked(self) -> None:
        rounds = read(episode(turn("a", 0), turn("b", 1), turn("a", 2))).rounds
        assert rounds.acted_BA.tolist() == [[1.0, 1.0], [1.0, 0.0]]
        assert rounds.saw_BAD[1, 1].tolist() == rounds.said_BAD[1, 1].tolist() == [0.0, 0.0]

    def test_turns_that_are_not_trained_are_no_part_of_it(self) -> None:
        played = episode(turn("judge", 0, trained=False), turn("a", 1), turn("b", 2))
        assert read(played).rounds.acted_BA.tolist() == [[1.0, 1.0]]

    def test_failed_episodes_are_excluded(self) -> None:
        good, failed = episode(turn("a", 0)), episode(turn("a", 0), error="EpisodeError: gone")
        signals = Signals(embedding={TurnKey(0, 1, 0): Embedding(torch.zeros(2), torch.zeros(2))})
        assert list(read_groups([group(failed, good)], signals, ("a",), "mean")) == [(0, 1)]


class TestState:
    def test_of_simultaneous_turns_it_is_the_mean_of_what_all_saw(self) -> None:
        played = episode(
            turn("a", 0, completed_before=0),
            turn("b", 1, completed_before=0),
            turn("a", 2, completed_before=2),
            turn("b", 3, completed_before=2),
        )
        assert read(played).rounds.state_BD.tolist() == [[0.5, 0.0], [2.5, 0.0]]

    def test_in_a_chain_it_excludes_texts_of_its_own_round(self) -> None:
        # The second agent's prompt holds the first one's words: only the first prompt is the state.
        played = episode(
            turn("a", 0, completed_before=0),
            turn("b", 1, completed_before=1),
            turn("a", 2, completed_before=2),
            turn("b", 3, completed_before=3),
        )
        assert read(played).rounds.state_BD.tolist() == [[0.0, 0.0], [2.0, 0.0]]


class TestRewards:
    def test_a_round_s_reward_stands_once_and_the_terminal_one_on_the_last_round(self) -> None:
        played = episode(
            turn("a", 0, reward=1.0), turn("b", 1, reward=3.0), turn("a", 2), turn("b", 3),
            rewards={"a": 4.0, "b": 0.0},
        )  # fmt: skip
        assert read(played).reward_K.tolist() == [2.0, 2.0]
        assert read(played, how="sum").reward_K.tolist() == [4.0, 4.0]

    def test_the_last_round_is_the_one_with_the_most_turns_not_the_last_in_time(self) -> None:
        # b speaks once and last: in its own first round. What comes at the end comes after all rounds.
        played = episode(turn("a", 0), turn("a", 1), turn("b", 2), rewards={"a": 1.0, "b": 1.0})
        assert read(played).reward_K.tolist() == [0.0, 1.0]

    def test_rewards_of_an_untrained_agent_count(self) -> None:
        played = episode(turn("a", 0), turn("frozen", 1, trained=False), rewards={"a": 0.0, "frozen": 1.0})
        assert read(played, "a").reward_K.tolist() == [0.5]

    def test_last_counts_the_reward_of_the_closing_agent(self) -> None:
        played = episode(turn("a", 0), turn("b", 1), rewards={"a": 5.0, "b": 2.0})
        assert read(played, how="last").reward_K.tolist() == [2.0]


def numbered(number: float, rounds: int = 1, cut: bool = False) -> JointEpisode:
    """An episode that says `number` everywhere."""
    full = torch.full((rounds, 2, 3), number)
    return JointEpisode(
        Rounds(full, full, torch.ones(rounds, 2), torch.full((rounds, 3), number)),
        torch.full((rounds,), number),
        cut,
    )


class TestReplay:
    def test_the_oldest_are_forgotten(self) -> None:
        replay = Replay(3)
        for first in (0, 2):
            replay.add([numbered(float(first)), numbered(float(first + 1))])
        assert [float(played.reward_K) for played in replay.episodes] == [1.0, 2.0, 3.0]

    def test_a_draw_repeats_nothing_and_depends_on_its_seed_alone(self) -> None:
        replay = Replay(10)
        replay.add([numbered(float(k)) for k in range(10)])
        torch.manual_seed(1)
        first = replay.draw(6, seed=4).reward_NK[:, 0].tolist()
        torch.manual_seed(2)
        assert replay.draw(6, seed=4).reward_NK[:, 0].tolist() == first
        assert len(set(first)) == 6
        assert replay.draw(6, seed=5).reward_NK[:, 0].tolist() != first

    @pytest.mark.parametrize("episodes", [0, 3])
    def test_its_state_is_all_of_it(self, episodes: int) -> None:
        replay, other = Replay(5), Replay(5)
        replay.add([numbered(float(k), rounds=k + 1, cut=k == 1) for k in range(episodes)])
        other.add([numbered(9.0)])
        other.load_state(replay.state())
        assert same_bits(other.state(), replay.state())
        assert [played.cut for played in other.episodes] == [False, True, False][:episodes]
