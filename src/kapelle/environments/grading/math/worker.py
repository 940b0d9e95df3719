"""Compare LaTeX strings with math-verify in a process that can be killed."""

from __future__ import annotations

import logging

from kapelle.environments.grading.processes import serve
from kapelle.types import Json

# sympy's default of 15 digits hides small differences: e^2 is not 7.389056.
ROUNDING_DIGITS = 12
WORKING_DIGITS = 30

# The first comparison of each kind loads modules and fills caches, which every forked child shares.
WARM = (
    (r"\frac{x}{2}+\sin 1", r"\sin 1+\frac{x}{2}"),
    (r"\sin^2 x", r"1-\cos^2 x"),
    (r"\sqrt[3]{16}", r"2\sqrt[3]{2}"),
    (r"\log 8", r"3\log 2"),
    (r"x > 5", r"5 < x"),
    (r"[0,1) \cup (2,\infty)", r"(2,\infty) \cup [0,1)"),
    (r"e^{2}", r"7.389"),
)


def compare(question: Json) -> Json:
    """Return whether `gold` and `answer` are equal in both orders, or the name of the string that cannot be parsed.

    Both strings are parsed only with the LaTeX parser of math-verify. The parser of math-verify for plain expressions evaluates
    Python code and is never used. The time limits of math-verify use `signal.alarm` and silently return False, so these limits
    are disabled; a process that exceeds the limits of its pool is killed instead.
    """
    # A forked child inherits this import.
    from math_verify import LatexExtractionConfig, parse, verify

    target = [LatexExtractionConfig(boxed_match_priority=0)]
    gold, answer = (
        parse(question[name], target, fallback_mode="no_fallback", parsing_timeout=None)
        for name in ("gold", "answer")
    )
    if not gold or not answer:
        return "answer" if gold else "gold"
    digits = {"float_rounding": ROUNDING_DIGITS, "numeric_precision": WORKING_DIGITS}
    try:
        return all(
            verify(one, other, timeout_seconds=None, raise_on_error=True, **digits)
            for one, other in ((gold, answer), (answer, gold))
        )
    except (MemoryError, RecursionError):
        raise
    # math-verify treats its own errors as "not the same", and so does this function.
    except Exception:  # noqa: BLE001
        return False


if __name__ == "__main__":
    logging.disable()
    # math-verify builds its grammar once.
    for gold, answer in WARM:
        compare({"gold": f"${gold}$", "answer": f"${answer}$"})
    serve(compare)
