"""Similarity of a text to a reference (ROUGE, chrF and BLEU), and a penalty for a wrong length.

The packages `rouge-score` (ROUGE, 2004, in Google's implementation) and `sacrebleu` (chrF, 2015; BLEU, 2002) compute the
measures of one text against one or more references, scaled to [0, 1]. They compare words and letters, not meaning. The BLEU
or chrF of a corpus differs from the mean over its sentences.

`rouge_l`, `rouge_1`, `rouge_2`, `rouge_lsum`, `chrf` and `bleu` are reward functions: they take `completion` and the row's
column `reference`.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from kapelle.errors import AbsentPackage, ConfigError
from kapelle.settings.base import Settings

Metric = Literal["rouge1", "rouge2", "rougeL", "rougeLsum", "chrf", "chrf++", "bleu"]
"""`rouge1`, `rouge2`: words and pairs of words; `rougeL`: the longest common subsequence of words, `rougeLsum` line by line. All
ROUGE metrics are F1 scores, optionally after Porter stemming. `chrf`: letters, F2; `chrf++`: words too. `bleu`: up to four
consecutive words, smoothed (`exp`), with an order no higher than the text allows."""
BleuTokeniser = Literal["13a", "intl", "char", "zh", "none"]
"""Tokenisation for BLEU: `13a` suits most languages, `intl` follows Unicode, `char` and `zh` suit text without spaces, `none`
splits at spaces."""
MAX_WORDS = 1_000
"""Maximum number of words in an answer; a longer answer scores 0, because the time for ROUGE-L grows with the product of both
lengths."""
MAX_CHARACTERS = 20_000


def check_packages(metrics: Mapping[Metric, float]) -> None:
    """Raise ConfigError, which names the extra to install, if a metric's package is missing."""
    for metric in metrics:
        package = "rouge_score" if metric.startswith("rouge") else "sacrebleu"
        if find_spec(package) is None:
            raise AbsentPackage(
                f"The metric `{metric}` needs an optional package. Install it with: pip install 'kapelle[text]'."
            )


def similarity(
    metric: Metric,
    text: str,
    references: Sequence[str],
    *,
    stem: bool = False,
    tokeniser: BleuTokeniser = "13a",
) -> float:
    """Return the similarity of a text to the nearest reference (BLEU: to all references together), in [0, 1].

    An empty or oversized text scores 0. `stem` applies to ROUGE (only English), `tokeniser` to BLEU.
    """
    if not text.strip() or too_long(text):
        return 0.0
    if metric.startswith("rouge"):
        scored = _rouge(metric, stem).score_multi(list(references), text)
        return float(scored[metric].fmeasure)
    return min(1.0, float(_bleu(metric, tokeniser).sentence_score(text, list(references)).score) / 100)


def too_long(text: str) -> bool:
    """Return whether a text is too long to be scored."""
    return len(text) > MAX_CHARACTERS or len(text.split()) > MAX_WORDS


@functools.lru_cache(maxsize=16)
def _rouge(metric: Metric, stem: bool) -> Any:
    check_packages({metric: 1.0})
    from rouge_score.rouge_scorer import RougeScorer

    # The package's own tokeniser keeps only a to z and digits, which is sufficient for the English stemmer.
    return RougeScorer([metric], use_stemmer=True) if stem else RougeScorer([metric], tokenizer=_Words())


class _Words:
    """Splits text in any alphabet into words for ROUGE."""

    def tokenize(self, text: str) -> list[str]:
        """Return the words of a text in lower case."""
        return _WORD.findall(text.lower())


_WORD = re.compile(r"[^\W_]+")


@functools.lru_cache(maxsize=16)
def _bleu(metric: Metric, tokeniser: BleuTokeniser) -> Any:
    check_packages({metric: 1.0})
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    if metric == "bleu":
        return BLEU(tokenize=tokeniser, effective_order=True)
    return CHRF(word_order=2 if metric == "chrf++" else 0)


# -------- Reward functions, for `kapelle.train` and the environment `rewarded`


def _rewarding(metric: Metric) -> Callable[[str, str | list[str]], float]:
    def reward(completion: str, reference: str | list[str]) -> float:
        return similarity(metric, completion, [reference] if isinstance(reference, str) else reference)

    reward.__name__ = reward.__qualname__ = re.sub("([a-z])([0-9L])", r"\1_\2", metric).lower()
    reward.__doc__ = f"Return {metric} of a completion against the row's `reference`, a string or a list of strings, in [0, 1]."
    return reward


