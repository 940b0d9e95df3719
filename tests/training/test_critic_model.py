"""Critics on a model of their own: another family reads text in its own tokens, trained by adapter, in full or by its head alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.families import FAMILIES
from tests.support.tiny import frozen_copy, learners_of, same_bits, sections, tiny_model

from kapelle import Trainer
from kapelle.algorithms.marft import MARFT
from kapelle.algorithms.signals.critic_values import value_samples
from kapelle.algorithms.signals.samples import critic_sample
from kapelle.errors import ConfigError
from kapelle.models.language_model import LanguageModel
from kapelle.models.renderer import ChatRenderer
from kapelle.models.weights import save_model
from kapelle.rows import turns_of
from kapelle.runs import checkpoint
from kapelle.runs.reader import read_latest
from kapelle.setup.recipe import resolve
from kapelle.team import Agent, Critic, Lora, Policy, Team
from kapelle.types import Episode, Message, Task, Turn

WORDS = "one two three apples and plums make five, they said; €5 is too much. What is the sum of all? "
PAD, END = "<pad>", "</s>"
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def word_tokenizer() -> Any:
    """Return a tokeniser that shares no token with the embedded model's: pieces of words, and another chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=[PAD, END], initial_alphabet=alphabet)
    raw.train_from_iterator([WORDS] * 4, trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token=END, pad_token=PAD, model_max_length=512,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    made.chat_template = TEMPLATE
    return made


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny Llama with that tokeniser."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("llama")
    words = word_tokenizer()
    shape = {**FAMILIES["llama"], "vocab_size": len(words), "max_position_embeddings": 512}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **shape))
    save_model(folder, LanguageModel(model, words, name="llama"))
    return str(folder)


def settings(model: str | None, train: str = "lora", name: str = "marft", **over: Any) -> dict[str, Any]:
    team = {"agents": 2, "lora": {"rank": 2, "alpha": 4.0}, "critic_lora": {"rank": 2}}
    team |= {"sampling": {"max_tokens": 4}, "critic_model": model, "critic_train": train}
    return sections(team=team, algorithm={"name": name, "group_size": 2}, workflow={"name": "chain"}, **over)


class Listed:
    """A turn of chosen bytes by the embedded model, and what reads it."""

    def __init__(self, text: str, special: tuple[int, ...] = ()) -> None:
        byte, word = tiny_model().renderer, ChatRenderer(word_tokenizer(), 512)
        self.readers = {"a": byte, "b": byte, "critic:a": word}.__getitem__
        self.word = word
        asked = [Message("user", "What is the sum?")]
        first = self.turn("a", 0, "one and two", byte, asked)
        self.last = self.turn("b", 1, text, byte, [Message("user", "said: one and two")], special)
        self.episode = Episode(Task("t", "What is the sum?"), 0, ("a", "b"), (first, self.last))
        policies = {name: Policy(name, lora=Lora()) for name in ("a", "b")}
        critics = {"critic:a": Critic("critic:a", "critic", reads_text=True)}
        self.team = Team(
            (Agent("a"), Agent("b")), policies, {"a": "a", "b": "b"}, {"base": "x", "critic": "y"},
            critics, {"a": "critic:a", "b": "critic:a"},
        )  # fmt: skip

    def turn(
        self, who: str, index: int, text: str, byte: ChatRenderer, new_messages: list[Message],
        special: tuple[int, ...] = (),
    ) -> Turn:  # fmt: skip
        ids = (*special, *byte.completion(text))
        return Turn(
            who,
            who,
            0,
            "",
            index,
            index,
            byte.start(new_messages),
            ids,
            (0.0,) * len(ids),
            "stop",
            text,
            tuple(new_messages),
        )

    def before(self, unit: Any = "token", view: Any = "central", after: bool = False) -> list[str]:
        """Return, value by value, all that the critic has read for it."""
        need = MARFT().build().critic
        assert need is not None
        need = replace(need, view=view, unit=unit)
        sample = critic_sample(self.episode, self.last, self.team, need, {}, self.readers, after=after)
        return [self.word.decode(sample.tokens[:place]) for place in sample.targets]


