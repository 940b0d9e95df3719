"""Compute the similarity of a text to a reference (ROUGE, chrF and BLEU) and a penalty for a wrong length.

The packages `rouge-score` (ROUGE, 2004, in Google's implementation) and `sacrebleu` (chrF, 2015; BLEU, 2002) compute the
metrics of one text against one or more references. All values are scaled to [0, 1]. These metrics compare words and characters,
not meaning. The BLEU or chrF score of a corpus differs from the mean of the scores of its sentences.

`rouge_l`, `rouge_1`, `rouge_2`, `rouge_lsum`, `chrf` and `bleu` are reward functions: their arguments are the `completion` and
the column `reference` of the dataset row.
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
"""The name of a similarity metric. `rouge1` and `rouge2` compare single words and pairs of consecutive words. `rougeL` uses the
longest common subsequence of words, and `rougeLsum` computes this subsequence line by line. All ROUGE metrics are F1 scores,
optionally after Porter stemming. `chrf` is the F2 score of character n-grams, and `chrf++` also includes word n-grams.
`bleu` compares sequences of up to four words with exponential smoothing (`exp`); for short texts, the maximum n-gram order
is reduced to the length of the text."""
BleuTokeniser = Literal["13a", "intl", "char", "zh", "none"]
"""The tokenisation of texts for BLEU. `13a` suits most languages, `intl` follows Unicode, `char` and `zh` suit languages
without spaces between words, and `none` splits at spaces."""
MAX_WORDS = 1_000
"""Maximum number of words in an answer. A longer answer scores 0, because the computation time of ROUGE-L grows with the
product of the lengths of the answer and the reference."""
MAX_CHARACTERS = 20_000


def check_packages(metrics: Mapping[Metric, float]) -> None:
    """Raise ConfigError if the optional package of a metric is missing; the message names the extra to install."""
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
    """Return the similarity of a text to the most similar reference, in [0, 1]; BLEU uses all references together.

    An empty or oversized text scores 0. `stem` enables English stemming for ROUGE, and `tokeniser` selects the tokenisation for
    BLEU.
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
    """A tokeniser for ROUGE that splits text in any alphabet into words."""

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
    """The required length of a text and the penalty for a different length.

    A text whose length deviates from the limits by a fraction d keeps the fraction 1 − min(1, penalty·d) of its score. For
    example, 50 words with a maximum of 40 give d = 0.25.
    """

    target: int | None = Field(default=None, ge=1)
    """Target length of the text, in `unit`. A relative deviation of at most `tolerance` is not penalised."""
    tolerance: float = Field(default=0.1, ge=0.0)
    """Maximum deviation from `target` without a penalty, as a fraction of `target`."""
    most: int | None = Field(default=None, ge=1)
    """Maximum length without a penalty, in `unit`."""
    least: int | None = Field(default=None, ge=1)
    """Minimum length without a penalty, in `unit`."""
    unit: Literal["words", "characters", "tokens"] = "words"
    """Unit of length: `words` (separated by white space), `characters`, or `tokens` of `tokeniser`."""
    tokeniser: str | None = None
    """Tokeniser for `unit: tokens`: the path of a model folder that contains `tokenizer.json`, or the path of this file."""
    penalty: float = Field(default=1.0, gt=0.0)
    """Factor of the penalty. The fraction of the score that is lost is `penalty` times the relative deviation from the
    permitted length. With a large value, the length is a hard limit."""

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
        """Raise ConfigError if the tokeniser cannot be loaded."""
        if self.tokeniser is not None:
            _tokeniser(self.tokeniser)

    def count(self, text: str) -> int:
        """Return the length of a text in the configured unit."""
        if self.unit == "words":
            return len(text.split())
        if self.unit == "characters":
            return len(text.strip())
        assert self.tokeniser is not None, "the validator requires it"
        return len(_tokeniser(self.tokeniser).encode(text.strip(), add_special_tokens=False).ids)

    def missed(self, count: int) -> float:
        """Return the relative deviation of the length `count` from the permitted length; 0 if the length is permitted."""
        low, high = float(self.least or 0), (math.inf if self.most is None else float(self.most))
        if self.target is not None:
            low, high = self.target * (1 - self.tolerance), self.target * (1 + self.tolerance)
        if count > high:
            return (count - high) / high
        return (low - count) / low if count < low else 0.0

    def kept(self, count: int) -> float:
        """Return the fraction of its score, in [0, 1], that a text of length `count` keeps."""
        return max(0.0, 1.0 - self.penalty * self.missed(count))

    def __str__(self) -> str:
        """Return a description of the required length for the prompt of an agent."""
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
