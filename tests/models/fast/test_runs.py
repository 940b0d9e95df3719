"""Attention of all spans by one kernel: a plan's runs under what torch documents of `varlen_attn`.

The kernel is CUDA's. Here a plain one takes its place that does what its documentation says, one sequence after another; on the twin of
a GPU (`tests/twin`) another one does, below torch's own operator.
"""

from __future__ import annotations

import itertools
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.models.fast.test_planned import PLANS, dense, drawn
from torch import Tensor

from kapelle.models.fast import attention as module
from kapelle.models.fast import kernels
from kapelle.models.fast.attention import Span, attend_by_plan, attend_by_runs, plan_spans, takes_runs


def documented(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """Each sequence by itself; a window of (n, 0) is the n tokens before each, aligned at the last ones; −1 is all."""
    before, after = window_size
    assert after == 0
    assert enable_gqa == (query.shape[1] != key.shape[1])
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    q_ends, k_ends = cu_seq_q.tolist(), cu_seq_k.tolist()
    assert (q_ends[0], q_ends[-1], k_ends[0], k_ends[-1]) == (0, len(query), 0, len(key))
    assert max_q == max(b - a for a, b in itertools.pairwise(q_ends))
    assert max_k == max(b - a for a, b in itertools.pairwise(k_ends))
    pieces = []
    for a, b, c, d in zip(q_ends, q_ends[1:], k_ends, k_ends[1:], strict=False):
        each = query.shape[1] // key.shape[1]
        q = query[a:b].transpose(0, 1)
        k, v = (x[c:d].transpose(0, 1).repeat_interleave(each, 0) for x in (key, value))
        seen = torch.ones(b - a, d - c, dtype=torch.bool).tril(d - c - (b - a))
        seen = seen if before < 0 else seen.triu(d - c - (b - a) - before)
        scores = (q @ k.transpose(1, 2) * scale).masked_fill(~seen, -torch.inf)
        pieces.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(pieces)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", SimpleNamespace(varlen_attn=documented))
    monkeypatch.setattr(kernels, "_found", {})


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize(("key_heads", "window"), [(1, None), (2, None), (4, None), (2, 3)])
def test_numbers_and_gradients_are_those_of_a_dense_product(
    name: str, key_heads: int, window: int | None
) -> None:
    spans = PLANS[name]
    tokens = sum(span.length for span in spans)
    inputs = drawn(tokens, 4, 0), drawn(tokens, key_heads, 1), drawn(tokens, key_heads, 2)
    given = drawn(tokens, 4, 3).detach()
    expected = dense(spans, *inputs, window or 99, None)
    found = attend_by_runs(plan_spans(spans).runs, *inputs, 0.3, window)
    assert float((found - expected).detach().abs().max()) < 1e-14
    wanted = torch.autograd.grad(expected, inputs, given)
    for one, other in zip(torch.autograd.grad(found, inputs, given), wanted, strict=True):
        assert float((one - other).abs().max()) < 1e-13


def test_a_plan_lays_spans_out_as_the_kernel_reads_them() -> None:
    """By hand: three tokens, a branch of two on them, and four tokens; then two sequences of two."""
    runs = plan_spans([Span(0, 3, None), Span(3, 2, (0, 3)), Span(5, 4, None)]).runs
    assert runs.query_ends_S.tolist() == [0, 3, 5, 9]
    assert runs.key_ends_S.tolist() == [0, 3, 8, 12]
    assert (runs.most_queries, runs.most_keys) == (4, 5)
    assert runs.key_M is not None
    assert runs.key_M.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 5, 6, 7, 8]
    even = plan_spans([Span(0, 2, None), Span(2, 2, None)]).runs
    assert even.query_ends_S.tolist() == even.key_ends_S.tolist() == [0, 2, 4]
    assert even.key_M is None


def test_keys_of_half_precision_are_added_up_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """256 and 1 are 257, which bfloat16 does not have. A CPU adds in float32 anyway, a GPU in the type of the sum."""
    sums: list[torch.dtype] = []
    plain = torch.Tensor.index_add_

    def watched(total: Tensor, *args: Any) -> Tensor:
        sums.append(total.dtype)
        return plain(total, *args)

    monkeypatch.setattr(torch.Tensor, "index_add_", watched)
    x_NJE = torch.ones(1, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    given = torch.tensor([256.0, 1, 1]).bfloat16()[:, None, None]
    repeated: Any = module._Repeated.apply(x_NJE, torch.zeros(3, dtype=torch.long))
    repeated.backward(given)
    assert x_NJE.grad is not None
    assert x_NJE.grad.item() == 258.0
    assert sums == [torch.float32]


class TestTrial:
    @pytest.fixture(autouse=True)
    def anywhere(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The rule and its trial, as on a Hopper; what they compute is on the CPU."""
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(kernels, "capability", lambda _: (9, 0))
        drawn_there = kernels.drawn
        monkeypatch.setattr(
            kernels,
            "drawn",
            lambda *shape, seed, device, dtype: drawn_there(
                *shape, seed=seed, device=torch.device("cpu"), dtype=dtype
            ),
        )
        plan = plan_spans
        monkeypatch.setattr(module, "plan_spans", lambda spans, _: plan(spans))

    like: Any = SimpleNamespace(device=torch.device("cuda:0"), dtype=torch.bfloat16, shape=(9, 4, 16))

    @pytest.mark.usefixtures("kernel")
    def test_a_kernel_that_works_as_documented_is_used(self, caplog: pytest.LogCaptureFixture) -> None:
        assert takes_runs(self.like, 2)
        assert takes_runs(self.like, 2, 512)
        assert not caplog.records

    @pytest.mark.usefixtures("kernel")
    def test_one_that_aligns_the_first_tokens_is_not(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        plain = torch.Tensor.tril
        monkeypatch.setattr(torch.Tensor, "tril", lambda seen, _offset=0: plain(seen))
        assert not takes_runs(self.like, 2)
        assert "differ from plain operations" in caplog.text


def test_a_cpu_uses_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_spans(PLANS["branches of two prefixes"])
    q, k, v = (drawn(25, heads, seed).detach().bfloat16() for seed, heads in enumerate((4, 2, 2)))
    expected = module.attend_by_buckets(plan, q, k, v, 0.3)
    assert torch.equal(attend_by_plan(plan, q, k, v, 0.3), expected)
    monkeypatch.setattr(module, "takes_runs", lambda *_: True)
    monkeypatch.setattr(module, "attend_by_runs", lambda runs, q, k, v, scale, window: q * scale)
    assert torch.equal(attend_by_plan(plan, q, k, v, 0.5), q * 0.5)