def test_a_value_knows_the_text_before_the_agents_token_and_no_more_of_it() -> None:
    text = "€5 apples and plums"
    seen = Listed(text).before()
    start = seen[0]
    assert len(seen) == len(text.encode()) + 1, (
        "one value before each byte, and one before the end of the turn"
    )
    characters = [k for k, letter in enumerate(text) for _ in letter.encode()] + [len(text)]
    known = [read.removeprefix(start) for read in seen]
    assert all(text[:count].startswith(read) for count, read in zip(characters, known, strict=True))
    assert known[-1] == text
    assert "" < known[9] < text, "it moves on inside of the answer"


def test_a_critic_reads_what_all_said_or_what_its_agent_read_in_its_own_template() -> None:
    listed = Listed("five")
    [central], [local] = listed.before("turn"), listed.before("turn", "local")
    new_messages = "[user] said: one and two</s>[assistant] "
    assert local == new_messages
    assert central == f"[user] What is the sum?</s>[assistant] one and two</s>{new_messages}"
    assert listed.before("turn", after=True) == [central, f"{central}five</s>"]
    assert listed.before("after") == [f"{central}five</s>"]


def test_what_a_turn_is_worth_knows_what_others_said_at_the_same_moment() -> None:
    listed = Listed("five")
    listed.last = replace(listed.last, completed_before=0)
    listed.episode = replace(listed.episode, turns=(listed.episode.turns[0], listed.last))
    asked, new_messages = (
        "[user] What is the sum?</s>[assistant] ",
        "[user] said: one and two</s>[assistant] ",
    )
    assert listed.before("turn") == [f"{asked}{new_messages}"]
    assert listed.before("after") == [f"{asked}one and two</s>{new_messages}five</s>"]


@pytest.mark.sample(6)
@pytest.mark.parametrize("train", ["lora", "full", "head"])
@pytest.mark.parametrize("name", ["marft", "ippo"])
def test_only_what_is_to_learn_learns_and_a_stopped_run_goes_on_alike(
    name: str, train: str, llama: str, tmp_path: Path
) -> None:
    def trained(run: Path, *counts: int) -> dict[str, Any]:
        for count in counts:
            with Trainer(resolve(settings(llama, train, name)), run_dir=run, resume=run.exists()) as trainer:
                before = {base: frozen_copy(m.base_parameters()) for base, m in trainer.models.items()}
                learners = learners_of(trainer.engine)
                critics = {
                    n: frozen_copy(learners[n].parameters) for n in learners if n.startswith("critic:")
                }
                list(trainer.steps(count))
                trainer.save()
                moved = {
                    b
                    for b, m in trainer.models.items()
                    if not same_bits(before[b], frozen_copy(m.base_parameters()))
                }
                assert moved == (
                    {c.base for c in trainer.team.critics.values()} if train == "full" else set()
                )
                for critic, was in critics.items():
                    assert not same_bits(was, frozen_copy(learners[critic].parameters))
                    assert (len(was) == 2) == (train == "head"), "a head's weight and bias, and else more"
                    assert all(model.name != "embedded" for b, model in trainer.models.items() if b != "base")
        latest = read_latest(run)
        assert latest is not None
        state: dict[str, Any] = checkpoint.load(latest)["train"]
        return state

    whole, parts = trained(tmp_path / "whole", 2), trained(tmp_path / "parts", 1, 1)
    for learner, state in whole["learners"].items():
        assert same_bits(state["weights"], parts["learners"][learner]["weights"])


def test_other_tokens_of_the_same_text_are_what_a_run_gives_its_critic(llama: str) -> None:
    with Trainer(resolve(settings(llama))) as trainer:
        [step] = trainer.steps(1)
        need = trainer.algorithm.critic
        assert need is not None
        samples, _ = value_samples(step.groups, trainer.team, need, trainer.loop.engine.renderer)
        for key, turn in turns_of(step.groups):
            read = word_tokenizer().decode(samples[key].tokens)
            assert all(message.content in read for message in turn.new_messages)


def test_a_critic_of_its_own_judges_agents_of_several_models(llama: str) -> None:
    given = settings(llama)
    agents = [{"name": "a"}, {"name": "b", "weights": {"model": llama, "train": "lora"}}]
    with pytest.raises(ConfigError, match=r"Set `team\.critic_model`"):
        Trainer(resolve({**given, "team": {**given["team"], "agents": agents, "critic_model": None}}))
    with Trainer(resolve({**given, "team": {**given["team"], "agents": agents}})) as trainer:
        [step] = trainer.steps(1)
    assert step.metrics["grad_norm/critic:a"] > 0
