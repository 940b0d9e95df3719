"""What stands between the head's linear map and the logits is read from the settings and seen at the logits."""

from __future__ import annotations

import pytest
import torch
from tests.support.families import build, tokenizer
from torch import Tensor
from transformers import PreTrainedModel

from kapelle.errors import ModelError
from kapelle.models.language_model import LanguageModel, scale_and_cap

LINEAR = torch.tensor([[1.0, -2.0, 4.0]])


@pytest.mark.parametrize(
    ("settings", "logits", "found"),
    [
        ({}, LINEAR, (1.0, None)),
        ({"logits_scaling": 4.0}, LINEAR / 4, (0.25, None)),  # as Granite
        ({"logits_scaling": 4.0}, LINEAR * 4, (4.0, None)),  # as HyperCLOVA X
        ({"logit_scale": 0.25}, LINEAR / 4, (0.25, None)),  # as Cohere
        ({"logit_scale": None, "attn_logit_softcapping": 50.0}, LINEAR, (1.0, None)),
        ({"final_logit_softcapping": 3.0}, 3 * torch.tanh(LINEAR / 3), (1.0, 3.0)),
        ({"logits_scaling": 4.0}, LINEAR * 3, None),
        ({}, LINEAR + 0.01, None),
    ],
)
def test_settings_are_read_as_the_models_logits_say(
    settings: dict[str, float], logits: Tensor, found: tuple[float, float | None] | None
) -> None:
    assert scale_and_cap(settings, LINEAR, logits, bound=1e-4) == found


def test_a_model_with_unknown_logits_is_rejected_at_loading() -> None:
    model = build("llama")
    add_one_per_cent(model)
    with pytest.raises(ModelError, match="LlamaForCausalLM"):
        LanguageModel(model, tokenizer())


def add_one_per_cent(model: PreTrainedModel) -> None:
    """Make the whole model's logits, but not its head's, one per cent larger."""

    def larger(_module: object, _inputs: object, output: object) -> object:
        output.logits = output.logits * 1.01  # type: ignore[attr-defined]
        return output

    model.register_forward_hook(larger)
