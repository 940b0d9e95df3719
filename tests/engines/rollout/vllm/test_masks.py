"""The masks that vLLM's structured output gets, asked as vLLM asks for them: they are those that training applies."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.engines.test_constraints import EVERY, YES_NO
from tests.models.test_token_masks import END, TOKENISERS, Words, allowed
from tokenizers import Tokenizer

from kapelle.engines.rollout.vllm.masks import MaskBackend, MaskGrammar, scheduler
from kapelle.errors import EngineError
from kapelle.models.token_masks import TokenMasks
from kapelle.runtime.constraints import forced_call, lark_of
from kapelle.types import Constraint

OTHER_END = "<|user|>"
GRAMMAR = SimpleNamespace(name="GRAMMAR")
CALL = forced_call([{"name": "add", "parameters": {"type": "object", "properties": {"a": {"enum": [1, 2]}}}}])


def number(raw: Tokenizer, token: str) -> int:
    found = raw.token_to_id(token)
    assert found is not None
    return found


def held(kind: str, constraint: Constraint) -> tuple[MaskBackend, MaskGrammar, TokenMasks]:
    """Return vLLM's side, and the masks of the trainer; a turn has two ends."""
    raw = TOKENISERS[kind]()
    words, size, ends = Words(raw), raw.get_vocab_size() + 5, {number(raw, END), number(raw, OTHER_END)}
    backend = MaskBackend(SimpleNamespace(tokenizer=words), size)
    found = backend.compile_grammar(GRAMMAR, lark_of(constraint), ends)
    return backend, found, TokenMasks(words, size, frozenset(ends))


@pytest.mark.parametrize("constraint", [*EVERY.values(), CALL], ids=[*EVERY, "call"])
@pytest.mark.parametrize("kind", TOKENISERS)
def test_every_step_allows_what_training_allows(kind: str, constraint: Constraint) -> None:
    backend, grammar, masks = held(kind, constraint)
    bitmask, drawn = backend.allocate_token_bitmask(3), random.Random(0)
    steps, ids = list[Any](), list[int]()
    while not grammar.is_terminated() and len(ids) < 60:
        grammar.fill_bitmask(bitmask, 1)
        steps.append(bitmask[1].clone().numpy())
        ids.append(drawn.choice(allowed(steps[-1])))
        assert grammar.accept_tokens("row", ids[-1:])
    np.testing.assert_array_equal(np.stack(steps), masks.of(constraint, tuple(ids)))
    assert (bitmask[[0, 2]] == -1).all(), "other rows are free"


def test_a_marker_that_is_one_token_may_be_that_token_and_each_end_ends() -> None:
    backend, grammar, _ = held("byte level", CALL)
    raw, bitmask = TOKENISERS["byte level"](), backend.allocate_token_bitmask(1)
    grammar.fill_bitmask(bitmask, 0)
    assert number(raw, "<tool_call>") in allowed(bitmask[0].numpy())
    for end in (number(raw, END), number(raw, OTHER_END)):
        _, said, _ = held("byte level", YES_NO)
        said.accept_tokens("row", raw.encode("yes").ids)
        said.fill_bitmask(bitmask, 0)
        assert end in allowed(bitmask[0].numpy())
        assert not said.is_terminated()
        said.accept_tokens("row", [end])
        assert said.is_terminated()


def test_drafts_are_accepted_up_to_the_first_error_and_rolled_back() -> None:
    backend, grammar, _ = held("bytes", YES_NO)
    ids = TOKENISERS["bytes"]().encode("nobody").ids
    end = number(TOKENISERS["bytes"](), END)
    first, again = (backend.allocate_token_bitmask(1) for _ in range(2))
    grammar.accept_tokens("row", ids[:2])
    grammar.fill_bitmask(first, 0)
    assert grammar.validate_tokens([*ids[2:], end, end]) == [*ids[2:], end]
    assert grammar.validate_tokens([end, *ids[2:]]) == [end]
    assert grammar.validate_tokens([ids[3], ids[4]]) == []
    grammar.accept_tokens("row", [*ids[2:], end])
    assert grammar.is_terminated()
    grammar.rollback(len(ids) - 1)
    grammar.fill_bitmask(again, 0)
    assert torch.equal(first, again)
    grammar.reset()
    assert grammar.validate_tokens(ids) == ids


@pytest.mark.parametrize(("kind", "spec"), [("JSON", "{}"), ("GRAMMAR", 'start: "x"')])
def test_other_forms_than_ours_are_rejected(kind: str, spec: str) -> None:
    backend, _, _ = held("bytes", YES_NO)
    with pytest.raises(EngineError, match="structured_outputs"):
        backend.compile_grammar(SimpleNamespace(name=kind), spec, {1})


@pytest.mark.parametrize("own", ["Scheduler", "AsyncScheduler"])
def test_the_scheduler_is_vllms_own(own: str) -> None:
    """A named class would else end its asynchronous scheduling."""

    class Config:
        scheduler_cls: str | None = "ours"

        def get_scheduler_cls(self) -> Any:
            assert self.scheduler_cls is None
            return lambda **given: (own, given)

    config = SimpleNamespace(
        model_config=SimpleNamespace(get_vocab_size=lambda: 70), scheduler_config=Config()
    )
    manager = SimpleNamespace(backend=None, _use_async_grammar_compilation=True)
    name, given = scheduler(vllm_config=config, structured_output_manager=manager, block_size=16)
    assert name == own
    assert given == {"vllm_config": config, "structured_output_manager": manager, "block_size": 16}
    assert config.scheduler_config.scheduler_cls == "ours"
    assert isinstance(manager.backend, MaskBackend)
    assert manager.backend.allocate_token_bitmask(2).shape == (2, 3)
    assert not manager._use_async_grammar_compilation
