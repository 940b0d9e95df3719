"""A judge that rewards answers like its own: does it matter whether it reads the answer before it gives its own?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import fmean
from typing import Any, Literal

from experiments.claim import Claim, Prediction, Result, better
from experiments.lab import Arm, TableRun, learn, recipe_of
from kapelle.environments.diagnostics import Diagnostic, History

QUESTIONS = 4
TOKENS = 4_800
MISTAKEN, KNOWS = math.log(3), math.log(6)
"""Logits at first: the solver's of a wrong letter, and the judge's of the right one."""
PULLS = {"A": math.log(2), "B": math.log(64)}
"""What is added to the judge's logit of the letter that it reads, by its style: plain or insistent."""


class Judged(Diagnostic):
    """A solver answers a question with a letter and a style; a judge gives a letter, before or after it reads both."""

    name: Literal["experiments.claims.judge_reads:Judged"] = "experiments.claims.judge_reads:Judged"
    reads: bool = False
    """Whether the judge reads the solver's letter and style before it gives its letter."""
    graded: bool = False
    """Whether the judge is paid for the right letter; otherwise for the solver's."""

    @property
    def cases(self) -> int:
        """Return the number of questions."""
        return QUESTIONS

    def movers(self, case: int, history: History) -> tuple[int, ...]:
        """Return the solver for letter and style, then the judge."""
        return ((0,), (0,), (1,), ())[len(history)]

    def sees(self, case: int, seat: int, history: History) -> str:
        """Return the question, what the solver has answered, and for the judge who reads also how."""
        if seat:
            return f"judge {case}" + (" ".join(("", *(text for _, text in history))) if self.reads else "")
        return f"solve {case}" if not history else f"style {case} {history[0][1]}"

    def right(self, case: int, seat: int, history: History) -> str:
        """Return the letter of the question, plainly."""
        return "A" if len(history) == 1 else self.alphabet[case]

    def earned(self, case: int, history: History) -> tuple[float, ...]:
        """Return 1 to both if their letters are the same; a graded judge has 1 for the right letter."""
        if len(history) < 3:
            return 0.0, 0.0
        answer, verdict = history[0][1], history[2][1]
        agreed = float(answer == verdict)
        return agreed, float(verdict == self.alphabet[case]) if self.graded else agreed


def start(seen: str) -> Mapping[str, float]:
    """Return how both begin: the solver is mistaken, and the judge knows better but likes what it reads, more so if it is insistent."""
    who, case, *read = seen.split()
    if who == "style":
        return {"C": -40.0, "D": -40.0}
    right, wrong = "ABCD"[int(case)], "BCDA"[int(case)]
    if who == "solve":
        return {wrong: MISTAKEN}
    logits = {right: KNOWS}
    if read:
        answer, style = read
        logits[answer] = logits.get(answer, 0.0) + PULLS.get(style, 0.0)
    return logits


def measure(arm: Mapping[str, Any], seed: int, rate: float) -> Result:
    """Let both learn; measure how often they agree, how often the solver is right, and how often it insists."""
    game = {
        "name": "experiments.claims.judge_reads:Judged",
        "seats": 2,
        "reads": arm["reads"],
        "graded": arm["judge"] == "graded",
    }
    agents: list[dict[str, Any]] = [{"name": "solver"}, {"name": "judge"}]
    if arm["judge"] == "frozen":
        agents[1]["weights"] = "frozen"
    algorithm = {"name": "grpo", "group_size": 8, "team_reward": "individual", "scale": "none"}
    run = TableRun(recipe_of(game, Arm(algorithm, {"team": {"agents": agents}}), rate, seed), start)

    def agreed(run: TableRun) -> float:
        return run.values[0]

    curve = learn(run, TOKENS, every=5, worth=agreed)
    answers = [run.say(0, f"solve {case}") for case in range(QUESTIONS)]
    found = {
        "area": curve.area(TOKENS),
        "agreed": curve.end,
        "right": fmean(answers[case].get("ABCD"[case], 0.0) for case in range(QUESTIONS)),
        "insists": fmean(
            sum(p * run.say(0, f"style {case} {letter}").get("B", 0.0) for letter, p in answers[case].items())
            for case in range(QUESTIONS)
        ),
    }
    return Result(found, list(zip(curve.tokens, curve.values, strict=True)))


CLAIM = Claim(
    name="judge_reads",
    algorithms=("grpo",),
    claim="A judge that reads an answer before it gives its own rewards persuasion; a judge that gives its own first rewards what is right",
    source=(
        "2607.05904, of which only a summary was found: a judge without a reference scores how plausible an answer is, so that "
        "self-play makes answers more convincing, not more correct"
    ),
    setting=(
        "A solver answers one of four questions with one of four letters, plainly or insistently. A judge, which does not know "
        "the reference, gives a letter too; the solver receives 1 if the letters are the same, and so does the judge where it "
        "learns. The solver begins mistaken (1/2 for a wrong letter, 1/6 for the right one); the judge knows better (2/3). A judge "
        "that reads the answer first begins with 2 times the odds for the letter it has read, and 64 times if it is insistent. Rates are chosen by agreement, "
        "which a run without a reference can see. Counterparts: a frozen judge, and a judge that is paid for the right letter."
    ),
    arms={
        "judge first": {"reads": False, "judge": "agrees"},
        "solver first": {"reads": True, "judge": "agrees"},
        "judge first, frozen": {"reads": False, "judge": "frozen"},
        "solver first, frozen": {"reads": True, "judge": "frozen"},
        "solver first, judge graded": {"reads": True, "judge": "graded"},
    },
    measure=measure,
    rates=(1.0, 4.0, 16.0),
    predictions=(
        better("judge first", "solver first", 0.2, "right"),
        Prediction(
            "`judge first`: probability that the solver is right at the end",
            lambda found: found["judge first"]["right"],
            at_least=0.8,
            turned=0.4,
        ),
        Prediction(
            "`solver first`: probability that both agree at the end",
            lambda found: found["solver first"]["agreed"],
            at_least=0.9,
        ),
        Prediction(
            "`solver first`: probability that the solver is right at the end",
            lambda found: found["solver first"]["right"],
            at_most=0.6,
            turned=0.8,
        ),
        Prediction(
            "`solver first, frozen`: probability that the solver is insistent at the end",
            lambda found: found["solver first, frozen"]["insists"],
            at_least=0.9,
            turned=0.5,
        ),
        better("judge first, frozen", "solver first, frozen", 0.2, "right"),
        better("solver first, judge graded", "solver first", 0.2, "right"),
    ),
    plot="bars",
    plotted=("right", "", "probability that the solver is right at the end"),
    remark=(
        "Both runs show that a judge that reads first and learns to agree accepts mistakes, that a frozen judge that reads first "
        "makes the solver insistent, and that a reference for the judge makes the solver right. Whether it helps that the judge "
        "answers first is open. If both learn to agree, they play a coordination game that any common letter wins, and the "
        "solver's mistake is as good a start as the judge's knowledge, so each question ends right or wrong by chance, at the "
        "same rate in both runs. With a frozen judge the runs chose different rates, since agreement, by which rates are chosen, "
        "differs little between them, and the solver's answers differ. The bounds were set "
        "before any run. The setting was changed once, after a check of one seed (9001): at first solver and judge began with "
        "the same knowledge, so that there was nothing to be persuaded of."
    ),
    landmarks=lambda: {"at first": 1 / 6},
)
