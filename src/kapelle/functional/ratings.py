"""Compute ratings of players from games between pairs, and analyse meta-games for strengths that are not transitive.

*Ratings* assign one number to each member of a pool. They are computed by Bradley and Terry's model (1952) on Elo's scale,
with intervals. *Meta-games* are analysed from the payoff matrix itself. If A beats B, B beats C and C beats A, no ratings are
correct, but α-Rank (arXiv:1903.01373), Nash averaging (arXiv:1806.02643) and the effective diversity of a pool
(arXiv:1901.08106) remain meaningful. The meta-strategies also select the next opponents of a population (PSRO,
arXiv:1711.00832).

Numpy, scipy and OpenSpiel are imported inside the functions. The extra `games` installs scipy and OpenSpiel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from statistics import NormalDist
from typing import TYPE_CHECKING, Literal, get_args

from kapelle.errors import ConfigError, did_you_mean
from kapelle.functional.statistics import t_quantile

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

    Array = NDArray[np.float64]

# -------- Ratings from games between pairs: Bradley and Terry's model (1952), with intervals from the profile likelihood
#
# A draw is half a win. Players are comparable if games link them, directly or through other players. Ratings are on Elo's scale
# (400 points are odds of ten to one).

Results = Mapping[tuple[int, int], tuple[int, int, int]]
"""Mapping from the numbers of two players (the smaller number first) to the wins of the first player, the draws, and the wins
of the second player."""
Tallies = Mapping[tuple[int, int], tuple[float, float, float]]
"""Results with fractional counts, which are used for games that depend on one another."""
PRIOR = 0.5
"""The number of wins, and of losses, against an average player that are added for every player, so that all ratings are
finite."""
ELO = 400 / math.log(10)
"""The number of points on Elo's scale per nat of log-odds."""


def linked(count: int, results: Tallies) -> list[list[int]]:
    """Return the sets of players that are connected by games, largest set first. Players without games are not included."""
    opponents: dict[int, set[int]] = {}
    for one, other in results:
        opponents.setdefault(one, set()).add(other)
        opponents.setdefault(other, set()).add(one)
    remaining, found = [k for k in range(count) if k in opponents], []
    while remaining:
        members, queue = set(), [remaining[0]]
        while queue:
            player = queue.pop()
            if player not in members:
                members.add(player)
                queue.extend(opponents[player])
        found.append(sorted(members))
        remaining = [k for k in remaining if k not in members]
    return sorted(found, key=len, reverse=True)


