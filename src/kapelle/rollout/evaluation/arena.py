"""The arena: every player against every other, in every seat, on the same deals, and what follows from the results.

A *deal* is one task with one seed. All pairs of players play the same deals, in each of them with every assignment of
the two to the seats, and turns in one seat of one deal are sampled with the same seed, whoever sits there (common random
numbers). What luck of the cards and of the seat gives is so taken out of each pair's payoff: intervals are over deals.
"""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import combinations, combinations_with_replacement, product
from math import fsum
from statistics import fmean
from typing import TYPE_CHECKING, Any

from kapelle.environment import Environment, asks_questions, is_opposed
from kapelle.errors import ConfigError
from kapelle.functional.ratings import (
    Results,
    alpha_rank,
    check_packages,
    cycle,
    log_odds,
    nash_averaging,
    openskill,
    ratings,
)
from kapelle.functional.statistics import finite, mean_interval
from kapelle.rollout.episodes import ScheduledEpisode, play_episode, play_seats
from kapelle.rollout.play import Play
from kapelle.runtime.randomness import derive_seed
from kapelle.team import Agent, Policy, Team
from kapelle.types import Cast, Episode, Json, Task

if TYPE_CHECKING:
    from rich.table import Table

DEALS = 20
"""From so many deals on, intervals of ratings are between deals; with fewer, games count as independent."""
CLOSE = 1e-9


@dataclass(frozen=True, slots=True)
class Contestant:
    """Who takes part: a team in memory, or a player of the environment itself."""

    label: str
    team: Team | None = None
    """One agent for each seat, or one for whichever seat; policies are named as the engine has them."""
    player: str = ""
    """The environment's own player, where there is no team."""


@dataclass(frozen=True, slots=True)
class Encounter:
    """What two players did to each other, or one in all seats: it is complete once it is there."""

    one: str
    other: str
    seatings: tuple[tuple[int, ...], ...]
    """Who sits where: for each seat 0 (the one) or 1 (the other)."""
    games: tuple[tuple[tuple[float, float] | None, ...], ...]
    """Deal → seating → mean payoff of the one's seats and of the other's; None where the episode failed."""
    turns: tuple[int, int]
    """Turns that each took."""
    invalid: tuple[int | None, int | None]
    """How many of them were no legal moves; None where the environment does not say, or plays itself."""
    tokens: tuple[int, int]
    """Tokens that each sampled."""
    failed: int = 0
    reason: str = ""
    """The most frequent reason why episodes failed."""

    def row(self) -> dict[str, Json]:
        """Return it as plain JSON."""
        return asdict(self)

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Encounter:
        """Return the meeting that `row` gave; ValueError, KeyError or TypeError for anything else."""
        size = _seatings_in(row)
        for deal in row["games"]:
            if not isinstance(deal, list) or len(deal) != size or not all(map(_is_paid, deal)):
                raise ValueError(f"a deal has {size} games, each of two payoffs or null, and one is {deal!r}")
        numbers = [
            *row["turns"],
            *row["tokens"],
            *(each for each in row["invalid"] if each is not None),
            row["failed"],
        ]
        if len(row["turns"]) != 2 or len(row["tokens"]) != 2 or len(row["invalid"]) != 2:
            raise ValueError("`turns`, `tokens` and `invalid` have a number for each of the two")
        if not all(type(each) is int and each >= 0 for each in numbers):
            raise ValueError(f"{numbers} are not all counts")
        games = tuple(tuple(pair and (pair[0], pair[1]) for pair in deal) for deal in row["games"])
        seatings = tuple(tuple(seating) for seating in row["seatings"])
        pairs = {name: tuple(row[name]) for name in ("turns", "invalid", "tokens")}
        return cls(**{**row, **pairs, "games": games, "seatings": seatings})

    @property
    def deals(self) -> tuple[tuple[float, float] | None, ...]:
        """Payoffs of both in each deal, over all seatings; None where one of its episodes failed."""
        return tuple(_over_seatings(deal) for deal in self.games)

    def counts(self, deal: int | None = None) -> tuple[int, int, int]:
        """Return deals that the one won, drew and lost over all seatings: one deal, or all.

        The luck of a deal falls on both alike, as in duplicate bridge.
        """
        paid = self.deals if deal is None else (_over_seatings(self.games[deal]),)
        ahead = [pair[0] - pair[1] for pair in paid if pair is not None]
        wins, losses = sum(each > CLOSE for each in ahead), sum(each < -CLOSE for each in ahead)
        return wins, len(ahead) - wins - losses, losses


