"""Images of squares: drawn from the task, recorded as files, and errors for models without vision."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from tests.support.tiny import SIZE

pytest.importorskip("PIL")

from PIL import Image as Pillow

from kapelle.environments.squares import COLOURS, GREY, Squares, drawn
from kapelle.errors import ConfigError
from kapelle.runs.reader import read_episodes
from kapelle.setup.problems import choose_tasks
from kapelle.training.trainer import Trainer
from kapelle.types import Image

SEES = {**SIZE, "sees": True, "hidden": 32, "heads": 4}


def pixels(image: Image) -> Pillow.Image:
    return Pillow.open(io.BytesIO(image.data)).convert("RGB")


class TestPictures:
    def test_an_image_shows_its_task(self) -> None:
        environment = Squares(ask=("colour", "count"), difficulty=(2, 4))
        for index in range(30):
            task = environment.task("train", index)
            grid, answer = task.data["grid"], task.data["answer"]
            side = round(len(grid) ** 0.5)
            seen = pixels(environment.start(task, ("a",), 0).images("a")[0])
            assert seen.size == (8 * side, 8 * side)
            shown = [seen.getpixel((8 * (k % side) + 4, 8 * (k // side) + 4)) for k in range(side * side)]
            names: dict[object, str] = {value: name for name, value in COLOURS.items()}
            if "Which" in task.question:
                assert [names[pixel] for pixel in shown if pixel != GREY] == [answer]
            else:
                colour = task.question.removeprefix("How many squares are ").removesuffix("?")
                assert shown.count(COLOURS[colour]) == int(answer)

    def test_the_same_task_has_the_same_image(self) -> None:
        environment = Squares()
        task = environment.task("test", 3)
        one, other = (environment.start(task, ("a", "b"), seed).images("b")[0] for seed in (1, 2))
        drawn.cache_clear()
        assert one == other == environment.start(task, ("a",), 0).images("a")[0]
        assert one.media == "image/png"

    def test_split_views_divide_the_grid(self) -> None:
        environment = Squares(ask=("count",), views="split", difficulty=(3, 3))
        task = environment.task("train", 0)
        world = environment.start(task, ("a", "b", "c"), 0)
        seen = [pixels(world.images(agent)[0]) for agent in "abc"]
        for k in range(9):
            shown = [each.getpixel((8 * (k % 3) + 4, 8 * (k // 3) + 4)) for each in seen]
            colour = COLOURS[task.data["grid"][k]] if task.data["grid"][k] else GREY
            assert shown[k % 3] == colour
            assert all(pixel == GREY for agent, pixel in enumerate(shown) if agent != k % 3)

    def test_no_image_is_in_both_splits(self) -> None:
        environment = Squares(difficulty=(2, 5))
        keys = [
            {str(environment.task(split, k).data["grid"]) for k in range(400)} for split in ("train", "test")
        ]
        assert not keys[0] & keys[1]
        tasks = choose_tasks(environment, "test", 20)
        assert len({str(task.data["grid"]) for task in tasks}) == 20

    @pytest.mark.parametrize(
        ("settings", "why"),
        [
            ({"difficulty": (1, 3)}, "2 to 6"),
            ({"difficulty": (3, 9)}, "2 to 6"),
            ({"views": "split"}, "3 agents"),
        ],
    )
    def test_impossible_grids_are_errors(self, settings: dict[str, object], why: str) -> None:
        with pytest.raises(ConfigError, match=why):
            Squares.model_validate(settings).check(("a", "b", "c"))


def run_settings(**more: Any) -> dict[str, Any]:
    return {
        "model": {"embedded": SEES},
        "team": {
            "agents": [{"name": "looker", "prompt": "{question}"}],
            "sampling": {"max_tokens": 4},
            "lora": {"rank": 2},
        },
        "environment": {"name": "squares"},
        "workflow": {"name": "solo"},
        "algorithm": {"name": "grpo", "group_size": 2},
        "training": {"steps": 1, "tasks_per_step": 2},
        "evaluation": {"problems": 2},
        **more,
    }


class TestRuns:
    def test_a_run_records_images_as_files(self, tmp_path: Path) -> None:
        with Trainer(**run_settings(), run_dir=tmp_path / "run") as trainer:
            trainer.train(1)
        episodes = list(read_episodes(tmp_path / "run"))
        assert len(episodes) == 4
        for episode in episodes:
            [turn] = episode.turns
            [image] = turn.images
            assert turn.new_messages[-1].images == (image,)
            assert (tmp_path / "run" / "images" / image.file).read_bytes() == image.data
            assert image == Squares().start(episode.task, ("looker",), 0).images("looker")[0]
        files = {path.name for path in (tmp_path / "run" / "images").iterdir()}
        assert files >= {episode.turns[0].images[0].file for episode in episodes}
        (tmp_path / "run" / "images" / episodes[0].turns[0].images[0].file).unlink()
        reread = next(read_episodes(tmp_path / "run"))
        assert reread == episodes[0]
        assert reread.turns[0].images[0].data == b""

    @pytest.mark.parametrize(
        ("more", "why"),
        [
            ({"model": {"path": "embedded"}}, "embedded"),
            ({"engine": {"name": "vllm"}}, "vllm"),
            ({"train_engine": {"name": "fsdp"}}, "fsdp"),
            (
                {"episode": {"environment_workers": 2}},
                "environment_workers",
            ),
            (
                {"environment": {"name": "mixture", "parts": {"a": {"environment": {"name": "squares"}}}}},
                r"environment\.parts\.a\.environment",
            ),
        ],
    )
    def test_settings_without_vision_are_errors(self, more: dict[str, object], why: str) -> None:
        with pytest.raises(ConfigError, match=why):
            Trainer(**run_settings(**more))
