"""What a run relies on in a train engine, asked of each: the built-in one, and a second tiny one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from tests.support.plain_engine import Plain
from tests.support.tiny import (
    LORA,
    draw_samples,
    frozen_copy,
    same_bits,
    stir,
    tiny_model,
    with_behaviour,
    with_columns,
)
from torch import Tensor

from kapelle.algorithm import Loss, Outputs, Targets
from kapelle.algorithms.sft import negative_log_likelihood
from kapelle.algorithms.shared.surrogate import ValueLossConfig
from kapelle.engines.train.protocol import (
    HEAD,
    Objective,
    TrainEngine,
    TrainEngineSettings,
    TrainSetup,
    UpdateLimits,
)
from kapelle.engines.train.settings import Torch
from kapelle.errors import ModelError, NumericsError, ParityError
from kapelle.models.language_model import LanguageModel
from kapelle.rows import Sample
from kapelle.settings.schema import OptimizerConfig
from kapelle.team import Critic, Policy, Rate, embedder_name, reference_name

ENGINES: Mapping[str, TrainEngineSettings] = {
    "torch": Torch(),
    "plain": Plain(),
}
USUAL = Rate()
LENGTHS = [(3, 5), (7, 2), (4, 1), (5, 4)]
NLL = Objective(negative_log_likelihood, ValueLossConfig().build(), parity=False)


Make = Callable[..., TrainEngine]


@pytest.fixture(params=["torch", pytest.param("plain", marks=pytest.mark.long)])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Builds engines on a fresh base: policies `a` and `b` with adapters, `still` that does not learn, a critic `v`."""
    made: list[TrainEngine] = []

    def build(rate: Rate = USUAL) -> TrainEngine:
        for earlier in made:  # one group of processes at a time
            earlier.close()
        setup = TrainSetup(
            {"base": tiny_model()},
            [Policy("a", lora=LORA), Policy("b", lora=LORA, rate=rate), Policy("still", trained=False)],
            [Critic("v", lora=LORA, rate=rate)],
            OptimizerConfig(lr=1e-2, eps=1e-3),
            UpdateLimits(microbatch_tokens=40),
            seed=0,
            references=True,
            embedders=True,
        )
        engine = ENGINES[request.param].build(setup)
        made.append(engine)
        for seed, name in enumerate(("a", "b", "v")):
            stirred = {key: tensor.detach().clone() for key, tensor in engine.weights(name).items()}
            stir({key: tensor for key, tensor in stirred.items() if not key.startswith(HEAD)}, seed)
            engine.load_weights(name, stirred)
        engine.refresh_references()
        engine.publish()
        return engine

    yield build
    for engine in made:
        engine.close()


@pytest.fixture
def engine(make: Make) -> TrainEngine:
    return make()


def learned(engine: TrainEngine) -> dict[str, dict[str, Tensor]]:
    """Return all weights as they are now."""
    names = ("a", "b", "still", "v", reference_name("a"), reference_name("b"))
    return {name: frozen_copy(engine.weights(name)) for name in names}


def changed(before: Mapping[str, object], after: Mapping[str, object]) -> set[str]:
    return {name for name in before if not same_bits(before[name], after[name])}


def words(*names: str, seed: int = 0) -> list[Sample]:
    return draw_samples(names, LENGTHS, seed)


def judged(seed: int = 0) -> list[Sample]:
    """Samples for the critic, asked for the place after the last token too."""
    generator = torch.Generator().manual_seed(seed)
    samples = [
        replace(s, targets=(*s.targets, len(s.tokens)), columns={})
        for s in draw_samples(["v"], LENGTHS, seed)
    ]
    returns = [torch.randn(len(s.targets), generator=generator) for s in samples]
    zeros = [torch.zeros(len(s.targets)) for s in samples]
    return with_columns(samples, **{"return": returns, "value": zeros})


def spoken(engine: TrainEngine, adapter: str | None, sample: Sample) -> Tensor:
    """Return what `transformers` makes of the engine's weights: the log-probs `_T` of a sample's targets."""
    model: LanguageModel = tiny_model()
    if adapter is not None:
        model.bank.add(adapter, LORA, 0)
        model.bank.fill(adapter, engine.weights(adapter))
    tokens = torch.tensor([sample.tokens])
    with torch.no_grad(), model.computing([(adapter, 0, 1)]):
        logp_LV = (
            model.model(input_ids=tokens, use_cache=False).logits[0].div(sample.temperature).log_softmax(-1)
        )
    return torch.stack([logp_LV[t - 1, sample.tokens[t]] for t in sample.targets])


