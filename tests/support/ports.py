"""What a ported script did: read from the directory of its run, as a user would look it up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from tests.workflows.stage import lines, play

from kapelle import Trainer
from kapelle.environment import Environment
from kapelle.runs.reader import episode_steps, read_config, read_groups, read_metrics
from kapelle.types import Episode, Task

CHATML = ("<|im_start|>{role}\n{content}<|im_end|>\n", "<|im_start|>assistant\n")


def chatml(*messages: tuple[str, str], end: str = "") -> str:
    """Return what a ChatML template makes of (role, content) pairs before an answer; `end` follows the opened answer."""
    message, opening = CHATML
    return "".join(message.format(role=role, content=content) for role, content in messages) + opening + end


@dataclass(frozen=True)
class Port:
    """A run of a ported script."""

    run: Path
    model: Path

    @property
    def settings(self) -> dict[str, Any]:
        """The run's own record of its settings."""
        found = yaml.safe_load(read_config(self.run))
        assert isinstance(found, dict)
        return found

    def setting(self, path: str) -> Any:
        """Return one of them by its dotted name."""
        at: Any = self.settings
        for part in path.split("."):
            at = at[part]
        return at

    @property
    def episodes(self) -> list[Episode]:
        """The kept episodes of all steps."""
        return [
            e
            for step in episode_steps(self.run)
            for group in read_groups(self.run, step)
            for e in group.episodes
        ]

    @property
    def batches(self) -> list[tuple[int, int]]:
        """Of each step: prompts, and completions of each."""
        found = [read_groups(self.run, step) for step in episode_steps(self.run)]
        return [(len(groups), len(groups[0].episodes)) for groups in found]

    def decoded(self, tokens: Sequence[int]) -> str:
        """Return tokens as the model's own tokeniser writes them, marks included."""
        from transformers import AutoTokenizer

        return str(AutoTokenizer.from_pretrained(self.model).decode(list(tokens)))

    @property
    def prompts(self) -> dict[tuple[str, str], str]:
        """Question and agent → the text that the agent read for its first turn."""
        first = {(e.task.question, turn.agent): turn for e in self.episodes for turn in reversed(e.turns)}
        return {key: self.decoded(turn.prompt_ids) for key, turn in first.items()}

    @property
    def rates(self) -> list[float]:
        """The learning rate of each step's last update, the same for all that learns."""
        found = [{row[key] for key in row if key.startswith("lr/")} for row in read_metrics(self.run)]
        assert all(len(each) == 1 for each in found)
        return [each.pop() for each in found]

    @property
    def trained(self) -> dict[str, str]:
        """What was saved of each policy at the last step: all weights, or adapters of a rank and an alpha."""
        latest = max((self.run / "checkpoints").iterdir())
        found = {}
        for policy in sorted((latest / "policies").iterdir()):
            adapter = policy / "adapter_config.json"
            if adapter.exists():
                values = json.loads(adapter.read_text(encoding="utf-8"))
                found[policy.name] = f"rank {values['r']}, alpha {values['lora_alpha']:g}"
            else:
                assert (policy / "model.safetensors").exists()
                found[policy.name] = "all weights"
        return found

    def earned(self, completions: Mapping[str, str | Sequence[str]]) -> Episode:
        """Return the episode in which the run's agents answer its first task with these texts, each with its own turn by turn."""
        with Trainer.from_run(self.run) as trainer:
            return scripted(trainer.config.environment, trainer.config.workflow, completions)


def scripted(
    environment: Environment, workflow: Any, completions: Mapping[str, str | Sequence[str]]
) -> Episode:
    """Return an episode of the environment's first training task in which agents say these texts."""
    environment.check(list(completions))
    task: Task = environment.task("train", 0)
    said = {agent: lines(*([text] if isinstance(text, str) else text)) for agent, text in completions.items()}
    [episode] = asyncio.run(play(environment, workflow, list(completions), said, task))
    return episode
