"""The metrics of a league, in the order in which they are displayed."""

from __future__ import annotations

from kapelle.runs.definitions import Metric

METRICS = (
    Metric(
        "league/rating",
        "Elo",
        "Rating of the learner in the steps before a member enters, relative to the first member that games link it to (Bradley and Terry's model); 400 points mean odds of ten to one.",
        "Does not rise from entry to entry: the policy changes without becoming stronger, or it cycles. Look at league/points.",
        known_as="Elo rating",
        panel=("league/rating", "newest member"),
        progress="the newest member's rating",
        is_relative=True,
    ),
    Metric(
        "league/rating_low",
        "Elo",
        "Lower end of its 95 % interval.",
        "As league/rating.",
        known_as="Elo rating, 95 %",
        panel=("league/rating", "lower end"),
    ),
    Metric(
        "league/rating_high",
        "Elo",
        "Upper end of its 95 % interval.",
        "As league/rating.",
        known_as="Elo rating, 95 %",
        panel=("league/rating", "upper end"),
    ),
    Metric(
        "league/points/<member>",
        "share",
        "Share of points that the learner wins against a member, where a draw is half a point; earlier games count less (`league.forget`).",
        "Near 1 for all: no opponent is strong enough to learn from. Let members enter sooner. Falls against old members: the learner forgets; draw them more often.",
        known_as="win rate (PFSP payoff)",
    ),
    Metric(
        "league/return/<learner>",
        "reward",
        "Mean return of a learner (`self`, `exploiter`, `follower_0`) in the step's games against members of the league.",
        "Stays far below 0: the pool is too strong to learn from. Set `league.population: pfsp` with `weight: even`, or a larger share of self-play.",
        known_as="return against the league",
    ),
    Metric(
        "league/nash_conv",
        "reward",
        "NashConv of the newest past self, computed exactly when it enters: how much all players together could gain by best responses.",
        "Does not fall while league/nash_conv_mixture does: the policy cycles around an equilibrium. Use the mixture.",
        known_as="NashConv, twice the exploitability of two players",
        panel=("league/nash_conv", "newest member"),
        progress="NashConv",
        is_falling=True,
    ),
    Metric(
        "league/nash_conv_mixture",
        "reward",
        "NashConv of the mixture of past selves, which draws one of them for a whole game: with equal probability, or by the meta-strategy of `psro`.",
        "Does not fall: the learner is not a best response to the pool. Let more steps pass between entries.",
        known_as="NashConv of the average policy",
        panel=("league/nash_conv", "mixture of the pool"),
    ),
    Metric(
        "league/legal",
        "share",
        "Minimum over information states of the probability that the newest past self writes a legal move.",
        "Falls: the policy degenerates. Lower `optimizer.lr`.",
        known_as="probability of a legal move",
    ),
    Metric(
        "league/members",
        "members",
        "Number of members of the pool, including permanent ones.",
        "Stays at its first value with `league.enter.beats`: the learner does not beat the pool.",
        known_as="population size",
    ),
    Metric(
        "league/effective_members",
        "members",
        "exp(entropy) of the probabilities with which members are drawn: the equivalent number of equally likely members.",
        "1: only one opponent. The learner overfits to it.",
        known_as="perplexity of the opponents drawn",
    ),
    Metric(
        "league/diversity",
        "reward",
        "Effective diversity of the pool (1901.08106): how much the members of its Nash average beat one another; for `psro`, for exact games, or with `league.pair_games`.",
        "0: one member beats all others, so that there is nothing to mix.",
        known_as="effective diversity",
    ),
    Metric(
        "league/invalid",
        "share",
        "Share of the learners' turns without a legal move, if the environment counts them (`info.invalid`).",
        "Rises: the policy degenerates. Lower `optimizer.lr`, or add a KL term.",
        known_as="illegal moves",
    ),
    Metric(
        "league/cross_play_gap",
        "reward",
        "Mean return of the learner's games with itself minus that of its games with members of the pool; only in games with equal rewards for all, "
        "and in steps that have both kinds (`league.population.share` below 1).",
        "Rises: the learner develops conventions that other players do not share. Use `fcp` with more partners or a `spread`, or other-play.",
        known_as="self-play minus cross-play gap",
    ),
    Metric(
        "league/parity",
        "nats",
        "Largest difference between the trainer's and the sampler's log-prob of a member's token; up to 16 turns of each member are compared.",
        "As parity/max: the run stops. The sampler's weights of a member differ from those with which it entered.",
        known_as="rollout and trainer log-prob difference of the league",
    ),
)
