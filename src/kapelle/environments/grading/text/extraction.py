"""Find the final answer in a text by explicit rules, which are tried in the given order.

A rule looks for its mark and has one of three results. If the mark is missing, the next rule is tried. If the mark gives an
answer, the search ends with this answer. If the mark is present but the answer is ambiguous, the text has no answer, and the
search also ends, so that another rule cannot accept an ambiguous answer.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from kapelle.environments.grading.verdict import SHOWN, Grade, no_answer
from kapelle.runtime.characters import CHAT_MARKS

# -------- Formulas and boxes in a text, some of which together form one answer: `$1$ and $2$`, `\boxed{1}, \boxed{2}`

FORMULA = re.compile(
    r"\$\$(.+?)\$\$|(?<!\\)\$(.+?)(?<!\\)\$|\\\(((?:(?!\\\().)+?)\\\)|\\\[((?:(?!\\\[).)+?)\\\]", re.DOTALL
)
r"""A regular expression for a formula: `$…$`, `$$…$$`, `\(…\)` or `\[…\]`. If `\(` or `\[` occurs twice before the closing
mark, the formula begins at the last occurrence, so that the search takes linear time."""

_SPACE = r"(?:\s|[,;~]|\\[,;: ]|\\q?quad)*"
_WORD = r"(?:(?P<word>and|or)|\\(?:text|mathrm)\{\s*,?\s*(?P<text>and|or)\s*\})?"
_BETWEEN = re.compile(_SPACE + _WORD + _SPACE)
"""Regular expression for the separators between the values of one answer."""
_EDGE = r"(?:\$|\\[()\[\]]|\s|[,;~]|\\[,;: ]|\\q?quad)*"
_BETWEEN_BOXES = re.compile(
    rf"{_EDGE}(?:\\text\{{[^{{}}]{{0,40}}\}}|(?:\s[a-z]{{2,15}}\s+)?(?:and|or))?{_EDGE}(?:[A-Za-z](?:_\{{?[0-9]\}}?)?\s*=\s*)?"
)
"""Regular expression for the separators between the boxes of one answer."""
_UNIT_BEHIND = re.compile(r"\s+([A-Za-z]{1,20}(?: [A-Za-z]{1,20}){0,2})\.?\s*")
_CURRENCY = re.compile(r"(?<![\\$0-9A-Za-z{(=])\$(?=[0-9][0-9,]*(?:\.[0-9]+)?[.,;]?\s+[A-Za-z]{2})")


def joined(text: str) -> str:
    """Join the formulas of one answer, and a unit after them, into one formula.

    Examples are `$1$ and $2$` and `$5$ cm`. A string that is not of this form is returned unchanged.
    """
    found = list(FORMULA.finditer(text))
    if not found or found[0].start() > 0 or (len(found) == 1 and found[0].end() == len(text)):
        return text
    together = _together(text, found)
    behind = text[found[-1].end() :].strip(",;")
    unit = _UNIT_BEHIND.fullmatch(behind)
    if together is None or (behind.strip(". ") and unit is None):
        return text
    return together + (f"\\text{{ {unit[1]}}}" if unit else "")


def _together(text: str, found: list[re.Match[str]]) -> str | None:
    """Return the formulas as one list, or None if anything other than a comma, `and` or `or` separates them."""
    inner = [next(part for part in match.groups() if part is not None).strip(" .,;") for match in found]
    pieces = [inner[0]]
    for before, after, formula in zip(found[:-1], found[1:], inner[1:], strict=True):
        between = _BETWEEN.fullmatch(text, before.end(), after.start())
        if between is None:
            return None
        word = between["word"] or between["text"]
        pieces += [f" {word} " if word else ", ", formula]
    return "".join(pieces)


def last_formula(text: str) -> tuple[str, int] | None:
    """Return the last formula of a text and the position of its end, or None if the text has no formula.

    The formula is joined with preceding formulas of the same list.
    """
    text = without_currencies(text)
    found = list(FORMULA.finditer(text))
    if not found:
        return None
    first = len(found) - 1
    while first and _BETWEEN.fullmatch(text, found[first - 1].end(), found[first].start()):
        first -= 1
    together = _together(text, found[first:])
    assert together is not None, "the separators were checked"
    return together, found[-1].end()


def without_currencies(text: str) -> str:
    """Replace the `$` of prices with a space, because this `$` does not open a formula."""
    return _CURRENCY.sub(" ", text)


@dataclass(frozen=True, slots=True)
class Box:
    r"""A box in a text: `\boxed{…}`, `\fbox{…}` or `\boxed7`."""

    content: str | None
    """The content of the box, or None if the box is not closed."""
    start: int
    end: int


_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|([0-9A-Za-z])(?!\w|[.,][0-9]))")


def boxes(text: str) -> list[Box]:
    """Return the outermost boxes of a text in order; a box that is not closed comes last."""
    found: list[Box] = []
    place = 0
    while opening := _BOX.search(text, place):
        depth, place = int(opening[1] is None), opening.end()
        opened = opening.start(1) if opening[1] else place
        while depth and place < len(text):
            # An escaped brace belongs to the answer.
            if text[place] == "\\":
                place += 1
            elif text[place] == "{":
                depth += 1
            elif text[place] == "}":
                depth -= 1
            place += 1
        inside = opening[1] or text[opened : place - 1].strip()
        found.append(Box(inside if depth == 0 else None, opening.start(), place))
    return found


ExtractionRule = Literal["hash", "last_box", "first_box", "only_box", "tag", "last_number", "prose", "whole"]
"""The name of a rule that extracts the final answer. `hash` takes the text after `####` on the same line; if `####` occurs
several times, all contents must agree. `last_box` and `first_box` take the content of the last or the first `\\boxed{…}`.
`only_box` takes the content of every box; all boxes must agree. `tag` takes the content of `<answer>…</answer>`; if there
are several such tags, all contents must agree. `last_number` takes the last number of the text. `prose` takes the last
formula or number after `answer is` if this phrase follows the last box. Otherwise `prose` takes the last box, or the last
formula or number of a text without a box. `whole` takes the entire text. Boxes and formulas that are separated by a comma,
`and` or `or` form one answer."""

MAX_TEXT = 200_000
"""Maximum number of characters in a text that is searched for an answer."""

MAX_NESTED = 4
"""Maximum depth of nested boxes."""
MAX_MARKS = 50
"""Maximum number of marked answers in a text. A text with more marked answers is considered a guess and has no answer."""


_MARKS: Mapping[ExtractionRule, str] = {
    "hash": "#### {}",
    "last_box": "\\boxed{{{}}}",
    "first_box": "\\boxed{{{}}}",
    "only_box": "\\boxed{{{}}}",
    "tag": "<answer>{}</answer>",
}


def marked(answer: str, rule: ExtractionRule) -> str:
    """Return the answer with the mark of the rule added, if the rule uses a mark."""
    return _MARKS.get(rule, "{}").format(answer)


@dataclass(frozen=True, slots=True)
class Extraction:
    """The final answer of a text, or the reason why the text has none."""

    text: str | None
    problem: str = ""


def extract(text: str, rules: Sequence[ExtractionRule]) -> Extraction:
    """Return the final answer of a text, found by the first rule whose mark occurs in the text.

    Only the part of the text that `said` returns is searched. Every rule except `whole` also ignores code fences and quoted
    lines (`> …`).
    """
    spoken = said(text)
    if spoken.text is None:
        return spoken
    for rule in rules:
        found = _RULES[rule](spoken.text)
        if found is not None:
            return found
    return Extraction(None, f"The text contains no answer in the required form ({', '.join(rules)}).")


def said(text: str) -> Extraction:
    """Return the part of a model's turn that other participants read, or the reason why this part cannot be determined.

    The function removes `<think>…</think>` and everything after an end-of-turn token, so that a model cannot write the next
    turn of the user. Characters that are displayed differently from their meaning are replaced (zero-width characters, digits
    of other scripts, look-alike minus signs) or rejected (marks of text direction, NUL, lone surrogates).
    """
    if len(text) > MAX_TEXT:
        return Extraction(None, f"The text has {len(text):,} characters; at most {MAX_TEXT:,} are read.")
    plain = clean(text)
    if plain is None:
        return Extraction(None, "The text contains characters that change how it is displayed.")
    return Extraction(own_turn(plain))


def own_turn(text: str) -> str:
    """Return a model's turn without its thinking and without any text after the end of the turn, otherwise unchanged."""
    spoken = CHAT_MARKS.split(text, maxsplit=1)[0]
    return spoken.rpartition("</think>")[2].partition("<think>")[0]


