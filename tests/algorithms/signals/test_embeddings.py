"""Embeddings of turns: teams on different models, a separate model, and sentence-transformers."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.episodes import episode, group, turn
from tests.support.sentences import sentences
from tests.support.tiny import SIZE, frozen_copy, learners_of, same_bits, sections

from kapelle.algorithms.signals.embeddings import Embeddings, embedded_turns, turn_texts
from kapelle.errors import ConfigError, ModelError
from kapelle.models.language_model import LanguageModel, load_language_model
from kapelle.models.weights import save_model
from kapelle.rows import Embedding, TurnKey
from kapelle.settings.schema import ModelConfig
from kapelle.team import EMBEDDER
from kapelle.training.trainer import Trainer
from kapelle.types import Group, Message

BOTH = pytest.mark.parametrize("name", ["vdn", "qmix"])
TWO_MODELS = {
    "lora": {"rank": 2, "alpha": 4.0},
    "sampling": {"max_tokens": 4},
    "agents": [{"name": "a"}, {"name": "b", "weights": {"model": "wide", "train": "lora"}}],
}


def wide(hidden: int = 24, seed: int = 5) -> LanguageModel:
    """A Qwen3 model of another width than the tests' usual 16."""
    return load_language_model(
        ModelConfig.model_validate({"embedded": {**SIZE, "hidden": hidden, "heads": 3, "seed": seed}})
    )


def run(name: str, team: Any = None, models: Any = None, **algorithm: Any) -> Trainer:
    fit = {"min_fill": 2, "updates": 3}
    chosen = {"name": name, "group_size": 3, "credit_warmup_steps": 0, "fit": fit, **algorithm}
    return Trainer(
        **sections(
            algorithm=chosen,
            workflow={"name": "debate", "rounds": 2},
            training={"steps": 3, "tasks_per_step": 2},
            **({} if team is None else {"team": team}),
        ),
        models=models,
    )


def moved(trainer: Trainer) -> dict[str, bool]:
    """Which learners two steps have moved, the second of them credited by the mixer."""
    before = {name: frozen_copy(each.parameters) for name, each in learners_of(trainer.engine).items()}
    rows = [step.metrics for step in trainer.steps(2)]
    assert "credit_weight" in rows[1]
    return {
        name: not same_bits(before[name], frozen_copy(each.parameters))
        for name, each in learners_of(trainer.engine).items()
    }


def read(trainer: Trainer, groups: Sequence[Group]) -> Mapping[TurnKey, Embedding]:
    """Return what the trainer's algorithm reads of the groups."""
    asked = trainer.algorithm.need(Embeddings)
    assert asked is not None
    return embedded_turns(asked.reader, groups, trainer.team, trainer.engine)


def width(trainer: Trainer) -> int:
    memory = trainer.loop.memory
    assert memory is not None
    state: Any = memory.state()
    return int(state["replay"]["saw_BAD"].shape[-1])


class TestDifferentModels:
    @pytest.mark.sample(2)
    @pytest.mark.slow
    @BOTH
    def test_a_team_on_two_models_learns_and_all_vectors_are_of_the_first(self, name: str) -> None:
        with run(name, TWO_MODELS, {"wide": wide()}) as trainer:
            assert moved(trainer) == {"a": True, "b": True}
            assert width(trainer) == 16

    @BOTH
    def test_the_embedder_stays_frozen_in_full_training(self, name: str) -> None:
        whole = {"agents": [{"name": "a", "weights": "shared"}, *TWO_MODELS["agents"][1:]]}  # type: ignore[index]
        with run(name, {**TWO_MODELS, **whole}, {"wide": wide()}) as trainer:
            played = next(trainer.steps(1)).groups
            before = read(trainer, played)
            next(trainer.steps(1))
            after = read(trainer, played)
            assert all(torch.equal(before[key].action_D, after[key].action_D) for key in before)


