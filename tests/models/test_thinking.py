"""Models that think: arguments of their chat templates, and what becomes of thoughts."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from tests.support.thinking import THINKING, thinking_folder, thinking_tokenizer
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from kapelle.cli import main
from kapelle.errors import ConfigError
from kapelle.models.renderer import ChatRenderer, light_renderer, load_renderer
from kapelle.runs.reader import read_episodes
from kapelle.settings.schema import ModelConfig
from kapelle.types import Json, Message, SampledMessage, conversation

U = Message("user", "2+2?")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return thinking_folder(tmp_path_factory.mktemp("model"))


class TestArguments:
    def test_they_reach_the_template(self) -> None:
        renderer = ChatRenderer(thinking_tokenizer(), 512)
        quiet = renderer.with_arguments({"enable_thinking": False})
        assert renderer.decode(renderer.start([U])).endswith("<|im_start|>assistant\n")
        assert quiet.decode(quiet.start([U])).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")

    def test_a_light_tokeniser_gives_the_same_ids(self, folder: Path) -> None:
        light, whole = (
            read(str(folder), ModelConfig()).with_arguments({"enable_thinking": False})
            for read in (light_renderer, load_renderer)
        )
        assert light.start([U]) == whole.start([U])

    def test_one_that_the_template_does_not_read_is_rejected(self) -> None:
        renderer = ChatRenderer(thinking_tokenizer(), 512)
        with pytest.raises(ConfigError, match=r"does not read\. Did you mean 'enable_thinking'\?"):
            renderer.with_arguments({"enable_thinkin": False})
        for inner in ("words", "messages", "m"):  # what the template sets itself is none either
            with pytest.raises(ConfigError, match="does not read"):
                renderer.with_arguments({inner: "x"})


@pytest.mark.parametrize(
    ("answer", "words"),
    [("<think>\nso 4\n</think>\n\n4", "4"), ("<think>\nso, by the", ""), ("4", "4")],
    ids=["", "cut off", "none"],
)
def test_thoughts_are_counted_in_tokens_and_characters(answer: str, words: str) -> None:
    renderer = ChatRenderer(thinking_tokenizer(), 512)
    ids = renderer.completion(answer)[:-1]
    text = renderer.spoken(ids)
    tokens, characters = renderer.thoughts(renderer.start([U]), ids, text)
    assert (renderer.spoken(ids[tokens:]).strip(), text[characters:]) == (words, words)
    assert (tokens == len(ids)) == (words == "")


def turns(
    template: str, arguments: Mapping[str, Json], answers: Sequence[str], new_messages: Sequence[Message]
) -> list[bool]:
    """Compare each prompt of a conversation with what the template writes; return which ones continue the tokens before."""
    tokens = thinking_tokenizer(template)
    renderer = ChatRenderer(tokens, 4096).with_arguments(arguments)
    texts = [Message("system", "Be brief."), U]
    before, prompt, continues = list(texts), renderer.start(texts), list[bool]()
    for answer, news in zip(answers, new_messages, strict=True):
        # Byte by byte, as no tokeniser would write a mark: the very ids have to come back.
        ids = (
            *(i for letter in answer for i in renderer.completion(letter)[:-1]),
            *renderer.completion("")[-1:],
        )
        ids = renderer.completion(answer) if "<" in answer else ids
        before.append(
            SampledMessage("assistant", answer, ids=ids, thoughts=renderer.thoughts(prompt, ids, answer)[0])
        )
        known, prompt = (*prompt, *ids), renderer.extend(prompt, ids, [news], before)
        opened = "<think>\n" if "<think>" not in answer and "</think>" in answer else ""
        texts += [Message("assistant", opened + answer), news]
        before.append(news)
        continues.append(prompt[: len(known)] == known)
        written = tokens.apply_chat_template(
            conversation(texts), tokenize=False, add_generation_prompt=True, **arguments
        )
        assert renderer.decode(prompt) == written
    return continues


THOUGHT = "<think>\nhm\n</think>\n\n4"
CALLING = "<think>\nlook\n</think>\n\n<tool_call>\n{}\n</tool_call>"
TOOL = Message("tool", "4")
ALWAYS_OPEN = THINKING.replace(
    "{%- if enable_thinking is defined and enable_thinking is false %}", "{{- '<think>\\n' }}{%- if false %}"
)
KEEPS = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"


class TestOwnThoughts:
    """What the agent reads of its own earlier thoughts is what its template writes."""

    @pytest.mark.parametrize("arguments", [{}, {"enable_thinking": True}])
    def test_they_go_before_the_next_message_of_the_user(self, arguments: Mapping[str, Json]) -> None:
        assert turns(THINKING, arguments, [THOUGHT, THOUGHT], [U, U]) == [False, False]

    def test_they_stay_in_a_chain_of_tool_calls(self) -> None:
        assert turns(THINKING, {}, [CALLING, THOUGHT, THOUGHT], [TOOL, TOOL, U]) == [True, True, False]

    def test_an_answer_without_thoughts_is_continued(self) -> None:
        assert turns(THINKING, {}, ["4", "5"], [U, U]) == [True, True]

    def test_a_template_that_keeps_them_is_continued(self) -> None:
        assert turns(KEEPS, {}, [THOUGHT, THOUGHT], [U, U]) == [True, True]

    def test_words_stay_the_tokens_that_were_sampled(self, data_folder: Path) -> None:
        raw = Tokenizer.from_file(str(data_folder / "tokenizer_tiny_bpe" / "tiny_bpe_tokenizer.json"))
        tokens = PreTrainedTokenizerFast(tokenizer_object=raw)
        tokens.add_special_tokens({"additional_special_tokens": ["<|im_start|>"], "eos_token": "<|im_end|>"})
        tokens.chat_template = THINKING
        renderer = ChatRenderer(tokens, 4096)
        letters = tuple(i for letter in "the answer" for i in renderer.completion(letter)[:-1])
        assert letters != renderer.completion("the answer")[:-1]
        ids = (
            *renderer.completion("<think>\nthe hint\n</think>\n\n")[:-1],
            *letters,
            *renderer.completion(""),
        )
        prompt = renderer.start([U])
        said = SampledMessage(
            "assistant", "", ids=ids, thoughts=renderer.thoughts(prompt, ids, renderer.spoken(ids))[0]
        )
        after = renderer.extend(prompt, ids, [U], [U, said])
        assert (*prompt, *letters) == after[: len(prompt) + len(letters)]


DEMO = ["demo", "warmup=null", "training.steps=1", "training.tasks_per_step=1", "algorithm.group_size=2"]
SMALL = ["evaluation.problems=1", "evaluation.problems_while_training=1", "team.sampling.max_tokens=4"]


@pytest.mark.slow
def test_a_run_of_such_a_model_is_trained_evaluated_talked_to_and_exported(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = str(tmp_path / "run"), tmp_path / "out"
    words = [*DEMO, *SMALL, f"model.path={folder}", "enable_thinking=false", "training.steps=2"]
    assert main(["train", *words, "--run-dir", run, "--no-rich"]) == 0
    assert main(["eval", run, "evaluation.problems=1"]) == 0
    assert main(["export", run, "--merge", "--out", str(out)]) == 0
    for team in (run, str(out)):
        monkeypatch.setattr("sys.stdin", io.StringIO("1+1?\n"))
        assert main(["chat", team]) == 0
    assert "actor:" in capsys.readouterr().out
    exported = load_renderer(str(out / "actor"), ModelConfig())
    assert exported.decode(exported.start([U])).endswith("<think>\n\n</think>\n\n")
    loud = exported.with_arguments({"enable_thinking": True})
    assert not loud.decode(loud.start([U])).endswith("</think>\n\n")


@pytest.mark.slow
def test_a_run_reads_them_by_agent(folder: Path, tmp_path: Path) -> None:
    given = [
        "model.chat_template_kwargs.enable_thinking=false",
        "team.agents.reasoner.chat_template_kwargs={enable_thinking: true}",
    ]
    words = [
        "train",
        *DEMO,
        *SMALL,
        f"model.path={folder}",
        *given,
        "--run-dir",
        str(tmp_path / "run"),
        "--no-rich",
    ]
    assert main(words) == 0
    turns = [turn for episode in read_episodes(tmp_path / "run", 1) for turn in episode.turns]
    block = load_renderer(str(folder), ModelConfig()).completion("<think>\n\n</think>\n\n")[:-1]
    assert {(turn.agent, turn.prompt_ids[-len(block) :] == block) for turn in turns} == {
        ("actor", True),
        ("reasoner", False),
    }


@pytest.mark.parametrize(("ending", "opened"), [("", "<think>\n"), ("<think>\n", "")])
def test_a_recorded_answer_has_its_thoughts(ending: str, opened: str) -> None:
    """`reasoning_content` of a data set is written behind the prompt, which may open the thoughts."""
    template = f"{THINKING.removesuffix('{%- endif %}')}{ending}{{%- endif %}}" if ending else THINKING
    renderer = ChatRenderer(thinking_tokenizer(template), 4096)
    row = {"role": "assistant", "content": "4", "reasoning_content": "two and two"}
    said = Message("assistant", "4", structured=json.dumps(row))
    assert renderer.answer(said) == f"{opened}two and two\n</think>\n\n4"
