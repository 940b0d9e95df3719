"""Episodes as joint rounds, and a memory of them that mixers are fitted on.

Round k of an episode is the k-th trained turn of every agent that has one: the joint action of value decomposition.
Agents are columns in seat order; one that has no k-th turn is masked.

The state of a round is the mean of what agents read *before* the round: of its prompts, those that were fixed when
its first turn was. In a chain the Actor's prompt holds the Reasoner's turn of the same round; were it part of the
state, the mixer could explain the return without the Reasoner, and the Reasoner's credit would vanish.

Shapes: A agents, D width of an embedding, K rounds of one episode, N episodes, B rounds of all of them in a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kapelle.algorithms.shared.rewards import FREE, PenaltyConfig, TeamReward, round_rewards
from kapelle.rows import Signals, TurnKey
from kapelle.types import Episode, Group, Turn


class Rounds(NamedTuple):
    """Joint actions and the states they were taken in."""

    saw_BAD: Tensor
    said_BAD: Tensor
    acted_BA: Tensor
    """1.0 where the agent took its turn; its other entries are 0."""
    state_BD: Tensor


@dataclass(frozen=True, slots=True)
class Played:
    """One episode as a mixer reads it."""

    rounds: Rounds
    """K of them, in order."""
    reward_K: Tensor
    """What the team was paid for each round, once; the terminal reward is on the last."""
    cut: bool
    """True if a limit of turns ended the episode: its future was not seen."""


class Fitted(NamedTuple):
    """Several episodes, their rounds in a row."""

    rounds: Rounds
    reward_NK: Tensor
    mask_NK: Tensor
    """1.0 at an episode's rounds; `pack` with it takes `_NK` to the rows of `rounds`."""
    cut_N: Tensor


def earned_by_round(
    episode: Episode,
    rounds: Sequence[Mapping[str, Turn]],
    how: TeamReward,
    penalties: PenaltyConfig = FREE,
) -> Tensor:
    """Return what the team earned in each round → float64 [K]; the terminal reward is on the last one."""
    placed = round_rewards(episode, how, penalties)
    paid = [sum(placed[turn.index] for turn in movers.values()) for movers in rounds]
    return torch.tensor(paid, dtype=torch.float64)


def read_episode(
    place: tuple[int, int], episode: Episode, signals: Signals, agents: Sequence[str], how: TeamReward
) -> Played | None:
    """Return an episode's joint rounds with the embeddings of its turns; None where no agent learns."""
    rounds = episode.rounds(agents, trained=True)
    if not rounds:
        return None
    some = signals.embedding[TurnKey(*place, next(iter(rounds[0].values())).index)].observation_D
    saw_KAD = torch.zeros(len(rounds), len(agents), some.shape[0])
    said_KAD, acted_KA = torch.zeros_like(saw_KAD), torch.zeros(saw_KAD.shape[:2])
    state_KD = torch.zeros(len(rounds), some.shape[0])
    for k, movers in enumerate(rounds):
        first = min(turn.index for turn in movers.values())
        before: list[Tensor] = []
        for agent, turn in movers.items():
            seen = signals.embedding[TurnKey(*place, turn.index)]
            i = agents.index(agent)
            saw_KAD[k, i], said_KAD[k, i], acted_KA[k, i] = seen.observation_D, seen.action_D, 1.0
            if turn.seen <= first:
                before.append(seen.observation_D)
        state_KD[k] = torch.stack(before).mean(0)
    reward_K = earned_by_round(episode, rounds, how).float()
    return Played(Rounds(saw_KAD, said_KAD, acted_KA, state_KD), reward_K, episode.truncated)


def read_groups(
    groups: Sequence[Group], signals: Signals, agents: Sequence[str], how: TeamReward
) -> dict[tuple[int, int], Played]:
    """Return every valid episode's joint rounds by (group, episode)."""
    found = {
        (g, e): read_episode((g, e), episode, signals, agents, how)
        for g, group in enumerate(groups)
        for e, episode in enumerate(group.episodes)
        if episode.error is None
    }
    return {place: played for place, played in found.items() if played is not None}


def joined(episodes: Sequence[Played]) -> Fitted:
    """Return several episodes as one batch."""
    pad = torch.nn.utils.rnn.pad_sequence
    reward_NK = pad([played.reward_K for played in episodes], batch_first=True)
    mask_NK = pad([torch.ones_like(played.reward_K) for played in episodes], batch_first=True)
    columns = zip(*(played.rounds for played in episodes), strict=True)
    rounds = Rounds(*(torch.cat(column) for column in columns))
    return Fitted(rounds, reward_NK, mask_NK, torch.tensor([float(played.cut) for played in episodes]))


class Replay:
    """The last `capacity` episodes, oldest first."""

    def __init__(self, capacity: int) -> None:
        """Remember at most `capacity` episodes."""
        self.capacity = capacity
        self.episodes: list[Played] = []

    def add(self, episodes: Sequence[Played]) -> None:
        """Remember episodes, and forget the oldest beyond the capacity."""
        self.episodes = [*self.episodes, *episodes][-self.capacity :]

    def draw(self, count: int, seed: int) -> Fitted:
        """Return `count` episodes drawn uniformly without repetition, or all if there are fewer."""
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(self.episodes), generator=generator)[:count]
        return joined([self.episodes[k] for k in order.tolist()])

    def state(self) -> dict[str, object]:
        """Return all episodes as a few tensors."""
        if not self.episodes:
            return {}
        batch = joined(self.episodes)
        return {
            **batch.rounds._asdict(),
            "reward_B": torch.cat([played.reward_K for played in self.episodes]),
            "rounds": [len(played.reward_K) for played in self.episodes],
            "cut": [played.cut for played in self.episodes],
        }

    def load_state(self, state: Mapping[str, object]) -> None:
        """Restore what `state` returned."""
        self.episodes = []
        if not state:
            return
        counts, cuts = state["rounds"], state["cut"]
        assert isinstance(counts, list)
        assert isinstance(cuts, list)
        columns = []
        for name in (*Rounds._fields, "reward_B"):
            column = state[name]
            assert isinstance(column, Tensor)
            columns.append([piece.clone() for piece in column.split(counts)])
        for *rounds, reward_K, cut in zip(*columns, cuts, strict=True):
            self.episodes.append(Played(Rounds(*rounds), reward_K, cut))