def _seatings_in(row: Mapping[str, Any]) -> int:
    """Return how many seatings a kept meeting has; ValueError where that is none."""
    seatings = row["seatings"]
    if not seatings or not all(each and set(each) <= {0, 1} for each in seatings):
        raise ValueError(f"`seatings` are {seatings!r}")
    return len(seatings)


def _is_paid(pair: object) -> bool:
    return pair is None or (
        isinstance(pair, list)
        and len(pair) == 2
        and all(type(each) in (int, float) and math.isfinite(each) for each in pair)
    )


def _over_seatings(deal: Sequence[tuple[float, float] | None]) -> tuple[float, float] | None:
    pairs = [pair for pair in deal if pair is not None]
    return (
        (fmean(one for one, _ in pairs), fmean(other for _, other in pairs))
        if len(pairs) == len(deal)
        else None
    )


def pairs_of(labels: Sequence[str], environment: Environment) -> list[tuple[str, str]]:
    """Return the pairs that meet: all, and each player with itself unless the game is one of constant sum."""
    return list((combinations if is_opposed(environment) else combinations_with_replacement)(labels, 2))


def seatings(seats: int, *, alone: bool) -> tuple[tuple[int, ...], ...]:
    """Return every assignment of two players to the seats in which both sit somewhere; of one player, the one."""
    if alone:
        return ((0,) * seats,)
    return tuple(each for each in product((0, 1), repeat=seats) if len(set(each)) == 2)


def seated(
    names: Sequence[str], pair: Sequence[Contestant], seating: Sequence[int]
) -> tuple[Team, Mapping[str, Cast]]:
    """Return the team of one seating, and the seats that the environment plays itself."""
    seats: dict[str, tuple[Team, str]] = {}
    cast: dict[str, Cast] = {}
    for k, name in enumerate(names):
        who = pair[seating[k]]
        if who.team is None:
            nobody = Policy(f"world:{who.label}", base="", trained=False)
            seats[name], cast[name] = (Team.alone(Agent(name), nobody), name), Cast("", who.player)
        else:
            seats[name] = who.team, who.team.sitting(k, len(names))
    return Team.gathered(seats), cast


async def meet(
    play: Play, names: Sequence[str], pair: tuple[Contestant, Contestant], tasks: Sequence[Task], seed: int
) -> Encounter:
    """Play all seatings of all deals at once, so that answers of both players share batches.

    `play` has the engine that holds everybody's policies, and the environment; its team is not read.
    """
    alone = pair[0].label == pair[1].label
    every = seatings(len(names), alone=alone)
    plays: list[Play] = []
    seats: list[ScheduledEpisode] = []
    for task in tasks:
        for seating in every:
            team, cast = seated(names, pair, seating)
            plays.append(replace(play, team=team))
            # The same seed in every seating of every pair: the same cards, and the same luck of each seat.
            seats.append(ScheduledEpisode(replace(task, cast=cast), 0, derive_seed(seed, "arena", task.id)))

    async def one(number: int, seat: ScheduledEpisode) -> Episode:
        return await play_episode(plays[number], seat.task, seat.seed)

    episodes = await play_seats(plays[0], seats, one)
    play.engine.release_caches()
    games: list[tuple[float, float] | None] = []
    turns, tokens, invalid = [0, 0], [0, 0], [0, 0]
    reports = [False, False]
    graded = asks_questions(play.environment)
    for number, episode in enumerate(episodes):
        seating = every[number % len(every)]
        who = dict(zip(names, seating, strict=True))
        if episode.error is not None:
            games.append(None)
            continue
        paid = payoffs(episode, names, graded=graded)
        earned = [[paid[name] for name in names if who[name] == side] for side in (0, 1)]
        games.append((fmean(earned[0]), fmean(earned[1] or earned[0])))
        wrong = episode.info.get("invalid")
        for turn in episode.turns:
            turns[who[turn.agent]] += 1
            tokens[who[turn.agent]] += len(turn.completion_ids)
        for name in names:
            count = finite(wrong.get(name)) if isinstance(wrong, Mapping) else None
            if count is not None and pair[who[name]].team is not None:
                invalid[who[name]] += int(count)
                reports[who[name]] = True
    errors = Counter(" ".join(each.error.split()) for each in episodes if each.error is not None)
    known = [count if reported else None for count, reported in zip(invalid, reports, strict=True)]
    size = len(every)
    return Encounter(
        pair[0].label,
        pair[1].label,
        every,
        tuple(tuple(games[k * size : (k + 1) * size]) for k in range(len(tasks))),
        (turns[0], turns[1]),
        (known[0], known[1]),
        (tokens[0], tokens[1]),
        errors.total(),
        errors.most_common(1)[0][0] if errors else "",
    )


