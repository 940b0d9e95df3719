"""The pool of a league: its members, the results of the learners against these members, and the payoff table.

A member is either a snapshot of the learners after some step, or permanent: a frozen model, an endpoint or a player of the
environment. The weights of snapshots are stored by `league.py`; this module only uses their names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from operator import add
from statistics import NormalDist
from typing import Any, Literal

from kapelle.features.league.settings import FcpPopulation, LeagueConfig, PsroPopulation
from kapelle.functional.statistics import t_quantile, wilson_interval

MAIN = "self"
"""Name of the learners of the team map."""
EXPLOITER = "exploiter"
"""Name of the learner whose only opponents are the learners of the team map (`league.exploiter`)."""
PARTNER = "partner_"
"""Prefix of the names of learners that are trained first, each by self-play (`fcp`)."""
FOLLOWER = "follower_"
"""Prefix of the names of additional learners in a line (`psro` with `learners`)."""
DRAFT = "draft-"
"""Prefix of the names of drafts, which are snapshots of learners in a line and are not members."""


def partners_of(league: LeagueConfig) -> int:
    """Return the number of partners that are trained before the learner."""
    return league.population.partners if isinstance(league.population, FcpPopulation) else 0


def followers_of(league: LeagueConfig) -> int:
    """Return the number of learners in a line after the first learner (pipeline PSRO)."""
    return league.population.learners - 1 if isinstance(league.population, PsroPopulation) else 0


@dataclass(frozen=True, slots=True)
class LeagueMember:
    """A member of the pool of a league."""

    name: str
    """Name of the member: `self@20` for the learners after step 20, `draft-self@25` for their draft, or the name in `league.members`."""
    step: int = 0
    """Number of the step after which the member entered the pool, or 0 for a permanent member."""
    serial: int = 0
    """Number of the member among all snapshots of the run, from 1, which is also the version of its weights."""
    kind: Literal["past", "policy", "player"] = "past"
    """Kind of member: a snapshot (`past`), a policy of the team map (`policy`) or a player of the environment (`player`)."""
    player: str = ""
    """Name of the environment's player."""
    policies: Mapping[str, str] = field(default_factory=dict)
    """Mapping from each agent to the policy of the team map that takes its role, for a member of kind `policy`."""


@dataclass(frozen=True, slots=True)
class MatchScore:
    """The results of a learner against a member. Older games have smaller weights (`league.forget`)."""

    wins: float = 0.0
    draws: float = 0.0
    losses: float = 0.0
    groups: float = 0.0
    """Number of groups of games. Each group is played on one task and usually on one deal, and groups are independent of each other."""
    squares: float = 0.0
    """Sum, over all groups, of the squared share of points in the group."""

    @property
    def games(self) -> float:
        """The weighted number of games."""
        return self.wins + self.draws + self.losses

    @property
    def points(self) -> float:
        """Share of points, where a draw is half a point.

        One half win and one half loss are added, so that the share is one half if there are no games.
        """
        return (self.wins + self.draws / 2 + 0.5) / (self.games + 1.0)

    def times(self, factor: float) -> MatchScore:
        """Return the score with the weight of every game multiplied by `factor`."""
        return MatchScore(*(value * factor for value in astuple(self)))

    def __add__(self, other: MatchScore) -> MatchScore:
        """Return the combined score of both sets of games."""
        return MatchScore(*map(add, astuple(self), astuple(other)))

    @classmethod
    def of_group(cls, ahead: Sequence[float]) -> MatchScore:
        """Return the score of one group of games, given the differences between the learner's and the opponent's payoffs."""
        wins, draws = sum(by > 0 for by in ahead), sum(by == 0 for by in ahead)
        share = (wins + draws / 2) / len(ahead)
        return cls(wins, draws, len(ahead) - wins - draws, 1.0, share**2)


