"""The arena: every player plays against every other player in every role on the same deals, and the results are rated.

A *deal* is one task with one seed. All pairs of players play the same deals, and each deal is played with every assignment of the two
players to the roles. Turns of the same role in the same deal are sampled with the same seed (common random numbers). Common random
numbers reduce the variance of the payoffs due to cards and roles. Confidence intervals are computed over deals.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import combinations, combinations_with_replacement, product
from math import fsum
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, FiniteFloat, NonNegativeInt, TypeAdapter, ValidationError

from kapelle.environment import Environment, has_comparable_answers, report_of
from kapelle.errors import ConfigError
from kapelle.functional.ratings import (
    Package,
    Results,
    alpha_rank,
    check_packages,
    cycle,
    log_odds,
    nash_averaging,
    ratings,
)
from kapelle.functional.statistics import finite, mean_interval
from kapelle.rollout.episodes import ScheduledEpisode, collect_scheduled, roll_out_episode
from kapelle.rollout.setup import RolloutSetup
from kapelle.runtime.randomness import derive_seed
from kapelle.team import Agent, Policy, Team
from kapelle.types import Cast, Episode, Json, Task

if TYPE_CHECKING:
    from rich.table import Table

DEALS = 20
"""Minimum number of deals for which intervals of ratings are computed over deals. With fewer deals, games are treated as independent."""
CLOSE = 1e-9


@dataclass(frozen=True, slots=True)
class Contestant:
    """A player of the arena, which is either a team in memory or a player of the environment."""

    label: str
    team: Team | None = None
    """A team with one agent for each role, or with one agent for all roles. The policies of the team have the same names as in the
    engine."""
    player: str = ""
    """Name of the environment's player, which is used if there is no team."""


Side = Annotated[int, Field(ge=0, le=1)]
"""Index (0 or 1) of one of the two players of a pair."""
Payoffs = tuple[FiniteFloat, FiniteFloat]
"""Mean payoff over the roles of the first player, and mean payoff over the roles of the second player."""


