"""The head in pieces: what torch says of all logits at once, while only a piece of them is ever alive."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kapelle.engines.train.torch import large_head
from kapelle.engines.train.torch.large_head import statistics_in_pieces
from kapelle.models.language_model import OutputHead

TOKENS, SIZE, WORDS = 7, 5, 23

PLAIN = OutputHead(torch.empty(0))
"""Scale and soft cap of most models."""

CAPPED = OutputHead(torch.empty(0), scale=0.7, softcap=2.0)
"""A Granite's scale and a Gemma's soft cap in one."""


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_head, "ROWS", 3)  # neither divides what is asked
    monkeypatch.setattr(large_head, "PIECE", 12)


class Asked(NamedTuple):
    """Hidden states, a head's weight and bias, and tokens at their temperatures."""

    hidden_KD: Tensor
    weight_VD: Tensor
    bias_V: Tensor
    token_K: Tensor
    temperature_K: Tensor

    def pieces(self, kind: OutputHead, *, entropy: bool = True) -> tuple[Tensor, Tensor]:
        """Ask the head in pieces."""
        head = kind._replace(weight_VD=self.weight_VD, bias_V=self.bias_V)
        return statistics_in_pieces(
            head, self.hidden_KD, self.token_K, self.temperature_K, entropy=entropy, learned=entropy
        )

    def at_once(self, kind: OutputHead) -> tuple[Tensor, Tensor]:
        """Ask torch, with the head's definition written out."""
        logits_KV = kind.scale * (self.hidden_KD @ self.weight_VD.T + self.bias_V).to(torch.float64)
        if kind.softcap:
            logits_KV = kind.softcap * torch.tanh(logits_KV / kind.softcap)
        logp_KV = (logits_KV / self.temperature_K[:, None]).log_softmax(dim=-1)
        return logp_KV.gather(1, self.token_K[:, None])[:, 0], -(logp_KV.exp() * logp_KV).sum(dim=-1)


def drawn(tokens: int = TOKENS, words: int = WORDS, *, head_learns: bool = False) -> Asked:
    """A question in float64."""
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return Asked(
        numbers(tokens, SIZE).requires_grad_(),
        numbers(words, SIZE).requires_grad_(head_learns),
        numbers(words).requires_grad_(head_learns),
        torch.randint(words, (tokens,), generator=generator),
        0.5 + torch.rand(tokens, generator=generator, dtype=torch.float64),
    )


def gradients(asked: Asked, found: tuple[Tensor, Tensor]) -> list[Tensor]:
    """The gradients of a sum in which every token's log-prob and entropy has a weight of its own."""
    weight_K = torch.arange(1.0, 1.0 + len(asked.token_K), dtype=torch.float64)
    total = (found[0] * weight_K).sum() + (found[1] * weight_K.flip(0)).sum()
    return list(torch.autograd.grad(total, [leaf for leaf in asked if leaf.requires_grad]))


@pytest.mark.parametrize("kind", [PLAIN, CAPPED], ids=["plain", "scaled and capped"])
@pytest.mark.parametrize("head_learns", [False, True])
class TestDerivatives:
    """Gradients are those of the function, by differences in float64."""

    @pytest.mark.sample(3)
    @pytest.mark.parametrize("asked_for", ["log-prob", "entropy", "both"])
    def test_they_are_the_slopes_of_the_function(
        self, kind: OutputHead, head_learns: bool, asked_for: str
    ) -> None:
        asked = drawn(4, 11, head_learns=head_learns)

        def answer(*leaves: Tensor) -> Tensor | tuple[Tensor, Tensor]:
            logp_K, entropy_K = asked._replace(
                **dict(zip(asked._fields, leaves, strict=False))  # hidden states, and maybe weight and bias
            ).pieces(kind, entropy=asked_for != "log-prob")
            return {"log-prob": logp_K, "entropy": entropy_K}.get(asked_for, (logp_K, entropy_K))

        assert torch.autograd.gradcheck(answer, asked[: 3 if head_learns else 1])

    @pytest.mark.parametrize(("tokens", "words"), [(0, 23), (1, 23), (3, 12), (7, 1), (7, 23)], ids=str)
    def test_they_are_those_of_all_logits_at_once(
        self, kind: OutputHead, head_learns: bool, tokens: int, words: int
    ) -> None:
        asked = drawn(tokens, words, head_learns=head_learns)
        own, whole = asked.pieces(kind), asked.at_once(kind)
        for one, other in zip(
            [*own, *gradients(asked, own)], [*whole, *gradients(asked, whole)], strict=True
        ):
            torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)


