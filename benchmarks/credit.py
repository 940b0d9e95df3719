"""How near each algorithm's credit is to the truth, and how fast a team learns by it, at equal numbers of sampled tokens.

    python -m benchmarks.credit            # ten seeds: an hour on one core
    python -m benchmarks.credit 5          # five
    python -m benchmarks.credit 5 "liar 3" # five of one team; the last results keep those of the others
    python -m benchmarks.credit quick      # two seeds, small teams
    python -m benchmarks.credit states     # 100,000 turns of some teams: is credit right on average, whatever an agent has read and says?
    python -m benchmarks.credit plot       # the last results as a picture

Policies are tables: an agent draws one of `WORDS` words, each a token, from the softmax of its logits for what it reads. Episodes, continuations and shared beginnings are
played by the library's own rollout, and credit is the algorithm's own; the exact advantage of every turn is known by enumeration. Learning is gradient ascent
on the logits, Σ A ∇ log π over the turns that have credit, over the number of episodes that they come from.

Teams: `additive` (all at once; each word is worth something by itself, and the team is paid the sum), `free rider` (the same, but the second agent's word is worth nothing), `chain` (in turn; each reads the word before it, and the team is paid 1
if every word is the right answer to the one before), `weak link` (a chain whose second agent is right by chance at first, while the others nearly always are) and `liar` (a debate of two rounds: each says a word, hears those of the
others, and says another; the team is paid 1 if most of the last words are right. At first everyone says what it has heard rather than something else, and the second agent nearly always says the same wrong word).
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import combinations_with_replacement, pairwise, takewhile
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor

from benchmarks.subjects import DrawnTasks
from kapelle.algorithm import Algorithm, Credit, algorithm_class
from kapelle.engines.rollout.protocol import Request
from kapelle.engines.rollout.scripted import ScriptedEngine
from kapelle.environment import Environment, Outcome
from kapelle.rollout.episodes import rollout
from kapelle.rollout.setup import RolloutSetup
from kapelle.rows import Signals, TurnKey, turns_of
from kapelle.team import Agent, Lora, Policy, Team
from kapelle.types import Episode, Group, Split, Task
from kapelle.workflow import Workflow
from kapelle.workflows.chain import Chain
from kapelle.workflows.debate import Debate
from kapelle.workflows.parallel import Parallel

WORDS = 4
RATE = 1.0
RIGHT = 0.9
"""Share of the best return at which a team has learned."""
RESULTS = Path(__file__).parent / "results" / "credit.json"


class Words(DrawnTasks):
    """Pays a team for the words that its agents have said, in team order."""

    name: Literal["benchmarks.credit:Words"] = "benchmarks.credit:Words"
    kind: Literal["additive", "free rider", "chain", "liar"] = "additive"

    def task(self, split: Split, index: int) -> Task:
        """Return the only task, by a number."""
        return Task(f"{split}-{index}", "0")

    def start(self, task: Task, agents: Sequence[str], seed: int) -> WordsState:
        """Return an episode state that waits for every agent's word, or for the last one's."""
        return WordsState(self.kind, agents)

    def extract(self, text: str) -> str:
        """Return a word as its own answer."""
        return text

    @property
    def reward_range(self) -> tuple[float, float]:
        """What an agent may be paid."""
        return (0.0, 1.0)


class WordsState:
    """Hears one word of each agent."""

    def __init__(self, kind: str, agents: Sequence[str]) -> None:
        self._kind, self._agents = kind, tuple(agents)
        self._said: dict[str, str] = {}
        self._over = False

    def observe(self, agent: str) -> str:
        """Show nothing but the agent's own place."""
        return "0"

    def movers(self) -> tuple[str, ...]:
        """Return everyone, once."""
        return () if self._over else self._agents

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """Hear what is said."""
        self._said |= actions
        self._over = True
        return {}

    def outcome(self) -> Outcome:
        """Pay every agent what the team has earned, over the number of agents: their sum is the team's return."""
        return Outcome(dict.fromkeys(self._agents, 0.0) | self._paid(), None)

    def _paid(self) -> dict[str, float]:
        if self._kind == "liar":
            won = sum(map(worth, self._said.values())) > len(self._said) / 2
            return dict.fromkeys(self._agents, won / len(self._agents))
        if self._kind != "chain":
            return {
                agent: worth(text) / paid_agents(self._kind, self._agents)
                for agent, text in self._said.items()
                if not rides(self._kind, agent)
            }
        [last] = self._said.values()
        return {self._agents[-1]: float(last == "right")}

    async def close(self) -> None:
        """Hold nothing."""


