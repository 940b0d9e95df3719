r"""What LaTeX writes for the eye alone, taken off: sizes, fonts, thin spaces, braces around one sign, environments around a whole.

Works on characters only and in linear time; nothing here changes what a text means.
"""

from __future__ import annotations

import re
from collections.abc import Callable

FONTS = (
    "text|mathrm|textnormal|textrm|textbf|textit|mbox|mathbf|operatorname|textsf|texttt|textsl|textsc|textup|textmd|emph|hbox"
    "|mathsf|mathtt|mathit|mathnormal"
)
_WORDS = "textnormal|textrm|mbox|textsf|texttt|textsl|textsc|textup|textmd|emph|hbox|mathsf|mathtt|mathnormal"
_END = r"(?![A-Za-z])"
_SIZES = "displaystyle|tiny|scriptsize|footnotesize|small|normalsize|large|Large|LARGE|huge|Huge|nolimits|limits|mathstrut|strut"
_DOLLAR = rf"\\(?:mathdollar|textdollar){_END}|\\(?:{FONTS})\{{\s*(?:US)?\s*\\?\$\s*\}}|(?<![A-Za-z])US\s?\\\$|\{{\\\$\}}"
_SAME: dict[str, str | Callable[[re.Match[str]], str]] = {
    # Sizes and spaces; a command keeps a space before the letter behind it.
    rf"\\(?:{_SIZES}){_END}\s*": "",
    r"\\(?:hspace|hskip|kern|mspace|vspace)\*?\s?(?:\{-?[0-9.]{1,6}\s?(?:em|ex|pt|mm|cm|mu|in)\}|[0-9.]{1,6}(?:em|ex|pt|mm|cm|mu))": " ",
    rf"\\(?:thinspace|enspace|enskip|medspace|thickspace|negthinspace|nobreakspace){_END}\s*": " ",
    r"\\\\\s?\[-?[0-9.]{1,5}\s?(?:pt|ex|em|mm|cm)\]|\\cr(?![A-Za-z])": r"\\\\",
    r"(\\[A-Za-z]{1,20})(?:\\[,;:!]){1,4}(?=[A-Za-z])": r"\1 ",
    r"(?<![\^_A-Za-z\]}\\])\{\}": "",
    # Braces around one sign, or around the digits of a number.
    r"(?<![\^_A-Za-z\]}])\{\s*(\\(?:times|cdot|pm|div|colon)|[-+.:=<>])\s*\}": r"\1 ",
    r"(?<=[0-9])\{?\.\}? (?=[0-9])": ".",
    r"(?<![\^_A-Za-z\]}0-9/])\{([0-9]{1,40})\}(?=\s*(?:_|\\[dtc]?frac))": r"\1",
    r"(?<=[0-9.])\s*\{(\\(?:[dtc]?frac\{[0-9]{1,20}\}\{[0-9]{1,20}\}|overline\s?\{[0-9]{1,20}\}))\}": r"\1",
    r"\\(overline|bar|sqrt|frac|dfrac|tfrac)\s+(?=[{\[])": r"\\\1",
    r"\\sqrt\[\s*\{?\s*2\s*\}?\s*\]": r"\\sqrt",
    r"\\sqrt\[\s*\{\s*([0-9]{1,3})\s*\}\s*\]": r"\\sqrt[\1]",
    r"\\sqrt(\[[0-9]{1,3}\])\s*([0-9A-Za-z])(?![0-9])": r"\\sqrt\1{\2}",
    rf"\\(?:left|right)?\s*\\([lr])brace{_END}\s*": lambda found: r"\{" if found[1] == "l" else r"\}",
    # Fonts.
    rf"\\(?:{_WORDS})(?=\s*\{{)": r"\\text",
    r"\\(text|mathrm|mathbf|textbf)\s+\{": r"\\\1{",
    rf"\\(?:{FONTS})\{{\s*\\(?:{FONTS})\{{([^{{}}]{{0,80}})\}}\s*\}}": r"\\text{\1}",
    r"\\(?:text|mathrm|mathbf)\{\s*([.:])\s*\}": r"\1",
    r"\\(text|mathrm|textbf|mathbf)\{(?:\\[,;: ]|~){1,4}\s*": r"\\\1{ ",
    r"^\{([A-Za-z])\}\s*=": r"\1=",
    r"\(\\(?:text|mathrm|mathbf|textbf)\{\s*([A-Z])\s*\}\)": r"(\1)",
    r"\\mathit\{([A-Za-z]{2,40})\}": r"\\text{\1}",
    rf"(?<![\^_A-Za-z\]}}])\{{(\\(?:{FONTS})\{{[^{{}}]{{0,80}}\}})\}}|\\underline\{{(\\(?:{FONTS})\{{[^{{}}]{{0,80}}\}})\}}": (
        lambda found: found[1] or found[2]
    ),
    # Signs that have several names.
    r"\\left\s*\.|\\right\s*\.": "",
    r"\\(overline|bar)\s*([0-9])(?![0-9])": r"\\\1{\2}",
    r"\$([0-9.,]{1,20})\$\s*\\?%": r"\1\\%",
    _DOLLAR: r"\\$",
    rf"\\textdegree{_END}|\\(?:text|mathrm)\{{\s*(?:°|\\degree)\s*\}}": r"^\\circ",
    r"(?<=[0-9})])\s*\^\s*(?:\{\s*\\(?:text|mathrm)\{o\}\s*\}|\\(?:text|mathrm)\{o\}|\{\s*\{\s*\\circ\s*\}\s*\}|\{\s*\\circ\s*\})": r"^\\circ",
    r"\{\s*\^\s*\\circ\s*\}": r"^\\circ",
    r"(?:\\left)?\(\s*([0-9.]{1,12})\s*(?:\\right)?\)\s*\^\s*\\circ|\{([0-9.]{1,12})\}\s*\^\s*\\circ|\\(?:text|mathrm)\{([0-9.]{1,12})\}\s*\^\s*\\circ": (
        lambda found: next(part for part in found.groups() if part) + r"^\circ"
    ),
    rf"\\(?:lor|vee){_END}": r"\\text{ or }",
    rf"\\(?:land|wedge){_END}": r"\\text{ and }",
    r"\\middle\s?\|": "|",
    rf"\\(?:leqq|leqslant){_END}": r"\\le ",
    rf"\\(?:geqq|geqslant){_END}": r"\\ge ",
    r"\\begin\{[bp]?smallmatrix\}": r"\\begin{matrix}",
    r"\\end\{[bp]?smallmatrix\}": r"\\end{matrix}",
    r"&\s*(=|<|>|\\[lg]eq?(?![A-Za-z]))|(=|<|>|\\[lg]eq?(?![A-Za-z]))\s*&": lambda found: found[1] or found[2],
    # A base behind a space, in braces or in another font.
    r"(?<=[0-9A-F)}])\s+_": "_",
    r"_\s*\{\s*([0-9]{1,2})\s*\}|_\s+([0-9])|_\{\s*\\(?:text|mathrm|mathbf)\{\s*([0-9]{1,2})\s*\}\s*\}": (
        lambda found: f"_{{{found[1] or found[2] or found[3]}}}"
    ),
    r"\\(?:text|mathrm|mathbf)\{([0-9A-F]{1,40})\}(?=_)": r"\1",
}  # fmt: skip
_REWRITTEN = [(re.compile(pattern), to) for pattern, to in _SAME.items()]
_SPACES = re.compile("[\u00a0\u1680\u2000-\u200a\u202f\u205f\u3000]")
_HIGH_LOW = re.compile("([⁰¹²³⁴⁵⁶⁷⁸⁹]{1,20})[⁄/]([₀₁₂₃₄₅₆₇₈₉]{1,20})")
_DIGITS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹₀₁₂₃₄₅₆₇₈₉", "0123456789" * 2)
_ROOTS = re.compile("([∛∜])\\s?(?:([0-9]{1,20}|[A-Za-z])|\\(([^()]{1,40})\\))")
_ENVIRONMENT = re.compile(
    r"\\begin\{(equation|align|aligned|gather|gathered|math|displaymath|split|multline)(\*?)\}(?P<inside>.*)\\end\{\1\2\}",
    re.DOTALL,
)
_INNER = re.compile(r"\\begin\{([a-z]{1,12}\*?)\}.*?\\end\{\1\}", re.DOTALL)
_GROUP = re.compile(r"(?<=[0-9]),[0-9]{3}(?![0-9])")
_OVER = re.compile(r"\\(over|choose)(?![A-Za-z])")