@dataclass(frozen=True, slots=True)
class Encounter:
    """All games between two players, or all games of one player that takes all roles."""

    one: str
    other: str
    role_orders: tuple[tuple[Side, ...], ...]
    """Assignments of the two players to the roles. Each assignment contains 0 (player `one`) or 1 (player `other`) for each role."""
    games: tuple[tuple[Payoffs | None, ...], ...]
    """Payoffs of all games, by deal and then by assignment. The payoffs of a failed episode are None."""
    turns: tuple[NonNegativeInt, NonNegativeInt]
    """Number of turns of each player."""
    invalid: tuple[NonNegativeInt | None, NonNegativeInt | None]
    """Number of turns of each player without a legal move. None if the environment does not count these turns, or if the player belongs
    to the environment."""
    tokens: tuple[NonNegativeInt, NonNegativeInt]
    """Number of tokens that each player sampled."""
    failed: NonNegativeInt = 0
    reason: str = ""
    """The most frequent reason for failed episodes."""

    def row(self) -> dict[str, Json]:
        """Return the encounter as a JSON object."""
        return asdict(self)

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Encounter:
        """Return the encounter from a JSON object that `row` returned. Raises ValueError if the object is invalid."""
        try:
            found = TypeAdapter(cls).validate_json(json.dumps(row), strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            raise ValueError(f"`{'.'.join(map(str, first['loc']))}`: {first['msg']}") from None
        if not found.role_orders or any(len(deal) != len(found.role_orders) for deal in found.games):
            raise ValueError("`games` needs one game of each deal for each of the `role_orders`")
        return found

    @property
    def deals(self) -> tuple[Payoffs | None, ...]:
        """Mean payoffs of each deal over its games, or None if one of these games failed."""
        return tuple(_mean_over_roles(deal) for deal in self.games)

    def counts(self, deal: int | None = None) -> tuple[int, int, int]:
        """Return how many deals (or whether the given deal) `one` won, drew and lost over all assignments, as in duplicate bridge."""
        results = self.deals if deal is None else (_mean_over_roles(self.games[deal]),)
        ahead = [pair[0] - pair[1] for pair in results if pair is not None]
        wins, losses = sum(each > CLOSE for each in ahead), sum(each < -CLOSE for each in ahead)
        return wins, len(ahead) - wins - losses, losses


def _mean_over_roles(deal: Sequence[Payoffs | None]) -> Payoffs | None:
    pairs = [pair for pair in deal if pair is not None]
    if len(pairs) < len(deal):
        return None
    return fmean(one for one, _ in pairs), fmean(other for _, other in pairs)


def pairs_of(labels: Sequence[str], environment: Environment) -> list[tuple[str, str]]:
    """Return all pairs of different players. If the game does not have a constant sum, also pair each player with itself."""
    pairs = combinations if report_of(environment).constant_sum else combinations_with_replacement
    return list(pairs(labels, 2))


def role_orders(roles: int, *, alone: bool) -> tuple[tuple[int, ...], ...]:
    """Return every assignment of two players to the roles in which both players have a role.

    With `alone`, one player takes all roles.
    """
    if alone:
        return ((0,) * roles,)
    return tuple(each for each in product((0, 1), repeat=roles) if len(set(each)) == 2)


def assigned_team(
    names: Sequence[str], pair: Sequence[Contestant], assignment: Sequence[int]
) -> tuple[Team, Mapping[str, Cast]]:
    """Return the team of one assignment, and a mapping from roles to the environment's players that take them."""
    roles: dict[str, tuple[Team, str]] = {}
    cast: dict[str, Cast] = {}
    for k, name in enumerate(names):
        player = pair[assignment[k]]
        if player.team is None:
            unused = Policy(f"world:{player.label}", base="", trained=False)
            roles[name], cast[name] = (Team.alone(Agent(name), unused), name), Cast("", player.player)
        else:
            roles[name] = player.team, player.team.agent_for_role(k, len(names))
    return Team.filling(roles), cast


async def meet(
    setup: RolloutSetup,
    names: Sequence[str],
    pair: tuple[Contestant, Contestant],
    tasks: Sequence[Task],
    seed: int,
) -> Encounter:
    """Play all assignments of all deals concurrently, so that completions of both players share batches.

    The argument `setup` provides the environment and the engine with the policies of all players. The team in `setup` is not used.
    """
    assignments = role_orders(len(names), alone=pair[0].label == pair[1].label)
    setups: list[RolloutSetup] = []
    scheduled: list[ScheduledEpisode] = []
    for task in tasks:
        for assignment in assignments:
            team, cast = assigned_team(names, pair, assignment)
            setups.append(replace(setup, team=team))
            # One seed for all assignments of all pairs, so that they have the same cards and each role has the same random numbers.
            own_seed = derive_seed(seed, "arena", task.id)
            scheduled.append(ScheduledEpisode(replace(task, cast=cast), 0, own_seed))

    async def one(number: int, each: ScheduledEpisode) -> Episode:
        return await roll_out_episode(setups[number], each.task, each.seed)

    episodes = await collect_scheduled(setups[0], scheduled, one)
    setup.engine.release_caches()
    games: list[Payoffs | None] = []
    turns, tokens = [0, 0], [0, 0]
    invalid: list[int | None] = [None, None]
    graded = has_comparable_answers(setup.environment)
    for number, episode in enumerate(episodes):
        side = dict(zip(names, assignments[number % len(assignments)], strict=True))
        if episode.error is not None:
            games.append(None)
            continue
        by_agent = payoffs(episode, names, graded=graded)
        one_s, other_s = ([by_agent[name] for name in names if side[name] == k] for k in (0, 1))
        games.append((fmean(one_s), fmean(other_s or one_s)))
        for turn in episode.turns:
            turns[side[turn.agent]] += 1
            tokens[side[turn.agent]] += len(turn.completion_ids)
        counted = episode.info.get("invalid")
        invalid_moves: Mapping[str, object] = counted if isinstance(counted, Mapping) else {}
        for name in names:
            count, k = finite(invalid_moves.get(name)), side[name]
            if count is not None and pair[k].team is not None:
                invalid[k] = (invalid[k] or 0) + int(count)
    errors = Counter(" ".join(each.error.split()) for each in episodes if each.error is not None)
    size = len(assignments)
    return Encounter(
        pair[0].label,
        pair[1].label,
        assignments,
        tuple(tuple(games[k * size : (k + 1) * size]) for k in range(len(tasks))),
        (turns[0], turns[1]),
        (invalid[0], invalid[1]),
        (tokens[0], tokens[1]),
        errors.total(),
        errors.most_common(1)[0][0] if errors else "",
    )


def payoffs(episode: Episode, names: Sequence[str], *, graded: bool) -> dict[str, float]:
    """Return the payoff of each agent in an episode.

    If a question is `graded` and only the agents that answer receive a reward, the other agents receive the mean of these rewards,
    because the team shares the payoff.
    """
    own = {name: payoff_of(episode, name) for name in names}
    rewards = [own[name] for name in names if name in episode.rewards]
    if not graded or not rewards or any(turn.reward for turn in episode.turns):
        return own
    return {name: own[name] if name in episode.rewards else fmean(rewards) for name in names}


def payoff_of(episode: Episode, agent: str) -> float:
    """Return the payoff of an agent as reported by the game, without penalties for invalid moves.

    If the environment does not report payoffs, the result is the return of the agent.
    """
    returns, slots = episode.info.get("returns"), episode.info.get("seats")
    own = slots.get(agent) if isinstance(slots, Mapping) else None
    if isinstance(returns, Sequence) and isinstance(own, Sequence):
        values = [finite(returns[slot - 1]) for slot in own if 0 < slot <= len(returns)]
        known = [value for value in values if value is not None]
        if known and len(known) == len(values):
            return fmean(known)
    return episode.total(agent)


@dataclass(frozen=True, slots=True)
class Payoff:
    """The mean payoff over deals, with its 95 % confidence interval."""

    mean: float
    low: float | None
    high: float | None
    deals: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Payoff | None:
        """Return the mean over the payoffs of deals, or None if there are no payoffs."""
        if not values:
            return None
        low, high = mean_interval(values) or (None, None)
        return cls(fsum(values) / len(values), low, high, len(values))


@dataclass(frozen=True)
class Arena:
    """The results of all encounters. The function `print` shows them as tables."""

    environment: str
    seats: int
    deals: int
    seed: int
    labels: tuple[str, ...]
    players: Mapping[str, Mapping[str, Json]]
    """Mapping from the label of each player to its kind, source and step."""
    meetings: Mapping[tuple[str, str], Encounter]
    opposed: bool
    """Whether the game has a constant sum."""

    def meeting(self, one: str, other: str) -> Encounter | None:
        """Return the encounter of two players in the order (one, other), or None if they have not met."""
        found = self.meetings.get((one, other))
        if found is not None or (other, one) not in self.meetings:
            return found
        turned = self.meetings[other, one]
        swapped = tuple(tuple(pair and (pair[1], pair[0]) for pair in deal) for deal in turned.games)
        return replace(
            turned,
            one=one,
            other=other,
            games=swapped,
            turns=turned.turns[::-1],
            invalid=turned.invalid[::-1],
            tokens=turned.tokens[::-1],
        )

    def payoff(self, one: str, other: str) -> Payoff | None:
        """Return the mean payoff of a player against another player over all deals and roles, or None if they have not met."""
        met = self.meeting(one, other)
        return None if met is None else Payoff.of([pair[0] for pair in met.deals if pair is not None])

    def lead(self, one: str, other: str) -> Payoff | None:
        """Return the difference between the payoffs of two players in their encounter."""
        met = self.meeting(one, other)
        pairs = [] if met is None else [pair for pair in met.deals if pair is not None]
        return Payoff.of([a - b for a, b in pairs])

    @cached_property
    def together(self) -> bool:
        """Whether all players receive equal payoffs in every game. With equal payoffs, cross-play is meaningful, but ratings are not."""
        pairs = [
            pair for met in self.meetings.values() for deal in met.games for pair in deal if pair is not None
        ]
        return not self.opposed and bool(pairs) and all(abs(a - b) <= CLOSE for a, b in pairs)

    @cached_property
    def results(self) -> Results:
        """Number of games won, drawn and lost, by the indices of the players."""
        return self._results(None)

    def _results(self, deal: int | None) -> Results:
        place = {label: k for k, label in enumerate(self.labels)}
        found = {}
        for (one, other), met in self.meetings.items():
            counts = met.counts(deal) if one != other else (0, 0, 0)
            if any(counts):
                k, n = place[one], place[other]
                found[min(k, n), max(k, n)] = counts if k < n else (counts[2], counts[1], counts[0])
        return found

    @cached_property
    def elo(self) -> Mapping[str, tuple[float, float, float]]:
        """Elo ratings with their 95 % confidence intervals, by label.

        The mapping is empty if all players receive equal payoffs or if encounters are missing.
        """
        if not self._rated:
            return {}
        deals = [self._results(deal) for deal in range(self.deals)] if self.deals >= DEALS else []
        rated = ratings(range(len(self.labels)), self.results, deals)
        return {self.labels[k]: each for k, each in rated.items()}

    @property
    def _rated(self) -> bool:
        """Whether ratings are meaningful, which requires that payoffs differ between players and that every pair has results."""
        pairs = len(self.labels) * (len(self.labels) - 1) // 2
        return not self.together and 0 < pairs == len(self.results)

    def _surely_ahead(self, k: int, n: int) -> float:
        """Return the difference between the payoffs of two players, or 0 if its 95 % confidence interval contains 0."""
        lead = self.lead(self.labels[k], self.labels[n]) if k != n else None
        if lead is None or lead.low is None or lead.high is None or lead.low <= 0 <= lead.high:
            return 0.0
        return lead.mean

    @cached_property
    def cycle(self) -> tuple[str, ...]:
        """A cycle of players in which each player significantly (95 %) beats the next player, and the last player beats the first.

        The result is empty if there is no cycle.
        """
        places = range(len(self.labels))
        return tuple(
            self.labels[k]
            for k in cycle([(k, n) for k in places for n in places if self._surely_ahead(k, n) > 0])
        )

    @cached_property
    def shares(self) -> Mapping[str, Mapping[str, float]]:
        """The values `nash_average` and `alpha_rank` of each player, by label.

        The mapping is empty if `elo` is empty or if the required packages are missing.
        """
        if not self._rated or not _installed("scipy"):
            return {}
        places = range(len(self.labels))
        # Strong selection treats every lead as a certain win, so only significant leads count.
        leads = [[self._surely_ahead(k, n) for n in places] for k in places]
        average, _ = nash_averaging(log_odds(len(self.labels), self.results))
        return {
            "nash_average": dict(zip(self.labels, map(float, average), strict=True)),
            "alpha_rank": dict(zip(self.labels, map(float, alpha_rank(leads)), strict=True)),
        }

    def self_play(self, label: str) -> Payoff | None:
        """Return the mean payoff of a player that plays all roles."""
        return self.payoff(label, label)

    def cross_play(self, label: str) -> Payoff | None:
        """Return the mean payoff of a player when it plays with the other players, averaged over these players in each deal."""
        own = [self.meeting(label, other) for other in self.labels if other != label]
        return Payoff.of(list(_by_deal([met for met in own if met is not None]).values()))

    @cached_property
    def gap(self) -> Payoff | None:
        """Mean payoff in self-play minus mean payoff in cross-play, over deals.

        The gap is the gain from conventions that other players do not share.
        """
        alone = [met for one, other in self.meetings if one == other and (met := self.meeting(one, other))]
        mixed = [met for one, other in self.meetings if one != other and (met := self.meeting(one, other))]
        if not (self.together and alone and mixed):
            return None
        own, others = _by_deal(alone), _by_deal(mixed)
        return Payoff.of([own[deal] - others[deal] for deal in own if deal in others])

    def invalid(self, label: str) -> float | None:
        """Return the share of a player's turns without a legal move, or None if the environment does not count these turns."""
        wrong, turns = self._invalid(label)
        return wrong / turns if turns else None

    def _invalid(self, label: str) -> tuple[int, int]:
        """Return the number of a player's turns without a legal move, and the number of its turns that were checked."""
        turns = wrong = 0
        for (one, other), met in self.meetings.items():
            for side, player in enumerate((one, other)):
                count = met.invalid[side]
                if player == label and count is not None and met.turns[side]:
                    wrong, turns = wrong + count, turns + met.turns[side]
        return wrong, turns

    @property
    def failed(self) -> int:
        """Number of episodes that ended with an error."""
        return sum(met.failed for met in self.meetings.values())

    @property
    def reasons(self) -> list[str]:
        """The most frequent reason for failures in each encounter with failed episodes."""
        return sorted({met.reason for met in self.meetings.values() if met.reason})

    @property
    def ranked(self) -> tuple[str, ...]:
        """Labels of the players, best first: sorted by rating, or by cross-play if all players receive equal payoffs."""

        def place(label: str) -> float:
            if self.elo:
                return -self.elo[label][0]
            found = self.cross_play(label) or self.self_play(label)
            return -found.mean if found is not None else 0.0

        return tuple(sorted(self.labels, key=place))

    def __str__(self) -> str:
        """Return tables of the ranked players, the payoff matrix and the values that are computed from them."""
        return "\n".join(lines(self))

    def row(self) -> dict[str, Json]:
        """Return the results as a JSON object. Payoffs are keyed by the player of the row and then by the player of the column."""

        def interval(rated: Mapping[str, tuple[float, float, float]], label: str) -> Json:
            if label not in rated:
                return None
            middle, low, high = rated[label]
            return {"rating": middle, "low": low, "high": high}

        def plain(payoff: Payoff | None) -> Json:
            return None if payoff is None else asdict(payoff)

        games = {
            label: sum(
                sum(met.counts())
                for pair, met in self.meetings.items()
                if label in pair and len(set(pair)) == 2
            )
            for label in self.labels
        }
        return {
            "environment": self.environment,
            "seats": self.seats,
            "deals": self.deals,
            "seed": self.seed,
            "together": self.together,
            "players": [
                {
                    "label": label,
                    **self.players.get(label, {}),
                    "games": games[label],
                    "elo": interval(self.elo, label),
                    **{name: shares[label] for name, shares in self.shares.items()},
                    "self_play": plain(self.self_play(label)),
                    "cross_play": plain(self.cross_play(label)),
                    "invalid": self.invalid(label),
                    "turns": self._invalid(label)[1] or None,
                }
                for label in self.labels
            ],
            "payoffs": [[plain(self.payoff(one, other)) for other in self.labels] for one in self.labels],
            "results": [
                [
                    None if one == other or (met := self.meeting(one, other)) is None else list(met.counts())
                    for other in self.labels
                ]
                for one in self.labels
            ],
            "cycle": list(self.cycle),
            "gap": plain(self.gap),
            "failed": self.failed,
            "reasons": self.reasons,
        }


def _installed(*packages: Package) -> bool:
    try:
        check_packages(*packages)
    except ConfigError:
        return False
    return True


def _by_deal(meetings: Sequence[Encounter]) -> dict[int, float]:
    """Return the payoff of `one` in each deal without failures, averaged over encounters."""
    columns = zip(*(met.deals for met in meetings), strict=True)
    return {
        deal: fmean(pair[0] for pair in column if pair is not None)
        for deal, column in enumerate(columns)
        if all(pair is not None for pair in column)
    }


# -------- The result as text for people

NAMES = 40
"""Maximum number of characters of a player's name."""
WIDE = 12
"""Maximum number of players for which the payoff table contains confidence intervals."""


def lines(result: Arena) -> list[str]:
    """Return the result as lines of text: the ranked players, the payoff matrix and the values that are computed from them."""
    found = [
        f"{result.environment}: {result.deals} deals, every pair in every assignment of {result.seats} roles",
        "",
    ]
    found += [*_players(result), "", *_matrix(result)]
    found.append(
        "payoff of the row's player against the column's player, over deals and all roles"
        + (
            ", with half its 95 % interval"
            if len(result.labels) <= WIDE
            else "; `arena.csv` has its 95 % intervals"
        )
    )
    if result.gap is not None:
        found.append(
            f"self-play minus cross-play: {_signed(result.gap)}, the gain from conventions that other players do not share"
        )
    if result.cycle:
        around = " beats ".join([*result.cycle, result.cycle[0]])
        found.append(
            f"players form a cycle: {around}. One rating per player cannot describe this; see Nash averaging and α-Rank."
        )
    elif result.elo and len(result.labels) > 2:
        found.append("no significant cycle: one rating per player describes the results")
    if not result.together and not result.shares and result.elo:
        found.append("α-Rank and Nash averaging need an extra: pip install 'kapelle[games]'")
    if result.failed:
        found.append(f"{result.failed} episodes failed and are excluded: {', '.join(result.reasons[:1])}")
    return found


def _players(result: Arena) -> list[str]:
    table = _table("player")
    headings = ["self-play", "cross-play"] if result.together else ["Elo", "95 %", "payoff"]
    cycles = bool(result.cycle and result.shares)
    for heading in (*headings, *(["Nash average", "α-Rank"] if cycles else []), "invalid moves"):
        table.add_column(heading, justify="right")
    for label in result.ranked:
        cells = [_short(label)]
        if result.together:
            cells += [_plain(result.self_play(label)), _plain(result.cross_play(label))]
        else:
            elo = result.elo.get(label)
            cells += ["–", "–"] if elo is None else [f"{elo[0]:+.0f}", f"{elo[1]:+.0f} to {elo[2]:+.0f}"]
            cells += [_signed(result.cross_play(label))]
        if cycles:
            cells += [f"{result.shares[name][label]:.2f}" for name in ("nash_average", "alpha_rank")]
        share = result.invalid(label)
        table.add_row(*cells, "–" if share is None else f"{100 * share:.1f} %")
    return _drawn(table)


def _matrix(result: Arena) -> list[str]:
    table = _table("payoff against")
    order = result.ranked
    for k, _ in enumerate(order, start=1):
        table.add_column(str(k), justify="right")
    for k, one in enumerate(order, start=1):
        row = (result.payoff(one, other) for other in order)
        cells = [_signed(each).split()[0] if len(order) > WIDE else _signed(each) for each in row]
        table.add_row(f"{k} {_short(one)}", *cells)
    return _drawn(table)


def _short(label: str) -> str:
    """Return a shortened name for the tables. Square brackets are escaped, because the package rich reads them as markup."""
    from rich.markup import escape

    return escape(label if len(label) <= NAMES else f"{label[: NAMES // 2]}…{label[1 - NAMES // 2 :]}")


def _signed(payoff: Payoff | None) -> str:
    if payoff is None:
        return "–"
    return f"{payoff.mean:+.3f}" + ("" if payoff.low is None else f" ± {payoff.mean - payoff.low:.3f}")


def _plain(payoff: Payoff | None) -> str:
    return _signed(payoff).lstrip("+")


def _table(first: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(first)
    return table


def _drawn(table: Table) -> list[str]:
    from rich.console import Console

    drawn = io.StringIO()
    Console(file=drawn, width=10_000, color_system=None).print(table)  # wide enough for every table
    return [line.rstrip() for line in drawn.getvalue().splitlines()]