class TestWeights:
    def test_they_have_the_names_that_other_programs_know(self, engine: TrainEngine) -> None:
        model = tiny_model()
        model.bank.add("x", LORA, 0)
        assert engine.weights("a").keys() == model.bank.parameters("x").keys()
        assert engine.weights("still").keys() == tiny_model().base_parameters().keys()
        critic = engine.weights("v")
        assert critic.keys() == {*model.bank.parameters("x"), f"{HEAD}weight", f"{HEAD}bias"}
        assert (critic[f"{HEAD}weight"].shape, critic[f"{HEAD}bias"].shape) == ((1, 16), (1,))

    def test_loaded_weights_score_and_are_published(self, engine: TrainEngine) -> None:
        before = engine.score(words("a", "b"))
        drawn = {key: torch.randn_like(tensor) for key, tensor in engine.weights("a").items()}
        engine.load_weights("a", drawn)
        assert same_bits(frozen_copy(engine.weights("a")), drawn)
        after = engine.score(words("a", "b"))
        assert all(not torch.equal(*pair) for pair in zip(before[:4], after[:4], strict=True))
        assert all(torch.equal(*pair) for pair in zip(before[4:], after[4:], strict=True))
        assert set(engine.publish()) == {"a"}

    def test_what_does_not_fit_is_rejected_and_nothing_moves(self, engine: TrainEngine) -> None:
        before = learned(engine)
        weights = dict(engine.weights("a"))
        first = next(iter(weights))
        for wrong in ({k: v for k, v in weights.items() if k != first}, {**weights, first: torch.zeros(1)}):
            with pytest.raises(ModelError, match="fit"):
                engine.load_weights("a", wrong)
        assert changed(before, learned(engine)) == set()


class TestScores:
    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    def test_they_are_the_models_own(self, engine: TrainEngine, temperature: float) -> None:
        samples = draw_samples(["b", "still", "a"], LENGTHS, temperature=temperature)
        for sample, logp_T in zip(samples, engine.score(samples), strict=True):
            assert (logp_T.dtype, logp_T.device.type) == (torch.float32, "cpu")
            adapter = None if sample.learner == "still" else sample.learner
            assert logp_T.sub(spoken(engine, adapter, sample)).abs().max() <= 1e-5

    def test_a_reference_stays_until_it_is_refreshed(self, engine: TrainEngine) -> None:
        asked = [replace(s, learner=reference_name("a")) for s in words("a")]
        begun = engine.score(asked)
        assert all(torch.equal(*pair) for pair in zip(begun, engine.score(words("a")), strict=True))
        engine.update(words("a"), NLL)
        assert same_bits(engine.score(asked), begun)
        engine.refresh_references()
        assert same_bits(engine.score(asked), engine.score(words("a")))

    def test_embeddings_are_those_of_the_frozen_base(self, engine: TrainEngine) -> None:
        asked = [replace(s, learner=embedder_name("a")) for s in words("a")]
        found = engine.embed(asked)
        assert [each.shape for each in found] == [(16,)] * len(asked)
        engine.update(words("a"), NLL)
        assert same_bits(engine.embed(asked), found)


