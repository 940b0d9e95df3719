"""A reward model of transformers: a sequence classifier with one label, which reads a whole conversation.

Shapes: B conversations, L tokens of the longest one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kapelle.errors import ModelError
from kapelle.models.checksums import verify_folder
from kapelle.models.light_tokenizer import context_of
from kapelle.models.paths import check_loaded, check_model_path, loading
from kapelle.models.renderer import ChatRenderer


class RewardModel:
    """One in memory."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model = model.eval().requires_grad_(False)
        self.renderer = ChatRenderer(tokenizer, context_of(model.config, tokenizer))

    @torch.inference_mode()
    def logits(self, conversations: Sequence[Sequence[int]]) -> list[float]:
        """Return the logit of each conversation, given as tokens."""
        pad = self.model.config.get_text_config().pad_token_id
        if pad is None and len(conversations) > 1:  # it finds the last token of a row by what pads it
            return [logit for each in conversations for logit in self.logits([each])]
        longest = max(map(len, conversations))
        ids_BL = torch.full((len(conversations), longest), pad or 0)
        mask_BL = torch.zeros_like(ids_BL)
        for row, tokens in enumerate(conversations):
            ids_BL[row, : len(tokens)] = torch.tensor(tokens)
            mask_BL[row, : len(tokens)] = 1
        device = self.model.device
        logits_B1 = self.model(input_ids=ids_BL.to(device), attention_mask=mask_BL.to(device)).logits
        return [float(logit) for logit in logits_B1[:, 0].float()]


def load_reward_model(folder: Path) -> RewardModel:
    """Load a folder of `save_pretrained`, on the GPU where there is one; ModelError names what is wrong with it.

    In half precision on a GPU, in float32 without one.
    """
    path = str(folder)
    check_model_path(path)
    verify_folder(folder)
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    with loading(path):
        config: Any = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
        if not any("ForSequenceClassification" in each for each in config.architectures or ()):
            raise ModelError(
                f"'{path}' is {', '.join(config.architectures or ['no architecture'])} and no reward model. Name a sequence "
                "classifier of one label, or a run of `algorithm.name: verifier`."
            )
        if config.num_labels != 1:
            raise ModelError(
                f"The classifier '{path}' has {config.num_labels} labels; a reward model has one. Which of them should be the "
                "reward is not written anywhere."
            )
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=True)
        gpu = torch.cuda.is_available()
        loaded: Any = AutoModelForSequenceClassification.from_pretrained(
            path,
            dtype=torch.bfloat16 if gpu else torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name
            trust_remote_code=False,
            local_files_only=True,
            use_safetensors=True,  # nothing is unpickled
        )
        model, found = loaded
        check_loaded(path, type(model).__name__, found)
        return RewardModel(model.to("cuda" if gpu else "cpu"), tokenizer)
