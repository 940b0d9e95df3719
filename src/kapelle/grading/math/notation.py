r"""Other ways to write the same mathematics, made one: `½` and `{1 \over 2}` are `\frac{1}{2}`, `]0,1[` is `(0,1)`.

Works on characters only and in linear time; nothing here changes what a text means.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

_HIGH = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n", strict=True))
_LOW = dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋ₙ", "0123456789+-n", strict=True))
_SIGNS = {
    "°": r"^\circ", "×": "*", "·": "*", "⋅": "*", "÷": "/", "√": r"\sqrt", "∞": r"\infty ", "±": r"\pm ", "∪": r"\cup ",
    "∩": r"\cap ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "∈": r"\in ", "∅": r"\emptyset ",
    "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℚ": r"\mathbb{Q}", "ℕ": r"\mathbb{N}", "ℂ": r"\mathbb{C}", "∠": r"\angle ",
    "′": "'", "’": "'", "⟨": "(", "⟩": ")",
}  # fmt: skip
_GREEK = {
    character: f"\\{unicodedata.name(character).rpartition(' ')[2].lower()} "
    for character in "αβγδεζηθικμνξπρστυφχψω"
} | {"λ": "\\lambda "}
_ODD = re.compile(f"[{''.join(_HIGH)}]+|[{''.join(_LOW)}]+|[^\x00-\x7f]")

_BASES = {"two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8", "nine": "9",
          "ten": "10", "twelve": "12", "sixteen": "16"}  # fmt: skip
# What is written otherwise and means the same, one after the other.
_NAMES: dict[str, str | Callable[[re.Match[str]], str]] = {
    r"\\(?:nice|s|c)frac(?![A-Za-z])": r"\\frac",
    r"([A-Za-z])\s*\\equiv(?![A-Za-z])(?=[^\\=]{1,40}\\(?:p|b)?mod(?![A-Za-z]))": r"\1=",
    r"(?<![0-9A-Za-z'])[0-9]{1,3}(?:'[0-9]{3})+(?![0-9'])": lambda found: found[0].replace("'", ""),
    r"\\[dt]binom(?![A-Za-z])": r"\\binom",
    r"\\[lr]?vert(?![A-Za-z])": "|",
    r"\\(?:[lr]?Vert)(?![A-Za-z])": r"\\|",
    r"\\[lr]angle(?![A-Za-z])": lambda found: "(" if found[0] == "\\langle" else ")",
    r"\\bigcup(?![A-Za-z])": r"\\cup",
    r"(?<=[)\]])\s*U\s*(?=[(\[])": r" \\cup ",
    r"\\(?:bb[rR]|R|reals)(?![A-Za-z])": r"\\mathbb{R}",
    r"\\[bB]igg?[lrm]?(?![A-Za-z])|\\(?:thin|en|med|thick)space(?![A-Za-z])|\\(?:text|script)style(?![A-Za-z])": "",
    r"\{\s*:\s*\}|\s*\\colon(?![A-Za-z])": ":",
    r"(?<![\^{ ])\s*\\degree(?![A-Za-z])": r"^\\circ",
    r"\\(?:text|mathrm)\{\s*\\?%\s*\}": r"\\%",
    r"\{\s*([^{}]{1,60}?)\s*\\over(?![A-Za-z])\s*([^{}]{1,60}?)\s*\}": r"\\frac{\1}{\2}",
    r"\{\s*([^{}]{1,60}?)\s*\\choose(?![A-Za-z])\s*([^{}]{1,60}?)\s*\}": r"\\binom{\1}{\2}",
    r"\\begin\{[bpB]?matrix\}": r"\\begin{pmatrix}",
    r"\\end\{[bpB]?matrix\}": r"\\end{pmatrix}",
    r"(?:\(|\\\{|\[)\s*(\\begin\{pmatrix\})((?:(?!\\begin).)*)(\\end\{pmatrix\})\s*(?:\)|\\\}|\])": r"\1\2\3",
    r"\\(log|ln|lg)_([0-9A-Za-z])(?![0-9A-Za-z])": r"\\\1_{\2}",
    r"_\{?\s*(?:\\text\{\s*|\()\s*([0-9]{1,2}|two|three|four|five|six|seven|eight|nine|ten|twelve|sixteen)\s*[})]\s*\}?": (
        lambda found: f"_{{{_BASES.get(found[1], found[1])}}}"
    ),
    r"\(([0-9]{1,40})\)_": r"\1_",
    r"(?<=[0-9A-F])\\(?:text|mathrm)\{([A-F]{1,8})\}(?=[0-9A-F]*_)": r"\1",
}  # fmt: skip
_REWRITTEN = [(re.compile(pattern, re.DOTALL), to) for pattern, to in _NAMES.items()]
_ABROAD = re.compile(r"([\[\]])([^\[\]()]{1,80}[,;][^\[\]()]{1,80})([\[\]])")
_COLOUR = r"\\(?:textcolor|color)\{[A-Za-z]{1,20}\}\{"
_BOUND = re.compile(r"[<>]|\\(?:[lg]eq?(?:slant)?|lt|gt)(?![A-Za-z])")
_WHOLES: dict[str, Callable[[re.Match[str]], str]] = {
    # 5 in a box or in colour; 12:30 in a text.
    rf"(?:\\(?:fbox|underline|boldsymbol|bm)\{{|{_COLOUR})([^{{}}]*)\}}": lambda found: found[1].strip(" $"),
    r"\\(?:text|mathrm|textbf|mathbf)\{\s*([-+]?(?:\\?\$)?[0-9][0-9:.,]*(?:\s?\\?%)?)\s*\}": lambda found: (
        found[1]
    ),
    # \text{5 cm}, \mathrm{5\,cm}
    r"\\(?:text|mathrm|textbf|mathbf)\{\s*([-+]?[0-9][0-9.,]*)(?:\s|\\[,;: ]|~)*([A-Za-z]{1,15}(?: [A-Za-z]{1,15}){0,2}(?:\^[23])?)\s*\}": (
        lambda found: rf"{found[1]}\text{{ {found[2]}}}"
    ),
    r"\\text\{\s*([-+0-9., ]{1,80})\s*\}": lambda found: found[1],
    # Equations one above the other.
    r"(?:\\begin\{cases\}((?:(?!\\begin|&)[^<>])+)\\end\{cases\}|\\\{\s*\\begin\{array\}\{[lcr]{1,3}\}((?:(?!\\begin|&)[^<>])+)\\end\{array\})": (
        lambda found: re.sub(r"\s*(?:[,;]\s*)?\\\\\s*", ", ", (found[1] or found[2]).strip(" \\,;"))
    ),
    # 3 to 2
    r"([0-9.]{1,12})\s*(?:\\text\{\s*to\s*\}|\bto\b)\s*([0-9.]{1,12})": lambda found: (
        f"{found[1]}:{found[2]}"
    ),
    # "March", Option E
    r"(?:\\text\{\s*)?[\"`']{1,2}([A-Za-z][A-Za-z ]{1,40})[\"']{1,2}\s*\}?": lambda found: found[1],
    r"(?:\\(?:text|textbf)\{\s*)?(?:[Oo]ption|[Cc]hoice|[Aa]nswer)(?:\s*:\s*|\s+)\(?([A-Z])\)?\s*\}?": lambda found: (
        found[1]
    ),
    r"\\mathbf\s?\{?R\}?|\\mathbb R": lambda _: r"\mathbb{R}",
    # |x| = 3 is x = ±3.
    r"\|\s*([abcdxy])\s*\|\s*=\s*([0-9\\][^|=,;<>]{0,60})": lambda found: rf"{found[1]}=\pm ({found[2]})",
    # A set by the bounds of what it holds.
    r"\\\{\s*[A-Za-z]\s*(?:\\in\s*\\mathbb\{R\}\s*)?(?:\||:|\\mid(?![A-Za-z]))\s*((?:(?!\\in(?![A-Za-z])).)+)\\\}": (
        lambda found: found[1].strip() if _BOUND.search(found[1]) else found[0]
    ),
    # 5th, 5^{\text{th}}
    r"([0-9]{1,9})\s*(?:\^\s*)?\{?\s*(?:\\(?:text|mathrm|textrm)\{\s*)?(?:st|nd|rd|th)\s*\}?\s*\}?": lambda found: (
        found[1]
    ),
    # March 3, 2020
    r"(?:\\(?:text|mathrm)\{)?\s*([A-Za-z]{3,9})\.?\s+([0-9]{1,2})(?:st|nd|rd|th)?,?\s+([0-9]{4})\s*\}?": (
        lambda found: rf"\text{{{found[1].lower()} {found[2]} {found[3]}}}"
    ),
    # 2:30 p.m.
    r"([0-9]{1,2}:[0-9]{2})\s*(?:\\(?:text|mathrm)\{)?\s*([aApP])\.?\s*[mM]\.?\s*\}?": (
        lambda found: rf"\text{{{found[1]} {found[2].lower()}m}}"
    ),
    # (A), A)
    r"\\(?:text|textbf|mathrm|mathbf)\{\s*\(?([A-Z])\)?\.?\s*\}": lambda found: found[1],
    r"\(?\s*([A-Z])\s*\)\.?": lambda found: found[1],
}
_KINDS = [(re.compile(pattern, re.DOTALL), rewrite) for pattern, rewrite in _WHOLES.items()]
_AMPERSAND = re.compile(r"\s*\\?&\s*")
_REPEATING = re.compile(
    r"(?<![0-9.,])([0-9]{0,20})\.([0-9]{0,20})"
    r"(?:\\(?:overline|bar)\{([0-9]{1,20})\}|\(([0-9]{1,20})\)|((?:\\dot\{[0-9]\}|\\dot [0-9])(?:[0-9]{0,18}(?:\\dot\{[0-9]\}|\\dot [0-9]))?))"
)


def plain_notation(body: str) -> str:
    """Return a text in the one notation that readers know."""
    if not body.isascii():
        body = re.sub(r"√\s*([0-9]+(?:\.[0-9]+)?|[A-Za-z])", r"\\sqrt{\1}", body)
        body = _ODD.sub(_in_ascii, body)
    for pattern, to in _REWRITTEN:
        body = pattern.sub(to, body)
    if "\\begin" not in body:
        body = _AMPERSAND.sub(", ", body)
    if "\\exp" in body:
        body = _as_power(body)
    if body[:1] == "]" or body[-1:] == "[":
        body = _ABROAD.sub(_with_usual_ends, body)
    body = _REPEATING.sub(_as_fraction, body)
    return _whole(body.strip())


def _whole(body: str) -> str:
    """Return an answer that is written as a whole in one of the ways for its kind in the usual one."""
    for pattern, rewrite in _KINDS:
        found = pattern.fullmatch(body)
        if found is not None:
            body = rewrite(found)
    return body


def _in_ascii(found: re.Match[str]) -> str:
    character = found[0]
    if character[0] in _HIGH:
        return f"^{{{''.join(map(_HIGH.__getitem__, character))}}}"
    if character[0] in _LOW:
        return f"_{{{''.join(map(_LOW.__getitem__, character))}}}"
    if character in _SIGNS or character in _GREEK:
        return _SIGNS.get(character) or _GREEK[character]
    if "VULGAR FRACTION" in unicodedata.name(character, ""):
        top, _, bottom = unicodedata.normalize("NFKC", character).partition("\N{FRACTION SLASH}")
        return rf"\frac{{{top}}}{{{bottom}}}"
    return character


def _with_usual_ends(found: re.Match[str]) -> str:
    """Return an interval of which brackets turned outwards leave out the ends: `]0,1]` is `(0,1]`."""
    return f"{'(' if found[1] == ']' else '['}{found[2]}{')' if found[3] == '[' else ']'}"


def _as_power(body: str) -> str:
    r"""Return a text in which each `\exp(x)` is `e^{x}`; one whose brackets do not match stays."""
    parts: list[str] = []
    start = 0
    for found in re.finditer(r"\\exp\s*([({])", body):
        depth, place = 1, found.end()
        while depth and place < len(body):
            depth += (body[place] in "({") - (body[place] in ")}")
            place += 1
        if depth or found.start() < start:
            continue
        parts += [body[start : found.start()], f"e^{{{body[found.end() : place - 1]}}}"]
        start = place
    return "".join([*parts, body[start:]])


def _as_fraction(found: re.Match[str]) -> str:
    r"""Return a decimal number that repeats as the fraction that it is: `0.1\overline{6}` is 15/90."""
    whole, digits = found[1], found[2]
    repeated = found[3] or found[4] or re.sub("[^0-9]", "", found[5])
    top = int((whole + digits + repeated) or 0) - int((whole + digits) or 0)
    return rf"\frac{{{top}}}{{{(10 ** len(repeated) - 1) * 10 ** len(digits)}}}"
