"""Execute what the how-to pages show: their commands, in this process, and their programs.

    python -m tools.docs_site.howto [PAGE …]

Each page runs in a folder of its own, in which `runs/mine` is a small finished run. One that reads it runs a second time, where it is
a run of `kapelle.train`, which a reward function pays and which therefore has no success. A block that begins with `# name.yaml` is written to that
file. Training is shown by `--dry-run`; commands that need another machine, a server or a terminal are only parsed, as those of all pages are
(`tests/repository/test_documents.py`).
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import re
import runpy
import shlex
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[2]
HOWTO = ROOT / "docs" / "howto"
BLOCK = re.compile(r"^( *)```(python|sh|yaml)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"# ([\w/]+\.\w+)\n")
EXECUTED = {"arena", "blame", "eval", "info", "plan", "recipes", "runs", "train", "demo", "validate"}
ELSEWHERE = ("--benchmark gsm8k", "--benchmark mt_bench", "--launch", "--real", "--resume", "--start", "vllm")
"""Words that ask for other processes, data of the hub, or a run that continues."""
SMALL = (
    "model.embedded={hidden: 32, layers: 2, heads: 2, kv_heads: 1, intermediate: 64}",
    "warmup.steps=2",
    "warmup.demonstrations=20",
    "training.steps=2",
    "training.tasks_per_step=2",
    "evaluation.problems=4",
    "evaluation.every=0",
    "checkpoint.every=1",
)

PAID = {
    "paid.jsonl": "".join(f'{{"question": "{a}+3", "answer": "{a + 3}"}}\n' for a in range(12)),
    "paid.py": "def exact(completion, answer):\n    return float(completion == answer)\n\n\n"
    "def brief(completion):\n    return -len(completion)\n",
}
"""Files of the run of `kapelle.train`: rows, and functions that pay."""
NEEDS_SUCCESS = ("which_agent_lost.md",)
"""Pages about what needs a success: for them the run says which episodes are solved."""


def train_in_one_call(run_dir: str, success: float | None = None) -> None:
    """Train such a run for two steps in the current folder, beside its files."""
    import kapelle

    for name, text in PAID.items():
        Path(name).write_text(text, encoding="utf-8")
    kapelle.train(
        "embedded",
        "paid.jsonl",
        ["paid.py:exact", "paid.py:brief"],
        ["reasoner", "actor"],
        eval_dataset=0.4,
        steps=2,
        team={"sampling": {"max_tokens": 2}},
        training={"tasks_per_step": 2},
        checkpoint={"every": 1},
        run_dir=run_dir,
        success=success,
    ).trainer.close()


def pages() -> list[Path]:
    """Return the how-to pages."""
    return sorted(path for path in HOWTO.glob("*.md") if path.name != "README.md")


def blocks(page: str) -> Iterator[tuple[str, str]]:
    """Yield (language, text) of a page's blocks in order."""
    for match in BLOCK.finditer(page):
        yield match[2], textwrap.dedent(match[3])


def files_of(page: str) -> dict[str, str]:
    """Return the files that a page's blocks are: name → text."""
    return {found[1]: text for _, text in blocks(page) if (found := NAMED.match(text))}


def commands(block: str) -> Iterator[list[str]]:
    """Yield the words of what can be executed here of a block of commands."""
    for line in block.replace("\\\n", " ").splitlines():
        program, *words = shlex.split(line, comments=True) or [""]
        if program != "kapelle" or words[0] not in EXECUTED or any(mark in line for mark in ELSEWHERE):
            continue
        yield [*words, *(["--dry-run"] if words[0] == "train" and "--dry-run" not in words else [])]


def execute(page: str) -> int:
    """Execute a page in the current folder; return how many commands and programs that were. Raises RuntimeError."""
    from kapelle.cli import main as kapelle

    for name, text in files_of(page).items():
        Path(name).write_text(text, encoding="utf-8")
    done = 0
    known: dict[str, object] = {}
    for language, text in blocks(page):
        if language == "sh":
            for words in commands(text):
                code = kapelle(words)
                if code:
                    raise RuntimeError(f"`kapelle {shlex.join(words)}` ended with {code}")
                done += 1
        elif language == "python":
            program = Path(f"block_{done}.py")
            program.write_text(text, encoding="utf-8")
            known = runpy.run_path(str(program), init_globals=known, run_name="__main__")
            done += 1
    return done


def visit(top: Path, page: tuple[Path, str]) -> tuple[int, str | None]:
    """Execute a page where `runs/mine` is the run of a name; return how many commands and programs that were, and what went wrong."""
    path, run = page
    folder = top / "pages" / run / path.stem
    shutil.copytree(top / run, folder / "runs" / "mine")
    for name, text in PAID.items():
        (folder / name).write_text(text, encoding="utf-8")
    shown = io.StringIO()
    try:
        with contextlib.chdir(folder), contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
            return execute(path.read_text(encoding="utf-8")), None
    except Exception as error:  # noqa: BLE001 - whatever a page's program raises is the page's fault
        said = textwrap.indent(shown.getvalue()[-2000:], "  ")
        return 0, f"{path.name} on the {run} run: {type(error).__name__}: {error}\n{said}"


def main(names: Sequence[str]) -> int:
    """Execute some pages or all; return the exit code."""
    from kapelle.cli import main as kapelle

    done, wrong = 0, 0
    chosen = [Path(name).resolve() for name in names] or pages()
    with tempfile.TemporaryDirectory() as top, contextlib.chdir(top):
        os.environ["KAPELLE_CACHE"] = str(Path(top) / "cache")
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            kapelle(["train", "demo", *SMALL, "--run-dir", "finished", "--no-rich"])
            train_in_one_call("one_call")
            train_in_one_call("with_success", 0.5)
        visits = [(path, "finished") for path in chosen]
        visits += [
            (path, "with_success" if path.name in NEEDS_SUCCESS else "one_call")
            for path in chosen
            if "runs/mine" in path.read_text(encoding="utf-8")
        ]
        # Pages change their process's folder and output: each is visited in one that visits no other meanwhile.
        with ProcessPoolExecutor(min(4, os.cpu_count() or 1), multiprocessing.get_context("spawn")) as pool:
            for count, fault in pool.map(partial(visit, Path(top)), visits):
                done += count
                wrong += fault is not None
                if fault is not None:
                    print(fault)
    print(f"{len(chosen)} how-to pages: {done} commands and programs executed, {wrong} pages wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
