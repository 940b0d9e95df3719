r"""Normalise mathematical notation: `½` and `{1 \over 2}` become `\frac{1}{2}`, and `]0,1[` becomes `(0,1)`.

The functions of this module only rewrite characters, run in linear time and preserve the meaning of an answer.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from decimal import Decimal
from typing import Literal

from kapelle.environments.grading.math.expression import NotAnAnswer, Unreadable
from kapelle.environments.grading.text.extraction import SCALES, boxes, joined

_HIGH = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n", strict=True))
_LOW = dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋ₙ", "0123456789+-n", strict=True))
_SIGNS = {
    "°": r"^\circ", "×": "*", "·": "*", "⋅": "*", "÷": "/", "√": r"\sqrt", "∞": r"\infty ", "±": r"\pm ", "∪": r"\cup ",
    "∩": r"\cap ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "∈": r"\in ", "∅": r"\emptyset ",
    "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℚ": r"\mathbb{Q}", "ℕ": r"\mathbb{N}", "ℂ": r"\mathbb{C}", "∠": r"\angle ",
    "′": "'", "’": "'", "⟨": r"\vector(", "⟩": ")",
}  # fmt: skip
_GREEK = {
    character: f"\\{unicodedata.name(character).rpartition(' ')[2].lower()} "
    for character in "αβγδεζηθικμνξπρστυφχψω"
} | {"λ": "\\lambda "}
_ODD = re.compile(f"[{''.join(_HIGH)}]+|[{''.join(_LOW)}]+|[^\x00-\x7f]")

_BASES = {"two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8", "nine": "9",
          "ten": "10", "twelve": "12", "sixteen": "16"}  # fmt: skip
# Spellings and their normal form, replaced in this order.
_NAMES: dict[str, str | Callable[[re.Match[str]], str]] = {
    r"\\(?:nice|s|c)frac(?![A-Za-z])": r"\\frac",
    r"([A-Za-z])\s*\\equiv(?![A-Za-z])(?=[^\\=]{1,40}\\(?:p|b)?mod(?![A-Za-z]))": r"\1=",
    r"(?<![0-9A-Za-z'])[0-9]{1,3}(?:'[0-9]{3})+(?![0-9'])": lambda found: found[0].replace("'", ""),
    r"\\[dt]binom(?![A-Za-z])": r"\\binom",
    r"\\[lr]?vert(?![A-Za-z])": "|",
    r"\\(?:[lr]?Vert)(?![A-Za-z])": r"\\|",
    r"\\[lr]angle(?![A-Za-z])": lambda found: "\\vector(" if found[0] == "\\langle" else ")",
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
    r"\\exp\s*(?:\(((?:[^()]++|\([^()]*+\))*+)\)|\{([^{}]*)\})": lambda found: f"e^{{{found[1] or found[2]}}}",
    r"\\log_\{?e\}?(?![A-Za-z])": r"\\ln ",
    r"\\(?:text|mathrm)\{([^{}]*)\}\s*/\s*\\(?:text|mathrm)\{([^{}]*)\}": r"\\text{\1/\2}",
    r"\\[dt]?frac\{\s*\\(?:text|mathrm)\{([^{}]*)\}\s*\}\{\s*\\(?:text|mathrm)\{([^{}]*)\}\s*\}": r"\\text{\1/\2}",
    r"\^\s*\{?\\circ\}?\s*(?:\\(?:text|mathrm)\{\s*)?([CF])(?![A-Za-z])\s*\}?": lambda found: (
        rf"\text{{ {'celsius' if found[1] == 'C' else 'fahrenheit'}}}"
    ),
    rf"([0-9]+(?:\.[0-9]+)?)(?:\s|\\[,;: ]|~)*(\\(?:text|mathrm)\{{\s*)?({'|'.join(SCALES)})(?![a-z])\s*(\}}?)": lambda found: (
        f"{(Decimal(found[1]) * SCALES[found[3]]).normalize():f}" + ("" if found[2] and found[4] else f" {found[2] or ''}{found[4]}")
    ),
}  # fmt: skip
_REWRITTEN = [(re.compile(pattern, re.DOTALL), to) for pattern, to in _NAMES.items()]
_ABROAD = re.compile(r"([\[\]])([^\[\]()]{1,80}[,;][^\[\]()]{1,80})([\[\]])")
_COLOUR = r"\\(?:textcolor|color)\{[A-Za-z]{1,20}\}\{"
_BOUND = re.compile(r"[<>]|\\(?:[lg]eq?(?:slant)?|lt|gt)(?![A-Za-z])")
_WHOLES: dict[str, str | Callable[[re.Match[str]], str]] = {
    # 5 in a box or in colour; 12:30 in a text.
    rf"(?:\\(?:fbox|underline|boldsymbol|bm)\{{|{_COLOUR})([^{{}}]*)\}}": lambda found: found[1].strip(" $"),
    r"\\(?:text|mathrm|textbf|mathbf)\{\s*([-+]?(?:\\?\$)?[0-9][0-9:.,]*(?:\s?\\?%)?)\s*\}": r"\1",
    # \text{5 cm}, \mathrm{5\,cm}
    r"\\(?:text|mathrm|textbf|mathbf)\{\s*([-+]?[0-9][0-9.,]*)(?:\s|\\[,;: ]|~)*([A-Za-z]{1,15}(?: [A-Za-z]{1,15}){0,2}(?:\^[23])?)\s*\}": (
        lambda found: rf"{found[1]}\text{{ {found[2]}}}"
    ),
    r"\\text\{\s*([-+0-9., ()\[\]]{1,80})\s*\}": r"\1",
    r"([0-9]{1,3})\s*'\s*([0-9]{1,2})\s*(?:\"|'')": r"\1\\text{ ft }\2\\text{ in}",
    r"(?:(?:[Tt]he\s+)?(?:[Ff]inal\s+)?[Aa]nswer(?:\s+is\b|\s*[:=])|\\text\{\s*[A-Za-z][A-Za-z ]{1,40}[:=]\s*\})\s*(.+)": r"\1",
    # A column of equations.
    r"(?:\\begin\{cases\}((?:(?!\\begin|&)[^<>])+)\\end\{cases\}|\\\{\s*\\begin\{array\}\{[lcr]{1,3}\}((?:(?!\\begin|&)[^<>])+)\\end\{array\})": (
        lambda found: re.sub(r"\s*(?:[,;]\s*)?\\\\\s*", ", ", (found[1] or found[2]).strip(" \\,;"))
    ),
    # 3 to 2
    r"([0-9.]{1,12})\s*(?:\\text\{\s*to\s*\}|\bto\b)\s*([0-9.]{1,12})": r"\1:\2",
    # "March", Option E
    r"(?:\\text\{\s*)?[\"`']{1,2}([A-Za-z][A-Za-z ]{1,40})[\"']{1,2}\s*\}?": r"\1",
    r"(?:\\(?:text|textbf)\{\s*)?(?:[Oo]ption|[Cc]hoice|[Aa]nswer)(?:\s*:\s*|\s+)\(?([A-Z])\)?\s*\}?": r"\1",
    r"\\mathbf\s?\{?R\}?|\\mathbb R": r"\\mathbb{R}",
    # |x| = 3 is x = ±3.
    r"\|\s*([abcdxy])\s*\|\s*=\s*([0-9\\][^|=,;<>]{0,60})": r"\1=\\pm (\2)",
    # A set defined by bounds.
    r"\\\{\s*[A-Za-z]\s*(?:\\in\s*\\mathbb\{R\}\s*)?(?:\||:|\\mid(?![A-Za-z]))\s*((?:(?!\\in(?![A-Za-z])).)+)\\\}": (
        lambda found: found[1].strip() if _BOUND.search(found[1]) else found[0]
    ),
    # 5th, 5^{\text{th}}
    r"([0-9]{1,9})\s*(?:\^\s*)?\{?\s*(?:\\(?:text|mathrm|textrm)\{\s*)?(?:st|nd|rd|th)\s*\}?\s*\}?": r"\1",
    # March 3, 2020
    r"(?:\\(?:text|mathrm)\{)?\s*([A-Za-z]{3,9})\.?\s+([0-9]{1,2})(?:st|nd|rd|th)?,?\s+([0-9]{4})\s*\}?": (
        lambda found: rf"\text{{{found[1].lower()} {found[2]} {found[3]}}}"
    ),
    # 2:30 p.m.
    r"([0-9]{1,2}:[0-9]{2})\s*(?:\\(?:text|mathrm)\{)?\s*([aApP])\.?\s*[mM]\.?\s*\}?": (
        lambda found: rf"\text{{{found[1]} {found[2].lower()}m}}"
    ),
    # (A), A)
    r"\\(?:text|textbf|mathrm|mathbf)\{\s*\(?([A-Z])\)?\.?\s*\}": r"\1",
    r"\(?\s*([A-Z])\s*\)\.?": r"\1",
}
_KINDS = [(re.compile(pattern, re.DOTALL), rewrite) for pattern, rewrite in _WHOLES.items()]
_AMPERSAND = re.compile(r"\s*\\?&\s*")
_REPEATING = re.compile(
    r"(?<![0-9.,])([0-9]{0,20})\.([0-9]{0,20})"
    r"(?:\\(?:overline|bar)\{([0-9]{1,20})\}|\(([0-9]{1,20})\)|((?:\\dot\{[0-9]\}|\\dot [0-9])(?:[0-9]{0,18}(?:\\dot\{[0-9]\}|\\dot [0-9]))?))"
)


def plain_notation(body: str) -> str:
    """Return an answer in the notation that the parser accepts."""
    if not body.isascii():
        body = re.sub(r"√\s*([0-9]+(?:\.[0-9]+)?|[A-Za-z])", r"\\sqrt{\1}", body)
        body = _ODD.sub(_in_ascii, body)
    for pattern, to in _REWRITTEN:
        body = pattern.sub(to, body)
    if "\\begin" not in body:
        body = _AMPERSAND.sub(", ", body)
    if body[:1] == "]" or body[-1:] == "[":
        # Brackets that point outwards exclude the ends: `]0,1]` is `(0,1]`.
        body = _ABROAD.sub(
            lambda found: f"{'(' if found[1] == ']' else '['}{found[2]}{')' if found[3] == '[' else ']'}",
            body,
        )
    body = _REPEATING.sub(_as_fraction, body).strip()
    # Rewrite entire answers of these kinds in their usual form.
    for pattern, to in _KINDS:
        found = pattern.fullmatch(body)
        if found is not None:
            body = found.expand(to) if isinstance(to, str) else to(found)
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


def _as_fraction(found: re.Match[str]) -> str:
    r"""Return a repeating decimal number as a fraction; for example, `0.1\overline{6}` becomes 15/90."""
    whole, digits = found[1], found[2]
    repeated = found[3] or found[4] or re.sub("[^0-9]", "", found[5])
    top = int((whole + digits + repeated) or 0) - int((whole + digits) or 0)
    return rf"\frac{{{top}}}{{{(10 ** len(repeated) - 1) * 10 ** len(digits)}}}"


# -------- Removes LaTeX that only affects appearance: sizes, fonts, thin spaces, redundant braces and environments
#
# This part works on characters only, in linear time, and preserves the meaning of a text.

FONTS = (
    "text|mathrm|textnormal|textrm|textbf|textit|mbox|mathbf|operatorname|textsf|texttt|textsl|textsc|textup|textmd|emph|hbox"
    "|mathsf|mathtt|mathit|mathnormal"
)
_WORDS = "textnormal|textrm|mbox|textsf|texttt|textsl|textsc|textup|textmd|emph|hbox|mathsf|mathtt|mathnormal"
_NAME_ENDS = r"(?![A-Za-z])"
_SIZES = "displaystyle|tiny|scriptsize|footnotesize|small|normalsize|large|Large|LARGE|huge|Huge|nolimits|limits|mathstrut|strut"
_DOLLAR = rf"\\(?:mathdollar|textdollar){_NAME_ENDS}|\\(?:{FONTS})\{{\s*(?:US)?\s*\\?\$\s*\}}|(?<![A-Za-z])US\s?\\\$|\{{\\\$\}}"
_SAME: dict[str, str | Callable[[re.Match[str]], str]] = {
    # Sizes and spaces; a space between a command and a following letter stays.
    rf"\\(?:{_SIZES}){_NAME_ENDS}\s*": "",
    r"\\(?:hspace|hskip|kern|mspace|vspace)\*?\s?(?:\{-?[0-9.]{1,6}\s?(?:em|ex|pt|mm|cm|mu|in)\}|[0-9.]{1,6}(?:em|ex|pt|mm|cm|mu))": " ",
    rf"\\(?:thinspace|enspace|enskip|medspace|thickspace|negthinspace|nobreakspace){_NAME_ENDS}\s*": " ",
    r"\\\\\s?\[-?[0-9.]{1,5}\s?(?:pt|ex|em|mm|cm)\]|\\cr(?![A-Za-z])": r"\\\\",
    r"(\\[A-Za-z]{1,20})(?:\\[,;:!]){1,4}(?=[A-Za-z])": r"\1 ",
    r"(?<![\^_A-Za-z\]}\\])\{\}": "",
    # Braces around a single sign, or around the digits of a number.
    r"(?<![\^_A-Za-z\]}])\{\s*(\\(?:times|cdot|pm|div|colon)|[-+.:=<>])\s*\}": r"\1 ",
    r"(?<=[0-9])\{?\.\}? (?=[0-9])": ".",
    r"(?<![\^_A-Za-z\]}0-9/])\{([0-9]{1,40})\}(?=\s*(?:_|\\[dtc]?frac))": r"\1",
    r"(?<=[0-9.])\s*\{(\\(?:[dtc]?frac\{[0-9]{1,20}\}\{[0-9]{1,20}\}|overline\s?\{[0-9]{1,20}\}))\}": r"\1",
    r"\\(overline|bar|sqrt|frac|dfrac|tfrac)\s+(?=[{\[])": r"\\\1",
    r"\\sqrt\[\s*\{?\s*2\s*\}?\s*\]": r"\\sqrt",
    r"\\sqrt\[\s*\{\s*([0-9]{1,3})\s*\}\s*\]": r"\\sqrt[\1]",
    r"\\sqrt(\[[0-9]{1,3}\])\s*([0-9A-Za-z])(?![0-9])": r"\\sqrt\1{\2}",
    rf"\\(?:left|right)?\s*\\([lr])brace{_NAME_ENDS}\s*": lambda found: r"\{" if found[1] == "l" else r"\}",
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
    # Symbols with several names.
    r"\\left\s*\.|\\right\s*\.": "",
    r"\\(overline|bar)\s*([0-9])(?![0-9])": r"\\\1{\2}",
    r"\$([0-9.,]{1,20})\$\s*\\?%": r"\1\\%",
    r"(?<!\\)\$\s*(and|or|,)\s*\$": r" \1 ",
    _DOLLAR: r"\\$",
    rf"\\textdegree{_NAME_ENDS}|\\(?:text|mathrm)\{{\s*(?:°|\\degree)\s*\}}": r"^\\circ",
    r"(?<=[0-9})])\s*\^\s*(?:\{\s*\\(?:text|mathrm)\{o\}\s*\}|\\(?:text|mathrm)\{o\}|\{\s*\{\s*\\circ\s*\}\s*\}|\{\s*\\circ\s*\})": r"^\\circ",
    r"\{\s*\^\s*\\circ\s*\}": r"^\\circ",
    r"(?:\\left)?\(\s*([0-9.]{1,12})\s*(?:\\right)?\)\s*\^\s*\\circ|\{([0-9.]{1,12})\}\s*\^\s*\\circ|\\(?:text|mathrm)\{([0-9.]{1,12})\}\s*\^\s*\\circ": (
        lambda found: next(part for part in found.groups() if part) + r"^\circ"
    ),
    rf"\\(?:lor|vee){_NAME_ENDS}": r"\\text{ or }",
    rf"\\(?:land|wedge){_NAME_ENDS}": r"\\text{ and }",
    r"\\middle\s?\|": "|",
    rf"\\(?:leqq|leqslant){_NAME_ENDS}": r"\\le ",
    rf"\\(?:geqq|geqslant){_NAME_ENDS}": r"\\ge ",
    r"\\begin\{[bp]?smallmatrix\}": r"\\begin{matrix}",
    r"\\end\{[bp]?smallmatrix\}": r"\\end{matrix}",
    r"&\s*(=|<|>|\\[lg]eq?(?![A-Za-z]))|(=|<|>|\\[lg]eq?(?![A-Za-z]))\s*&": lambda found: found[1] or found[2],
    # A base after a space, in braces or in another font.
    r"(?<=[0-9A-F)}])\s+_": "_",
    r"_\s*\{\s*([0-9]{1,2})\s*\}|_\s+([0-9])|_\{\s*\\(?:text|mathrm|mathbf)\{\s*([0-9]{1,2})\s*\}\s*\}": (
        lambda found: f"_{{{found[1] or found[2] or found[3]}}}"
    ),
    r"\\(?:text|mathrm|mathbf)\{([0-9A-F]{1,40})\}(?=_)": r"\1",
}  # fmt: skip
_SPELLED = [(re.compile(pattern), to) for pattern, to in _SAME.items()]
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


def _unadorned(text: str) -> str:
    """Return the text without LaTeX commands that only affect its appearance."""
    if not text.isascii():
        text = _SPACES.sub(" ", text).replace("–", "-")
        text = _HIGH_LOW.sub(
            lambda found: rf"\frac{{{found[1].translate(_DIGITS)}}}{{{found[2].translate(_DIGITS)}}}", text
        ).replace("⁄", "/")
        text = _ROOTS.sub(
            lambda found: rf"\sqrt[{'34'['∛∜'.index(found[1])]}]{{{found[2] or found[3]}}}", text
        )
    if not text.isalnum():
        for pattern, to in _SPELLED:
            text = pattern.sub(to, text)
    # The first `{a \\over b}` or `\\choose`, with any brackets in it; regular expressions cannot count brackets.
    found = _OVER.search(text)
    if found is not None:
        opening = _outer_brace(text, range(found.start() - 1, -1, -1), "}", "{")
        closing = _outer_brace(text, range(found.end(), len(text)), "{", "}")
        if opening is not None and closing is not None:
            top, bottom = text[opening + 1 : found.start()].strip(), text[found.end() : closing].strip()
            command = "frac" if found[1] == "over" else "binom"
            text = rf"{text[:opening]}\{command}{{{top}}}{{{bottom}}}{text[closing + 1 :]}"
    return text


def _outer_brace(text: str, places: range, deeper: str, higher: str) -> int | None:
    """Return the index of the brace that closes the enclosing group, or None if there is no such brace."""
    depth = 0
    for place in places:
        depth += (text[place] == deeper) - (text[place] == higher)
        if depth < 0:
            return place
    return None


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


# -------- The characters of a mathematical answer: delimiters, spacing, brackets, and formulas between words
#
# This part works in linear time on texts of at most `MAX_CHARACTERS`.

MAX_CHARACTERS = 400
MAX_WRAPPINGS = 4
"""Maximum number of nested marks that are removed around an answer, such as bold type around a box."""

_SPACING = re.compile(r"(?<!\\)\\(?:[,;:! ]|q?quad|displaystyle\b|left\b|right\b|limits\b)|(?<=\S)~(?=\S)")
_ARRAY = re.compile(
    r"[\[(]\s*\\begin\{array\}\{[clr| ]{1,64}\}((?:(?!\\begin).)*)\\end\{array\}\s*[\])]", re.DOTALL
)
_ONE_LETTER = re.compile(r"(?:(?<=\S)|(?<=[-+*/] ))\\(?:mathrm|mathbf|mathit|operatorname)\{([A-Za-z])\}")
_UPRIGHT = re.compile(r"(?<=[0-9)}])\\(?:mathrm|operatorname)\{([smghlLNJWV])\}$")
"""Regular expression for a one-letter unit in an upright font; variables are not set in an upright font."""
_WORD_BETWEEN = r"(?:\\(?:text|mathrm|textrm)\{\s*,?\s*(?:%s)\s*\}|(?<![A-Za-z\\])(?:%s)(?![a-z]))"
_AND = re.compile(r"[,;]?\s*" + _WORD_BETWEEN % ("and|or", "and|or") + r"[,;]?\s*")
_BOTH = re.compile(r"[,;]?\s*" + _WORD_BETWEEN % ("and", "and") + r"[,;]?\s*")
_OR = re.compile(r"[,;]?\s*" + _WORD_BETWEEN % ("or", "or") + r"[,;]?\s*")


def opened(text: str) -> str:
    """Return an answer without its delimiters and surrounding marks.

    Raises NotAnAnswer if the answer is empty and Unreadable if it is too long.
    """
    if len(text) > MAX_CHARACTERS:
        raise Unreadable(f"It has {len(text):,} characters; at most {MAX_CHARACTERS} are allowed.")
    body = tidy(text)
    if not body:
        raise NotAnAnswer("It is empty.")
    return body


def tidy(text: str) -> str:
    """Return an answer in normalised notation, without delimiters, surrounding marks, spacing commands and a final full stop."""
    body = _unadorned(text)
    for _ in range(MAX_WRAPPINGS):
        body = _unmarked(body)
    if "\\begin" not in body:
        # The text was escaped twice: `\\\\frac`.
        body = re.sub(r"\\{2}(?=[A-Za-z])", lambda _: "\\", body)
    body = joined(body)
    for opening, closing in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        size = len(opening) + len(closing)
        if len(body) > size and body.startswith(opening) and body.endswith(closing):
            inner = body[len(opening) : -len(closing)]
            # In `$5 or $6`, the dollar signs are not a pair of delimiters around an answer.
            if opening not in inner.replace("\\$", "") and not inner.endswith("\\"):
                body = _unmarked(inner)
                break
    # `11,\! 111`: the negative space joins the digits of one number.
    body = re.sub(r",\s*\\!\s*", ",", body)
    body = _SPACING.sub(lambda match: " " if match[0] in {"\\ ", "~"} else "", body)
    body = _ARRAY.sub(lambda match: rf"\begin{{pmatrix}}{match[1]}\end{{pmatrix}}", body)
    body = _ONE_LETTER.sub(r"\1", _UPRIGHT.sub(r"\\text{ \1}", body))
    body = re.sub(r"\s*\{,\s*\}", ",", body).replace("\\lbrace", "\\{").replace("\\rbrace", "\\}")
    return re.sub(r"(?<!\\)\\$", "", plain_notation(body)).strip()


def with_commas(body: str) -> str:
    """Return the answer with a comma in place of each `and` and `or` between values."""
    return _AND.sub(", ", body)


def split_word(body: str, word: Literal["and", "or"]) -> list[str]:
    """Return the parts of an answer that are separated by the given word (`and` or `or`)."""
    return [part.strip() for part in (_BOTH if word == "and" else _OR).split(body)]


_END = re.compile(
    r"(?:\\(?:[,;:! ]|q?quad)|[\s~])*+(?:(?<!\.)(?<![^\\],)[.,;])?+(?:\\(?:[,;:! ]|q?quad)|[\s~])*+$"
)
_MARKED = re.compile(
    r"\*\*(?P<bold>[^*]+)\*\*|`(?P<code>[^`]+)`|(?:\\(?:therefore|implies|Rightarrow|Longrightarrow|quad)(?![A-Za-z])|\\[,;: ]|=(?!=))(?P<rest>.+)"
)


def _unmarked(text: str) -> str:
    """Return an answer without surrounding marks such as bold type, a box, a leading `=` or a trailing comma."""
    body = _END.sub("", text.strip())
    # Remove an environment or braces around the entire answer, but keep the set `{1, 2}`.
    framed = _ENVIRONMENT.fullmatch(body)
    inside = framed["inside"].strip().removesuffix("\\\\").strip().removeprefix("&").strip() if framed else ""
    if inside and "\\\\" not in _INNER.sub("", inside):
        body = inside
    elif body[:1] == "{" and _outer_brace(body, range(1, len(body)), "{", "}") == len(body) - 1:
        body = body if _has_comma(body[1:-1]) else body[1:-1].strip()
    found = _MARKED.fullmatch(body)
    if found:
        return next(part for part in found.groups() if part).strip()
    boxed = boxes(body) if body.startswith("\\boxed{") else []
    whole = len(boxed) == 1 and boxed[0].end == len(body) and boxed[0].content
    return whole if whole and "\\boxed" not in whole else body


def split_top(text: str, mark: str) -> list[str]:
    """Split a string at each occurrence of `mark` outside all brackets and return the parts.

    Any closing bracket closes the last open bracket, as in `[0, 1)`. Raises Unreadable if the brackets are unbalanced.
    """
    return split_marked(text, re.compile(re.escape(mark)))[0]


def split_marked(text: str, mark: re.Pattern[str]) -> tuple[list[str], list[str]]:
    """Split a string like `split_top`, but at the matches of a regular expression; return the parts and the matched separators."""
    parts: list[str] = []
    marks: list[str] = []
    depth = start = place = 0
    while place < len(text):
        character = text[place]
        found = mark.match(text, place) if depth == 0 else None
        if found is not None:
            parts.append(text[start:place])
            marks.append(found[0])
            start = place = found.end()
            continue
        if text.startswith("\\begin{", place):
            depth += 1
        elif text.startswith("\\end{", place):
            depth -= 1
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        if depth < 0:
            raise Unreadable("Its brackets are unbalanced.")
        place += 1
    if depth:
        raise Unreadable("Its brackets are unbalanced.")
    return [*parts, text[start:]], marks
