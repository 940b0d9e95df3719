"""Score an argument by rules for evidence, structure and consistency.

Each score is a multiple of 1/4 and comes with an explanation. The rules judge the form of an argument, not its truth: a
well-structured false argument can satisfy them, and a model that is trained only on these rules learns only the form. A
sentence counts for only one kind of evidence, and a repeated sentence is ignored, so that repeated keywords do not increase the
score.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from kapelle.environments.grading.text.extraction import said


@dataclass(frozen=True, slots=True)
class ArgumentScore:
    """The scores of the texts of one side of a debate."""

    evidence: float
    """Fraction of the kinds of evidence in `EVIDENCE` that occur in the texts, each in a separate sentence. All scores lie in
    [0, 1]."""
    structure: float
    """Fraction of the four signs of structure that are present: an opening on the topic, moderate sentence length, ordered
    points and a conclusion."""
    consistency: float
    """Fraction of the four signs of consistency that are present."""
    explanations: Mapping[str, str]
    """Mapping from the name of each score to an explanation that lists the present and the missing signs."""

    @property
    def total(self) -> float:
        """The mean of the three scores."""
        return fmean((self.evidence, self.structure, self.consistency))


_SENTENCE = re.compile(r"[^.!?\n]+[.!?]?")
_WORD = re.compile(r"[a-z][a-z'-]+")
_SHORTEST = 6
"""Minimum number of words in a sentence that counts as evidence."""

EVIDENCE: Mapping[str, re.Pattern[str]] = {
    "a figure": re.compile(
        r"\b\d+(?:[.,]\d+)?\s*(?:%|percent|per cent|years?|people|million|billion|of \d)|\b(?:19|20)\d\d\b"
    ),
    "a source": re.compile(
        r"\b(?:according to|stud(?:y|ies)|survey|report(?:s|ed)?|research(?:ers)?|data (?:from|of))\b"
    ),
    "an example": re.compile(r"\b(?:for example|for instance|such as|consider the case|as in)\b"),
    "a cause": re.compile(r"\b(?:because|therefore|as a result|leads? to|causes?|hence|consequently)\b"),
}
_ORDER = re.compile(r"\b(?:first(?:ly)?|second(?:ly)?|third(?:ly)?|next|moreover|furthermore|finally)\b")
_CLOSE = re.compile(r"\b(?:in conclusion|to conclude|in sum(?:mary)?|overall|for these reasons|therefore)\b")
_CONCEDES = re.compile(
    r"\b(?:my opponents? (?:is|are) right|i (?:fully )?agree with (?:my|the) opponents?|i was wrong|i concede"
    r"|i change my mind|i have no argument)\b"
)


def score_argument(
    texts: Sequence[str], topic: str, side: str, rivals: Sequence[str], others: Sequence[str]
) -> ArgumentScore:
    """Score the texts of one side of a debate.

    `rivals` are the texts of the opposing sides, and `others` are the names of these sides.
    """
    own = [(spoken.text or "").strip() for spoken in map(said, texts)]
    sentences = _sentences(own)
    distinct = list(dict.fromkeys(_plain(sentence) for sentence in sentences))
    if not distinct:
        nothing = "The side gave no argument."
        return ArgumentScore(0.0, 0.0, 0.0, dict.fromkeys(("evidence", "structure", "consistency"), nothing))
    # Each sentence counts for the first matching kind that no earlier sentence has shown.
    evidence = dict.fromkeys(EVIDENCE, False)
    for sentence in distinct:
        if len(sentence.split()) >= _SHORTEST:
            shown = (k for k, pattern in EVIDENCE.items() if not evidence[k] and pattern.search(sentence))
            if kind := next(shown, None):
                evidence[kind] = True
    words = fmean(len(sentence.split()) for sentence in distinct)
    about, last = content_words(topic), _sentences([own[-1]])
    structure = {
        "opens with the topic or the side": bool(content_words(distinct[0]) & about)
        or side.casefold() in distinct[0].split(),
        "3 to 40 sentences of 4 to 40 words on average": 3 <= len(distinct) <= 40 and 4 <= words <= 40,
        "orders its points": len({match for sentence in distinct for match in _ORDER.findall(sentence)}) >= 2,
        "closes": bool(last) and _CLOSE.search(_plain(last[-1])) is not None,
    }
    about |= content_words(distinct[0])
    named = "|".join(re.escape(name.casefold()) for name in others)
    turned = re.compile(
        rf"\b(?:i|we) (?:argue|speak|stand|am|are) (?:for |on )?(?:the )?(?:side of )?(?:{named})\b"
    )
    new_messages = content_words(" ".join(rivals)) - about
    consistency = {
        "stays with the topic": fmean(bool(content_words(sentence) & about) for sentence in distinct)
        >= 1 / 3,
        "repeats no sentence": len(distinct) == len(sentences),
        "keeps its side": not any(_CONCEDES.search(s) or (others and turned.search(s)) for s in distinct),
        "answers the other side": not new_messages
        or len(new_messages & content_words(" ".join(distinct))) >= 2,
    }
    explanations = {}
    for name, marks in (("evidence", evidence), ("structure", structure), ("consistency", consistency)):
        has = ", ".join(mark for mark, there in marks.items() if there)
        lacks = ", ".join(mark for mark, there in marks.items() if not there)
        explanations[name] = f"has: {has or 'nothing'}; lacks: {lacks or 'nothing'}"
    shares = [sum(marks.values()) / 4 for marks in (evidence, structure, consistency)]
    return ArgumentScore(shares[0], shares[1], shares[2], explanations)


_PLAIN_WORDS = (
    "the and are but for from has have that this with will would should could their them they there what when "
    "which who whom whose why how not can may more most much many than then its into our your you was were been "
    "being also because while does did about over under such very only one two"
)
_PLAIN = frozenset(_PLAIN_WORDS.split())


def content_words(text: str) -> frozenset[str]:
    """Return the set of meaningful words of a text in lower case, without common words such as `the`."""
    return frozenset(w for w in _WORD.findall(text.casefold()) if len(w) > 2 and w not in _PLAIN)


def _sentences(texts: Sequence[str]) -> list[str]:
    return [s.strip() for text in texts for s in _SENTENCE.findall(text) if _WORD.search(s.casefold())]


def _plain(sentence: str) -> str:
    return " ".join(re.sub(r"[^\w%'\s.,-]", " ", sentence.casefold()).strip(" .!?").split())
