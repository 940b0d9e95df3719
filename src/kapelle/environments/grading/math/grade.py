r"""Grade mathematical answers with an exact parser, and with math-verify where this parser is not sufficient.

The exact parser handles numbers, polynomials and their quotients, square roots, lists, sets, intervals, points, matrices,
equations and words, and compares them by exact algebra. Answers in other notation (`\sin x`, cube roots) are compared by
math-verify in a process that can be killed. The comparison of math-verify is less strict. An answer is therefore sent to
math-verify only if no letter, word or command in the answer could cause a false match (`why_not_comparable`).
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from kapelle.environments.grading.math.algebra import Quotient, TooLarge
from kapelle.environments.grading.math.answers import MathAnswer, has_relation, read_answer, shortens
from kapelle.environments.grading.math.expression import GREEK, NotAnAnswer, Unfamiliar, Unreadable
from kapelle.environments.grading.math.notation import MAX_CHARACTERS, split_top, tidy
from kapelle.environments.grading.math.numeric import (
    FUNCTION,
    is_measure,
    parse_number,
    same_figure,
    same_value,
    unit_named,
    without_name,
)
from kapelle.environments.grading.math.sameness import Percent, is_number, same_answer
from kapelle.environments.grading.processes import AnswerLimits, KillableProcesses, ProcessFailed, TooCostly
from kapelle.environments.grading.text.extraction import FORMULA, ExtractionRule, clean, extract
from kapelle.environments.grading.text.match import plain_text
from kapelle.environments.grading.verdict import Grade, no_answer, right, ungraded, wrong

COMPARISON = AnswerLimits(cpu_s=3.0)
"""Limits of one comparison by math-verify. The limit on CPU time is five times the CPU time of the most expensive legitimate
comparison (0.6 s)."""


def math_processes(size: int = 2, limits: AnswerLimits = COMPARISON) -> KillableProcesses:
    """Return a pool of processes that run up to `size` math-verify comparisons concurrently; further comparisons wait."""
    return KillableProcesses("kapelle.environments.grading.math.worker", size, limits)


def shared_math_processes() -> KillableProcesses:
    """Return the pool of math-verify processes that is shared within this process.

    The pool starts with the first comparison that needs math-verify and stops when the process exits.
    """
    # Each process has its own pool, because a fork must not write to the pipes of its parent's servers.
    process = os.getpid()
    return _SHARED.get(process) or _SHARED.setdefault(process, math_processes())


_SHARED: dict[int, KillableProcesses] = {}
"""Mapping from process ids to the pool of each process."""


@dataclass(frozen=True, slots=True)
class Undecided:
    """An answer that the exact parser cannot grade and that math-verify must compare with the gold answer."""

    answer: str
    gold: str


def grade_math(
    text: str,
    gold: str,
    rules: Sequence[ExtractionRule],
    processes: KillableProcesses,
    percent: Percent = "figure",
    question: str = "",
) -> Grade:
    """Grade the final answer of a text: it must equal the gold answer and must not be a formula copied from the question.

    The verdict is `no_answer` if the answer is too long, ambiguous or undefined, or if comparing it with math-verify exceeds
    the CPU time or memory that `processes` allows. If the gold answer or the machine causes the failure, the verdict is
    `ungraded`.
    """
    read = read_math(text, gold, rules, percent)
    grade = compare_math(read, processes) if isinstance(read, Undecided) else read
    return unless_copied(grade, gold, question)


def unless_copied(grade: Grade, gold: str, question: str) -> Grade:
    """Return `no_answer` if the answer is copied from the question and differs in form from the gold answer; otherwise return `grade`."""
    answer = grade.answer or ""
    if not grade.score or not _copies(answer, question) or _spelled(answer) == _spelled(gold_answer(gold)):
        return grade
    return no_answer(f"'{answer[:80]}' is copied from the question.")


def read_math(
    text: str,
    gold: str,
    rules: Sequence[ExtractionRule],
    percent: Percent = "figure",
) -> Grade | Undecided:
    """Return the verdict of the exact parser, or the comparison that math-verify must make; this function never blocks."""
    found = extract(text, rules)
    if found.text is None:
        return no_answer(found.problem)
    answer = found.text
    if len(answer) > MAX_CHARACTERS:
        return no_answer(f"The answer has {len(answer):,} characters; at most {MAX_CHARACTERS} are allowed.")
    truth = gold_answer(gold)
    try:
        short = len(gold) <= GOLD_CHARACTERS
        same = (short and plain_text(tidy(answer)) == plain_text(tidy(gold))) or _same(answer, truth, percent)
    except _GoldRejected as problem:
        return _no_gold(answer, truth, str(problem))
    except Unreadable as problem:
        return _unreadable(answer, str(problem))
    if same is None:
        return _without_names(*_with_one_constant(answer, truth))
    return right(answer) if same else wrong(answer, truth)


_TO_WORK_OUT = re.compile(r"(?<!^)[-+*/^!=×÷·]|\\[a-z]+|\|")
"""Regular expression for the signs of a formula that must be evaluated; numbers and names do not contain these signs."""
_SIDE = re.compile(r"[=<>,;]|\\(?:[lg]eq?|approx)(?![A-Za-z])")
_IN_WORDS = re.compile(r"[0-9(√.][0-9(). +*/^×÷·!√-]*[0-9)!]")
"""Regular expression for a formula in a text without `$`."""


def _copies(answer: str, question: str) -> bool:
    """Return whether an answer is a formula from the question or one side of such a formula, ignoring spaces."""
    if not _TO_WORK_OUT.search(tidy(answer)):
        return False
    formulas = [next(part for part in found.groups() if part) for found in FORMULA.finditer(question)]
    sides = (side for each in formulas or _IN_WORDS.findall(question) for side in (each, *_SIDE.split(each)))
    return _spelled(answer) in {_spelled(side.strip(" .?")) for side in sides if len(side) <= GOLD_CHARACTERS}


def gold_answer(gold: str) -> str:
    """Return the final answer of a gold text: the contents of its boxes, or the conclusion of a solution in prose."""
    listed = _LISTED.fullmatch(gold)
    gold = (listed[1].replace("', '", ", ") if listed else gold).removeprefix("\\approx")
    gold = clean(gold) or gold
    if len(gold) <= MAX_CHARACTERS and "\\boxed" not in gold:
        return gold
    found = extract(gold, ("last_box", "prose"))
    return gold.rpartition("\\boxed{")[2] if found.text is None else found.text


_LISTED = re.compile(r"\['(.*)'\]", re.DOTALL)
"""Regular expression for the Python representation of a list of strings, which some datasets contain."""


def gold_problem(gold: str) -> str | None:
    """Return why a gold answer is invalid, an empty string if it is valid, or None if math-verify must decide."""
    truth = gold_answer(gold)
    try:
        return None if parse_number(truth) is None and _known_gold(truth) is None else ""
    except _GoldRejected as problem:
        return str(problem)


def library_problem(gold: str, processes: KillableProcesses) -> str:
    """Return why math-verify cannot parse a gold answer, or an empty string if it can; this function blocks like `compare_math`."""
    truth = gold_answer(gold)
    grade = compare_math(Undecided(truth, truth), processes)
    return "" if grade.status == "graded" else grade.explanation


def compare_math(left: Undecided, processes: KillableProcesses) -> Grade:
    """Return the verdict of math-verify.

    The call blocks for as long as the limits of `processes` allow, so asynchronous code must run it in a thread.
    """
    answer, gold = left.answer, left.gold
    try:
        same = processes.ask({"gold": _for_library(gold), "answer": _for_library(answer)})
    except TooCostly as problem:
        # If the answer is too expensive to compare, it is incorrect. If the gold answer is too expensive, the episode fails.
        if answer != gold and compare_math(Undecided(gold, gold), processes).status == "graded":
            return no_answer(f"'{answer[:80]}' is not accepted as an answer. {problem}")
        return ungraded(answer, f"'{answer[:80]}' could not be compared. {problem}")
    except ProcessFailed as problem:
        return ungraded(answer, f"'{answer[:80]}' could not be compared. {problem}")
    if same == "gold":
        return _no_gold(answer, gold, "Neither the built-in reader nor math-verify can parse it.")
    if same == "answer":
        return _unreadable(answer, "It cannot be parsed.")
    return right(answer) if same else wrong(answer, gold)


_DECIMAL = re.compile(r"(?<![0-9.,_])([0-9]{0,40})\.([0-9]{1,40})(?![0-9.])")
_IN_DEGREES = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*\^\s*\{?\s*\\circ\s*\}?")


def _for_library(text: str) -> str:
    r"""Return an answer as input for math-verify, with angles such as the one in `\cos 20^\circ` converted to radians.

    The conversion is necessary because math-verify ignores degree signs.
    """
    body = tidy(text)
    if FUNCTION.search(body):
        body = _IN_DEGREES.sub(r"\\left(\\frac{\1\\pi}{180}\\right)", body)
    # Write each decimal number as a fraction, because math-verify compares decimals approximately.
    body = _DECIMAL.sub(lambda found: rf"\frac{{{int(found[1] + found[2])}}}{{{10 ** len(found[2])}}}", body)
    return f"${body}$"


def _unreadable(answer: str, problem: str) -> Grade:
    return no_answer(f"'{answer[:80]}' is not accepted as an answer. {problem}")


def _no_gold(answer: str, gold: str, problem: str) -> Grade:
    return ungraded(answer, f"The gold answer '{gold[:80]}' cannot be read. {problem}")


def _same(answer: str, gold: str, percent: Percent) -> bool | None:
    """Return whether two answers are the same by the rules of this module, or None if math-verify must decide.

    Raises Unreadable if the first string must not be accepted as an answer, and _GoldRejected if the gold answer is invalid.
    """
    # Answers with equal text are equal.
    if plain_text(tidy(answer)) == plain_text(tidy(gold)):
        return True
    if any(
        same(left, right)
        for same in (_is_comma_for_point, _is_float_of)
        for left, right in ((answer, gold), (gold, answer))
    ):
        return True
    # The name of a geometric figure has no value: `\\angle ABC`.
    named, truth_named = _label(answer), _label(gold)
    if truth_named is not None:
        return named == truth_named
    if _spelled(answer) == _spelled(gold) or _rows(answer) == _rows(gold) != []:
        return True
    answer, gold = _with_one_constant(*(_INTEGERS.sub("", tidy(text)) for text in (answer, gold)))
    unknowns = {found[1].replace(" ", "") for found in map(_OF.match, map(tidy, (answer, gold))) if found}
    if len(unknowns) > 1:
        return False  # such as `f(c) = c|x|` and `f(x) = c|x|`
    one, other = parse_number(answer), parse_number(gold)
    if one is not None and other is not None:
        return (same_figure if percent == "figure" else same_value)(one, other)
    # The gold answer is read first: if this fails, the answer is not at fault.
    truth, read = _known_gold(gold), _known(answer)
    if truth is not None and not truth.unfinished and (read.unfinished if read else is_number(truth)):
        raise Unreadable(
            "It still has to be calculated."
            if read
            else "It is not a number, or it still has to be calculated."
        )
    if read is not None and truth is not None:
        with contextlib.suppress(TooLarge):
            return same_answer(read, truth, percent)
    left = _without_names(answer, gold)
    why = why_not_comparable(left.answer, left.gold)
    if why:
        raise Unreadable(why)
    return None


_LABELLED = re.compile(
    r"(?:m\s*)?\\(angle|measuredangle|triangle|overline|overrightarrow|overleftrightarrow|widehat|vec|overset\{\\frown\})"
    r"\s*\{?\s*([A-Z]['0-9]{0,2}(?:\s*[A-Z]['0-9]{0,2}){1,4})\s*\}?"
)
_TURNS_ROUND = {"angle", "measuredangle", "overline", "overleftrightarrow", "widehat"}


def _label(text: str) -> tuple[str, str] | None:
    r"""Return the normal form of the name of a geometric figure, such as `\angle ABC`, or None for any other string."""
    found = _LABELLED.fullmatch(tidy(text))
    if found is None:
        return None
    points = re.findall(r"[A-Z]['0-9]*", found[2])
    kind = found[1].removeprefix("measured")
    return kind, " ".join(min(points, points[::-1]) if kind in _TURNS_ROUND else points)


_INTEGERS = re.compile(
    r"\s*[,;]?\s*(?:\\q?quad\s*)?(?:\\text\{\s*,?\s*(?:where|for|with|for any|for all)?\s*\}\s*|\()?\s*[klmn]\s*\\in\s*"
    r"(?:\\mathbb\{Z\}|\\mathbb Z|Z)\s*\)?$"
)
"""Regular expression for a suffix that declares a letter to be an integer: `, k \\in \\mathbb{Z}`."""
_CONSTANT = re.compile(r"\+\s*([CcKk])$")
"""Regular expression for a constant of integration at the end of an answer."""


def _with_one_constant(answer: str, gold: str) -> tuple[str, str]:
    """Return both answers with the letter of their constant of integration renamed to C."""
    ours, theirs = _CONSTANT.search(answer), _CONSTANT.search(gold)
    if ours is None or theirs is None:
        return answer, gold
    before = answer[: ours.start(1)], gold[: theirs.start(1)]
    if {ours[1], theirs[1], "C"} & (_letters(before[0]) | _letters(before[1])):
        return answer, gold
    return f"{before[0]}C", f"{before[1]}C"


_SIMPLE_FRACTION = re.compile(
    r"(?<![A-Za-z0-9)}])\\[dt]?frac\{([^{}]*(?:\{[^{}]*\}[^{}]*)?)\}\{([^{}]*(?:\{[^{}]*\}[^{}]*)?)\}(?![A-Za-z0-9\\({^])"
)
_ONE = re.compile(r"[A-Za-z0-9]+|[A-Za-z0-9]\^[A-Za-z0-9]|[0-9]+!")


def _spelled(text: str) -> str:
    """Return an answer with inline fractions and without spaces; answers with equal results are equal."""
    body = _SIMPLE_FRACTION.sub(
        lambda found: "/".join(part if _ONE.fullmatch(part) else f"({part})" for part in found.groups()),
        re.sub(r"\^\{([A-Za-z0-9])\}", r"^\1", tidy(text)),
    )
    # A space between two digits or letters is significant.
    return re.sub(r"\s*([^A-Za-z0-9\s])\s*", r"\1", " ".join(body.split()))


_CASES = re.compile(
    r"(?:[A-Za-z](?:\([A-Za-z]\))?\s*=\s*)?\\begin\{cases\}((?:(?!\\begin).)*)\\end\{cases\}", re.DOTALL
)


def _rows(text: str) -> list[str]:
    """Return the sorted rows of a definition by cases, or an empty list for any other string."""
    found = _CASES.fullmatch(tidy(text))
    if found is None or "&" not in found[1]:
        return []
    rows = []
    for written in found[1].split("\\\\"):
        row = re.sub(r"\\text\{\s*,?\s*(?:if|for|when)?\s*\}|[\s,;.]", "", written)
        rows.append(re.sub(r"\\([lg])eq(?:slant)?(?![A-Za-z])", r"\\\1e", row))
    return sorted(row for row in rows if row)


def _without_names(answer: str, gold: str) -> Undecided:
    """Return both strings as input for math-verify, without the name before the equals sign if only one has a name or the names match."""
    (name, value), (other, truth) = without_name(tidy(answer)), without_name(tidy(gold))
    named = bool(name or other) and (name == other or not (name and other)) and value and truth
    return Undecided(value, truth) if named else Undecided(answer, gold)


_OF = re.compile(r"[A-Za-z](?:_\{?[A-Za-z0-9]{1,3}\}?)?\(([A-Za-z](?:, ?[A-Za-z]){0,3})\)\s*=[^=]*$")
"""Regular expression for a definition of a function, whose group contains the variables: x in `f(x) = …`."""
_POINTED = re.compile(r"([-+]?[0-9]{1,20})([.,])([0-9]{2,20})")


def _is_comma_for_point(comma: str, point: str) -> bool:
    """Return whether two strings are the same number with a decimal comma and with a decimal point, such as `2,74` and 2.74.

    The numbers must have the same digits, with at least two digits after the comma, because `0,5` and `1,2` are lists. `1,234`
    is read as an integer.
    """
    one, other = (
        _POINTED.fullmatch(tidy(text).removesuffix("\\$").rstrip("$€£ ")) for text in (comma, point)
    )
    if one is None or other is None or (one[2], other[2]) != (",", "."):
        return False
    thousands = len(one[3]) % 3 == 0 and one[1].lstrip("+-") != "0"
    return (one[1], one[3]) == (other[1], other[3]) and not thousands


FLOAT_DIGITS = 14
"""Minimum number of significant digits of a decimal number that is accepted as the floating-point value of an irrational
number."""
_FLOAT = re.compile(r"[-+]?([0-9]{0,20}\.[0-9]{1,40})")


def _is_float_of(text: str, other: str) -> bool:
    r"""Return whether a string is the floating-point value of an irrational number, such as 4.123105625617661 for `\sqrt{17}`.

    Every digit must be correct. A string with fewer digits is a rounded number, which differs from the irrational number.
    Rational numbers are excluded, because they can be written exactly: 0.3333333333333333 is not accepted for 1/3.
    """
    (name, written), (other_name, exact) = without_name(tidy(text)), without_name(tidy(other))
    found = _FLOAT.fullmatch(written)
    if found is None or _FLOAT.fullmatch(exact) or (name and other_name and name != other_name):
        return False
    if len(found[1].replace(".", "").lstrip("0")) < FLOAT_DIGITS:
        return False
    try:
        read = _known(exact)
    except Unreadable:
        return False
    if read is None or read.unit or not read.letters <= {"\\pi"}:
        return False
    value = read.value
    return isinstance(value, Quotient) and value.rational is None and shortens(written, value)


GOLD_CHARACTERS = 20_000
"""Maximum number of characters in a gold answer. The limit exists because the parsing time grows with the length."""


class _GoldRejected(Exception):
    """Raised for a gold answer that neither the exact parser nor math-verify can read."""


def _known_gold(gold: str) -> MathAnswer | None:
    if len(gold) > GOLD_CHARACTERS:
        raise _GoldRejected(f"It has {len(gold):,} characters; at most {GOLD_CHARACTERS:,} are allowed.")
    try:
        split_top(tidy(gold), ",")
    except Unreadable as problem:
        raise _GoldRejected(str(problem)) from None
    try:
        return _known(gold)
    except NotAnAnswer as problem:
        raise _GoldRejected(str(problem)) from None
    except Unreadable:
        # A gold answer may be longer and less usual than an answer is allowed to be.
        return None


def _known(text: str) -> MathAnswer | None:
    try:
        return read_answer(text)
    except Unfamiliar:
        return None


_COMMAND = re.compile(r"\\(?:[A-Za-z]+|.)")
_LETTER = re.compile(r"[A-Za-z]+")
_KNOWN = (
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp sqrt frac dfrac tfrac cdot times"
    " div pi infty cup cap in le leq ge geq lt gt ne neq binom pmatrix text mathrm mathbb emptyset setminus"
    " lfloor rfloor lceil rceil pm circ degree left right max min gcd mod"
)
_FUNCTIONS = frozenset(_KNOWN.split())
_PLAIN_FUNCTIONS = frozenset({"sin", "cos", "tan", "log", "ln", "exp", "sqrt", "pi"})
_HARMLESS = frozenset({"\\{", "\\}", "\\\\", "\\,", "\\;", "\\!", "\\ ", "\\|", "\\$", "\\%"})


def why_not_comparable(answer: str, gold: str) -> str:
    """Return why math-verify must not compare an answer with the gold answer, or an empty string if the comparison is allowed.

    The comparison of math-verify is not strict. The rules of this function ensure that a guess is not accepted only because
    math-verify approximates values or because the guess can be read in more than one way.
    """
    ours, theirs = tidy(answer), tidy(gold)
    if not ours.isascii():
        return "It contains characters that do not occur in answers."
    strange = {
        command
        for command in set(_COMMAND.findall(ours)) - set(_COMMAND.findall(theirs)) - _HARMLESS
        if command[1:] not in _FUNCTIONS | GREEK
    }
    if strange:
        return f"It uses {', '.join(sorted(strange)[:3])}, which the gold answer does not use."
    try:
        alone = len(split_top(ours, ",")) == len(split_top(theirs, ","))
    except Unreadable as problem:
        return str(problem)
    # Used to detect a ratio of three or more numbers that is compared with a ratio of a different length.
    marks = [text.rpartition("=")[2].count(":") for text in (ours, theirs)]
    faults = {
        "It contains letters that the gold answer does not contain.": bool(_letters(ours) - _letters(theirs)),
        "Two numbers are next to each other.": bool(re.search(r"(?<!\^)[0-9]\s+[0-9]", ours)),
        "Its words differ from those of the gold answer.": _remarks(ours) != _remarks(theirs),
        "Its numbers between words differ from those of the gold answer.": bool(
            _remarks(ours) or _remarks(theirs)
        )
        and re.findall("[0-9.]+", ours) != re.findall("[0-9.]+", theirs),
        "Its indices differ from those of the gold answer.": not set(_INDEX.findall(ours))
        <= set(_INDEX.findall(theirs)),
        "Its number of primes (') differs from that of the gold answer.": ours.count("'")
        != theirs.count("'"),
        "Only one of the two answers is an equation with an absolute value.": bool(_SIZED.match(ours))
        != bool(_SIZED.match(theirs)),
        "The ratio has a different number of parts than the gold answer.": marks[0] != marks[1]
        and max(marks) > 1,
        "It still has to be calculated.": not _letters(theirs) - {"e", "i"}
        and bool(set(_FUNCTION.findall(ours)) - set(_FUNCTION.findall(theirs))),
        "It hedges between several values.": ours.count("=") > theirs.count("=") + 1
        or bool(_HEDGES.search(ours)),
        "It gives a different number of values than the gold answer.": not alone,
        "It is a common divisor or multiple of unknowns, which math-verify reads as a number.": bool(
            _COMMON.search(ours + theirs)
        ),
        "One of the two answers is a statement without an unknown.": _is_fact(ours) or _is_fact(theirs),
    }
    return next((fault for fault, found in faults.items() if found), "")


_FUNCTION = re.compile(
    r"\\(a?)(?:rc)?(?:sin|cos|tan|cot|sec|csc)|\\(l)(?:og|n|g)(?![a-z])|\\(binom|lfloor|lceil|max|min|gcd|lcm|[bp]?mod)|([!|])"
)
"""Regular expression for functions, with one group for each kind: trigonometric functions, logarithms and other functions."""


def _is_fact(text: str) -> bool:
    r"""Return whether a string is a relation between numbers only, such as `\log_2 8 = 3`.

    The result matters because math-verify only decides whether such a relation is true.
    """
    plain = _COMMAND.sub(lambda command: "x" if command[0][1:] in GREEK else " ", text)
    unknowns = set(_LETTER.findall(plain)) - _PLAIN_FUNCTIONS
    return ("=" in text or has_relation(text)) and not unknowns


_COMMON = re.compile(r"(?:gcd|lcm|GCD|LCM)(?![A-Za-z])[^A-Za-z]{0,20}(?<!\\)[A-Za-z]")
_HEDGES = re.compile(r"[?~\";]|\\approx")
_SIZED = re.compile(r"\|[^|A-Z]+\|\s*=")
_INDEX = re.compile(r"(?<!\\log)(?<!\\sum)_(\{[^{}]*\}|.)")
_REMARK = re.compile(r"\\(?:text|mathrm|textrm|textbf|mbox)\{\s*([^{}]*?)[\s.]*\}")


def _remarks(text: str) -> set[str]:
    r"""Return the words of an answer, such as `is false` in `\text{ is false}`, without units and single letters."""
    said = {remark.strip(" ,;") for remark in _REMARK.findall(text)}
    return {
        each
        for each in said
        if len(each) > 1 and each not in {"and", "or"} and not is_measure(unit_named(each))
    }


def _letters(text: str) -> set[str]:
    plain = _COMMAND.sub(" ", text)
    # The letter before a lone `=` names the answer.
    plain = re.sub(r"^\s*[A-Za-z]\s*=(?!.*=)", " ", plain)
    return {letter for run in _LETTER.findall(plain) if run not in _PLAIN_FUNCTIONS for letter in run}