def dependence(scores: Iterable[MatchScore]) -> float:
    """Return how many games of these pairs contain as much information as one independent game.

    The value is between 1 and the number of games per task. The result is the design effect (Kish 1965) over all pairs: the variance
    of the tasks' shares of points divided by the variance for independent games, corrected by the quantile of Student's t
    distribution if there are few tasks. If there is no variance, a task is counted as one game.
    """
    measured = [score for score in scores if score.groups >= 2.0]
    groups, games = sum(score.groups for score in measured), sum(score.games for score in measured)
    if games <= groups:
        return 1.0
    between = within = 0.0
    for score in measured:
        share = (score.wins + score.draws / 2) / score.games
        between += max(0.0, score.squares - score.groups * share**2) * score.groups / (score.groups - 1.0)
        varied = max(0.0, share * (1.0 - share) - score.draws / score.games / 4)
        within += varied * score.groups**2 / score.games
    known = min(games / groups, max(1.0, between / within)) if within > 0.0 else games / groups
    few = t_quantile(0.975, int(groups) - len(measured)) / NormalDist().inv_cdf(0.975)
    return known * few**2


Pair = tuple[str, str]


class MemberPool:
    """The members of the pool in the order in which they entered, and their results."""

    def __init__(self, settings: LeagueConfig, fixed: Sequence[LeagueMember]) -> None:
        """Create a pool that contains only the permanent members."""
        self._settings = settings
        self.members: list[LeagueMember] = list(fixed)
        self.drafts: list[LeagueMember] = []
        """Snapshots of the learners in a line, in the order of the line. Only learners that are later in the line meet a draft."""
        self.scores: dict[Pair, MatchScore] = {}
        """Mapping from a learner and a member to the recent results, from which the probabilities of opponents are computed."""
        self.met: dict[Pair, MatchScore] = {}
        """Mapping from a snapshot and a member to the results of all games that the learner played before the snapshot was taken. These
        results are used for ratings. The key of the next snapshot is `LEARNER@now`."""
        self.payoffs: dict[tuple[str, str, str], float] = {}
        """The payoff table of PSRO: mapping from (agent, member in its role, member in the other roles) to the expected return of the
        agent."""
        self.payoff_games: dict[tuple[str, str, str], int] = {}
        """Mapping from the same keys to the number of games in this mean, which is 0 for exact values."""
        self.gone: dict[str, tuple[int, float]] = {}
        """Mapping from former members with stored weights to the steps after which they entered and left the pool. This mapping is not
        part of a checkpoint, because it is determined by the checkpoints on disk."""
        self.since: dict[str, int] = {}
        """Mapping from each learner to the step of its last entry into the pool."""
        self.entered = 0
        """Number of snapshots that were taken in the run."""

    @property
    def names(self) -> list[str]:
        """Names of the members, permanent members first."""
        return [member.name for member in self.members]

    @property
    def past(self) -> list[LeagueMember]:
        """The snapshots, oldest first."""
        return [member for member in self.members if member.kind == "past"]

    def before(self, level: int) -> list[LeagueMember]:
        """Return the opponents of the learner at this position in the line: the members, and drafts of the learners ahead of it."""
        return [*self.members, *self.drafts[:level]]

    def played(self, learner: str, member: str, ahead: Sequence[float]) -> None:
        """Add the games of one task between a learner and a member, or between the exploiter and the learner.

        The argument `ahead` contains the differences between the learner's and the opponent's payoffs. Games against drafts and
        former members are not counted.
        """
        if member not in self.names and member != MAIN:
            return
        own, now = MatchScore.of_group(ahead), f"{learner}@now"
        self.scores[learner, member] = self.scores.get((learner, member), MatchScore()) + own
        self.met[now, member] = self.met.get((now, member), MatchScore()) + own

    def fade(self) -> None:
        """Reduce the weights of all games.

        This method is called once per step.
        """
        self.scores = {pair: score.times(self._settings.forget) for pair, score in self.scores.items()}

    def may_enter(self, learner: str, step: int) -> bool:
        """Return whether a learner may enter the pool after this step."""
        enter = self._settings.enter
        waited = step - self.since.get(learner, 0)
        if enter is None or waited < enter.every:
            return False
        too_late = enter.at_latest is not None and waited >= enter.at_latest
        return enter.beats is None or too_late or self._beats(learner, enter.beats, enter.confidence)

    def _beats(self, learner: str, share: float, confidence: float) -> bool:
        own = [score for (one, _), score in self.met.items() if one == f"{learner}@now"]
        # A one-sided test with the number of independent games, which uses the lower end of a two-sided interval.
        each = dependence(own)
        games = int(sum(score.games for score in own) / each)
        points = int(sum(score.wins + score.draws / 2 for score in own) / each)
        low, _ = wilson_interval(points, games, 2 * confidence - 1) if games else (0.0, 1.0)
        return low > share

    def enter(self, learner: str, step: int) -> tuple[LeagueMember, LeagueMember | None]:
        """Add a learner to the pool after a step, and return the new member and the member that leaves in exchange (or None)."""
        self.entered += 1
        member = LeagueMember(f"{learner}@{step}", step, self.entered)
        now = f"{learner}@now"
        for one, other in [pair for pair in self.met if pair[0] == now]:
            self.met[member.name, other] = self.met.pop((one, other))
        self.members.append(member)
        self.since[learner] = step
        past = self.past
        if len(past) <= self._settings.keep:
            return member, None
        former = self._leaves(learner, past[:-1])
        self.members.remove(former)
        self._remove(former, step)
        return member, former

    def redraft(self, learners: Sequence[str], step: int) -> list[LeagueMember]:
        """Replace all drafts with new drafts of these learners after a step, and return the new drafts."""
        for draft in self.drafts:
            self._remove(draft, step)
        self.drafts = []
        for learner in learners:
            self.entered += 1
            self.drafts.append(LeagueMember(f"{DRAFT}{learner}@{step}", step, self.entered))
        return self.drafts

    def _remove(self, member: LeagueMember, step: int) -> None:
        """Remove the results of a member that leaves after a step, and record that its weights are stored."""
        name = member.name
        self.gone[name] = (member.step, step)
        self.scores = {pair: score for pair, score in self.scores.items() if name not in pair}
        self.met = {pair: score for pair, score in self.met.items() if name not in pair}
        self.payoffs = {key: value for key, value in self.payoffs.items() if name not in key[1:]}
        self.payoff_games = {key: count for key, count in self.payoff_games.items() if key in self.payoffs}

    def _leaves(self, learner: str, past: Sequence[LeagueMember]) -> LeagueMember:
        """Return the member that leaves the pool. The newest snapshot always stays."""
        match self._settings.leaves:
            case "weakest":
                # An exploiter meets only the learner, so its entry is judged by the learner's results.
                scored = learner if learner.startswith(FOLLOWER) else MAIN
                return max(past, key=lambda each: self.scores.get((scored, each.name), MatchScore()).points)
            case "thinned" if len(past) > 2:
                # The member with the nearest neighbours in time leaves; the first and the last stay.
                gaps = [after.step - before.step for before, after in zip(past, past[2:], strict=False)]
                return past[1 + gaps.index(min(gaps))]
            case _:
                return past[0]

    def state(self) -> dict[str, Any]:
        """Return the state of the pool as plain values, for a checkpoint."""
        return {
            "members": [asdict(member) for member in self.members],
            "drafts": [asdict(draft) for draft in self.drafts],
            "scores": [[*pair, *astuple(score)] for pair, score in self.scores.items()],
            "met": [[*pair, *astuple(score)] for pair, score in self.met.items()],
            "payoffs": [[*key, value] for key, value in self.payoffs.items()],
            "payoff_games": [[*key, count] for key, count in self.payoff_games.items()],
            "since": dict(self.since),
            "entered": self.entered,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state` returned."""
        self.members = [LeagueMember(**each) for each in state["members"]]
        self.drafts = [LeagueMember(**each) for each in state["drafts"]]
        self.scores = {(one, other): MatchScore(*rest) for one, other, *rest in state["scores"]}
        self.met = {(one, other): MatchScore(*rest) for one, other, *rest in state["met"]}
        self.payoffs = {(agent, one, other): value for agent, one, other, value in state["payoffs"]}
        self.payoff_games = {(agent, one, other): count for agent, one, other, count in state["payoff_games"]}
        self.since = dict(state["since"])
        self.entered = int(state["entered"])
