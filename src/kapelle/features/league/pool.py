"""The pool of a league: its members, how the learners did against them, and what each pair is worth.

A member is a snapshot of the learners as they were after some step, or somebody who is always there: a frozen model, an
endpoint, a player of the environment. The weights of snapshots are kept by `training/league.py`; here they are names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import NormalDist
from typing import Any, Literal

from kapelle.features.league.settings import EnterConfig, FcpPopulation, LeagueConfig, PsroPopulation
from kapelle.functional.statistics import t_quantile, wilson_interval

MAIN = "self"
"""The learners that the team map names."""
EXPLOITER = "exploiter"
"""The learner whose only opponents are these (`league.exploiter`)."""
PARTNER = "partner_"
"""Begins the names of learners that learn first, each with itself alone (`fcp`)."""
FOLLOWER = "follower_"
"""Begins the names of further learners of a line (`psro` with `learners`)."""
DRAFT = "draft-"
"""Begins the names of drafts, which are no members."""


def partners_of(league: LeagueConfig) -> int:
    """Return how many partners learn by themselves before the learner does."""
    return league.population.partners if isinstance(league.population, FcpPopulation) else 0


def followers_of(league: LeagueConfig) -> int:
    """Return how many learners a line has beside the first (pipeline PSRO)."""
    return league.population.learners - 1 if isinstance(league.population, PsroPopulation) else 0


@dataclass(frozen=True, slots=True)
class LeagueMember:
    """One of the pool."""

    name: str
    """`self@20`: the learners after step 20; `draft-self@25`: the same on their way; or the name in `league.members`."""
    step: int = 0
    """The step after which it entered; 0 for who is always there."""
    serial: int = 0
    """Its number among all snapshots that were ever taken, from 1: the version of its weights."""
    kind: Literal["past", "policy", "player"] = "past"
    """A snapshot; a policy of the team map; a player of the environment."""
    plays: str = ""
    """The player of the environment."""
    policies: Mapping[str, str] = field(default_factory=dict)
    """Agent → the policy of the team map that plays its seat, for a member that is one."""


@dataclass(frozen=True, slots=True)
class MatchScore:
    """How a learner did against a member; games count less as they grow old (`league.forget`)."""

    wins: float = 0.0
    draws: float = 0.0
    losses: float = 0.0
    groups: float = 0.0
    """Groups of games of one task, most often on one deal: what is independent of one another."""
    squares: float = 0.0
    """Sum over groups of the square of their share of points."""

    @property
    def games(self) -> float:
        """How many there were, by their weight."""
        return self.wins + self.draws + self.losses

    @property
    def points(self) -> float:
        """Share of points, a draw being half of one, with half a win and half a loss added: one half before the first game."""
        return (self.wins + self.draws / 2 + 0.5) / (self.games + 1.0)

    def times(self, by: float) -> MatchScore:
        """Return the score in which every game counts `by` times as much."""
        return MatchScore(
            self.wins * by, self.draws * by, self.losses * by, self.groups * by, self.squares * by
        )

    def __add__(self, other: MatchScore) -> MatchScore:
        """Return the score of the games of both."""
        return MatchScore(
            self.wins + other.wins,
            self.draws + other.draws,
            self.losses + other.losses,
            self.groups + other.groups,
            self.squares + other.squares,
        )

    @classmethod
    def of_group(cls, ahead: Sequence[float]) -> MatchScore:
        """Return the score of one group of games, in each of which the learner was ahead by so much: only the sign counts."""
        wins, draws = sum(by > 0 for by in ahead), sum(by == 0 for by in ahead)
        share = (wins + draws / 2) / len(ahead)
        return cls(wins, draws, len(ahead) - wins - draws, 1.0, share**2)


def dependence(scores: Iterable[MatchScore]) -> float:
    """Return how many games of these pairs say as much as one independent game would: 1, or as many as a task has at most.

    It is by how much more the tasks' shares of points vary than those of independent games (the design effect, Kish 1965,
    over all pairs together), with Student's quantile for that of so few tasks. Where nothing varies, a task is one game.
    """
    played = [score for score in scores if score.groups >= 2.0]
    groups, games = sum(score.groups for score in played), sum(score.games for score in played)
    if games <= groups:
        return 1.0
    between = within = 0.0
    for score in played:
        share = (score.wins + score.draws / 2) / score.games
        between += max(0.0, score.squares - score.groups * share**2) * score.groups / (score.groups - 1.0)
        varied = max(0.0, share * (1.0 - share) - score.draws / score.games / 4)
        within += varied * score.groups**2 / score.games
    known = min(games / groups, max(1.0, between / within)) if within > 0.0 else games / groups
    few = t_quantile(0.975, int(groups) - len(played)) / NormalDist().inv_cdf(0.975)
    return known * few**2


Pair = tuple[str, str]


class MemberPool:
    """Members in the order in which they entered, and everything that is known of them."""

    def __init__(self, settings: LeagueConfig, fixed: Sequence[LeagueMember]) -> None:
        """Begin with those that are always there."""
        self._settings = settings
        self.members: list[LeagueMember] = list(fixed)
        self.drafts: list[LeagueMember] = []
        """Snapshots of learners on their way, in the order of their line. Only the learners behind one meet it."""
        self.scores: dict[Pair, MatchScore] = {}
        """(Learner, member) → how the learner does against it by now, for draws."""
        self.met: dict[Pair, MatchScore] = {}
        """(Entrant, member) → all games of the learner while it became that entrant, for ratings; the one to be is called `now`."""
        self.payoffs: dict[tuple[str, str, str], float] = {}
        """(Agent, its member, the others' member) → the agent's expected return: the table of PSRO."""
        self.payoff_games: dict[tuple[str, str, str], int] = {}
        """The same → games that the return is the mean of, 0 where it was computed exactly; absent where a checkpoint did not say."""
        self.gone: dict[str, tuple[int, float]] = {}
        """Snapshots that left the pool and whose weights are still stored → the steps after which each was taken and left. No state of the
        league: it follows from the checkpoints on disk."""
        self.since: dict[str, int] = {}
        """Learner → the step of its last entry."""
        self.entered = 0
        """Snapshots that were ever taken."""

    @property
    def names(self) -> list[str]:
        """Names of the members, those that are always there first."""
        return [member.name for member in self.members]

    @property
    def past(self) -> list[LeagueMember]:
        """The snapshots, oldest first."""
        return [member for member in self.members if member.kind == "past"]

    def before(self, level: int) -> list[LeagueMember]:
        """Return whom a learner answers that has `level` learners before it: the members and these."""
        return [*self.members, *self.drafts[:level]]

    def played(self, learner: str, member: str, ahead: Sequence[float]) -> None:
        """Note the games of one task, a learner's against a member or the exploiter's against the learner, and by how much it was ahead in each.

        Games against drafts, and those against who has left meanwhile, leave no trace.
        """
        if member not in self.names and member != MAIN:
            return
        own, now = MatchScore.of_group(ahead), _now(learner)
        self.scores[learner, member] = self.scores.get((learner, member), MatchScore()) + own
        self.met[now, member] = self.met.get((now, member), MatchScore()) + own

    def fade(self) -> None:
        """Let all games count less, once for each step."""
        self.scores = {pair: score.times(self._settings.forget) for pair, score in self.scores.items()}

    def may_enter(self, learner: str, step: int) -> bool:
        """Return whether a learner enters after this step."""
        enter = self._settings.enter
        waited = step - self.since.get(learner, 0)
        if enter is None or waited < enter.every:
            return False
        return enter.beats is None or self._beats(learner, enter) or (
            enter.at_latest is not None and waited >= enter.at_latest
        )  # fmt: skip

    def _beats(self, learner: str, enter: EnterConfig) -> bool:
        assert enter.beats is not None
        now = _now(learner)
        own = [score for (one, _), score in self.met.items() if one == now]
        # Of as many games as are independent; one-sided: the lower end of the two-sided interval of twice the doubt.
        each = dependence(own)
        games = int(sum(score.games for score in own) / each)
        points = int(sum(score.wins + score.draws / 2 for score in own) / each)
        low, _ = wilson_interval(points, games, 2 * enter.confidence - 1) if games else (0.0, 1.0)
        return low > enter.beats

    def enter(self, learner: str, step: int) -> tuple[LeagueMember, LeagueMember | None]:
        """Let a learner enter as it is after a step; return the new member and who leaves for it, if anybody."""
        self.entered += 1
        member = LeagueMember(f"{learner}@{step}", step, self.entered)
        now = _now(learner)
        for one, other in [pair for pair in self.met if pair[0] == now]:
            self.met[member.name, other] = self.met.pop((one, other))
        self.members.append(member)
        self.since[learner] = step
        past = self.past
        if len(past) <= self._settings.keep:
            return member, None
        out = self._leaves(learner, past[:-1])
        self.members.remove(out)
        self._let_go(out, step)
        return member, out

    def redraft(self, learners: Sequence[str], step: int) -> list[LeagueMember]:
        """Take new drafts of these learners after a step, in the place of all that there are; return the new ones."""
        for draft in self.drafts:
            self._let_go(draft, step)
        self.drafts = []
        for learner in learners:
            self.entered += 1
            self.drafts.append(LeagueMember(f"{DRAFT}{learner}@{step}", step, self.entered))
        return self.drafts

    def _let_go(self, member: LeagueMember, step: int) -> None:
        """Forget the results of who leaves after a step; its weights are named as gone."""
        name = member.name
        self.gone[name] = (member.step, step)
        self.scores = {pair: score for pair, score in self.scores.items() if name not in pair}
        self.met = {pair: score for pair, score in self.met.items() if name not in pair}
        self.payoffs = {key: value for key, value in self.payoffs.items() if name not in key[1:]}
        self.payoff_games = {key: count for key, count in self.payoff_games.items() if key in self.payoffs}

    def _leaves(self, learner: str, past: Sequence[LeagueMember]) -> LeagueMember:
        """Return who leaves of those that are not the newest."""
        match self._settings.leaves:
            case "weakest":
                # Of an exploiter's entry, too: it meets nobody but the learner.
                scored = learner if learner.startswith(FOLLOWER) else MAIN
                return max(past, key=lambda each: self.scores.get((scored, each.name), MatchScore()).points)
            case "thinned" if len(past) > 2:
                # The one whose neighbours are nearest in time; the first and the last of them stay.
                gaps = [after.step - before.step for before, after in zip(past, past[2:], strict=False)]
                return past[1 + gaps.index(min(gaps))]
            case _:
                return past[0]

    def state(self) -> dict[str, Any]:
        """Return everything as plain values, for a checkpoint."""
        return {
            "members": [asdict(member) for member in self.members],
            "drafts": [asdict(draft) for draft in self.drafts],
            "scores": [[*pair, *_plain(score)] for pair, score in self.scores.items()],
            "met": [[*pair, *_plain(score)] for pair, score in self.met.items()],
            "payoffs": [[*key, value] for key, value in self.payoffs.items()],
            "payoff_games": [[*key, count] for key, count in self.payoff_games.items()],
            "since": dict(self.since),
            "entered": self.entered,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self.members = [LeagueMember(**each) for each in state["members"]]
        self.drafts = [
            LeagueMember(**each) for each in state.get("drafts", ())
        ]  # older checkpoints have none
        self.scores = {(one, other): _score(rest) for one, other, *rest in state["scores"]}
        self.met = {(one, other): _score(rest) for one, other, *rest in state["met"]}
        self.payoffs = {(agent, one, other): value for agent, one, other, value in state["payoffs"]}
        # Older checkpoints hold no counts.
        counts = state.get("payoff_games", ())
        self.payoff_games = {(agent, one, other): count for agent, one, other, count in counts}
        self.since = dict(state["since"])
        self.entered = int(state["entered"])


def _now(learner: str) -> str:
    return f"{learner}@now"


def _plain(score: MatchScore) -> list[float]:
    return [score.wins, score.draws, score.losses, score.groups, score.squares]


def _score(plain: Sequence[float]) -> MatchScore:
    if len(plain) == 3:  # an older checkpoint's, as if every game had been a group
        wins, draws, losses = plain
        return MatchScore(wins, draws, losses, wins + draws + losses, wins + draws / 4)
    return MatchScore(*plain)