rouge_1 = _rewarding("rouge1")
rouge_2 = _rewarding("rouge2")
rouge_l = _rewarding("rougeL")
rouge_lsum = _rewarding("rougeLsum")
chrf = _rewarding("chrf")
bleu = _rewarding("bleu")


# -------- The penalty for missing the required length


class Length(Settings):
    """The required length of a text, and the penalty for missing it.

    A text that misses the length by a fraction d (10 words beyond 40 are d = 0.25) keeps 1 − min(1, penalty·d) of its score.
    """

    target: int | None = Field(default=None, ge=1)
    """Target length; a deviation of up to `tolerance` is not penalised."""
    tolerance: float = Field(default=0.1, ge=0.0)
    """Deviation without penalty, as a fraction of the target."""
    most: int | None = Field(default=None, ge=1)
    """Greatest length without penalty."""
    least: int | None = Field(default=None, ge=1)
    """Smallest length without penalty."""
    unit: Literal["words", "characters", "tokens"] = "words"
    """Unit of length: words separated by spaces, characters, or tokens of `tokeniser`."""
    tokeniser: str | None = None
    """For `unit: tokens`: the folder of a model with `tokenizer.json`, or that file itself."""
    penalty: float = Field(default=1.0, gt=0.0)
    """Factor of the penalty: the lost fraction of the score is `penalty` times the fraction by which the length is missed. Large
    values make the length a hard limit."""

    @model_validator(mode="after")
    def _says_something(self) -> Length:
        if self.target is None and self.most is None and self.least is None:
            raise ValueError("`length` is empty. Set `target`, `most` or `least`")
        if self.target is not None and (self.most is not None or self.least is not None):
            raise ValueError(
                "`length` sets both a `target` and a limit. Set `target` with its `tolerance`, or set `least` and `most`"
            )
        if self.least is not None and self.most is not None and self.least > self.most:
            raise ValueError(f"`length.least: {self.least}` is greater than `length.most: {self.most}`")
        if (self.unit == "tokens") != (self.tokeniser is not None):
            raise ValueError(
                "`length.unit: tokens` requires `tokeniser`, the folder of a model; omit it for the other units"
            )
        return self

    def check(self) -> None:
        """Raise ConfigError if the tokeniser cannot be read."""
        if self.tokeniser is not None:
            _tokeniser(self.tokeniser)

    def count(self, text: str) -> int:
        """Return the length of a text in `unit`."""
        if self.unit == "words":
            return len(text.split())
        if self.unit == "characters":
            return len(text.strip())
        assert self.tokeniser is not None, "the validator requires it"
        return len(_tokeniser(self.tokeniser).encode(text.strip(), add_special_tokens=False).ids)

    def missed(self, count: int) -> float:
        """Return the fraction by which a text misses the length; 0 within the limits."""
        low, high = float(self.least or 0), (math.inf if self.most is None else float(self.most))
        if self.target is not None:
            low, high = self.target * (1 - self.tolerance), self.target * (1 + self.tolerance)
        if count > high:
            return (count - high) / high
        return (low - count) / low if count < low else 0.0

    def kept(self, count: int) -> float:
        """Return the fraction of the score that a text of this length keeps, in [0, 1]."""
        return max(0.0, 1.0 - self.penalty * self.missed(count))

    def __str__(self) -> str:
        """Return the description for agents."""
        if self.target is not None:
            return f"about {self.target} {self.unit}"
        if self.least is not None and self.most is not None:
            return f"{self.least} to {self.most} {self.unit}"
        return (
            f"at most {self.most} {self.unit}"
            if self.most is not None
            else f"at least {self.least} {self.unit}"
        )


@functools.lru_cache(maxsize=8)
def _tokeniser(path: str) -> Any:
    from tokenizers import Tokenizer

    place = Path(path).expanduser()
    file = place / "tokenizer.json" if place.is_dir() else place
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:
        # The library raises a plain `Exception` for any fault in a file.
        raise ConfigError(
            f"`length.tokeniser: {path}` cannot be read: {error}. Give the folder of a model that contains tokenizer.json."
        ) from error
