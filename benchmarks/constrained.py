"""Completions of a given form: what a decode step pays for masks, with a small vocabulary and with one of Qwen3's size.

Peers: transformers' `generate` with a logits processor, on the same weights, prompts and forms, by llguidance and its own functions
for torch, and by xgrammar's own processor where that package is installed (it asks for Triton, so `bench` leaves it out). Each
contender runs with and without the form, the completions being equally long, so that what the form costs is known for each.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import json
import statistics
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerFast

from benchmarks.measure import apart, cpu_seconds, single_thread
from benchmarks.subjects import CONTEXT, MODELS, NEVER, prompt_ids
from kapelle.engines.rollout.local.decode_batch import decode
from kapelle.engines.rollout.local.decode_strategies import Job
from kapelle.models.embedded import build_model, build_tokenizer
from kapelle.models.language_model import LanguageModel
from kapelle.types import Constraint, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROWS, PROMPT, NEW, ROUNDS = 16, 64, 32, 3
MANY = 151_936
"""Tokens of Qwen3."""
SCHEMA: Mapping[str, Any] = {
    "type": "array",
    "minItems": 50,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "right": {"type": "boolean"},
            "votes": {"type": "integer", "minimum": 0, "maximum": 999},
        },
        "required": ["name", "right", "votes"],
        "additionalProperties": False,
    },
}
"""More than `NEW` tokens say: no completion ends early."""
CHOICES = tuple(
    f"{start} {'and so on ' * 150}" for start in ("fold", "call", "raise", "check", "bet", "pass")
)
"""Texts of which `NEW` tokens are a part."""


def run() -> dict[str, Any]:
    """Return CPU-seconds, ratios and what a form costs for two vocabularies and two forms."""
    single_thread()
    found = {}
    for words in (build_tokenizer(CONTEXT), large_tokenizer()):
        for form in (Constraint.json_schema(SCHEMA), Constraint.choices(CHOICES)):
            found[f"1M, {len(words):,} words, {form.kind}"] = measured(words, form)
    return found


def measured(words: PreTrainedTokenizerFast, form: Constraint) -> dict[str, Any]:
    """Return one vocabulary and form."""
    prompts = [prompt_ids(row, PROMPT) for row in range(ROWS)]
    endless = copy.deepcopy(words)  # what would end a turn is a token that the model cannot say
    endless.add_special_tokens({"eos_token": NEVER})
    free, theirs = (_model(each, len(words)) for each in (endless, words))
    here = {"generate": partial(generated, free, prompts, None)}
    here["generate, llguidance"] = partial(generated, theirs, prompts, _llguidance(words, form))
    if importlib.util.find_spec("xgrammar") is not None:
        here["generate, xgrammar"] = partial(generated, theirs, prompts, _xgrammar(words, form))
    own = {
        "ours": partial(
            sampled, LanguageModel(_model(endless, len(words)), endless, "float32"), prompts, None
        ),
        "ours, held": partial(
            sampled, LanguageModel(_model(words, len(words)), words, "float32"), prompts, form
        ),
    }
    seconds: dict[str, list[float]] = {name: [] for name in (*own, *here)}
    with ExitStack() as processes:
        contenders: dict[str, Callable[[], float]] = {
            name: processes.enter_context(apart(work)) for name, work in own.items()
        }
        contenders |= {name: partial(cpu_seconds, work) for name, work in here.items()}
        for number in range(ROUNDS + 1):
            for name in list(contenders)[:: -1 if number % 2 else 1]:
                seconds[name].append(contenders[name]())
    return summary({name: each[1:] for name, each in seconds.items()})


def summary(seconds: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return medians, ratios to `ours, held`, and what a form costs: of our time, and of each token in microseconds."""
    held = seconds["ours, held"]
    found: dict[str, Any] = {
        "cpu_s": {name: statistics.median(each) for name, each in seconds.items()},
        "share_of_ours": statistics.median(
            1 - free / own for free, own in zip(seconds["ours"], held, strict=True)
        ),
        "us_a_token": {},
        "ratio": {},
    }
    for name, each in seconds.items():
        if name in {"ours", "generate"}:
            continue
        free = seconds[name.split(",", maxsplit=1)[0]]
        found["us_a_token"][name] = statistics.median(
            1e6 * (own - without) / (ROWS * NEW) for own, without in zip(each, free, strict=True)
        )
        if name != "ours, held":
            ratios = [their / own for their, own in zip(each, held, strict=True)]
            found["ratio"][name] = [statistics.median(ratios), min(ratios), max(ratios)]
    return found