class TestUpdates:
    def test_only_learners_with_samples_change(self, engine: TrainEngine) -> None:
        for moving, samples in (("a", words("a")), ("v", judged()), ("b", words("b"))):
            before, versions = learned(engine), dict(engine.versions)
            engine.update(samples, NLL)
            assert changed(before, learned(engine)) == {moving}
            assert {n for n, version in engine.versions.items() if version != versions[n]} == {moving} - {"v"}
        assert set(engine.versions) == {"a", "b"}

    def test_each_policy_and_critic_takes_steps_at_its_own_rate(self, make: Make) -> None:
        moved = []
        for rate in (USUAL, Rate(lr=3e-2)):
            engine = make(rate)
            before = learned(engine)
            engine.update(words("a", "b") + judged(), NLL)
            after = learned(engine)
            moved.append(
                {name: {key: after[name][key] - of[key] for key in of} for name, of in before.items()}
            )
        usual, faster = moved
        assert same_bits(usual["a"], faster["a"])
        for name in ("b", "v"):
            for key, step in usual[name].items():
                torch.testing.assert_close(faster[name][key], 3 * step, rtol=1e-3, atol=1e-6)

    def test_sums_are_divided_by_the_weight_of_each_learner(self, make: Make) -> None:
        """Every sample of one policy twice over gives the same step, whatever the others have."""
        found = []
        for samples in (words("a", "b"), [*words("a"), *words("b"), *words("a")], words("a")):
            one = make()
            one.update(samples, NLL)
            found.append(frozen_copy(one.weights("a")))
        for other in found[1:]:
            assert max(float((found[0][k] - other[k]).abs().max()) for k in other) <= 1e-6

    def test_demonstrated_tokens_become_likelier(self, engine: TrainEngine) -> None:
        samples = words("a")
        before = float(torch.cat(engine.score(samples)).mean())
        for _ in range(10):
            engine.update(samples, NLL)
        assert float(torch.cat(engine.score(samples)).mean()) > before + 0.05

    def test_the_samplers_word_is_compared_before_anything_moves(self, engine: TrainEngine) -> None:
        true = with_behaviour(engine, words("a", "b"))
        assert engine.check_parity(true)["parity/max"] <= 1e-4
        wrong = with_columns(true, behaviour=[s.columns["behaviour"] - 0.1 for s in true])
        before = learned(engine)
        with pytest.raises(ParityError):
            engine.check_parity(wrong)
        with pytest.raises(ParityError):
            engine.update(wrong, replace(NLL, parity=True))
        assert changed(before, learned(engine)) == set()
        assert engine.update(true, replace(NLL, parity=True))["parity/max"] <= 1e-4

    @pytest.mark.sample(2)
    def test_samples_of_older_weights_are_compared_with_those(self, engine: TrainEngine) -> None:
        older = {name: frozen_copy(engine.weights(name)) for name in ("a", "b")}
        sampled = with_behaviour(engine, words("a", "b"))
        for _ in range(10):
            engine.update(sampled, NLL)
        now = learned(engine)
        with pytest.raises(ParityError):
            engine.check_parity(sampled)
        assert engine.check_parity(sampled, older)["parity/max"] <= 1e-4
        with pytest.raises(ParityError):
            engine.check_parity(with_behaviour(engine, words("a", "b")), older)
        assert changed(now, learned(engine)) == set()

    def test_a_loss_that_is_not_finite_stops_without_a_change(self, make: Make) -> None:
        one = make()
        before = learned(one)
        with pytest.raises(NumericsError, match="not finite"):
            one.update(words("a"), replace(NLL, policy_loss=no_number))
        assert changed(before, learned(one)) == set()
        one.update(words("a"), NLL)
        after = learned(one)
        other = make()
        other.update(words("a"), NLL)
        assert changed(after, learned(other)) == set()


def no_number(outputs: Outputs, targets: Targets) -> Loss:
    loss = negative_log_likelihood(outputs, targets)
    return loss._replace(total=loss.total * float("nan"))


class TestPublishing:
    def test_changes_are_published_once_with_their_version(self, engine: TrainEngine) -> None:
        assert engine.publish() == {}
        engine.update([*words("a"), *judged()], NLL)
        found = engine.publish()
        assert set(found) == {"a"}
        assert found["a"].version == engine.versions["a"] == 1
        assert same_bits(frozen_copy(found["a"].weights), frozen_copy(engine.weights("a")))
        assert engine.publish() == {}

    def test_an_exchange_is_of_weights_and_references_under_a_version_of_its_own(
        self, engine: TrainEngine
    ) -> None:
        engine.update(words("a"), NLL)
        engine.publish()
        before = learned(engine)
        engine.exchange("a", "b")
        after = learned(engine)
        for one, other in (("a", "b"), ("b", "a")):
            assert same_bits(after[one], before[other])
            assert same_bits(after[reference_name(one)], before[reference_name(other)])
        assert {name: each.version for name, each in engine.publish().items()} == {"a": 2, "b": 2}


class TestState:
    def test_an_update_is_undone_and_repeated_exactly(self, engine: TrainEngine) -> None:
        samples = [*words("a", "b"), *judged()]
        engine.update(samples, NLL)
        engine.publish()
        held, then, versions = deepcopy(engine.state()), learned(engine), dict(engine.versions)
        engine.update(samples, NLL)
        engine.refresh_references()
        engine.publish()
        after = learned(engine)
        engine.load_state(held)
        assert changed(then, learned(engine)) == set()
        assert dict(engine.versions) == versions
        assert set(engine.publish()) == {"a", "b"}
        engine.update(samples, NLL)
        engine.refresh_references()
        assert changed(after, learned(engine)) == set()

    def test_it_wakes_up_in_another_engine(self, make: Make) -> None:
        samples = [*words("a", "b"), *judged()]
        one = make()
        one.update(samples, NLL)
        held = deepcopy(one.state())
        one.update(samples, NLL)
        expected = learned(one)
        other = make()
        other.load_state(held)
        other.update(samples, NLL)
        assert changed(expected, learned(other)) == set()