def ratings(
    members: Sequence[int],
    results: Tallies,
    shared: Sequence[Tallies] = (),
    *,
    zero: int | None = None,
) -> dict[int, tuple[float, float, float]]:
    """Return the ratings of connected players with the ends of their 95 % intervals, relative to the mean or to the player `zero`.

    The interval contains the ratings whose profile log-likelihood is less than 1.96²/2 nats below the maximum. Points vary
    less if there are draws, so the likelihood of each player is then adjusted to the reduced variance (the sandwich variance;
    Pace, Salvan and Sartori 2011, Statistica Sinica 21).

    The argument `shared` contains the same games in groups of dependent games (for example one deal that every pair played).
    If `shared` is given, the variance is computed between groups, and the quantile is that of Student's t.
    """
    import numpy as np

    count = len(members)
    place = {each: k for k, each in enumerate(members)}
    points_MM, games_MM, draws_MM = (np.zeros((count, count)) for _ in range(3))
    for (one, other), (wins, draws, losses) in results.items():
        if one not in place or other not in place:
            continue
        k, n = place[one], place[other]
        points_MM[k, n] += wins + draws / 2
        points_MM[n, k] += losses + draws / 2
        draws_MM[k, n] += draws
        draws_MM[n, k] += draws
        games_MM[k, n] += wins + draws + losses
        games_MM[n, k] += wins + draws + losses

    def chances(strength_M: Array) -> Array:
        return np.asarray(1 / (1 + np.exp(-(strength_M[:, None] - strength_M[None, :]))))

    def likelihood(strength_M: Array) -> float:
        prior = PRIOR * (strength_M - 2 * np.logaddexp(0, strength_M)).sum()
        gap_MM = strength_M[:, None] - strength_M[None, :]
        return float(prior - (points_MM * np.logaddexp(0, -gap_MM)).sum())

    def slopes(strength_M: Array) -> tuple[Array, Array]:
        chance_MM, average_M = chances(strength_M), 1 / (1 + np.exp(-strength_M))
        gradient_M = (points_MM - games_MM * chance_MM).sum(1) + PRIOR * (1 - 2 * average_M)
        known_MM = games_MM * chance_MM * (1 - chance_MM)
        return gradient_M, np.diag(known_MM.sum(1) + 2 * PRIOR * average_M * (1 - average_M)) - known_MM

    def highest(strength_M: Array, contrast_M: Array | None = None, at: float = 0.0) -> Array:
        """Return the strengths of maximum likelihood. If a contrast is given, the contrast is constrained to equal `at`."""
        for _ in range(100):
            gradient_M, information_MM = slopes(strength_M)
            if contrast_M is None:
                step_M = np.linalg.solve(information_MM, gradient_M)
            else:
                bordered = np.block(
                    [[information_MM, contrast_M[:, None]], [contrast_M[None, :], np.zeros((1, 1))]]
                )
                step_M = np.linalg.solve(bordered, np.append(gradient_M, at - contrast_M @ strength_M))[:-1]
            step_M *= min(1.0, 2 / max(float(np.abs(step_M).max()), 1e-300))
            strength_M = strength_M + step_M
            if np.abs(step_M).max() < 1e-9:
                break
        return strength_M

    best_M = highest(np.zeros(count))
    most = likelihood(best_M)
    inverse_MM = np.linalg.inv(slopes(best_M)[1])
    chance_MM = chances(best_M)
    if len(shared) > 1:
        meat_MM = np.zeros((count, count))
        for group in shared:
            gradient_M = np.zeros(count)
            for (one, other), (wins, draws, losses) in group.items():
                if one in place and other in place:
                    k, n = place[one], place[other]
                    over = wins + draws / 2 - (wins + draws + losses) * chance_MM[k, n]
                    gradient_M[k] += over
                    gradient_M[n] -= over
            meat_MM += np.outer(gradient_M, gradient_M)
        meat_MM *= len(shared) / (len(shared) - 1)
        quantile = t_quantile(0.975, len(shared) - 1)
    else:
        # Points of 1, ½ or 0 with mean p have the variance p(1 − p) minus a quarter of the share of draws.
        varied_MM = games_MM * chance_MM * (1 - chance_MM) - draws_MM / 4
        meat_MM = np.diag(varied_MM.sum(1)) - varied_MM
        quantile = NormalDist().inv_cdf(0.975)
    rated = {}
    for each, k in place.items():
        contrast_M = np.full(count, -1 / count) if zero is None else -np.eye(count)[place[zero]]
        contrast_M[k] += 1
        if not contrast_M.any():
            rated[each] = (0.0, 0.0, 0.0)
            continue
        toward_M = inverse_MM @ contrast_M
        width, met = float(contrast_M @ toward_M), float(games_MM[k].sum())
        # If every game was drawn, the points do not vary; allow for three decided games that were not observed.
        varies = max(
            float(toward_M @ meat_MM @ toward_M) / width, 3 / (met + 3) if draws_MM.any() or shared else 1.0
        )
        centre, ends = float(contrast_M @ best_M), []
        for side in (-1.0, 1.0):
            span, strength_M = quantile * math.sqrt(width * varies), best_M
            for _ in range(30):  # the root of the likelihood's drop is nearly linear in the distance
                strength_M = highest(strength_M, contrast_M, centre + side * span)
                root = math.sqrt(max(0.0, 2 * (most - likelihood(strength_M))) / varies)
                if abs(root / quantile - 1) < 1e-6:
                    break
                span *= quantile / root
            ends.append(ELO * (centre + side * span))
        rated[each] = (ELO * centre, ends[0], ends[1])
    return rated


Package = Literal["open_spiel", "scipy"]


def check_packages(*packages: Package, what: str = "This") -> None:
    """Raise ConfigError if a package that `what` needs is not installed. The message names the extra that installs the package."""
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise ConfigError(f"{what} needs the package {missing[0]}: pip install 'kapelle[games]'.")


def can_measure_diversity() -> bool:
    """Return whether scipy, which `effective_diversity` needs, is installed."""
    return find_spec("scipy") is not None


# -------- Meta-games: tables of payoffs
#
# Legend of shapes: P players, M members (of one pool), A, B, … members of the first, second, … player's pool.