def payoffs(episode: Episode, names: Sequence[str], *, graded: bool) -> dict[str, float]:
    """Return what an episode paid each agent.

    Where a question was asked (`graded`) and those alone are paid whose answer was graded, the others earn what these earn on
    average: the team is paid, whoever of it spoke last.
    """
    own = {name: payoff_of(episode, name) for name in names}
    paid = [own[name] for name in names if name in episode.rewards]
    if not graded or not paid or any(turn.reward for turn in episode.turns):
        return own
    return {name: own[name] if name in episode.rewards else fmean(paid) for name in names}


def payoff_of(episode: Episode, agent: str) -> float:
    """Return what the game paid an agent's seats, without penalties for invalid moves; the agent's return where the environment does not say."""
    returns, seats = episode.info.get("returns"), episode.info.get("seats")
    if (
        isinstance(returns, Sequence)
        and isinstance(seats, Mapping)
        and isinstance(seats.get(agent), Sequence)
    ):
        own = [finite(returns[seat - 1]) for seat in seats[agent] if 0 < seat <= len(returns)]
        known = [value for value in own if value is not None]
        if known and len(known) == len(own):
            return fmean(known)
    return episode.total(agent)


@dataclass(frozen=True, slots=True)
class Payoff:
    """A mean over deals with its 95 % interval."""

    mean: float
    low: float | None
    high: float | None
    deals: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Payoff | None:
        """Return the mean of what each deal gave; None without any."""
        if not values:
            return None
        low, high = mean_interval(values) or (None, None)
        return cls(fsum(values) / len(values), low, high, len(values))