class TestHardNumbers:
    @pytest.mark.parametrize("head_learns", [False, True])
    def test_forbidden_words_change_nothing(self, head_learns: bool) -> None:
        asked = drawn()
        forbidden = torch.arange(WORDS) % 3 == 0
        asked = asked._replace(
            weight_VD=asked.weight_VD.requires_grad_(head_learns),
            token_K=asked.token_K - asked.token_K % 3 + 1,
            bias_V=asked.bias_V.masked_fill(forbidden, float("-inf")),
        )
        kept = asked._replace(
            weight_VD=asked.weight_VD[~forbidden],
            bias_V=asked.bias_V[~forbidden],
            token_K=asked.token_K // 3 * 2,
        )
        own, whole = asked.pieces(PLAIN), kept.at_once(PLAIN)
        for one, other in zip(
            [*own, *gradients(asked, own)], [*whole, *gradients(asked, whole)], strict=True
        ):
            torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)

    @pytest.mark.parametrize("shift", [-3e4, 3e4])
    def test_logits_far_from_zero_change_nothing(self, shift: float) -> None:
        asked = drawn()
        far = asked._replace(bias_V=asked.bias_V + shift)
        for one, other in zip(far.pieces(PLAIN), asked.at_once(PLAIN), strict=True):
            torch.testing.assert_close(one, other, atol=1e-9, rtol=0)

    def test_nan_stays_in_its_row(self) -> None:
        asked = drawn()
        with torch.no_grad():
            asked.hidden_KD[2] = float("nan")
        logp_K, entropy_K = asked.pieces(PLAIN)
        assert logp_K.isnan().tolist() == entropy_K.isnan().tolist() == [k == 2 for k in range(TOKENS)]

    @pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
    def test_a_nearly_certain_token_keeps_its_gradient_in_half_precision(self, half: torch.dtype) -> None:
        # p_y = 0.9999: W[y] minus the mean of W would be rounding errors of W[y] alone, forty times the result.
        asked = drawn()
        sure = asked._replace(
            bias_V=torch.zeros(WORDS, dtype=torch.float64).index_fill_(0, torch.tensor([4]), 12.0),
            weight_VD=asked.weight_VD * 0.1,
            token_K=torch.full((TOKENS,), 4),
        )
        expected_KD = gradients(sure, (sure.at_once(PLAIN)[0], torch.zeros(TOKENS)))[0]
        single = sure._replace(**{k: v.detach().float() for k, v in sure._asdict().items() if k != "token_K"})
        single.hidden_KD.requires_grad_()
        with torch.autocast("cpu", half):
            logp_K, _ = single.pieces(PLAIN, entropy=False)
        assert logp_K.dtype == torch.float32
        own_KD = gradients(single, (logp_K, torch.zeros(TOKENS)))[0]
        assert float((own_KD - expected_KD).norm() / expected_KD.norm()) < 0.03


aten = torch.ops.aten


class Watched(TorchDispatchMode):
    """Sizes of everything that operations return, and how many products there are."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.products = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.products += func.overloadpacket in (aten.mm, aten.addmm, aten.addmm_)
        if isinstance(result, Tensor) and result._base is None:
            self.largest = max(self.largest, result.numel())
        return result


class TestCost:
    """4,000 words, of which a piece has 100 for 10 tokens; 40 tokens, so 160 pieces."""

    PIECES = 160

    def watched(
        self, monkeypatch: pytest.MonkeyPatch, *, entropy: bool, learned: bool, head_learns: bool, grad: bool
    ) -> Watched:
        monkeypatch.setattr(large_head, "ROWS", 10)
        monkeypatch.setattr(large_head, "PIECE", 1000)
        asked = drawn(40, 4000, head_learns=head_learns)
        head = OutputHead(asked.weight_VD, asked.bias_V)
        watched = Watched()
        with watched, torch.set_grad_enabled(grad):
            logp_K, entropy_K = statistics_in_pieces(
                head, *asked[:1], *asked[3:], entropy=entropy, learned=learned
            )
            if grad:
                (logp_K.sum() + entropy_K.sum()).backward()
        return watched

    @pytest.mark.parametrize("entropy", [False, True])
    def test_a_frozen_head_allocates_a_piece_at_most(
        self, monkeypatch: pytest.MonkeyPatch, entropy: bool
    ) -> None:
        watched = self.watched(monkeypatch, entropy=entropy, learned=entropy, head_learns=False, grad=True)
        assert watched.largest == 1000  # of 160,000 logits
