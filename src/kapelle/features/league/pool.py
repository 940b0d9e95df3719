"""The pool of a league: its members, the learners' results against them, and the table of payoffs.

A member is either a snapshot of the learners after some step, or permanent: a frozen model, an endpoint or a player of the
environment. `league.py` keeps the weights of snapshots; this module only knows their names.
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
"""The learners of the team map."""
EXPLOITER = "exploiter"
"""The learner whose only opponents are the learners of the team map (`league.exploiter`)."""
PARTNER = "partner_"
"""Prefix of learners that are trained first, each by self-play (`fcp`)."""
FOLLOWER = "follower_"
"""Prefix of additional learners of a line (`psro` with `learners`)."""
DRAFT = "draft-"
"""Prefix of drafts, which are snapshots of learners of a line and not members."""


def partners_of(league: LeagueConfig) -> int:
    """Return the number of partners that are trained before the learner."""
    return league.population.partners if isinstance(league.population, FcpPopulation) else 0


def followers_of(league: LeagueConfig) -> int:
    """Return how many learners of a line follow the first one (pipeline PSRO)."""
    return league.population.learners - 1 if isinstance(league.population, PsroPopulation) else 0


@dataclass(frozen=True, slots=True)
class LeagueMember:
    """A member of the pool."""

    name: str
    """`self@20` for the learners after step 20, `draft-self@25` for their draft, or the name in `league.members`."""
    step: int = 0
    """The step after which it entered; 0 for a permanent member."""
    serial: int = 0
    """Its number among all snapshots of the run, from 1; this is the version of its weights."""
    kind: Literal["past", "policy", "player"] = "past"
    """Whether it is a snapshot, a policy of the team map or a player of the environment."""
    player: str = ""
    """The player of the environment."""
    policies: Mapping[str, str] = field(default_factory=dict)
    """Agent → the policy of the team map that plays its role, for a member of kind `policy`."""


@dataclass(frozen=True, slots=True)
class MatchScore:
    """Results of a learner against a member; older games have smaller weights (`league.forget`)."""

    wins: float = 0.0
    draws: float = 0.0
    losses: float = 0.0
    groups: float = 0.0
    """Number of groups of games, each on one task and usually on one deal; groups are the independent units."""
    squares: float = 0.0
    """Sum over groups of the square of their share of points."""

    @property
    def games(self) -> float:
        """The weighted number of games."""
        return self.wins + self.draws + self.losses

    @property
    def points(self) -> float:
        """Share of points, where a draw is half a point. Half a win and half a loss are added, so that it is one half without games."""
        return (self.wins + self.draws / 2 + 0.5) / (self.games + 1.0)

    def times(self, factor: float) -> MatchScore:
        """Return the score with the weight of every game multiplied."""
        return MatchScore(*(value * factor for value in astuple(self)))

    def __add__(self, other: MatchScore) -> MatchScore:
        """Return the score of both sets of games together."""
        return MatchScore(*map(add, astuple(self), astuple(other)))

    @classmethod
    def of_group(cls, ahead: Sequence[float]) -> MatchScore:
        """Return the score of one group of games by the signs of the learner's leads."""
        wins, draws = sum(by > 0 for by in ahead), sum(by == 0 for by in ahead)
        share = (wins + draws / 2) / len(ahead)
        return cls(wins, draws, len(ahead) - wins - draws, 1.0, share**2)


def dependence(scores: Iterable[MatchScore]) -> float:
    """Return how many games of these pairs carry the information of one independent game: from 1 to the games of a task.

    This is the design effect (Kish 1965) over all pairs: the variance of the tasks' shares of points divided by that of independent
    games, corrected by Student's quantile for few tasks. Without variance, a task counts as one game.
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
    """Members in the order of entry, and their results."""

    def __init__(self, settings: LeagueConfig, fixed: Sequence[LeagueMember]) -> None:
        """Begin with the permanent members."""
        self._settings = settings
        self.members: list[LeagueMember] = list(fixed)
        self.drafts: list[LeagueMember] = []
        """Snapshots of the learners of a line, in the order of the line. Only later learners of the line meet a draft."""
        self.scores: dict[Pair, MatchScore] = {}
        """(Learner, member) → recent results, from which opponents are drawn."""
        self.met: dict[Pair, MatchScore] = {}
        """(Entrant, member) → all games of the learner before it entered, for ratings; `LEARNER@now` for the next entrant."""
        self.payoffs: dict[tuple[str, str, str], float] = {}
        """The table of PSRO: (agent, member in its role, member in the other roles) → the agent's expected return."""
        self.payoff_games: dict[tuple[str, str, str], int] = {}
        """The same keys → number of games in this mean; 0 for an exact value."""
        self.gone: dict[str, tuple[int, float]] = {}
        """Former members with stored weights → the steps after which each entered and left. It is not part of a checkpoint, because it
        follows from the checkpoints on disk."""
        self.since: dict[str, int] = {}
        """Learner → the step of its last entry."""
        self.entered = 0
        """Number of snapshots taken in the run."""

    @property
    def names(self) -> list[str]:
        """Names of the members, permanent ones first."""
        return [member.name for member in self.members]

    @property
    def past(self) -> list[LeagueMember]:
        """The snapshots, oldest first."""
        return [member for member in self.members if member.kind == "past"]

    def before(self, level: int) -> list[LeagueMember]:
        """Return the opponents of the learner at this place of the line: the members, and drafts of the learners ahead of it."""
        return [*self.members, *self.drafts[:level]]

    def played(self, learner: str, member: str, ahead: Sequence[float]) -> None:
        """Add the games of one task between a learner and a member, or the exploiter and the learner, given the learner's leads.

        Games against drafts and former members are not counted.
        """
        if member not in self.names and member != MAIN:
            return
        own, now = MatchScore.of_group(ahead), f"{learner}@now"
        self.scores[learner, member] = self.scores.get((learner, member), MatchScore()) + own
        self.met[now, member] = self.met.get((now, member), MatchScore()) + own

    def fade(self) -> None:
        """Reduce the weights of all games, once for each step."""
        self.scores = {pair: score.times(self._settings.forget) for pair, score in self.scores.items()}

    def may_enter(self, learner: str, step: int) -> bool:
        """Return whether a learner enters after this step."""
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
        """Let a learner enter after a step; return the new member, and the member that leaves in exchange, or None."""
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
        """Return the member that leaves; the newest snapshot always stays."""
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
        """Return the state as plain values, for a checkpoint."""
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