@dataclass(frozen=True)
class Arena:
    """The results of all meetings; `print` shows them."""

    environment: str
    seats: int
    deals: int
    seed: int
    labels: tuple[str, ...]
    players: Mapping[str, Mapping[str, Json]]
    """Label → what it stands for: its kind, source and step."""
    meetings: Mapping[tuple[str, str], Encounter]
    opposed: bool
    """Whether the environment says that what one wins the others lose."""

    def meeting(self, one: str, other: str) -> Encounter | None:
        """Return what the two did, as (one, other); None if they have not met."""
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
        """Return what a player earns against another, over deals and all seats; None if they have not met."""
        met = self.meeting(one, other)
        return None if met is None else Payoff.of([pair[0] for pair in met.deals if pair is not None])

    def lead(self, one: str, other: str) -> Payoff | None:
        """Return by how much a player earns more than another when the two meet."""
        met = self.meeting(one, other)
        return (
            None if met is None else Payoff.of([pair[0] - pair[1] for pair in met.deals if pair is not None])
        )

    @cached_property
    def together(self) -> bool:
        """Whether all were paid alike in every game: ratings say nothing then, and cross-play does."""
        pairs = [
            pair for met in self.meetings.values() for deal in met.games for pair in deal if pair is not None
        ]
        return not self.opposed and bool(pairs) and all(abs(a - b) <= CLOSE for a, b in pairs)

    @cached_property
    def results(self) -> Results:
        """Games won, drawn and lost, by players' places."""
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
        """Rating on Elo's scale with its 95 % interval, by label; empty where all play together, or not all have met."""
        if self.together or not self._linked:
            return {}
        deals = [self._results(deal) for deal in range(self.deals)] if self.deals >= DEALS else []
        rated = ratings(range(len(self.labels)), self.results, deals)
        return {self.labels[k]: each for k, each in rated.items()}

    @cached_property
    def openskill(self) -> Mapping[str, tuple[float, float, float]]:
        """OpenSkill's μ with μ ± 1.96 σ, by label; empty where all play together, or without the package."""
        if self.together or not self._linked:
            return {}
        try:
            check_packages("openskill")
        except ConfigError:
            return {}
        return {
            self.labels[k]: each
            for k, each in openskill(range(len(self.labels)), self.results, self.seed).items()
        }

    @property
    def _linked(self) -> bool:
        return len(self.labels) > 1 and len(self.results) == len(self.labels) * (len(self.labels) - 1) // 2

    @cached_property
    def cycle(self) -> tuple[str, ...]:
        """Players of which each beats the next and the last the first, every time by more than chance (95 %); empty without."""
        beats = []
        for k, one in enumerate(self.labels):
            for n, other in enumerate(self.labels):
                lead = self.lead(one, other) if one != other else None
                if lead is not None and (lead.low or 0.0) > 0:
                    beats.append((k, n))
        return tuple(self.labels[k] for k in cycle(beats))

    @cached_property
    def shares(self) -> Mapping[str, Mapping[str, float]]:
        """`nash_average` and `alpha_rank` of each player, by label; empty where all play together, or without the packages."""
        if self.together or not self._linked:
            return {}
        try:
            check_packages("open_spiel", "scipy")
        except ConfigError:
            return {}
        # A lead within chance is none: strong selection would make a certain victory of it.
        lead = [[0.0] * len(self.labels) for _ in self.labels]
        for k, one in enumerate(self.labels):
            for n, other in enumerate(self.labels):
                found = self.lead(one, other) if k != n else None
                if found is not None and found.low is not None and found.high is not None:
                    lead[k][n] = found.mean if found.low > 0 or found.high < 0 else 0.0
        average, _ = nash_averaging(log_odds(len(self.labels), self.results))
        return {
            "nash_average": dict(zip(self.labels, map(float, average), strict=True)),
            "alpha_rank": dict(zip(self.labels, map(float, alpha_rank(lead)), strict=True)),
        }

    def self_play(self, label: str) -> Payoff | None:
        """Return what a player earns with itself in all seats."""
        return self.payoff(label, label)

    def cross_play(self, label: str) -> Payoff | None:
        """Return what a player earns with the others, each deal averaged over them."""
        own = [self.meeting(label, other) for other in self.labels if other != label]
        return Payoff.of(list(_by_deal([met for met in own if met is not None]).values()))

    @cached_property
    def gap(self) -> Payoff | None:
        """Mean self-play less mean cross-play, deal by deal: what conventions among oneself are worth."""
        alone = [met for one, other in self.meetings if one == other and (met := self.meeting(one, other))]
        mixed = [met for one, other in self.meetings if one != other and (met := self.meeting(one, other))]
        if not (self.together and alone and mixed):
            return None
        own, others = _by_deal(alone), _by_deal(mixed)
        return Payoff.of([own[deal] - others[deal] for deal in own if deal in others])

    def invalid(self, label: str) -> float | None:
        """Return the share of a player's turns that were no legal move; None where nothing says so."""
        wrong, turns = self._invalid(label)
        return wrong / turns if turns else None

    def _invalid(self, label: str) -> tuple[int, int]:
        """Return how many of a player's turns were no legal move, and how many those are of which that is known."""
        turns = wrong = 0
        for (one, other), met in self.meetings.items():
            for side, who in enumerate((one, other)):
                count = met.invalid[side]
                if who == label and count is not None and met.turns[side]:
                    wrong, turns = wrong + count, turns + met.turns[side]
        return wrong, turns

    @property
    def failed(self) -> int:
        """Episodes that ended in an error."""
        return sum(met.failed for met in self.meetings.values())

    @property
    def reasons(self) -> list[str]:
        """Why episodes failed: the most frequent reason of each meeting."""
        return sorted({met.reason for met in self.meetings.values() if met.reason})

    @property
    def ranked(self) -> tuple[str, ...]:
        """Labels, the best first: by rating, or where all play together by cross-play."""

        def place(label: str) -> float:
            if self.elo:
                return -self.elo[label][0]
            found = self.cross_play(label) or self.self_play(label)
            return -found.mean if found is not None else 0.0

        return tuple(sorted(self.labels, key=place))

    def __str__(self) -> str:
        """Return the players in order, the matrix of payoffs, and what follows from both."""
        return "\n".join(lines(self))

    def row(self) -> dict[str, Json]:
        """Return everything as plain JSON; payoffs by the row's player, then the column's."""

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
                    "openskill": interval(self.openskill, label),
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