_MINUS = dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2212\u02d7\ufe63\uff0d\u2796"), "-")
# Embeddings, overrides and isolates of text direction show readers a different order than the grader sees.
_DIRECTION = re.compile("[\u202a-\u202e\u2066-\u2069\u200e\u200f\u061c\x00\ud800-\udfff]")


def clean(text: str) -> str | None:
    """Return a string as it is displayed, with ASCII digits and minus signs, or None if its display is ambiguous."""
    if _DIRECTION.search(text):
        return None
    if text.isascii():
        return text
    plain = []
    for character in text.translate(_MINUS):
        category = "" if character.isascii() else unicodedata.category(character)
        # Format characters are invisible.
        if category != "Cf":
            plain.append(str(unicodedata.decimal(character)) if category == "Nd" else character)
    return "".join(plain)


_NOT_OWN = re.compile(r"^[ \t]*```.*?(?:^[ \t]*```|\Z)|^[ \t]*>[^\n]*$", re.DOTALL | re.MULTILINE)


def _own(text: str) -> str:
    """Return the text without code fences and quoted lines."""
    return _NOT_OWN.sub("", text)


# Asterisks or underscores around words. In a power such as `2**3`, a number or bracket is next to them instead.
_EMPHASIS = re.compile(
    r"(?<![\w)\]}*])(?P<mark>\*\*\*|\*\*|\*|___|__)(?=[^\s*_])(?P<words>[^*\n]*?)(?<=[^\s*_])(?P=mark)(?![\w(\[{*])"
)


