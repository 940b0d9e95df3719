"""What `kapelle data` takes on the command line."""

from __future__ import annotations

import argparse

from kapelle.cli.run_arguments import add_flag


def declare_data(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `kapelle data`."""
    parser.add_argument("action", choices=["prepare"], help="write the files of a data set")
    parser.add_argument("name", metavar="NAME", help="gsm8k, math, deepscaler, deepmath, anli or mbpp")
    parser.add_argument("--out", required=True, metavar="FOLDER", help="folder to write; must not exist yet")
    parser.add_argument(
        "--source",
        metavar="WHERE",
        help="a folder, a file or `owner/name` on the Hugging Face hub (the usual name there)",
    )
    parser.add_argument(
        "--train", default="", metavar="A,B", help="splits or files to train on, in place of the usual ones"
    )
    parser.add_argument("--test", default="", metavar="A,B", help="splits or files to test on")
    parser.add_argument("--form", choices=["jsonl", "parquet"], default="jsonl", help="what to write (jsonl)")
    parser.add_argument(
        "--test-share",
        type=_share,
        default=0.1,
        metavar="X",
        help="share to test on where none is published (0.1)",
    )
    parser.add_argument(
        "--max-unusable",
        type=_share,
        default=0.01,
        metavar="X",
        help="largest share of rows that may be left out as unusable (0.01)",
    )
    add_flag(parser, "--json", "print the manifest")


def _share(text: str) -> float:
    share = float(text)
    if not 0.0 <= share < 1.0:
        raise argparse.ArgumentTypeError(f"{text} is not a share from 0 to 1")
    return share
