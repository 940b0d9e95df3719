r"""The comparison of answers with which MATH was published (arXiv:2103.03874; `is_equiv` of github.com/hendrycks/math 985bdc16, read 2026-11).

Two answers are equal if their normal forms are the same string. No values are computed, so `\frac{2}{4}` and `\frac{1}{2}` differ.
"""

from __future__ import annotations

import re

_REMOVED = re.compile(r"\\left|\\right|\^\{\\circ\}|\^\\circ|\\\$")
_WHOLE = r"(0|-?[1-9][0-9]*)"


def is_equiv(answer: str, gold: str) -> bool:
    """Return whether two LaTeX answers have the same normal form, or are the same string if one of them has no normal form."""
    try:
        return normal_form(answer) == normal_form(gold)
    except ValueError:
        return answer == gold


def normal_form(text: str) -> str:
    r"""Return an answer without spaces, units, `\%` and a leading `x=`, with braces around arguments.

    Raises ValueError for text with several units or with a command that lacks its argument, which the published function does not
    normalise either.
    """
    text = text.replace("\n", "").replace("\\!", "").replace("\\\\", "\\")
    text = _REMOVED.sub("", text.replace("tfrac", "frac").replace("dfrac", "frac"))
    text, *units = text.split("\\text{ ")
    if len(units) > 1:
        raise ValueError("several units")
    text = text.replace("\\%", "").replace(" .", " 0.").replace("{.", "{0.")
    text = f"0{text}" if text.startswith(".") else text
    name, *value = text.split("=")
    text = value[0] if len(value) == 1 and len(name) <= 2 else text
    if re.search(r"\\sqrt$|\\sqrt(?=\\sqrt)", text):
        raise ValueError("a root of nothing")
    text = re.sub(r"\\sqrt([^{])", r"\\sqrt{\1}", text).replace(" ", "")
    text = _with_braces(text)
    text = "\\frac{1}{2}" if text == "0.5" else text
    return re.sub(rf"^{_WHOLE}/{_WHOLE}$", r"\\frac{\1}{\2}", text)


def _with_braces(text: str) -> str:
    r"""Return the text with `\frac12` and `\frac1{2}` written as `\frac{1}{2}`."""
    first, *parts = text.split("\\frac")
    for part in parts:
        if not part:
            raise ValueError("a fraction without a numerator")
        if len(part) == 1 and part != "{":
            return text
    return first + "".join("\\frac" + re.sub(r"^([^{])(?:([^{])|(?=\{))", _braced, part) for part in parts)


def _braced(found: re.Match[str]) -> str:
    return f"{{{found[1]}}}" + (f"{{{found[2]}}}" if found[2] else "")