Solver = Literal["nash", "alpha_rank", "prd", "uniform"]
"""The name of a solver for meta-strategies; see `meta_strategy`."""
SOLVER_NEEDS: Mapping[Solver, tuple[Package, ...]] = {
    "nash": ("scipy",), "alpha_rank": (), "prd": ("open_spiel",), "uniform": (),
}  # fmt: skip


MUTATION = 0.01
"""The probability that a mutant with a lower payoff takes over in α-Rank. The probability is positive, so that every profile
is reached."""


def log_odds(count: int, results: Results) -> Array:
    """Return an antisymmetric table (M, M) of the log-odds that the row player beats the column player; 0 for pairs without games.

    A draw counts as half a win. Half a win and half a loss are added for every pair, so that all odds are finite.
    """
    import numpy as np

    odds_MM = np.zeros((count, count))
    for (one, other), (wins, draws, losses) in results.items():
        odds_MM[one, other] = math.log((wins + draws / 2 + 0.5) / (losses + draws / 2 + 0.5))
        odds_MM[other, one] = -odds_MM[one, other]
    return odds_MM


def meta_strategy(payoffs: ArrayLike, by: str) -> list[Array]:
    """Return a meta-strategy for each player of a payoff table (P, A, B, …): a distribution over the player's members.

    - `nash` (two players): for a zero-sum table, the equilibrium strategy with the highest entropy, which is unique. For
      other tables, the equilibrium with the highest sum of payoffs, found by mixed-integer programming (Sandholm, Gilpin and
      Conitzer, AAAI 2005).
    - `alpha_rank`: the marginal distribution of each player under α-Rank (arXiv:1903.01373) in the limit of strong selection.
    - `prd`: projected replicator dynamics as implemented in OpenSpiel (arXiv:1711.00832), averaged over 20,000 steps.
    - `uniform`: equal probabilities for all members.

    Raises ConfigError if the solver is unknown, the table is invalid, or the solver is `nash` and there are not two players.
    """
    import numpy as np

    table = np.asarray(payoffs, dtype=np.float64)
    solvers: Mapping[str, Callable[[Array], list[Array]]] = {
        "nash": _nash, "alpha_rank": _alpha_marginals, "prd": _replicator, "uniform": _uniform,
    }  # fmt: skip
    if by not in solvers:
        known = get_args(Solver)
        raise ConfigError(
            f"'{by}' is not a meta-strategy. Choose one of {', '.join(known)}.{did_you_mean(by, known)}"
        )
    if table.ndim < 2 or table.shape[0] != table.ndim - 1 or 0 in table.shape or not np.isfinite(table).all():
        raise ConfigError(
            f"Payoffs must be finite and have the shape (players, members of player 1, members of player 2, …), "
            f"but their shape is {table.shape}."
        )
    return solvers[by](table)


def alpha_rank(*payoffs: ArrayLike) -> Array:
    """Return α-Rank in the limit of strong selection (arXiv:1903.01373): the share of time in each profile of members, as a flat array.

    One table (M, M) describes a symmetric game in one population. With several tables (A, B, …), each player has its own
    population. In each transition, a mutant takes over one population with probability 0.99 if its payoff is higher, 0.5 if
    it is equal, and 0.01 if it is lower. Raises ConfigError if payoffs are not finite.
    """
    import numpy as np

    tables = [np.asarray(table, dtype=np.float64) for table in payoffs]
    if not all(np.isfinite(table).all() for table in tables):
        raise ConfigError("α-Rank needs finite payoffs. Replace the entries that are NaN or infinite.")

    def takes_over(mutant: Array, resident: Array) -> Array:
        chances = np.where(mutant > resident, 1 - MUTATION, MUTATION)
        return np.where(np.isclose(mutant, resident, atol=1e-14), 0.5, chances)

    # Rates from profile s (row) to profile r (column), up to a factor that leaves the stationary distribution unchanged.
    if len(tables) == 1:
        rates_SR = takes_over(tables[0].T, tables[0])
    else:
        profiles = np.arange(tables[0].size).reshape(tables[0].shape)
        rates_SR = np.zeros((profiles.size, profiles.size))
        for axis, table in enumerate(tables):
            count = table.shape[axis]
            neighbours = np.moveaxis(profiles, axis, -1).reshape(-1, count)
            for members, own in zip(neighbours, np.moveaxis(table, axis, -1).reshape(-1, count), strict=True):
                rates_SR[np.ix_(members, members)] = takes_over(own[None, :], own[:, None])
    np.fill_diagonal(rates_SR, 0.0)
    flow_SR = rates_SR - np.diag(rates_SR.sum(1))
    # The stationary distribution has no net flow into any profile; the sum of 1 replaces one of these dependent equations.
    equations_RS = np.vstack([flow_SR.T[:-1], np.ones(len(flow_SR))])
    share_S: Array = np.linalg.solve(equations_RS, np.eye(len(flow_SR))[-1])
    return np.maximum(share_S, 0.0)  # rounding