def unadorned(text: str) -> str:
    """Return a text without what stands in it for the eye alone."""
    if not text.isascii():
        text = _SPACES.sub(" ", text).replace("–", "-")
        text = _HIGH_LOW.sub(lambda found: rf"\frac{{{_d(found[1])}}}{{{_d(found[2])}}}", text).replace(
            "⁄", "/"
        )
        text = _ROOTS.sub(
            lambda found: rf"\sqrt[{'34'['∛∜'.index(found[1])]}]{{{found[2] or found[3]}}}", text
        )
    if not text.isalnum():
        for pattern, to in _REWRITTEN:
            text = pattern.sub(to, text)
    if _OVER.search(text):
        text = _without_over(text)
    return text


def _d(digits: str) -> str:
    return digits.translate(_DIGITS)


def _without_over(text: str) -> str:
    r"""Return a text with `\frac{a}{b}` for the first `{a \over b}`, and `\binom{a}{b}` for `\choose`, whatever brackets it has."""
    found = _OVER.search(text)
    assert found is not None, "it was looked for"
    opening, closing = _brace_before(text, found.start()), _brace_behind(text, found.end())
    if opening is None or closing is None:
        return text
    top, bottom = text[opening + 1 : found.start()].strip(), text[found.end() : closing].strip()
    command = "frac" if found[1] == "over" else "binom"
    return rf"{text[:opening]}\{command}{{{top}}}{{{bottom}}}{text[closing + 1 :]}"


def _brace_before(text: str, place: int) -> int | None:
    depth = 0
    for index in range(place - 1, -1, -1):
        depth += (text[index] == "}") - (text[index] == "{")
        if depth < 0:
            return index
    return None


def _brace_behind(text: str, place: int) -> int | None:
    depth = 0
    for index in range(place, len(text)):
        depth += (text[index] == "{") - (text[index] == "}")
        if depth < 0:
            return index
    return None


def without_frame(body: str) -> str:
    """Return an answer without an environment or braces around the whole of it; `{1, 2}` is a set and stays."""
    found = _ENVIRONMENT.fullmatch(body)
    inside = found["inside"].strip().removesuffix("\\\\").strip().removeprefix("&").strip() if found else ""
    if inside and "\\\\" not in _INNER.sub("", inside):
        return inside
    if body[:1] == "{" and _brace_behind(body, 1) == len(body) - 1 and not _has_comma(body[1:-1]):
        return body[1:-1].strip()
    return body


def _has_comma(text: str) -> bool:
    depth = 0
    for place, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if (
            character in ",;"
            and depth == 0
            and text[max(place - 1, 0)] != "\\"
            and not _GROUP.match(text, place)
        ):
            return True
    return False
