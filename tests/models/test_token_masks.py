"""Masks of constraints: for tokens of any tokeniser, of calls of tools, and for grammars that mean harm."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from kapelle.errors import ConfigError
from kapelle.models.light_tokenizer import light_tokenizer
from kapelle.models.token_masks import TokenMasks
from kapelle.runtime.constraints import forced_call
from kapelle.types import Constraint

END = "<|end|>"


class Words:
    """A tokeniser as a renderer has it."""

    def __init__(self, raw: Tokenizer) -> None:
        self.backend_tokenizer, self.name_or_path = raw, "words"


def byte_level() -> Tokenizer:
    """Merges of bytes, as GPT-2 and Qwen have them: tokens of parts of characters among them."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    text = ['yes no nobody Köln Bern €uro {"city": "Köln", "sure": true} the cat sat 東京 東 京'] * 4
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(
        text, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    )
    return with_ends(raw)


def byte_fallback() -> Tokenizer:
    """Pieces with `▁` for a space and `<0xE2>` for bytes, as Llama 2, Mistral and Gemma have them."""
    pieces = [*'abcdefghijklmnopqrstuvwxyz{}":,.', "yes", "no", "▁", "▁no", "▁yes", "body", "ö", "K", "B"]
    vocabulary = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}
    for piece in pieces:
        vocabulary.setdefault(piece, len(vocabulary))
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))  # noqa: S106
    raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return with_ends(raw)


def with_ends(raw: Tokenizer) -> Tokenizer:
    raw.add_special_tokens([END, "<|user|>"])
    raw.add_tokens([AddedToken("<tool_call>", special=False), AddedToken("</tool_call>", special=False)])
    return raw


def embedded() -> Tokenizer:
    return light_tokenizer().backend_tokenizer


TOKENISERS = {"bytes": embedded, "byte level": byte_level, "byte fallback": byte_fallback}


def masks_of(raw: Tokenizer) -> TokenMasks:
    end = raw.token_to_id(END)
    assert end is not None
    return TokenMasks(Words(raw), raw.get_vocab_size() + 5, frozenset({end}))


def allowed(bits_W: Any) -> list[int]:
    return [int(token) for token in np.nonzero(np.unpackbits(bits_W.view(np.uint8), bitorder="little"))[0]]


def drawn(masks: TokenMasks, constraint: Constraint, end: int, seed: int, most: int = 80) -> list[int]:
    """Return a completion, every allowed token equally likely."""
    draw = np.random.default_rng(seed)
    walk, ids = masks.begin(constraint), list[int]()
    while len(ids) < most:
        token = int(draw.choice(allowed(masks.next([walk])[0])))
        ids.append(token)
        if token == end:
            return ids
        walk.take(token)
    return ids


@pytest.mark.parametrize("kind", TOKENISERS)
def test_a_choice_is_written_in_the_tokens_of_the_tokeniser(kind: str) -> None:
    raw = TOKENISERS[kind]()
    masks, end = masks_of(raw), raw.token_to_id(END)
    assert end is not None
    constraint = Constraint.choices(["yes", "no", "nobody", "Köln"])
    found = [drawn(masks, constraint, end, seed) for seed in range(60)]
    texts = [raw.decode(ids[:-1], skip_special_tokens=False) for ids in found]
    assert set(texts) == {"yes", "no", "nobody", "Köln"}
    assert all(ids == [*raw.encode(text).ids, end] for ids, text in zip(found, texts, strict=True))


@pytest.mark.parametrize("kind", TOKENISERS)
def test_the_end_is_allowed_exactly_where_the_text_is_complete(kind: str) -> None:
    raw = TOKENISERS[kind]()
    masks, end = masks_of(raw), raw.token_to_id(END)
    assert end is not None
    walk = masks.begin(Constraint.regex("[ab]{1,3}"))
    for place in range(4):
        now = allowed(masks.next([walk])[0])
        assert (end in now) == walk.complete == (place > 0)
        if place == 3:
            assert now == [end]
            return
        token = raw.encode("ab"[place % 2]).ids[-1]
        walk.take(token)


@pytest.mark.parametrize("kind", TOKENISERS)
@pytest.mark.parametrize(
    "constraint",
    [
        Constraint.regex("(?s:.*)"),
        Constraint.json_object(),
        Constraint.grammar("start: (<[0-20]> | /[a-z]/)*"),
        Constraint.grammar("start: <[*]>*"),
        forced_call([{"name": "f", "parameters": {"type": "object"}}], words=True),
    ],
    ids=["any text", "object", "tokens by number", "any token", "call"],
)
def test_special_tokens_are_never_allowed(kind: str, constraint: Constraint) -> None:
    raw = TOKENISERS[kind]()
    masks, end = masks_of(raw), raw.token_to_id(END)
    assert end is not None
    special = {number for number, token in raw.get_added_tokens_decoder().items() if token.special}
    beyond = set(range(raw.get_vocab_size(), raw.get_vocab_size() + 32))
    for seed in range(3):
        walk = masks.begin(constraint)
        for token in drawn(masks, constraint, end, seed, most=30):
            now = set(allowed(masks.next([walk])[0]))
            assert not now & (special - {end})
            assert not now & beyond
            if token == end:
                break
            walk.take(token)