def nash_averaging(advantages: ArrayLike) -> tuple[Array, Array]:
    """Return the Nash average of an antisymmetric table (M, M), and the payoff of each member against it (arXiv:1806.02643).

    The Nash average is the equilibrium with the highest entropy: copies of a member share its weight, and members that are
    dominated by a mixture of others have weight 0. The function `log_odds` computes such a table from results.
    """
    import numpy as np

    table = np.asarray(advantages, dtype=np.float64)
    if table.ndim != 2 or table.shape[0] != table.shape[1] or not table.size or not np.isfinite(table).all():
        raise ConfigError(
            f"Nash averaging needs a square table of finite numbers, but the shape is {table.shape}."
        )
    if np.abs(table + table.T).max() > 1e-9 * max(1.0, float(np.abs(table).max())):
        raise ConfigError("Nash averaging needs an antisymmetric table: entry (i, j) is minus entry (j, i).")
    share_M = _most_even(table)
    return share_M, table @ share_M


def effective_diversity(advantages: ArrayLike) -> float:
    """Return the effective diversity pᵀ⌊A⌋₊p of a pool under its Nash average p (arXiv:1901.08106, definition 4).

    The effective diversity measures how strongly the best members beat one another. The diversity is 0 if one member beats
    all others.
    """
    import numpy as np

    share_M, _ = nash_averaging(advantages)
    return float(share_M @ np.maximum(np.asarray(advantages, dtype=np.float64), 0.0) @ share_M)


def effective_number(distribution: ArrayLike) -> float:
    """Return the effective number of members, exp(entropy): a uniform distribution over this number of members has the same entropy."""
    import numpy as np

    share_M = np.asarray(distribution, dtype=np.float64)
    share_M = share_M[share_M > 0]
    return float(np.exp(-(share_M * np.log(share_M)).sum()))


def cycle(beats: Sequence[tuple[int, int]]) -> list[int]:
    """Return the shortest cycle, in which each member beats the next and the last beats the first.

    Return an empty list if there is no cycle. The argument `beats` contains pairs (winner, loser). If there is no cycle,
    ratings can represent all results.
    """
    losers: dict[int, list[int]] = {}
    for winner, loser in sorted(beats):
        losers.setdefault(winner, []).append(loser)
    shortest: list[int] = []
    for start in sorted(losers):
        paths, seen = [[start]], {start}
        while paths and (not shortest or len(paths[0]) < len(shortest)):
            path = paths.pop(0)
            for after in losers.get(path[-1], ()):
                if after == start:
                    shortest, paths = path, []
                    break
                if after not in seen:
                    seen.add(after)
                    paths.append([*path, after])
    return shortest


def _uniform(table: Array) -> list[Array]:
    import numpy as np

    return [np.full(count, 1 / count) for count in table.shape[1:]]


def _alpha_marginals(table: Array) -> list[Array]:
    share = alpha_rank(*table).reshape(table.shape[1:])
    axes = range(share.ndim)
    return [share.sum(tuple(other for other in axes if other != axis)) for axis in axes]


def _replicator(table: Array) -> list[Array]:
    check_packages("open_spiel")
    import numpy as np
    from open_spiel.python.algorithms.projected_replicator_dynamics import projected_replicator_dynamics

    # Steps of a thousandth are small next to payoffs of about 1, whatever the game's unit.
    scale = np.abs(table - table.mean(tuple(range(1, table.ndim)), keepdims=True)).max()
    found = projected_replicator_dynamics(list(table / (scale or 1.0)), prd_iterations=20_000)
    return [np.asarray(each) / np.sum(each) for each in found]


def _nash(table: Array) -> list[Array]:
    import numpy as np

    if table.shape[0] != 2:
        raise ConfigError(
            f"The meta-strategy `nash` supports two players, but the table has {table.shape[0]} players. Use "
            "`alpha_rank` or `prd`."
        )
    total = table[0] + table[1]
    if np.ptp(total) <= 1e-9 * max(1.0, float(np.abs(table).max())):
        return [_most_even(table[0]), _most_even(table[1].T)]
    return _best_equilibrium(table)