_STRUCTURE = re.compile(
    r"^#{1,6}[ \t]+|^[ \t]*[-*+][ \t]+(?=[A-Za-z])|</?(?:b|strong|i|em)>|~~[^~\n]+~~", re.MULTILINE
)


def _unemphasised(text: str) -> str:
    """Return the text without Markdown marks for headings, lists and emphasis, and without struck-out words."""
    return _STRUCTURE.sub("", _EMPHASIS.sub(r"\g<words>", text))


_HASH = re.compile(r"#{4,}((?:(?!####)[^\n])*)")


def _hash(text: str) -> Extraction | None:
    marked = [content.strip() for content in _HASH.findall(_own(text))]
    if not marked:
        return None
    if not marked[-1]:
        return Extraction(None, "Nothing follows the last `####`.")
    if len(set(marked)) > 1:
        return Extraction(None, f"{len(marked)} answers follow `####`, and they differ.")
    return Extraction(marked[0])


_TAG = re.compile(r"</?answer>")


def _tag(text: str) -> Extraction | None:
    own = _own(text)
    tags = list(_TAG.finditer(own))
    if not tags:
        return None
    in_turns = all((tag[0] == "<answer>") == (place % 2 == 0) for place, tag in enumerate(tags))
    if len(tags) % 2 or not in_turns or len(tags) > 2 * MAX_MARKS:
        return Extraction(None, "The answer tags do not alternate between opening and closing.")
    pairs = zip(tags[::2], tags[1::2], strict=True)
    contents = {own[opening.end() : closing.start()].strip() for opening, closing in pairs}
    if len(contents) > 1:
        return Extraction(None, f"The {len(tags) // 2} answer tags have different contents.")
    content = contents.pop()
    return Extraction(content) if content else Extraction(None, "The answer tag is empty.")