def _by_deal(meetings: Sequence[Encounter]) -> dict[int, float]:
    """Return each deal's payoff of the one, averaged over meetings, where none of them failed in it."""
    columns = zip(*(met.deals for met in meetings), strict=True)
    return {
        deal: fmean(pair[0] for pair in column if pair is not None)
        for deal, column in enumerate(columns)
        if all(pair is not None for pair in column)
    }


# -------- The same for people

NAMES = 40
"""Most characters of a player's name."""
WIDE = 12
"""Most players whose payoffs are shown with their intervals."""


def lines(result: Arena) -> list[str]:
    """Return the result for people: the players in order, the matrix of payoffs, and what follows from both."""
    found = [
        f"{result.environment}: {result.deals} deals, every pair in every assignment of {result.seats} seats",
        "",
    ]
    found += [*_players(result), "", *_matrix(result)]
    found.append(
        "payoff of the row's player against the column's, over deals and all seats"
        + (
            ", with half its 95 % interval"
            if len(result.labels) <= WIDE
            else "; `arena.csv` has its 95 % intervals"
        )
    )
    if result.gap is not None:
        found.append(
            f"self-play minus cross-play: {_signed(result.gap)}: what a team earns by conventions that others do not share"
        )
    if result.cycle:
        around = " beats ".join([*result.cycle, result.cycle[0]])
        found.append(
            f"play cycles: {around}. No line of ratings is right then; Nash averaging and α-Rank say who is left."
        )
    elif result.elo and len(result.labels) > 2:
        found.append("no cycle beyond chance: a line of ratings says it all")
    if not result.together and not result.openskill and result.elo:
        found.append("OpenSkill, α-Rank and Nash averaging need an extra: pip install 'kapelle[games]'")
    if result.failed:
        found.append(f"{result.failed} episodes failed and are left out: {', '.join(result.reasons[:1])}")
    return found


def _players(result: Arena) -> list[str]:
    table = _table("player")
    headings = ["self-play", "cross-play"] if result.together else ["Elo", "95 %", "OpenSkill", "payoff"]
    cycles = bool(result.cycle and result.shares)
    for heading in (*headings, *(["Nash average", "α-Rank"] if cycles else []), "invalid moves"):
        table.add_column(heading, justify="right")
    for label in result.ranked:
        cells = [_short(label)]
        if result.together:
            cells += [_plain(result.self_play(label)), _plain(result.cross_play(label))]
        else:
            elo, skill = result.elo.get(label), result.openskill.get(label)
            cells += ["–", "–"] if elo is None else [f"{elo[0]:+.0f}", f"{elo[1]:+.0f} to {elo[2]:+.0f}"]
            cells += ["–" if skill is None else f"{skill[0]:.1f} ± {(skill[2] - skill[1]) / 2:.1f}"]
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
        paid = (result.payoff(one, other) for other in order)
        cells = [_signed(each).split()[0] if len(order) > WIDE else _signed(each) for each in paid]
        table.add_row(f"{k} {_short(one)}", *cells)
    return _drawn(table)


def _short(label: str) -> str:
    """Return a name as the tables have it; rich would read what stands in square brackets as markup."""
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
    Console(file=drawn, width=10_000, color_system=None).print(table)  # as wide as it is: nothing is wrapped
    return [line.rstrip() for line in drawn.getvalue().splitlines()]