def _most_even(payoffs_AB: Array) -> Array:
    """Return the row player's equilibrium strategy with the highest entropy in a zero-sum game with the given row payoffs.

    A strategy p is an equilibrium strategy if p·column ≥ value for every column. Linear programs find the rows and columns
    that no equilibrium uses. Over the remaining rows and columns, the entropy is maximised through its dual, which is smooth:
    by strict complementarity (Goldman and Tucker 1956), the constraints of used columns are equations, and the constraints of
    other columns are slack.
    """
    check_packages("scipy")
    import numpy as np

    size = float(np.abs(payoffs_AB - payoffs_AB.mean()).max()) or 1.0
    scaled_AB = (payoffs_AB - payoffs_AB.mean()) / size
    share_A, slack_B, value, middle_A = _reach(scaled_AB)
    share_B, slack_A, _, _ = _reach(-scaled_AB.T)
    # Either a row's share or its slack is 0 up to rounding, where their product is about 1e-9. For nearly equal rows both are
    # small; a row is excluded if no strategy with it reaches the value of the game.
    for sure in (1.0, 1e3, 1e6):
        rows, columns = share_A > sure * slack_A, share_B > sure * slack_B
        if rows.any() and columns.any():
            found_A = _most_even_on(scaled_AB - value, rows, columns)
            if (found_A @ scaled_AB).min() >= value - 1e-8:
                return found_A
    return middle_A


def _most_even_on(excess_AB: Array, rows: NDArray[np.bool_], columns: NDArray[np.bool_]) -> Array:
    """Return the strategy over `rows` with the highest entropy whose excess is at least 0 for every column and 0 for `columns`.

    The argument `excess_AB` contains the payoffs minus the value of the game.
    """
    import numpy as np
    from scipy.optimize import minimize

    excess_RB = excess_AB[rows]

    def shares(price_B: Array) -> Array:
        weight_R = excess_RB @ price_B
        weight_R = np.exp(weight_R - weight_R.max())
        return np.asarray(weight_R / weight_R.sum())

    def dual(price_B: Array) -> tuple[float, Array]:
        weight_R = excess_RB @ price_B
        most = float(weight_R.max())
        return most + math.log(np.exp(weight_R - most).sum()), excess_RB.T @ shares(price_B)

    equations = np.vstack([excess_RB[:, columns].T, np.ones(len(excess_RB))])
    if np.linalg.matrix_rank(equations, tol=1e-9) == len(excess_RB):  # the strategy is unique
        share_R = np.linalg.lstsq(equations, np.append(np.zeros(columns.sum()), 1.0), rcond=None)[0]
    else:
        bounds = [(None, None) if used else (0.0, None) for used in columns]
        price_B = minimize(
            dual, np.zeros(len(columns)), jac=True, method="L-BFGS-B", bounds=bounds,
            options={"ftol": 1e-15, "gtol": 1e-10, "maxiter": 10_000, "maxfun": 20_000},
        ).x  # fmt: skip
        binding = columns | (price_B > 1e-7)
        for _ in range(100):  # Newton's method on the binding constraints, for the last digits
            share_R, slope_B = shares(price_B), dual(price_B)[1] * binding
            if np.abs(slope_B).max() < 1e-14:
                break
            own_RB = excess_RB * binding
            curvature = own_RB.T @ (share_R[:, None] * own_RB) - np.outer(slope_B, slope_B)
            step_B, before, length = (
                np.linalg.lstsq(curvature, slope_B, rcond=1e-12)[0],
                dual(price_B)[0],
                1.0,
            )
            while length > 1e-6 and dual(price_B - length * step_B)[0] > before:
                length /= 2
            price_B = price_B - length * step_B
        share_R = shares(price_B)
    found_A = np.zeros(len(rows))
    found_A[rows] = np.maximum(share_R, 0) / np.maximum(share_R, 0).sum()
    return found_A