def _last_box(text: str) -> Extraction | None:
    own = _own(text)
    found = boxes(own)
    if not found:
        return None
    # Boxes that belong to the last box are joined with it: `\\boxed{1}` and `\\boxed{2}`.
    first = len(found) - 1
    while first and _BETWEEN_BOXES.fullmatch(own, found[first - 1].end, found[first].start):
        first -= 1
    contents = dict.fromkeys(box.content for box in found[first:])
    each = [_box(content, len(found)) for content in contents]
    wrong = next((box for box in each if box.text is None), None)
    return wrong or Extraction(", ".join(box.text or "" for box in each))


def _first_box(text: str, *, only: bool = False) -> Extraction | None:
    """Return the content of the first box; with `only`, the extraction fails unless all boxes have the same content."""
    contents = [box.content for box in boxes(_own(text))]
    if only and len(set(contents)) > 1:
        return Extraction(None, f"The {len(contents)} boxes have different contents.")
    return _box(contents[0], len(contents)) if contents else None


def _box(content: str | None, count: int) -> Extraction:
    if count > MAX_MARKS:
        return Extraction(None, f"The text contains {count} boxes; at most {MAX_MARKS} are allowed.")
    if content is None:
        return Extraction(None, "The box is never closed.")
    if not content:
        return Extraction(None, "The box is empty.")
    for _ in range(MAX_NESTED):
        inner = boxes(content)
        if not inner or (inner[0].start, inner[0].end) != (0, len(content)) or not inner[0].content:
            break
        content = inner[0].content  # a box around a box
    if boxes(content):
        return Extraction(None, "The box contains another box.")
    return Extraction(content)


# -------- The last number of a text, read as a person would read it: `1 234`, `1 1/2`, `2.5 million`, `50 percent`
#
# If the number is part of an expression, a time, a date or a name, the text has no answer.

GROUPS = r"[1-9][0-9]{0,2}(?P<gap>[ ,'’_~\u00a0\u2007\u2009\u202f]|\\[,;:! ]|\{(?:,|\\,)\}|,\\!)[0-9]{3}(?:(?P=gap)[0-9]{3})*(?![0-9])"
"""Regular expression for an integer with thousands separators."""
SCALES = {
    "hundred": 10**2,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
    "dozen": 12,
}
"""Mapping from words that multiply the preceding number to their values."""
HALVES = "¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"
_FRACTION = r"\\[dt]?frac(?:\{-?[0-9]+\}\{[0-9]+\}|[0-9]{2})"
_LITERAL = re.compile(
    rf"(?:(?<![0-9A-Za-z)\]}}])-\s?)?(?:\\?[$€£])?-?(?:(?:[0-9]+\s?)?(?:{_FRACTION}|[{HALVES}])|[0-9]+[ \t]+[0-9]+/[0-9]+"
    rf"|(?:{GROUPS}(?:\.[0-9]+)?|[0-9]+(?:[.,][0-9]+)*)(?:[eE][-+]?[0-9]+\b|/[0-9]+(?:[.,][0-9]+)*)?"
    rf"|(?<![0-9A-Za-z.])\.[0-9]+)(?:\s?(?:\\?%|(?:{'|'.join(SCALES)}|percent(?:age)?|per cent|pct)\b))?"
)
_LENGTH_SQUARED = re.compile(
    r"(?<![A-Za-z])((?:[cmk]?m|ft|in|inches|feet|yd|yards|miles|meters|metres|units)\}?) ?(?:\^\{?[23]\}?|[²³])(?![0-9A-Za-z])"
)
_PART_BEFORE = re.compile(
    r"(?:(?:[*/×·÷⋅√∛∜±^_]|\\(?!boxed|fbox|text|mathrm|mathbf)[A-Za-z]+)\{?\s*"  # `2^`, `\sqrt{`
    r"|(?:[0-9)}\]%$]|(?<![A-Za-z])[A-Za-z])\s*[-+]\s*|[0-9]\s*x\s*"  # `3 -`, `x +`, `3 x`
    r"|[0-9]\s+(?:plus|minus|times|over|mod|choose|of|out\s+of|(?:divided\s+|multiplied\s+)?by)\s+|\b(?:minus|negative)\s+"
    r"|(?:[0-9][:—~'’_]|[0-9]\.\.+|[0-9]\\[,;:! ]|[0-9A-Za-z]\(|[A-Za-z])(?<!USD)(?<!EUR)(?<!Rs))\Z",  # `3:`, `f(`, `x`
    re.IGNORECASE,
)
_OPERAND_BEFORE = re.compile(r"(?:[0-9)%$]|(?<![A-Za-z])[A-Za-z]) *\Z")
_AND_BEFORE = re.compile(r"[0-9]\s+and\s+\Z")
_PART_AFTER = re.compile(
    r"\s*(?:[*×·÷⋅√π+]|/(?![a-z]{2,}\b)|\^(?!\{?\\(?:circ|degree))|\\(?:pi|sqrt|times|cdot|div|pm)\b|(?:\\text\{\s*)?cents\b)"
    r"|[ \t]*(?:-[ \t]*(?:$|[A-Za-z(\\](?![A-Za-z]))|=[ \t]*(?:$|[?\n]))"  # `12 -`, `12 =`
    r"|\s*\\text\{\s*(?:hundred|thousand|[mbtr]+illion|dozen)|[ \t]and (?:a|one|two|three)[ -](?:hal|thir|quarter|fourth|fif)"
    r"|[:'’_][0-9]|‰|[bm]n\b|\((?=[-+]?\s?(?:[0-9]|[A-Za-z](?![A-Za-z])))"
    r"|[ \t]?[xyz](?![A-Za-z])|(?![msghlLVWNJCFdpA])[A-Za-z](?![A-Za-z])|[ \t]+(?:plus|minus|divided|multiplied)\b"
)