class TestAModelOfOnesOwn:
    def test_a_separate_embedder_reads_the_turns_of_a_team(self, tmp_path: Path) -> None:
        save_model(tmp_path / "reader", wide(hidden=36))
        with run("vdn", embedder=str(tmp_path / "reader")) as trainer:
            before = frozen_copy(trainer.models[EMBEDDER].base_parameters())
            assert all(moved(trainer).values())
            assert EMBEDDER not in learners_of(trainer.engine)
            assert same_bits(before, frozen_copy(trainer.models[EMBEDDER].base_parameters()))
            assert width(trainer) == 36

    def test_what_it_reads_is_the_text_after_what_was_read_before(self) -> None:
        # What an agent said is read after what it saw: by hand, the model's last hidden states averaged.
        reader = wide(hidden=36)
        with run("vdn", models={"reader": reader}, embedder="reader") as trainer:
            step = next(trainer.steps(1))
            found = read(trainer, step.groups)
            (before, words) = turn_texts(step.groups)[TurnKey(0, 0, 2)]
            assert step.groups[0].episodes[0].turns[0].text in before
            prompt = reader.renderer.start([Message("user", before)])
            tokens = torch.tensor([*prompt, *reader.renderer.completion(words)])
            with torch.no_grad():
                hidden = reader.model(tokens[None], output_hidden_states=True).hidden_states[-1][0]
            seen = found[TurnKey(0, 0, 2)]
            torch.testing.assert_close(seen.action_D, hidden[len(prompt) :].mean(0), atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(
                seen.observation_D, hidden[: len(prompt)].mean(0), atol=1e-5, rtol=1e-4
            )

    def test_longer_than_its_context_the_end_is_read(self) -> None:
        config = ModelConfig.model_validate({"embedded": {**SIZE, "context": 24}})
        reader = load_language_model(config)
        question = Message("user", "x" * 99)
        with run("vdn", models={"reader": reader}, embedder="reader") as trainer:
            for words in ("y" * 60, "no"):
                played = [group(episode(turn("agent_0", 0, new_messages=(question,), text=words)))]
                [seen] = read(trainer, played).values()
                prompt, said = reader.renderer.start([question]), reader.renderer.completion(words)[:23]
                for tokens, count, found in (
                    (prompt, 24, seen.observation_D),
                    ((*prompt, *said), len(said), seen.action_D),
                ):
                    with torch.no_grad():
                        ids = torch.tensor([tokens[-24:]])
                        hidden = reader.model(ids, output_hidden_states=True).hidden_states[-1][0]
                    torch.testing.assert_close(found, hidden[-count:].mean(0), atol=1e-5, rtol=1e-4)

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            ({"embedder_device": "cpu"}, "embedder_device"),
            ({"embedder": "reader", "embedder_device": "cuda:7"}, "algorithm.embedder_device: cuda:7"),
            ({"embedder": "reader", "embedder_device": "gpu"}, "algorithm.embedder_device: gpu"),
        ],
    )
    def test_an_unavailable_device_raises_an_error(self, given: dict[str, str], said: str) -> None:
        with pytest.raises(ConfigError, match=said):
            run("vdn", models={"reader": wide()}, **given)


@pytest.fixture
def library() -> Iterator[None]:
    with sentences():
        yield


class TestSentenceTransformers:
    def test_a_missing_package_raises_an_error_before_a_model_loads(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "sentence_transformers", None)
        with pytest.raises(ConfigError, match=r"pip install 'kapelle\[embed\]'"):
            run("vdn", embedder="sentence-transformers:all-MiniLM-L6-v2")

    @pytest.mark.usefixtures("library")
    def test_a_team_is_credited_by_its_vectors(self) -> None:
        with run("qmix", TWO_MODELS, {"wide": wide()}, embedder="sentence-transformers:letters") as trainer:
            assert moved(trainer) == {"a": True, "b": True}
            assert width(trainer) == 3

    @pytest.mark.usefixtures("library")
    def test_a_name_that_it_does_not_know(self) -> None:
        with pytest.raises(ModelError, match=r"'other' cannot be loaded: other is no known model"):
            run("vdn", embedder="sentence-transformers:other")

    @pytest.mark.usefixtures("library")
    def test_an_unreachable_hub_and_an_invalid_name_raise_errors_at_once(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kapelle.models.paths.hub_fault", lambda name, **_: "the hub is silent")
        with pytest.raises(
            ModelError, match=r"'sentence-transformers/unheard' .* not downloaded, and the hub is silent"
        ):
            run("vdn", embedder="sentence-transformers:unheard")
        with pytest.raises(ModelError, match="'a/b/c' does not exist"):
            run("vdn", embedder="sentence-transformers:a/b/c")


def test_what_an_agent_read_is_its_conversation() -> None:
    first = turn("a", 0, new_messages=(Message("system", "be kind"), Message("user", "1+1")), text="2")
    again = turn(
        "a",
        2,
        prompt_ids=(*first.prompt_ids, *first.completion_ids, 7),
        new_messages=(Message("user", "sure?"),),
        text="yes",
    )
    other = turn("b", 1, new_messages=(Message("user", "1+1"),), text="3")
    found = turn_texts([group(episode(first, other, again))])
    assert found == {
        TurnKey(0, 0, 0): ("be kind\n\n1+1", "2"),
        TurnKey(0, 0, 1): ("1+1", "3"),
        TurnKey(0, 0, 2): ("be kind\n\n1+1\n\n2\n\nsure?", "yes"),
    }