def _reach(payoffs_AB: Array) -> tuple[Array, Array, float, Array]:
    """Return the largest share of each row and the largest excess of each column over all equilibria, the value, and an interior strategy.

    The argument `payoffs_AB` contains the row payoffs of a zero-sum game, scaled to a magnitude of about 1.
    """
    import numpy as np
    from scipy.optimize import linprog

    options = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}
    A, B = payoffs_AB.shape
    # Variables: the rows' shares, and the value of the game.
    best = linprog(
        np.append(np.zeros(A), -1.0), A_ub=np.hstack([-payoffs_AB.T, np.ones((B, 1))]), b_ub=np.zeros(B),
        A_eq=np.append(np.ones(A), 0.0)[None, :], b_eq=[1.0], bounds=[(0, 1)] * A + [(None, None)], options=options,
    )  # fmt: skip
    assert best.success, f"every finite table has a value: {best.message}"
    value = float(best.x[-1])
    share_A = best.x[:A].copy()
    excess_B, known = share_A @ payoffs_AB - value, [best.x[:A]]
    for reached, goals in ((share_A, np.eye(A)), (excess_B, payoffs_AB.T)):
        for k in np.flatnonzero(reached < 1e-3):
            most = linprog(
                -goals[k], A_ub=-payoffs_AB.T, b_ub=np.full(B, 1e-9 - value), A_eq=np.ones((1, A)), b_eq=[1.0],
                bounds=(0, 1), options=options,
            )  # fmt: skip
            if most.success and (most.x @ payoffs_AB).min() > value - 2e-9:
                np.maximum(share_A, most.x, out=share_A)
                np.maximum(excess_B, most.x @ payoffs_AB - value, out=excess_B)
                known.append(most.x)
    middle_A = np.maximum(np.mean(known, axis=0), 0.0)
    return share_A, excess_B, value, middle_A / middle_A.sum()


def _best_equilibrium(table: Array) -> list[Array]:
    """Return the equilibrium with the highest sum of payoffs in a two-player game.

    One binary variable per member states whether the member is unused. The share of an unused member is 0, and its regret can
    be positive.
    """
    check_packages("scipy")
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp

    low, size = float(table.min()), float(np.ptp(table)) or 1.0
    first_AB, second_BA = (table[0] - low) / size, (table[1].T - low) / size
    A, B = first_AB.shape
    eye_A, eye_B = np.eye(A), np.eye(B)

    def block(**parts: Array) -> Array:
        """Return rows of coefficients of all variables: the shares p and q, the values u and v, and the flags a and b of unused members."""
        widths = {"p": A, "q": B, "u": 1, "v": 1, "a": A, "b": B}
        count = next(iter(parts.values())).shape[0]
        return np.hstack([parts.get(name, np.zeros((count, width))) for name, width in widths.items()])

    ones_A, ones_B = np.ones((A, 1)), np.ones((B, 1))
    constraints = [
        LinearConstraint(block(p=ones_A.T), 1, 1),
        LinearConstraint(block(q=ones_B.T), 1, 1),
        LinearConstraint(block(q=-first_AB, u=ones_A), 0, np.inf),  # no member has more than the value
        LinearConstraint(block(p=-second_BA, v=ones_B), 0, np.inf),
        LinearConstraint(block(q=-first_AB, u=ones_A, a=-eye_A), -np.inf, 0),  # members with less are unused
        LinearConstraint(block(p=-second_BA, v=ones_B, b=-eye_B), -np.inf, 0),
        LinearConstraint(block(p=eye_A, a=eye_A), -np.inf, 1),
        LinearConstraint(block(q=eye_B, b=eye_B), -np.inf, 1),
    ]
    objective = block(u=np.array([[-1.0]]), v=np.array([[-1.0]]))[0]
    binary = block(a=np.ones((1, A)), b=np.ones((1, B)))[0]
    found = milp(objective, integrality=binary, bounds=Bounds(0, 1), constraints=constraints)
    assert found.success, f"every finite table has an equilibrium: {found.message}"
    p_A, q_B = found.x[:A], found.x[A : A + B]

    def exact(share_A: Array, other_B: Array, against_BA: Array) -> Array:
        """Return the nearest strategy for which all used members of the other player have equal payoffs.

        The solver is exact only to 1e-6.
        """
        rows, columns = share_A > 1e-6, other_B > 1e-6
        own = against_BA[np.ix_(columns, rows)]
        equations = np.vstack([own - own.mean(0), np.ones(rows.sum())])
        wanted = np.append(np.zeros(columns.sum()), 1.0)
        moved = share_A[rows] + np.linalg.lstsq(equations, wanted - equations @ share_A[rows], rcond=None)[0]
        full_A = np.zeros(len(share_A))
        full_A[rows] = np.maximum(moved, 0)
        return full_A

    return [exact(p_A, q_B, second_BA), exact(q_B, p_A, first_AB)]
