"""On every architecture sampler, trainer, `transformers` alone and PEFT compute the same, adapters included."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from tests.support.families import FAMILIES, family_model
from tests.support.tiny import (
    draw_samples,
    first_gradient,
    lora_policies,
    stir,
    train_engine,
    with_behaviour,
    with_columns,
)
from torch import Tensor

from kapelle.algorithms.shared.surrogate import SurrogateConfig, ValueLossConfig
from kapelle.engines.rollout.local.decode_batch import decode
from kapelle.engines.rollout.local.decode_strategies import Job
from kapelle.engines.train.protocol import Objective
from kapelle.models.adapters import named
from kapelle.models.language_model import LanguageModel
from kapelle.models.lora_bank import layers_of
from kapelle.models.weights import save_adapter
from kapelle.rows import Sample
from kapelle.team import Critic, Lora
from kapelle.types import Sampling

# The reference implementation asks transformers something that it calls old.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
]

LORA = Lora(rank=2, alpha=4.0)
BAR = 4e-6
JOBS = [
    Job(adapter, tuple((37 * k + 11 * i) % 250 + 6 for i in range(length)), Sampling(max_tokens=tokens), k)
    for k, (adapter, length, tokens) in enumerate([("a", 5, 8), ("b", 12, 4), ("a", 10, 8), ("b", 3, 6)])
]
PLAYING = [family for family in FAMILIES if family not in ("bert", "xlstm")]


def alone(model: LanguageModel, job: Job, ids: list[int]) -> Tensor:
    """The completion's log-probs by `transformers` alone, one text at a time."""
    text = torch.tensor([[*job.prompt, *ids]])
    with model.bank.routed([(job.adapter, 0, 1)]):
        logits_LV: Tensor = model.model(input_ids=text, use_cache=False).logits[0]
    places = torch.arange(len(job.prompt) - 1, text.shape[1] - 1)
    return logits_LV.log_softmax(-1)[places, torch.tensor(ids)]


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=() if f in ("gpt2", "gemma2") else pytest.mark.slow) for f in PLAYING]
)
def test_sampler_trainer_transformers_and_peft_agree(family: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = family_model(family)
    bare = copy.deepcopy(model.model)
    engine = train_engine(lora_policies("a", "b", lora=LORA), models={"base": model}, stirred=False)
    for seed, name in enumerate("ab"):
        stir(model.bank.parameters(name), seed, 0.1)
    outputs = decode(model, JOBS)
    texts = [
        Sample(j.adapter or "", (*j.prompt, *o.ids), tuple(range(len(j.prompt), len(j.prompt) + len(o.ids))))
        for j, o in zip(JOBS, outputs, strict=True)
    ]
    trained = engine.score(texts)
    for job, output, logp_T in zip(JOBS, outputs, trained, strict=True):
        expected_T = alone(model, job, output.ids).detach()
        assert float((torch.tensor(output.logprobs) - expected_T).abs().max()) <= BAR
        assert float((logp_T - expected_T).abs().max()) <= BAR
    save_adapter(tmp_path / "a", engine.weights("a"), named(layers_of(model.model), LORA), family)
    theirs = peft.PeftModel.from_pretrained(bare, str(tmp_path / "a")).eval()
    text = torch.tensor([texts[0].tokens])
    with torch.no_grad(), model.bank.routed([("a", 0, 1)]):
        own = model.model(input_ids=text, use_cache=False).logits
        assert float((own - theirs(input_ids=text, use_cache=False).logits).abs().max()) < 1e-5
        with theirs.disable_adapter():
            assert float((own - theirs(input_ids=text, use_cache=False).logits).abs().max()) > 0.01


@pytest.mark.parametrize("family", ["gpt2", pytest.param("falcon_h1", marks=pytest.mark.slow)])
def test_a_policy_and_a_critic_learn_by_the_gradients_of_transformers(family: str) -> None:
    model = family_model(family)
    engine = train_engine(
        lora_policies("a", lora=LORA), [Critic("v", "base", LORA)], models={"base": model}, stirred=False
    )
    stir(model.bank.parameters("a"), 0, 0.1)
    lengths = [(3, 5), (7, 2), (12, 4)]
    samples = with_behaviour(engine, draw_samples(["a"], lengths))
    judged = draw_samples(["v"], lengths)
    ones, zeros = ([torch.full((len(s.targets),), k) for s in judged] for k in (1.0, 0.0))
    wanted = [*samples, *with_columns(judged, **{"return": ones, "value": zeros})]

    own = model.bank.parameters("a")
    loss = sum(
        (
            alone(model, Job("a", s.tokens[: s.targets[0]], Sampling(), 0), list(s.tokens[s.targets[0] :]))
            * s.columns["advantage"]
        ).sum()
        for s in samples
    )
    expected = torch.autograd.grad(-torch.as_tensor(loss), list(own.values()))

    before = torch.cat(engine.score(judged))
    engine.update(wanted, Objective(SurrogateConfig().build(), ValueLossConfig().build(), 0.5))
    found = first_gradient(engine, "a")
    flat_found, flat_expected = (
        torch.cat([g.flatten() for g in grads]) for grads in (found.values(), expected)
    )
    assert float(torch.cosine_similarity(flat_found, flat_expected, dim=0)) > 1 - 1e-6
    assert not before.any()
    assert float(torch.cat(engine.score(judged)).mean()) > 0.05  # towards the return of 1