AT_ONCE = ("additive", "free rider")
FOLLOWS = 1.0
"""What each debater that says a word adds to its logit for those who hear it, at first."""
AGAIN = "Answer again."
"""How what an agent reads ends after the first round of a debate."""
Heard = int | tuple[int, ...]
"""What an agent reads: the word before it, or in a debate those of the others in ascending order; `WORDS` is none."""


def rides(kind: str, agent: str) -> bool:
    """Return whether an agent's word is worth nothing."""
    return kind == "free rider" and agent == "agent_1"


def paid_agents(kind: str, agents: Sequence[str]) -> int:
    """Return how many agents' words are worth something."""
    return sum(not rides(kind, agent) for agent in agents)


def worth(text: str) -> float:
    """Return what a word is worth by itself: the last one is right."""
    return float(text == str(WORDS - 1))


class Tables:
    """The policies of a team: logits by agent and by what it reads."""

    def __init__(self, agents: int, kind: str, seed: int) -> None:
        self.kind, self.names = kind, tuple(f"agent_{k}" for k in range(agents))
        draw = torch.Generator().manual_seed(seed)
        reads: list[Heard] = list(range(WORDS + 1))
        if kind == "liar":
            reads = [WORDS, *combinations_with_replacement(range(WORDS + 1), agents - 1)]
        self.logits = {
            (name, read): 0.1 * torch.randn(WORDS, generator=draw, dtype=torch.float64)
            for name in self.names
            for read in reads
        }
        if kind == "weak link":  # everyone but the second agent nearly always answers rightly
            for (name, read), table in self.logits.items():
                if name != self.names[1] and isinstance(read, int):
                    table[(read + 1) % WORDS] += 3.0
        if kind == "liar":
            for (name, read), table in self.logits.items():
                if name == self.names[1]:
                    table[0] += 3.0
                for word in read if isinstance(read, tuple) else ():
                    table[word : word + 1] += FOLLOWS  # silence is no word

    def chances(self, name: str, read: Heard) -> Tensor:
        """Return how likely each word is."""
        return self.logits[name, read].softmax(-1)

    def reads(self, name: str, text: str) -> Heard:
        """Return what an agent makes of a message."""
        if self.kind in AT_ONCE:
            return WORDS
        if self.kind == "liar":
            if not text.endswith(AGAIN):
                return WORDS
            lines = [line.partition(": ") for line in text.splitlines()]
            words = sorted(int(word or WORDS) for _, colon, word in lines if colon)
            return (*words, *[WORDS] * (len(self.names) - 1 - len(words)))  # a debate continues without some
        return int(text) if text and name != self.names[0] else WORDS

    def debated(self, first: Mapping[str, int], last: Mapping[str, int]) -> float:
        """Return how likely it is that most of the last words are right, if these agents say these words in the two rounds."""
        if len(first) < len(self.names):
            name = next(name for name in self.names if name not in first)
            chances: list[float] = self.chances(name, WORDS).tolist()
            return sum(
                chance * self.debated({**first, name: word}, last) for word, chance in enumerate(chances)
            )
        right_K = [1.0]
        """Chance of k right words."""
        for name in self.names:
            new_messages = tuple(sorted(word for other, word in first.items() if other != name))
            right = worth(str(last[name])) if name in last else float(self.chances(name, new_messages)[-1])
            right_K = [
                (1.0 - right) * a + right * b for a, b in zip([*right_K, 0.0], [0.0, *right_K], strict=True)
            ]
        return sum(right_K[len(self.names) // 2 + 1 :])

    def value(self, said: Sequence[int]) -> float:
        """Return the team's expected return after the first agents have said these words; in a debate, before anybody has."""
        if self.kind == "liar":
            assert not said
            return self.debated({}, {})
        if self.kind in AT_ONCE:
            known = [float(word == WORDS - 1) for word in said]
            known += [float(self.chances(name, WORDS)[-1]) for name in self.names[len(said) :]]
            paid = [each for name, each in zip(self.names, known, strict=True) if not rides(self.kind, name)]
            return statistics.fmean(paid)
        right = all(
            word == (before + 1) % (WORDS) for before, word in zip((WORDS - 1, *said), said, strict=False)
        )
        return float(right) * self._rest(len(said), said[-1] if said else WORDS)

    def _rest(self, place: int, read: int) -> float:
        if place == len(self.names):
            return 1.0
        answer = (read + 1) % WORDS if read < WORDS else 0
        return float(self.chances(self.names[place], read)[answer]) * self._rest(place + 1, answer)


def truth(tables: Tables, episode: Episode) -> dict[int, float]:
    """Return the exact advantage of every turn: what the team may expect after it, less before it."""
    said = [int(turn.text) for turn in episode.turns]
    if tables.kind == "liar":
        first = {turn.agent: int(turn.text) for turn in episode.turns if turn.completed_before == 0}
        start, between = tables.debated({}, {}), tables.debated(first, {})
        return {
            turn.index: tables.debated({turn.agent: int(turn.text)}, {}) - start
            if turn.completed_before == 0
            else tables.debated(first, {turn.agent: int(turn.text)}) - between
            for turn in episode.turns
        }
    found = {}
    for turn in episode.turns:
        if tables.kind in AT_ONCE:  # no one hears the others
            chance = float(tables.chances(turn.agent, WORDS)[-1])
            share = (not rides(tables.kind, turn.agent)) / paid_agents(tables.kind, tables.names)
            found[turn.index] = (worth(turn.text) - chance) * share
        else:
            found[turn.index] = tables.value(said[: turn.index + 1]) - tables.value(said[: turn.index])
    return found


def stage(tables: Tables, algorithm: Algorithm) -> RolloutSetup:
    """Return how a team of tables plays."""

    def speak(request: Request) -> str:
        read = tables.reads(request.agent, request.messages[-1].content)
        weights = tables.chances(request.agent, read).tolist()
        return str(random.Random(request.seed).choices(range(WORDS), weights)[0])

    kind = "chain" if tables.kind == "weak link" else tables.kind
    agents = tuple(
        Agent(name, prompt=None if k == 0 or kind != "chain" else "{" + tables.names[k - 1] + "}")
        for k, name in enumerate(tables.names)
    )
    workflows = {"chain": Judged(tables), "liar": Debate(reply=f"{{answers}}\n\n{AGAIN}")}
    policies = {name: Policy(name, lora=Lora()) for name in tables.names}
    return RolloutSetup(
        Team(agents, policies, {name: name for name in tables.names}),
        cast("Environment", Words(kind=kind)),
        cast("Workflow", workflows.get(kind, Parallel())),
        ScriptedEngine(dict.fromkeys(tables.names, speak)),
        data=algorithm.data,
    )


class Judged(Chain):
    """A chain whose world hears whether every word was the right answer to the one before."""

    def __init__(self, tables: Tables) -> None:
        super().__init__()
        object.__setattr__(self, "_tables", tables)

    async def run(self, scene: Any) -> None:
        """Play one episode."""
        said: list[str] = []
        for name in scene.names:
            turn = await scene[name].say(said[-1] if said else "")
            said.append(turn.text)
        words = [int(text) if text else -1 for text in said]
        right = words[0] == 0 and all(b == (a + 1) % WORDS for a, b in pairwise(words))
        await scene.step({scene.names[-1]: "right" if right else "wrong"})


def arms(kind: str, agents: int) -> dict[str, dict[str, Any]]:
    """Return the settings of every contender for a team; what follows a comma in a name tells two of one algorithm apart."""
    many = {"group_size": 12, "team_reward": "sum"}
    few = {"group_size": 4, "team_reward": "sum"}
    found: dict[str, dict[str, Any]] = {
        "grpo": {"scale": "none", **many},
        "rloo": many,
        "rloo, 4": few,  # what small groups gain at one rate, by more steps for as many tokens, before anything is played on
        "magrpo": many,
        "counterfactual": few,
        "ccpo": few,
    }
    if agents <= 4:
        found["sharp"] = few
    if kind not in AT_ONCE:
        moments = 2 if kind == "liar" else agents
        widths = {2: (4, 3), 3: (3, 2, 2), 4: (3, 2, 2, 1)}[moments]
        found["c3"] = {"widths": widths, "team_reward": "sum"}
        found["c3, 4"] = {"widths": (2, 2), "team_reward": "sum"}
    return found


def algorithm_of(name: str, settings: Mapping[str, Any]) -> Algorithm:
    """Return the row of a contender."""
    name = name.partition(",")[0]
    kind: Any = algorithm_class(name)
    row: Algorithm = kind.model_validate({"name": name, **settings}).build()
    return row


def step_of(tables: Tables, algorithm: Algorithm, setup: RolloutSetup, number: int) -> list[Group]:
    """Play one group."""
    tasks = [Task(f"train-{number}", "0")]
    groups = asyncio.run(rollout(setup, tasks, algorithm.data.group_size, number))
    episodes = [episode for one in groups for episode in one.episodes]
    assert all(episode.error is None for episode in episodes)
    assert all(each.returns for episode in episodes for each in episode.interventions), (
        "a continuation failed"
    )
    return groups


def given_to(groups: Sequence[Group], credit: Mapping[TurnKey, Credit]) -> dict[TurnKey, float]:
    """Return the advantage of every turn that has credit, without the factor by which a tree weighs turns that several episodes share."""
    shared: dict[str, dict[TurnKey, int]] = {}
    for key, each in credit.items():
        if each.weight:
            turns = [episode.turns[key.turn] for episode in groups[key.group].episodes[key.episode :]]
            copies = list(takewhile(lambda turn: turn.copied, turns[1:]))
            shared.setdefault(turns[0].policy, {})[key] = 1 + len(copies)
    return {
        key: float(credit[key].advantage_T[0]) * statistics.fmean(own.values()) / count
        for own in shared.values()
        for key, count in own.items()
    }


def tokens_of(groups: Sequence[Group]) -> int:
    """Return what a step has sampled, continuations included and shared turns once."""
    turns = sum(len(turn.completion_ids) for _, turn in turns_of(groups) if not turn.copied)
    return turns + sum(sum(each.continued.values()) for one in groups for each in one.episodes)


def fidelity(
    kind: str, agents: int, name: str, settings: Mapping[str, Any], tokens: int, seed: int
) -> dict[str, float]:
    """Compare credit with exact advantages over so many sampled tokens, at the policies of the start."""
    tables, algorithm = Tables(agents, kind, seed), algorithm_of(name, settings)
    setup = stage(tables, algorithm)
    assert algorithm.credit is not None
    given: list[float] = []
    exact: list[float] = []
    riding: list[float] = []
    spent = number = 0
    while spent < tokens:
        number += 1
        groups = step_of(tables, algorithm, setup, 1000 * seed + number)
        spent += tokens_of(groups)
        known = [[truth(tables, episode) for episode in one.episodes] for one in groups]
        for key, advantage in given_to(groups, algorithm.credit(groups, Signals())).items():
            given.append(advantage)
            exact.append(known[key.group][key.episode][key.turn])
            if rides(kind, groups[key.group].episodes[key.episode].turns[key.turn].agent):
                riding.append(advantage)
    noise = [a - b for a, b in zip(given, exact, strict=True)]
    wrong = [a * b < 0 for a, b in zip(given, exact, strict=True) if abs(b) > 1e-9]
    return {
        "turns for 1,000 tokens": 1000 * len(given) / spent,
        "bias": statistics.fmean(noise),
        "noise": statistics.pstdev(noise) / max(statistics.pstdev(exact), 1e-12),
        "correlation": statistics.correlation(given, exact) if statistics.pstdev(given) else 0.0,
        "sign errors": sum(wrong) / max(1, len(wrong)),
        "free rider's spread": statistics.pstdev(riding) / statistics.pstdev(given) if riding else 0.0,
    }


def by_state(kind: str, agents: int, name: str, settings: Mapping[str, Any], turns: int) -> dict[str, float]:
    """Compare credit with exact advantages on average over the turns at which an agent reads the same and says the same, in 1,000 groups or more.

    `bias` is how far apart they are (root mean square over all turns, without what luck explains) over the spread of the truth, `worst` the greatest distance in its own
    standard errors, `mean` that of all turns, and `standard error` its own. Turns of one group are not independent: groups are what errors are computed from.
    """
    tables, algorithm = Tables(agents, kind, 0), algorithm_of(name, settings)
    setup = stage(tables, algorithm)
    assert algorithm.credit is not None
    exact: list[float] = []
    apart: dict[object, list[tuple[float, int]]] = {}
    """Of each state and word: the sum of differences, and the number of turns, in every group."""
    number = 0
    while len(exact) < turns:
        number += 1
        groups = step_of(tables, algorithm, setup, number)
        known = [[truth(tables, episode) for episode in one.episodes] for one in groups]
        own: dict[object, list[float]] = {"all": []}
        for key, advantage in given_to(groups, algorithm.credit(groups, Signals())).items():
            turn = groups[key.group].episodes[key.episode].turns[key.turn]
            right = known[key.group][key.episode][key.turn]
            place = (turn.agent, tables.reads(turn.agent, turn.new_messages[-1].content), turn.text)
            exact.append(right)
            own["all"].append(advantage - right)
            own.setdefault(place, []).append(advantage - right)
        for where, found in own.items():
            apart.setdefault(where, []).append((sum(found), len(found)))

    def mean_and_error(sums: Sequence[tuple[float, int]]) -> tuple[float, float]:
        count = sum(n for _, n in sums)
        mean = sum(total for total, _ in sums) / count
        # Where no one has won yet the spread is nothing; one win more would move the mean by 1 / count.
        return mean, max(1.0, math.sqrt(sum((total - n * mean) ** 2 for total, n in sums))) / count

    mean, error = mean_and_error(apart.pop("all"))
    often = {place: sums for place, sums in apart.items() if len(sums) >= 1000}
    judged = [(*mean_and_error(sums), sum(n for _, n in sums)) for sums in often.values()]
    square = sum(n * (m * m - e * e) for m, e, n in judged) / sum(n for *_, n in judged)
    return {
        "turns": len(exact),
        "states and words": len(judged),
        "bias": math.sqrt(max(square, 0.0)) / statistics.pstdev(exact),
        "worst": max(abs(m) / e for m, e, _ in judged),
        "mean": mean,
        "standard error": error,
    }


def states(turns: int = 100_000) -> None:
    """Measure whether credit is right on average in every state, and write it beside what else is known."""
    found: dict[str, Any] = {}
    for team in ("chain 2", "liar 3"):
        kind, agents, _ = TEAMS[team]
        for name in ("rloo", "c3"):
            began = time.perf_counter()
            row = by_state(kind, agents, name, arms(kind, agents)[name], turns)
            found.setdefault(team, {})[name] = row
            print(f"{time.perf_counter() - began:6.1f} s  {team}: {name} {row}", file=sys.stderr, flush=True)
    known = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps({**known, "states": found}, indent=2) + "\n", "utf-8")


def learn(
    kind: str, agents: int, name: str, settings: Mapping[str, Any], most: int, seed: int
) -> dict[str, float]:
    """Return how many tokens a team samples until it has learned (`most` at the most), and the mean of its curve until `most`."""
    tables, algorithm = Tables(agents, kind, seed), algorithm_of(name, settings)
    setup = stage(tables, algorithm)
    assert algorithm.credit is not None
    spent = number = 0
    reached = float("inf")
    area = 0.0
    while spent < most:
        number += 1
        groups = step_of(tables, algorithm, setup, 1000 * seed + number)
        now = tokens_of(groups)
        value = tables.value(())
        area += min(now, most - spent) * value
        if value >= RIGHT:
            reached = min(reached, spent)
        spent += now
        credit = algorithm.credit(groups, Signals())
        counts: dict[str, int] = {}
        for key, each in credit.items():
            turn = groups[key.group].episodes[key.episode].turns[key.turn]
            counts[turn.agent] = counts.get(turn.agent, 0) + bool(each.weight)
        moves: dict[tuple[str, Heard], Tensor] = {}
        for key, each in credit.items():
            turn = groups[key.group].episodes[key.episode].turns[key.turn]
            if not each.weight:
                continue
            read = tables.reads(turn.agent, turn.new_messages[-1].content)
            towards = -tables.chances(turn.agent, read)
            towards[int(turn.text)] += 1.0
            by = RATE * len(tables.names) * float(each.advantage_T[0]) / counts[turn.agent]
            place = (turn.agent, read)
            moves[place] = moves.get(place, torch.zeros(WORDS, dtype=torch.float64)) + by * towards
        for place, move in moves.items():
            tables.logits[place] += move
    return {"tokens": reached, "area": area / most, "end": tables.value(())}


TEAMS: Mapping[str, tuple[str, int, int]] = {
    "additive 2": ("additive", 2, 1000),
    "additive 4": ("additive", 4, 2500),
    "free rider 4": ("free rider", 4, 2500),
    "chain 2": ("chain", 2, 2000),
    "weak link 4": ("weak link", 4, 4000),
    "chain 4": ("chain", 4, 10_000),
    "additive 8": ("additive", 8, 8000),
    "additive 16": ("additive", 16, 20_000),
    "liar 3": ("liar", 3, 4000),
    "liar 5": ("liar", 5, 8000),
}
"""Kind, agents and tokens."""


def run(teams: Sequence[str], seeds: int, out: Path | None = None) -> dict[str, Any]:
    """Measure every contender on every team; `out` holds what is known so far, of other teams too."""
    earlier: dict[str, Any] = {}
    if out is not None and out.exists():
        earlier = json.loads(out.read_text("utf-8"))
    found: dict[str, Any] = {}
    if earlier.get("seeds") == seeds:
        found = {team: rows for team, rows in earlier["teams"].items() if team not in teams}
    for team in teams:
        kind, agents, most = TEAMS[team]
        for name, settings in arms(kind, agents).items():
            began = time.perf_counter()
            known = [fidelity(kind, agents, name, settings, 1000, seed) for seed in range(min(seeds, 5))]
            learned = [learn(kind, agents, name, settings, most, seed) for seed in range(seeds)]
            found.setdefault(team, {})[name] = {
                **{key: statistics.fmean(each[key] for each in known) for key in known[0]},
                "tokens": statistics.median(each["tokens"] for each in learned),
                "area": statistics.fmean(each["area"] for each in learned),
                "area, standard error": statistics.stdev(each["area"] for each in learned) / math.sqrt(seeds),
                "end": statistics.fmean(each["end"] for each in learned),
            }
            print(f"{time.perf_counter() - began:6.1f} s  {team}: {name}", file=sys.stderr, flush=True)
            if out is not None:
                known_now = {**earlier, "seeds": seeds, "rate": RATE, "teams": found}
                out.write_text(json.dumps(known_now, indent=2) + "\n", "utf-8")
    return found


def table(found: Mapping[str, Any]) -> str:
    """Return what was measured as a table."""
    lines = [
        "| team | credit | correlation | noise | sign errors | tokens until 0.9 | area | end |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for team, rows in found.items():
        for name, row in rows.items():
            tokens = "–" if math.isinf(row["tokens"]) else f"{row['tokens']:,.0f}"
            lines.append(
                f"| {team} | `{name}` | {row['correlation']:.2f} | {row['noise']:.2f} | {100 * row['sign errors']:.0f} % | {tokens} | "
                f"{row['area']:.3f} ± {row['area, standard error']:.3f} | {row['end']:.2f} |"
            )
    return "\n".join(lines)


def plot(found: Mapping[str, Any], file: Path) -> None:
    """Draw how many tokens each contender needs to be right, over the number of agents of an additive team, and in chains."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    additive = {int(team.split()[-1]): rows for team, rows in found.items() if team.startswith("additive")}
    for name in ("grpo", "counterfactual", "ccpo", "sharp"):
        known = [(n, rows[name]["tokens"]) for n, rows in sorted(additive.items()) if name in rows]
        left.plot(*zip(*known, strict=True), marker="o", label=name)
    left.set(
        title="all at once, paid the sum",
        xlabel="agents",
        ylabel=f"tokens until {RIGHT} of the best",
        xscale="log",
        yscale="log",
    )
    left.set_xticks(sorted(additive), [str(n) for n in sorted(additive)])
    left.minorticks_off()
    left.legend(frameon=False, fontsize="small")
    chains = {team: rows for team, rows in found.items() if team.split()[0] not in ("additive", "free")}
    names = ("grpo", "counterfactual", "ccpo", "sharp", "c3")
    for k, name in enumerate(names):
        places = [x + 0.15 * (k - 2) for x, rows in enumerate(chains.values()) if name in rows]
        own = [rows[name] for rows in chains.values() if name in rows]
        errors = [row["area, standard error"] for row in own]
        right.bar(places, [row["area"] for row in own], 0.14, yerr=errors, label=name)
    right.set(title="one after another, and in a debate", ylabel="mean success over the tokens")
    right.set_xticks(range(len(chains)), list(chains))
    right.set_ylim(0.0, 1.15)
    right.legend(frameon=False, fontsize="small", ncol=len(names), loc="upper center")
    figure.savefig(file, metadata={"Date": None})


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["quick"]:
            print(table(run(["additive 2", "chain 2"], 2)))
        case ["states"]:
            states()
        case ["plot"]:
            plot(json.loads(RESULTS.read_text("utf-8"))["teams"], RESULTS.with_suffix(".svg"))
        case [seeds, *teams]:
            teams = teams or list(TEAMS)
            known = run(teams, int(seeds), RESULTS)
            print(table({team: known[team] for team in teams}))
        case _:
            print(table(run(list(TEAMS), 10, RESULTS)))
