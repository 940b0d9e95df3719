"""What lies between products, compiled: the numbers of plain operations up to rounding, compiled once for all lengths.

A GPU's code is Triton's; here torch makes C++ of the same graphs, which shows that they are whole and mean the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.models.fast.test_grouped import far
from tests.twin import COMPILER
from torch import Tensor

from kapelle.models.fast import elementwise, flat, kernels
from kapelle.models.fast.elementwise import PLAIN, compiled

CPU = torch.device("cpu")
compiles = pytest.mark.skipif(COMPILER is None, reason="g++ is not installed: torch compiles nothing here")


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
        out_NTE, raw, inverse = PLAIN.turned(heads_NTE, None, cos_N1E, sin_N1E, 0.0, torch.float32)
        assert out_NTE[0, 0].tolist() == [-3.0, -4.0, 1.0, 2.0]
        assert raw is inverse is None
        back_NTE, none = PLAIN.turned_back(out_NTE, None, None, None, cos_N1E, sin_N1E, torch.float32, False)
        assert torch.equal(back_NTE, heads_NTE)
        assert none is None

    def test_gates(self) -> None:
        """silu(0) = 0 with slope 1/2."""
        gate, up = torch.zeros(1, 1), torch.full((1, 1), 3.0)
        assert PLAIN.gated(gate, up, False).item() == 0.0
        lit, inner = PLAIN.regated(gate, up, False)
        dgate, dup = PLAIN.gated_back(torch.full((1, 1), 2.0), lit, gate, up, False)
        assert (inner.item(), dgate.item(), dup.item()) == (0.0, 3.0, 0.0)


@pytest.fixture(scope="module")
def graphs() -> Iterator[Any]:
    """The pieces compiled again, with torch's count of what it compiled."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    yield counters
    torch._dynamo.reset()


@compiles
@pytest.mark.long
class TestCompiled:
    def test_they_pass_the_trial_and_lengths_share_them(self, graphs: Any) -> None:
        for one, other in elementwise.trial(CPU, torch.float32, torch.float32, 64, 16):
            assert far(one, other) < 1e-5
        # Ten pieces: either gate, heads with and without a norm, gradients with and without one of the weight, and with more to add.
        once = graphs["stats"]["unique_graphs"]
        assert 8 <= once <= 20
        assert not graphs["graph_break"]
        generator = torch.Generator().manual_seed(1)
        for tokens in (2, 3, 16, 31, 64, 100, 257):
            x_ND, dh_ND, more_ND = torch.randn(3, tokens, 64, generator=generator)
            weight_D = torch.randn(64, generator=generator)
            with torch.no_grad():
                (h, inverse), (expected, _) = (
                    pieces.normed(x_ND, weight_D, 1e-6, torch.float32) for pieces in (compiled(), PLAIN)
                )
                assert far(h, expected) < 1e-5
                (dx, _), (expected, _) = (
                    pieces.normed_back(x_ND, weight_D, inverse, dh_ND.clone(), more_ND, False)
                    for pieces in (compiled(), PLAIN)
                )
                assert far(dx, expected) < 1e-5
        assert graphs["stats"]["unique_graphs"] == once

    def test_an_incorrect_piece_is_found(
        self, graphs: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(kernels, "_found", {})

        def half_gated(gate_NF: Tensor, up_NF: Tensor, gelu: bool) -> Tensor:
            return PLAIN.gated(gate_NF, up_NF, gelu) * 0.5

        for made, right in ((PLAIN, True), (PLAIN._replace(gated=half_gated), False)):
            monkeypatch.setattr(elementwise, "compiled", lambda made=made: made)
            where = ("here", right)
            found = kernels.holds(
                "pieces", where, lambda: elementwise.trial(CPU, torch.float32, torch.float32, 64, 16)
            )
            assert found is right
        assert "pieces differ from plain operations" in caplog.text


def test_plain_kernels_are_requested_by_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """`model.kernels: plain`: neither grouped adapters, nor one attention, nor compiled pieces, whatever there is."""
    from tests.support.tiny import tiny_model

    from kapelle.models.fast import routed_linear
    from kapelle.models.fast.attention import plan_sequences
    from kapelle.models.language_model import LanguageModel
    from kapelle.team import Lora

    asked: list[str] = []
    for module, name in ((flat, "pieces_for"), (flat, "attend_by_plan"), (routed_linear, "takes_groups")):
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
        assert set(asked) == ({"pieces_for", "attend_by_plan", "takes_groups"} if allowed else set())
    assert torch.equal(*said)