def _last_number(text: str) -> Extraction | None:
    text = _LENGTH_SQUARED.sub(r"\1", _unemphasised(_own(text)))
    newest = deque(_LITERAL.finditer(text), maxlen=1)
    if not newest:
        return None
    last = newest[0]
    before, after = text[max(0, last.start() - 24) : last.start()], text[last.end() :]
    # Superscripts and ⑤ are numbers too, and their effect on this number is unknown.
    odd = any(unicodedata.category(character) == "No" for character in before[-1:] + after)
    part = _OPERAND_BEFORE if last[0].startswith("-") else _AND_BEFORE if "/" in last[0] else None
    named = _PART_BEFORE.search(before) and last[0][0] not in "\\$€£"
    if odd or named or (part and part.search(before)) or _PART_AFTER.match(after):
        return Extraction(None, f"The last number, '{last[0].strip()}', is part of an expression.")
    return Extraction(last[0].strip())


_ALL_FORMULA = re.compile(r"\$(?:[^$\\]|\\(?!boxed).)+\$", re.DOTALL)
_ANSWER = re.compile(r"\b(?:final\s+)?answer\b\**\s*(?P<is>is\b|:|=)?", re.IGNORECASE)
_LABELLED = re.compile(r"(?<![\\{A-Za-z])[A-Za-z]{2,}\s*[,:=\n]")
_SENTENCE = re.compile(r"\$|\\[(\[]|(?<![\\{A-Za-z])[A-Za-z]{2,}\s+[A-Za-z]{2,}")


def _prose(text: str) -> Extraction | None:
    own = _unemphasised(_own(text)).strip()
    if _ALL_FORMULA.fullmatch(own):
        return Extraction(own)
    marked = _last_box(own)
    said = deque(_ANSWER.finditer(own), maxlen=1)
    if said and said[0]["is"] and said[0].start() > max((box.start for box in boxes(own)), default=-1):
        behind = own[said[0].end() :]
        # The formula right after `answer is` counts if the box agrees or the closing phrase of Minerva's answers follows.
        formula = _AT_ONCE.match(behind)
        content = (formula[1] or formula[2]).strip() if formula else ""
        boxed = marked.text if marked is not None else None
        same = boxed is not None and _UNSEEN.sub("", boxed) == _UNSEEN.sub("", content)
        if formula and (same or _HOPED.match(behind, formula.end())):
            return Extraction(content)
        concluded = _conclusion(behind)
        if concluded is not None:
            return concluded
    if marked is not None or not own:
        return marked
    if _SENTENCE.search(own):
        return _conclusion(own)
    return (_conclusion(own) if _LABELLED.search(own) else None) or Extraction(own)


