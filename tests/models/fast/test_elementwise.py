"""What lies between products: by hand, as operations, and as Triton's kernels (`test_triton_products.py`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kapelle.models.fast import elementwise, flat, kernels
from kapelle.models.fast.elementwise import KERNELS, PLAIN

CPU = torch.device("cpu")


class TestByHand:
    def test_a_norm(self) -> None:
        """(3, 4): mean square 12.5; weights 1 and 2."""
        h_ND, inverse_N1 = PLAIN.normed(
            torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0]), 0.0, torch.float32
        )
        assert inverse_N1.item() == pytest.approx(12.5**-0.5)
        assert h_ND[0].tolist() == pytest.approx([3 / 12.5**0.5, 8 / 12.5**0.5])

    def test_a_quarter_turn(self) -> None:
        heads_NTE = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
        cos_N1E, sin_N1E = torch.zeros(1, 1, 4), torch.ones(1, 1, 4)
        turns, no_weights = (cos_N1E, sin_N1E, 0.0, torch.float32), [None, None]
        made, kept = PLAIN.turned([heads_NTE, -heads_NTE], no_weights, *turns)
        assert made[0][0, 0].tolist() == [-3.0, -4.0, 1.0, 2.0]
        assert made[1][0, 0].tolist() == [3.0, 4.0, -1.0, -2.0]
        assert kept == [None] * 4
        back, none = PLAIN.turned_back(made, kept, no_weights, *turns, [False, False])
        assert torch.equal(back[0], heads_NTE)
        assert none == no_weights

    def test_gates(self) -> None:
        """silu(0) = 0 with slope 1/2."""
        gate, up = torch.zeros(1, 1), torch.full((1, 1), 3.0)
        assert PLAIN.gated(gate, up, False).item() == 0.0
        lit, inner = PLAIN.regated(gate, up, False)
        dgate, dup = PLAIN.gated_back(torch.full((1, 1), 2.0), lit, gate, up, False)
        assert (inner.item(), dgate.item(), dup.item()) == (0.0, 3.0, 0.0)


def test_the_operations_are_the_plain_ones_on_a_cpu() -> None:
    for dtype in kernels.BOUNDS:
        for one, other in elementwise.trial(CPU, dtype, 40, 12):
            assert one.dtype == other.dtype
            assert one.shape == other.shape
            assert float((one - other).abs().max()) <= kernels.BOUNDS[dtype] * float(other.abs().max())


def test_an_incorrect_piece_is_found(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernels, "_found", {})

    def half_gated(gate_NF: Tensor, up_NF: Tensor, gelu: bool) -> Tensor:
        return PLAIN.gated(gate_NF, up_NF, gelu) * 0.5

    for made, right in ((KERNELS, True), (KERNELS._replace(gated=half_gated), False)):
        monkeypatch.setattr(elementwise, "KERNELS", made)
        found = kernels.holds(
            "pieces", ("here", right), lambda: elementwise.trial(CPU, torch.float32, 64, 16)
        )
        assert found is right
    assert "pieces differ from plain operations" in caplog.text


def test_plain_kernels_are_requested_by_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """`model.kernels: plain`: neither grouped adapters, nor one attention, nor kernels for pieces, whatever there is."""
    from tests.support.tiny import tiny_model

    from kapelle.models.fast import routed_linear
    from kapelle.models.fast.attention import plan_sequences
    from kapelle.models.language_model import LanguageModel
    from kapelle.team import Lora

    asked: list[str] = []
    for module, name in ((flat, "pieces_for"), (flat, "attend_by_plan"), (routed_linear, "has_kernel")):
        plain = getattr(module, name)

        def watched(*args: Any, plain: Any = plain, name: str = name, **named: Any) -> Any:
            asked.append(name)
            return plain(*args, **named)

        monkeypatch.setattr(module, name, watched)
    said = []
    for allowed in (True, False):
        base = tiny_model()
        model = LanguageModel(base.model, base.tokenizer, kernels=allowed)
        model.bank.add("a", Lora(rank=2, alpha=2.0), 0)
        asked.clear()
        tokens_N = torch.arange(6, 12)
        with model.computing([("a", 0, 6)]):
            said.append(model.hidden(tokens_N, tokens_N - 6, plan_sequences([6])))
        assert set(asked) == ({"pieces_for", "attend_by_plan", "has_kernel"} if allowed else set())
    assert torch.equal(*said)
