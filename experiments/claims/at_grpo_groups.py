"""AT-GRPO's comparison sets on short paths: by agent and turn, and without the agent, the turn or both."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import cache
from statistics import fmean
from typing import Any, Literal, cast

from experiments.claim import Claim, Result, better
from experiments.lab import Arm, TableRun, learn, recipe_of
from kapelle.algorithm import Algorithm, Credit
from kapelle.algorithms.shared.groups import BY_SCALE, Earlier, by_agent_turn, compare
from kapelle.algorithms.shared.monte_carlo import MonteCarlo, spread
from kapelle.environments.puzzles import PlanPath, Room, read_board
from kapelle.rows import Signals, TurnKey
from kapelle.types import Group, Split, Task

TOKENS = 8_000


class GroupedReturns(MonteCarlo):
    """AT-GRPO without a tree, whose comparison sets may omit the agent and the turn."""

    name: Literal["experiments.claims.at_grpo_groups:GroupedReturns"] = (
        "experiments.claims.at_grpo_groups:GroupedReturns"
    )
    by_agent: bool = True
    by_turn: bool = True

    def build(self) -> Algorithm:
        """Return the algorithm that these settings describe."""
        return self.row(self.name, judge=self.credit)

    def credit(
        self, groups: Sequence[Group], signals: Signals, earlier: Earlier | None = None
    ) -> Mapping[TurnKey, Credit]:
        """Return the credit: the return from each turn on, compared within the chosen sets."""
        members = []
        for member in by_agent_turn(groups, self.rewards(groups, signals)):
            task, agent, turn = member.place
            place = (task, agent if self.by_agent else "", turn if self.by_turn else -1)
            members.append(member._replace(place=place))
        return spread(self, groups, compare(members, BY_SCALE["std"], earlier))


class CornerPaths(PlanPath):
    """Paths to a corner of 3×3 cells, one move per turn."""

    name: Literal["experiments.claims.at_grpo_groups:CornerPaths"] = (  # type: ignore[assignment]
        "experiments.claims.at_grpo_groups:CornerPaths"
    )
    alphabet: str = "UDLR"

    def task(self, split: Split, index: int) -> Task:
        """Return a path from a random cell."""
        start = random.Random(f"{self.seed}/{split}/{index}").choice(STARTS)
        return Task(f"{split}-{index}", start, {"board": start, "difficulty": 4})


CELLS = frozenset((row, column) for row in range(3) for column in range(3))
ROOM = Room(3, CELLS, frozenset({(2, 2)}))
STARTS = [ROOM.shown((cell, ())) for cell in sorted(CELLS - ROOM.goals)]
GAME = {
    "name": "experiments.claims.at_grpo_groups:CornerPaths",
    "side": 3,
    "turns": 4,
    "slack": 1.0,
    "wording": "short",
    "local_reward": 0.5,
}


def success(run: TableRun) -> float:
    """Return the exact chance that the team solves a task, over all starts."""
    game = cast("CornerPaths", run.environment)

    @cache
    def moves(board: str) -> Mapping[str, float]:
        found = dict.fromkeys(game.alphabet, 0.0)
        for proposal, chance in run.say(0, board).items():
            for move, own in run.say(1, f"{board}\n{proposal}").items():
                found[move] += chance * own
        return found

    @cache
    def solved(board: str, turns: int) -> float:
        room, position = read_board(board)
        if room.solved(position):
            return 1.0
        chances = moves(board).items() if turns else ()
        return sum(own * solved(room.shown(room.moved(position, move)), turns - 1) for move, own in chances)

    return fmean(solved(start, game.turns) for start in STARTS)


def measure(arm: Mapping[str, Any], seed: int, rate: float) -> Result:
    """Let a team of two tables learn."""
    algorithm = {
        "name": "experiments.claims.at_grpo_groups:GroupedReturns",
        "team_reward": "individual",
        **arm,
    }
    run = TableRun(recipe_of(GAME, Arm(algorithm), rate, seed))
    curve = learn(run, TOKENS, every=20, worth=success)
    points = list(zip(curve.tokens, curve.values, strict=True))
    return Result({"area": curve.area(TOKENS), "end": curve.end}, points)


CLAIM = Claim(
    name="at_grpo_groups",
    algorithms=("at_grpo",),
    claim="On short paths, comparison sets per agent and turn learn faster than sets that omit the agent, the turn, or both",
    source="AT-GRPO, 2510.11062, ablation of the groups",
    setting=(
        "Two tables, a planner and an executor, solve paths to a corner of 3×3 cells (`plan_path`) in at most four "
        "turns. In each turn, the planner proposes a move, and the executor reads the proposal and moves. Half of the "
        "planner's reward is for its own proposals. Eight episodes per step, 8,000 sampled tokens, advantages divided "
        "by the standard deviation, returns from each turn on, no tree. `area` and `end` are of the exact success."
    ),
    arms={
        "agent and turn": {"by_agent": True, "by_turn": True},
        "agent": {"by_agent": True, "by_turn": False},
        "turn": {"by_agent": False, "by_turn": True},
        "nothing": {"by_agent": False, "by_turn": False},
    },
    measure=measure,
    rates=(4.0,),
    seeds=5,
    predictions=(
        better("agent and turn", "agent", 0.02),
        better("agent and turn", "turn", 0.02),
        better("agent", "nothing", 0.02),
        better("turn", "nothing", 0.02),
        better("agent and turn", "nothing", 0.1, "end"),
    ),
    remark=(
        "All four sets learn equally well here: differences of the area are about 0.01. A set that omits the agent or the "
        "turn moves the baseline by a number that is independent of the move, which adds variance but no bias. This does "
        "not reproduce the paper's setting, a language model with tree sampling; it shows that the sets alone do not "
        "explain its large differences. Tables cannot show a swap of roles, because they do not generalise to the "
        "prompts of the other role. The rate was chosen after one run of each arm with rates 1 and 4 and another seed, "
        "at 12,000 tokens. While the runs were under way, the number of seeds was set to three for lack of time and "
        "then back to five; the results were first read when five was restored."
    ),
)