def sampled(model: LanguageModel, prompts: Sequence[Sequence[int]], form: Constraint | None) -> None:
    """Sample by our decoder."""
    sampling = Sampling(max_tokens=NEW, constraint=form)
    said = decode(model, [Job(None, tuple(prompt), sampling, seed) for seed, prompt in enumerate(prompts)])
    assert all(len(one.ids) == NEW for one in said), "ours has full length"
    if form is not None:
        _check(str(model.tokenizer.decode(said[0].ids)), form)


def generated(
    model: Any,
    prompts: Sequence[Sequence[int]],
    processor: Callable[[], LogitsProcessor] | None,
) -> None:
    """Sample by `generate`."""
    prompts_RP = torch.tensor(prompts)
    with torch.no_grad():
        told = model.generate(
            prompts_RP,
            attention_mask=torch.ones_like(prompts_RP),
            max_new_tokens=NEW,
            do_sample=True,
            top_k=0,
            logits_processor=LogitsProcessorList([] if processor is None else [processor()]),
        )
    assert told.shape == (ROWS, PROMPT + NEW), "theirs has full length"


def _check(text: str, form: Constraint) -> None:
    begins = ("[",) if form.kind == "json_schema" else tuple(choice[:3] for choice in CHOICES)
    assert text.startswith(begins), f"{text[:40]!r} has the form"


def _model(words: PreTrainedTokenizerFast, size: int) -> PreTrainedModel:
    """Return the model of a vocabulary of so many tokens; the same weights at every call."""
    return build_model(MODELS["1M"], size, int(words.eos_token_id), int(words.pad_token_id))


# -------- Peers


class Held(LogitsProcessor):
    """Holds the rows of one `generate` to a grammar of llguidance, by its functions for torch."""

    def __init__(self, grammar: Any, executor: Any, prompt: int) -> None:
        self._matchers = [grammar.deep_copy() for _ in range(ROWS)]
        self._executor, self._prompt = executor, prompt
        self._bits: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores of what may come next."""
        from llguidance import torch as helpers

        if self._bits is None:
            self._bits = helpers.allocate_token_bitmask(ROWS, scores.shape[1])
        if input_ids.shape[1] > self._prompt:
            for matcher, token in zip(self._matchers, input_ids[:, -1].tolist(), strict=True):
                assert matcher.consume_token(token), "it was allowed"
        pairs = [(matcher, row) for row, matcher in enumerate(self._matchers)]
        helpers.fill_next_token_bitmask_par(self._executor, pairs, self._bits)
        helpers.apply_token_bitmask_inplace(scores, self._bits)
        return scores


def _llguidance(words: PreTrainedTokenizerFast, form: Constraint) -> Callable[[], LogitsProcessor]:
    from llguidance import LLExecutor, LLMatcher
    from llguidance.hf import from_tokenizer

    if form.kind == "json_schema":
        grammar = LLMatcher.grammar_from_json_schema(form.text, overrides={"whitespace_pattern": "[ ]?"})
    else:
        grammar = LLMatcher.grammar_from_lark(f"start: {' | '.join(map(json.dumps, json.loads(form.text)))}")
    matcher = LLMatcher(from_tokenizer(words, n_vocab=len(words)), grammar)
    assert not matcher.get_error(), matcher.get_error()
    return partial(Held, matcher, LLExecutor(), PROMPT)


def _xgrammar(words: PreTrainedTokenizerFast, form: Constraint) -> Callable[[], LogitsProcessor]:
    xgrammar, theirs = (importlib.import_module(name) for name in ("xgrammar", "xgrammar.contrib.hf"))
    compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo.from_huggingface(words, vocab_size=len(words)))
    if form.kind == "json_schema":
        grammar = compiler.compile_json_schema(form.text)
    else:
        grammar = compiler.compile_grammar(f"root ::= {' | '.join(map(json.dumps, json.loads(form.text)))}")
    return partial(theirs.LogitsProcessor, grammar)


# -------- A large vocabulary


def large_tokenizer() -> PreTrainedTokenizerFast:
    """Return byte pairs learned from Python's own library, and pairs of those up to `MANY`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    files = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    texts = (file.read_text("utf-8", errors="replace") for file in files if "site-packages" not in file.parts)
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<|end|>", "<|pad|>"]
    raw.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=MANY,
            min_frequency=1,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=special,
            show_progress=False,
        ),
    )
    made = json.loads(raw.to_str())
    vocabulary: dict[str, int] = made["model"]["vocab"]
    learned = [token for token in vocabulary if token not in special]
    pairs = (first + second for second in learned[256:] for first in learned[256:1256])
    while len(vocabulary) < MANY:
        vocabulary.setdefault(next(pairs), len(vocabulary))
    raw = Tokenizer.from_str(json.dumps(made))
    raw.decoder = decoders.ByteLevel()
    words = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=special[0], pad_token=special[1])
    words.chat_template = build_tokenizer(CONTEXT).chat_template
    assert len(words) == MANY, f"it has {len(words)} tokens"
    return words
