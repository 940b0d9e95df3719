"""Conversations that a chat template rejects or omits say the same in a form that it takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.tiny import tiny_model

from kapelle.cli import main
from kapelle.errors import ModelError
from kapelle.models.embedded import build_tokenizer
from kapelle.models.renderer import ChatRenderer
from kapelle.types import Message

GEMMA = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}"
    "{{ '<turn>' + role + '\n' + message['content'] | trim + '<end>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<turn>model\n'}}{% endif %}"
)
MISTRAL = (
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + '</s>' }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
CHATML = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<end>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SILENT = "{% for m in messages %}{% if m['role'] != 'system' %}{{ m['role'] + ':' + m['content'] + ';' }}{% endif %}{% endfor %}"
"""Leaves system messages out without a word, and never opens the agent's message."""
PARTS = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}{% for part in m['content'] %}{% if part['type'] == 'text' %}"
    "{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def renderer(template: str) -> ChatRenderer:
    made = build_tokenizer(512)
    made.chat_template = template
    return ChatRenderer(made, 512)


def started(template: str, *said: tuple[str, str]) -> str:
    read = renderer(template)
    return read.decode(read.start([Message(role, text) for role, text in said]))


S, U, V, A = ("system", "Be brief."), ("user", "2+2?"), ("user", "Well?"), ("assistant", "4")


@pytest.mark.parametrize(
    ("template", "said", "expected"),
    [
        (GEMMA, [S, U], "<turn>user\nBe brief.\n\n2+2?<end>\n<turn>model\n"),
        (GEMMA, [U, V], "<turn>user\n2+2?\n\nWell?<end>\n<turn>model\n"),
        (
            GEMMA,
            [S, U, A, ("tool", "8"), ("tool", "9"), V],
            "<turn>user\nBe brief.\n\n2+2?<end>\n<turn>model\n4<end>\n<turn>user\n8\n\n9\n\nWell?<end>\n<turn>model\n",
        ),
        (GEMMA, [A, U], "<turn>user\n<end>\n<turn>model\n4<end>\n<turn>user\n2+2?<end>\n<turn>model\n"),
        (
            GEMMA,
            [S, A, U],
            "<turn>user\nBe brief.<end>\n<turn>model\n4<end>\n<turn>user\n2+2?<end>\n<turn>model\n",
        ),
        (MISTRAL, [S, U], "[INST] Be brief.\n\n2+2? [/INST]"),
        (
            MISTRAL,
            [U, A, A, V],
            "[INST] 2+2? [/INST] 4</s>[INST]  [/INST] 4</s>[INST] Well? [/INST]",
        ),
        (SILENT, [S, U], "user:Be brief.\n\n2+2?;assistant:"),
        (PARTS, [S, U], "<|system|>Be brief.<|user|>2+2?<|assistant|>"),
        (
            CHATML,
            [S, V, U, A, A],
            "<|system|>Be brief.<end><|user|>Well?<end><|user|>2+2?<end><|assistant|>4<end><|assistant|>4<end><|assistant|>",
        ),
    ],
)
def test_a_rejected_conversation_is_rendered_in_a_supported_form(
    template: str, said: list[tuple[str, str]], expected: str
) -> None:
    assert started(template, *said) == expected


@pytest.mark.parametrize(
    ("template", "rest"),
    [
        (GEMMA, "<turn>model\nfour<end>\n<turn>user\nNo.\n\n3+3?<end>\n<turn>model\n"),
        (MISTRAL, " [/INST]four</s>[INST] No.\n\n3+3? [/INST]"),
    ],
)
def test_what_is_heard_later_is_joined_too(template: str, rest: str) -> None:
    read = renderer(template)
    prompt = read.start([Message(*S), Message(*U)])
    four = read.completion("four")[:4]
    following = read.extend(prompt, four, [Message("user", "No."), Message("user", "3+3?")])
    assert following[: len(prompt) + 4] == (*prompt, *four)
    assert read.decode(following).endswith(rest)


def test_a_template_that_leaves_the_question_out_is_rejected() -> None:
    with pytest.raises(ModelError, match="user"):
        started("{% for m in messages %}{{ m['role'] }}{% endfor %}", U)


def test_a_template_that_hangs_at_a_system_message_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kapelle.models.chat_template.LIMIT_S", 0.2)
    slow = "{% if messages[0]['role'] == 'system' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
    with pytest.raises(ModelError, match="did not finish"):
        started(slow + CHATML, S, U)


@pytest.mark.parametrize(
    "reach", ["''.__class__.__mro__", "cycler.__init__.__globals__", "messages.append({})"]
)
def test_a_hostile_template_reaches_nothing(reach: str) -> None:
    with pytest.raises(ModelError, match="SecurityError"):
        started("{{ " + reach + ".x }}" + CHATML, U)


@pytest.fixture
def saved(tmp_path: Path) -> Callable[[str], Path]:
    def save(template: str) -> Path:
        model = tiny_model()
        model.model.save_pretrained(tmp_path / "model")
        model.tokenizer.chat_template = template
        model.tokenizer.save_pretrained(tmp_path / "model")
        return tmp_path / "model"

    return save


RUN = ["team.agents.actor.system=Answer.", "training.steps=1", "training.tasks_per_step=1"]
SMALL = ["evaluation.problems=1", "evaluation.problems_while_training=1", "algorithm.group_size=2"]


@pytest.mark.slow
def test_a_team_with_system_prompts_trains_on_a_model_that_rejects_them(
    saved: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["demo", f"model.path={saved(GEMMA)}", *RUN, *SMALL]
    assert main(["validate", *words]) == 0
    assert capsys.readouterr().out.count("does not support system messages") == 1
    assert main(["train", *words, "--run-dir", str(tmp_path / "run"), "--no-rich"]) == 0
    assert "does not support system messages" in capsys.readouterr().out
