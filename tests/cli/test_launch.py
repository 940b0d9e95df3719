"""Batch scripts and manifests: what they start, and that nothing of a recipe's words is run or lost on the way."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from kapelle.cli import main
from kapelle.cli.launch import LaunchedJob, manifest, script, seconds_of

HOSTILE = ('description=it\'s $(touch pwned) `id` "x" $HOME $$(A) \\', "team.agents=2;rm -rf /", "a=é\nb: |")


def job(**over: Any) -> LaunchedJob:
    values: dict[str, Any] = {
        "name": "mine",
        "files": ("demo",),
        "settings": HOSTILE,
        "real": True,
        "run_dir": "runs/my $(run)",
        "nodes": 2,
        "processes": 4,
        "gpus": 4,
        "cpus": 3,
        "memory_gb": 64,
        "seconds": 90_061,
        "image": None,
        "volume": None,
    }
    return LaunchedJob(**{**values, **over})


def started(text: str, folder: Path, **programs: str) -> list[str]:
    """Run a script whose programs only say what they were given, and return their words, one to a line each."""
    bin_folder = folder / "bin"
    bin_folder.mkdir()
    for name in ("srun", "torchrun", "kapelle", "scontrol", "apptainer"):
        program = bin_folder / name
        program.write_text(
            programs.get(name, '#!/bin/bash\nfor word in "$@"; do printf "%s\\0" "$word"; done\n')
        )
        program.chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", text],
        cwd=folder,
        env={"PATH": f"{bin_folder}:/usr/bin:/bin", "SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "n[1-2]"},
        capture_output=True,
        check=True,
    )
    assert done.stderr == b""
    return done.stdout.decode().split("\0")[:-1]


TRAIN = ["demo", "--real", *HOSTILE, "--run-dir", "runs/my $(run)", "--no-rich"]


class TestSlurm:
    def test_every_node_starts_torchrun_with_the_words_as_they_were_given(self, tmp_path: Path) -> None:
        words = started(script(job()), tmp_path, scontrol="#!/bin/bash\necho n1\nseq -f n%.0f 2 20000\n")
        wanted = (
            "torchrun --nnodes 2 --nproc-per-node 4 --rdzv-id 77 --rdzv-backend c10d --rdzv-endpoint n1:20077"
        )
        assert words == ["--kill-on-bad-exit=1", *wanted.split(), "-m", "kapelle", "train", *TRAIN]
        assert [path.name for path in tmp_path.iterdir()] == ["bin"]

    def test_a_run_that_is_there_is_continued(self, tmp_path: Path) -> None:
        run = tmp_path / "runs" / "my $(run)"
        run.mkdir(parents=True)
        (run / "config.yaml").touch()
        words = started(script(job(nodes=1, processes=1, image="mine.sif")), tmp_path)
        container = ["apptainer", "exec", "--nv", "--bind", str(tmp_path), "mine.sif"]
        assert words == ["--kill-on-bad-exit=1", *container, "kapelle", "train", *TRAIN, "--resume"]


class TestKubernetes:
    def things(self, **over: Any) -> dict[str, Any]:
        made = job(image="reg/kapelle:1", volume="claim", run_dir="/runs/mine", **over)
        return {thing["kind"]: thing for thing in yaml.safe_load_all(manifest(made))}

    def test_pods_meet_at_the_first(self, tmp_path: Path) -> None:
        things = self.things()
        assert list(things) == ["Service", "Job"]
        spec = things["Job"]["spec"]
        assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
        assert spec["activeDeadlineSeconds"] == 90_061
        pod = spec["template"]["spec"]
        assert pod["subdomain"] == things["Service"]["metadata"]["name"] == "mine"
        assert things["Service"]["spec"]["selector"] == {"job-name": "mine"}
        [container] = pod["containers"]
        assert container["resources"] == {
            "requests": {"cpu": 12, "memory": "64G"},
            "limits": {"nvidia.com/gpu": 4},
        }
        assert pod["volumes"][0] == {"name": "runs", "persistentVolumeClaim": {"claimName": "claim"}}
        shell, option, text = container["command"]
        assert (shell, option) == ("/bin/sh", "-c")
        words = started(text.replace("$$", "$"), tmp_path)
        wanted = "--nnodes 2 --nproc-per-node 4 --rdzv-id mine --rdzv-backend c10d --rdzv-endpoint mine-0.mine:29500"
        train = [word.replace("runs/my $(run)", "/runs/mine") for word in TRAIN]
        assert words == [*wanted.split(), "-m", "kapelle", "train", *train]

    def test_what_kubernetes_would_replace_is_kept(self) -> None:
        [container] = self.things()["Job"]["spec"]["template"]["spec"]["containers"]
        text = container["command"][2]
        assert shlex.split(text.replace("$$", "$"))
        assert "$(" not in text.replace("$$", "")

    def test_the_recipes_files_go_along(self, tmp_path: Path) -> None:
        overlay = tmp_path / "my overlay.yaml"
        overlay.write_text("training: {steps: 3}\n# é 'x'\n", "utf-8")
        things = self.things(files=("demo", str(overlay)), settings=(), nodes=1, processes=1, gpus=0)
        assert list(things) == ["ConfigMap", "Job"]
        assert things["ConfigMap"]["data"] == {"1-my-overlay.yaml": overlay.read_text("utf-8")}
        [container] = things["Job"]["spec"]["template"]["spec"]["containers"]
        assert "train demo /recipe/1-my-overlay.yaml --real" in container["command"][2]
        assert {"name": "recipe", "mountPath": "/recipe", "readOnly": True} in container["volumeMounts"]

    def test_it_is_what_kubernetes_reads(self) -> None:
        validate = pytest.importorskip("kubernetes_validate")
        for thing in self.things().values():
            validate.validate(thing, "1.30", strict=True)
        broken = self.things()["Job"]
        broken["spec"]["completion"] = 2
        with pytest.raises(validate.ValidationError):
            validate.validate(broken, "1.30", strict=True)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("1:30", 90),
        ("12:00:00", 43_200),
        ("2-6", 194_400),
        ("1-0:30", 88_200),
        ("1-1:1:1", 90_061),
    ],
)
def test_times_are_read_as_slurm_reads_them(text: str, seconds: int) -> None:
    assert seconds_of(text) == seconds


def test_a_script_is_written_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.sh"
    words = ["launch", "--slurm", "demo", "--output", str(path), "--unchecked", "--gpus", "0"]
    assert main(words) == 0
    assert f"sbatch {path}" in capfd.readouterr().out
    text = path.read_text()
    assert "--gpus" not in text
    assert subprocess.run(["bash", "-n", path], check=True).returncode == 0
    assert main(words) == 2
    assert "exists already" in capfd.readouterr().err
    assert path.read_text() == text