_AT_ONCE = re.compile(r"\s*:?\s*(?:\$([^$]{1,400})\$|\\\(((?:(?!\\\().){1,400}?)\\\))")
_HOPED = re.compile(r"[.\s]*I hope it is correct")
_UNSEEN = re.compile(r"[\s$\\!.]")


def _conclusion(text: str) -> Extraction | None:
    """Return the last formula of a text, or the last number if it follows this formula."""
    formula = last_formula(text)
    number = _last_number(without_currencies(text)[formula[1] :] if formula else text)
    if number is not None and (number.text is not None or formula is None):
        return number
    return Extraction(formula[0]) if formula else None


def _whole(text: str) -> Extraction | None:
    content = text.strip()
    return Extraction(content) if content else None


_RULES: Mapping[ExtractionRule, Callable[[str], Extraction | None]] = {
    "hash": _hash,
    "last_box": _last_box,
    "first_box": _first_box,
    "only_box": functools.partial(_first_box, only=True),
    "tag": _tag,
    "last_number": _last_number,
    "prose": _prose,
    "whole": _whole,
}


# -------- What the last sentence of a text states: `B` for `The answer is **B**.`

_WRAPPED = re.compile(r"\\(?:text\w{0,8}|math\w{1,8}|mbox|boxed|fbox)\s*\{([^{}]*)\}")
_LEAD = re.compile(
    r"(?:\b(?:is|are|be|choose|pick|select|option|choice|answer)\b|'s\b|:)[\s:=]*", re.IGNORECASE
)
_AGREES = re.compile(
    r"(.+?)[,\s]+(?:is|as)\s+(?:the\s+|my\s+)?(?:correct|right|best|final|answer|choice)(?:\s+(?:answer|option|choice))?",
    re.IGNORECASE | re.DOTALL,
)
_DENIES = re.compile(
    r"n't\b|\b(?:not|never|neither|nor|no|wrong|incorrect|false|except|unlikely|cannot)\b", re.IGNORECASE
)


MAX_STATEMENT = 400
"""Maximum number of characters of the last line that are read."""
_AROUND = "$ \t\n.*`\"'"


def statements(text: str) -> list[str]:
    """Return the parts of a text that may be its answer.

    These are the whole text, its last line, and the ends of this line after a word such as `is` or a colon. In a line such as
    `B is the correct answer`, only the part before `is` is used.
    """
    plain = _EMPHASIS.sub(r"\g<words>", _WRAPPED.sub(r"\1", text)).strip(_AROUND)
    line = plain.rpartition("\n")[2][-MAX_STATEMENT:]
    agreed = _AGREES.fullmatch(line)
    stated = agreed[1] if agreed else line
    places = [0, *(lead.end() for lead in _LEAD.finditer(stated))]
    # A denial in an earlier sentence may refer to something else, so it is ignored.
    return [plain] + [
        stated[place:].strip(_AROUND)
        for place in places
        if not _DENIES.search((stated[:place] + line[len(stated) :]).rpartition(". ")[2])
    ]


# -------- From a text to its answer, or to the verdict that it has no answer

T = TypeVar("T")


def read_answer(
    text: str, rules: Sequence[ExtractionRule], read: Callable[[str], T | None], otherwise: str
) -> T | Grade:
    """Return the final answer of a text, parsed by `read`, or the verdict `no_answer` if there is no valid answer.

    `read` must return None for an invalid answer. The explanation of the verdict then describes the answer with the string
    `otherwise`.
    """
    found = extract(text, rules)
    if found.text is None:
        return no_answer(found.problem)
    answer = read(found.text)
    return no_answer(f"'{found.text[:SHOWN]}' is {otherwise}.") if answer is None else answer


def answer_in(text: str, rules: Sequence[ExtractionRule], read: Callable[[str], T | None]) -> T | None:
    """Return the final answer of a text, parsed by `read`, or None if there is no answer."""
    found = extract(text, rules).text
    return None if found is None else read(found)