BYTE_LEVEL = byte_level()
BYTE_LEVEL_MASKS = masks_of(BYTE_LEVEL)


def test_masks_of_a_whole_completion_are_those_of_its_steps() -> None:
    raw = byte_level()
    masks, end = masks_of(raw), raw.token_to_id(END)
    assert end is not None
    constraint = Constraint.json_schema(
        {
            "type": "object",
            "properties": {"a": {"type": "string", "maxLength": 4}},
            "additionalProperties": False,
        }
    )
    ids = tuple(drawn(masks, constraint, end, 4))
    bits_TW = masks.of(constraint, ids)
    assert (masks_of(raw).of(constraint, ids) == bits_TW).all(), "another process finds the same"
    walk = masks.begin(constraint, ids[:2])
    assert (masks.next([walk, masks.begin(constraint)]) == bits_TW[[2, 0]]).all()
    assert all(token in allowed(bits_W) for token, bits_W in zip(ids, bits_TW, strict=True))


# -------- Calls of tools


# -------- What cannot be, and what means harm


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


HOSTILE = {
    "deep": Constraint.json_schema(nested(5000))
    if sys.getrecursionlimit() > 20_000
    else Constraint("json_schema", '{"type":"array","items":' * 5000 + "{}" + "}" * 5000),
    "not so deep": Constraint.json_schema(nested(60)),
    "many": Constraint.json_schema({"enum": [f"value {number}" for number in range(50_000)]}),
    "many choices": Constraint.choices([f"value {number} of {number * 7919}" for number in range(20_000)]),
    "exponential": Constraint.regex("(a|b)*a(a|b){400}"),
    "nested counts": Constraint.regex("((a{1,100}){1,100}){1,100}"),
    "long": Constraint.regex("a" * 2_000_000),
    "self": Constraint.json_schema({"$ref": "#"}),
    "all of": Constraint.json_schema(
        {
            "allOf": [
                {"anyOf": [{"properties": {f"p{i}{j}": {"type": "integer"}}} for j in range(8)]}
                for i in range(12)
            ]
        }
    ),
    "recursive": Constraint.grammar('start: a\na: a a | "x" | "y"'),
    "patterns": Constraint.json_schema({"type": "string", "pattern": "^(a+)+(b+)+(c{1,500}){1,500}$"}),
}


@pytest.mark.sample(9)
@pytest.mark.parametrize("kind", HOSTILE)
def test_harm_is_bounded(kind: str) -> None:
    """Each is compiled, or rejected, and some tokens are drawn: in seconds, in a process of its own with 2 GB."""
    program = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
from tests.models.test_token_masks import *
masks, end = BYTE_LEVEL_MASKS, BYTE_LEVEL.token_to_id(END)
try:
    print(len(drawn(masks, HOSTILE[{kind!r}], end, 0, most=60)))
except ConfigError as error:
    print("refused:", error)
    assert len(str(error)) < 600
status = open("/proc/self/status").read()  # ru_maxrss begins at the peak of the process that started this one
print("peak", status.split("VmHWM:")[1].split()[0])
"""
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert time.monotonic() - begun < 60
    peak = re.search(r"peak (\d+)", done.stdout)
    assert peak is not None
    assert int(peak[1]) < 2_000_000, done.stdout


def test_a_grammar_that_cannot_continue_ends_the_turn() -> None:
    raw = Tokenizer(models.BPE(vocab={"y": 0, "e": 1, "s": 2}, merges=[]))
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([END])
    masks = TokenMasks(Words(raw), 4, frozenset({3}))
    walk = masks.begin(Constraint.choices(["yo"]))
    assert allowed(masks.next([walk])[0]) == [0]
    walk.take(0)
    assert allowed(masks.next([walk])[0]) == [3]
    assert not walk.complete
    with pytest.raises(ConfigError, match="no token can begin such a text"):
        masks.begin(Constraint.choices(["no"]))


@pytest.mark.parametrize(
    ("choices", "most", "expected"),
    [
        (["yes"], 4, True),  # three bytes and the end
        (["yes"], 3, False),
        (["yes", "no"], 3, True),
        (["yes", "no"], 2, False),
        (["y" * 70], 71, True),
        (["y" * 70], 70, None),  # the search for longer completions is never conclusive
    ],
)
def test_a_completion_fits_with_its_end(choices: list[str], most: int, expected: bool | None) -> None:
    assert masks_of(embedded()).fits(Constraint.choices(choices), most) is expected
