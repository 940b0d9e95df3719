"""Defines the usage, the summary and the arguments of every command.

This module uses only the standard library, so that `--help` responds at once. The code of a command is imported when
the command is called. The defaults of the commands are also defined in this module, because the help texts mention
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kapelle.cli.option_values import gigabytes, positive, share, whole

Argument = tuple[tuple[str, ...], dict[str, Any]]
"""The positional and keyword arguments of a call of `ArgumentParser.add_argument`."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command of the command line. The module of the same name defines `run(arguments) -> int`, which returns the exit code."""

    summary: str
    arguments: tuple[Argument, ...]


def command(summary: str, *arguments: Argument) -> Command:
    """Create a command."""
    return Command(summary, arguments)


def option(names: str, meaning: str, **more: Any) -> Argument:
    """Create an option. The argument `names` contains the flags and the name of the value, such as `-o --output FILE`.

    With `--split eval|train`, the value must be one of the two words. With `--tag TAG …`, the option may be given
    several times. An option without a value, such as `--json`, is True if it is given.
    """
    *flags, value = names.split()
    if value == "…":
        value, more = flags.pop(), {"action": "append", "default": [], **more}
        meaning += "; may be given several times"
    if value.startswith("-"):
        return (*flags, value), {"action": "store_true", "help": meaning, **more}
    if "|" in value:
        more["choices"] = value.split("|")
    if (default := more.get("default")) not in (None, [], ""):
        meaning += f" (default: {default if isinstance(default, str) else format(default, 'g')})"
    return tuple(flags), {"metavar": value, "help": meaning, **more}


def positional(name: str, metavar: str, meaning: str, **more: Any) -> Argument:
    """Create a positional argument."""
    return (name,), {"metavar": metavar, "help": meaning, **more}


def words(metavar: str, meaning: str) -> Argument:
    """Create the positional arguments of a command, from which `parser.split_words` separates the settings."""
    return positional("words", metavar, meaning, nargs="*")


KINDS = ("environment", "workflow", "algorithm", "project", "app")
"""The kinds of components that `kapelle new` can create."""
FRAMEWORKS = ("openai", "openai_agents", "langgraph", "pydantic_ai", "autogen", "smolagents", "crewai")
"""The frameworks for which `kapelle new app` can create a program."""

EVERYONE = "*"
"""The same value as in `settings.schema`, which takes too long to import for `--help`."""


def start_words(given: Sequence[str] | None) -> list[str]:
    """Convert the values of `--start-from` to the setting `start_from`."""
    import json

    named: dict[str, str] = {}
    for word in given or ():
        agent, mark, folder = word.partition("=")
        named |= {agent: folder} if mark and "/" not in agent else {EVERYONE: word}
    return [f"start_from={json.dumps(named)}"] if named else []


CALLS, SECONDS, BATCH = 1024, 600.0, 64
"""The defaults of `kapelle serve`: the maximum number of calls in progress, the maximum seconds per call, and the number of
answers scored together."""

TOOL_FORMS = ("hermes", "llama", "pythonic", "mistral", "deepseek", "glm", "qwen_coder", "harmony")
"""The values of `grading.text.tool_call.Form`, whose import would slow down `--help`."""

SESSION_IDLE = 3600.0
"""The default number of seconds without a call after which a session without a reward may be closed."""


# -------- Arguments that several commands share

_SETTINGS = "settings such as training.steps=100, with YAML values"
_RECIPE = words(
    "RECIPE …",
    "a built-in recipe (`kapelle recipes ls`) or a YAML file, then YAML files that override parts of it, then "
    f"{_SETTINGS}",
)
_REAL = option("--real", "use the recipe's values for a pretrained model (its section `real`)")
_RUN_DIR = option("--run-dir DIR", "folder of the run (default: runs/NAME-TIME)")
_JSON = option("--json", "print one JSON object")
_JSON_AND_PROGRESS = option("--json", "print one JSON object; progress goes to stderr")
_NO_RICH = option("--no-rich", "print plain lines, in a terminal too")

_PLAYER = (
    words(
        "RUN …",
        "a run directory, then settings such as evaluation.problems=100, with YAML values (for a run, those of "
        "`environment`, `episode` and `evaluation`)",
    ),
    option("--model -m PATH", "in place of a run: a model, a PEFT adapter, a name on a hub or `embedded`"),
    option("--environment -e NAME", "what the model plays: an environment, or a recipe with its team"),
    _REAL,
)


def _binding(port: int | None, default: str = "") -> tuple[Argument, ...]:
    """Return the options for the address of a service and for who may call it.

    Without `port`, the command itself chooses the default.
    """
    return (
        option("--host HOST", "address to listen on", default="127.0.0.1"),
        option("--port PORT", f"port to listen on; 0 picks a free one{default}", type=int, default=port),
        option("--tls-cert FILE", "PEM file of the TLS certificate, with its chain"),
        option("--tls-key FILE", "PEM file of its key"),
        option("--allow-host NAME …", "another host name by which clients address this service"),
    )


# -------- The commands

COMMANDS: Mapping[str, Command] = {
    "demo": command(
        "train a tiny two-agent team on this machine and watch it learn",
        words("key.path=value", _SETTINGS),
        _RUN_DIR,
        _JSON_AND_PROGRESS,
        _NO_RICH,
    ),
    "new": command(
        "create a working starting point for your own code, with a test and a recipe",
        positional("kind", "KIND", f"what to create: {', '.join(KINDS)}"),
        positional("name", "NAME", "its name, such as word_count; a folder of that name is created here"),
        option("--framework FRAMEWORK", f"app: framework to use: {', '.join(FRAMEWORKS)} (default: openai)"),
    ),
    "train": command(
        "train a team as described by a recipe",
        _RECIPE,
        _REAL,
        _RUN_DIR,
        option("--resume", "continue the run in --run-dir; or write `kapelle train --resume RUN`"),
        option("--dry-run", "print which agent has which weights, and each setting with its origin"),
        _JSON_AND_PROGRESS,
        _NO_RICH,
        option(
            "--launch torchrun|ray",
            "torchrun: several processes on this machine, as torch's launcher starts them; ray: on a Ray cluster, "
            "or on a Ray instance started for this run (section `ray` of the recipe); see docs/clusters.md and docs/ray.md",
        ),
        option("--processes N", "number of processes (default: one for each GPU; with ray 1)", type=whole(1)),
        option(
            "--start-from [AGENT=]WEIGHTS …",
            "weights to start from: a run (RUN, RUN@best, RUN@STEP), a PEFT folder or a model",
        ),
    ),
    "doctor": command(
        "find faults in the machines of a run before the run starts",
        option(
            "--launch torchrun|ray",
            "torchrun: several processes on this machine; ray: on the machines of a cluster. With your own launcher, "
            "start `kapelle doctor` in place of `kapelle train`",
        ),
        option("--processes N", "number of processes (default: one for each GPU; with ray 1)", type=whole(1)),
        option("--address A", "the Ray cluster: auto, or host:port (default: start Ray here)"),
        option("--gpus N", "GPUs of each process on Ray", type=whole(0), default=0),
        option("--run-dir DIR", "the folder that all machines must share", default="runs"),
        option("--timeout SECONDS", "how long to wait for all processes", type=float, default=60.0),
        _JSON,
    ),
    "launch": command(
        "write the batch script or manifest that trains a recipe on a cluster",
        _RECIPE,
        _REAL,
        option("--slurm", "write a batch script for SLURM"),
        option("--kubernetes", "write a manifest for Kubernetes"),
        option("--nodes N", "machines", type=whole(1), default=1),
        option("--processes P", "processes on each machine", type=whole(1), default=1),
        option("--cpus N", "CPU cores for each process (default: the scheduler's choice)", type=whole(1)),
        option("--memory GB", "gigabytes on each machine (default: the scheduler's choice)", type=whole(1)),
        option("--gpus N", "GPUs on each machine; 0 for none (default: one for each process)", type=whole(0)),
        option("--time TIME", "time limit: minutes, H:MM:SS or DAYS-HOURS"),
        option("--image IMAGE", "the container image; Kubernetes needs one"),
        option("--volume CLAIM", "Kubernetes: the persistent volume claim that stores /runs"),
        option("--name NAME", "the job's name (default: the recipe's)"),
        option("--run-dir DIR", "folder of the run (default: runs/NAME; in a pod /runs/NAME)"),
        option("--output FILE", "new file to write to (default: standard output)"),
        option("--unchecked", "skip the checks of models and data that only the cluster has"),
    ),
    "plan": command(
        "estimate how much memory a run will need and what fits, before a model is loaded",
        _RECIPE,
        _REAL,
        option(
            "--gpu-memory GB",
            "memory of each GPU: report what fits, or what to change (exit code 3)",
            type=gigabytes,
        ),
        option("--processes N", "plan for one of N processes that train together", type=whole(1), default=1),
        _JSON,
    ),
    "eval": command(
        "measure a run or a model on unseen problems",
        *_PLAYER,
        option(
            "--benchmark -b NAME",
            "published benchmarks in place of the own problems: gsm8k, math, humaneval, mbpp, mt_bench, several with commas; `list` "
            "shows them",
        ),
        option(
            "--no-baselines",
            "skip the baselines: one agent alone, and majority votes with the same number of tokens",
        ),
        option("--swap", "also play the same problems with each role on the weights of the next agent"),
        option(
            "--num-episodes -n N",
            "number of unseen problems; the same as evaluation.problems=N",
            type=whole(1),
        ),
        option("--output -o FILE", ".json for results and episodes, .jsonl for the episodes alone"),
        option("--samples K", "answers to each problem: avg@K, pass@1 to pass@K, maj@K", type=whole(1)),
        option(
            "--temperature T",
            "temperature of all agents (default: greedy; with --samples, that of training)",
            type=float,
        ),
        option(
            "--table lm-eval|hub",
            "print a table in lm-eval's format, or the front matter of a model card for the Hub",
        ),
        _JSON,
    ),
    "blame": command(
        "find out which agent's turns made a run's episodes fail",
        words(
            "RUN …",
            "a run directory, RUN@best or RUN@STEP, then settings of `environment`, `episode` and `evaluation`; with settings, "
            "new episodes are sampled",
        ),
        option("--split eval|train", "episodes of the evaluation, or of training tasks", default="eval"),
        option(
            "--episodes N", "maximum number of failed episodes, and of solved ones", type=whole(1), default=50
        ),
        option("--samples K", "continuations from before and after each turn", type=whole(1), default=8),
        option("--seed N", "seed of the continuations (default: the run's)", type=whole(0)),
        option(
            "--json FILE",
            "print one JSON object, or write it to a new file; progress goes to stderr",
            nargs="?",
            const="-",
        ),
    ),
    "arena": command(
        "play runs, models, servers and a game's built-in players against each other in every role, and rate them",
        words(
            "PLAYER …",
            "RUN, RUN@best, RUN@STEP, a model's or adapter's folder, OWNER/NAME on a hub, http://HOST/v1#MODEL, or a player of the "
            "environment (nash, mcts(simulations=200), random); NAME=PLAYER gives it another name. Then settings of `environment`, "
            "`workflow`, `team.sampling`, `episode`, `engine` and `model`",
        ),
        option("--environment NAME", "environment, recipe or OpenSpiel game (default: the first run's)"),
        option("--games N", "deals of each pair, in every assignment of roles", type=whole(1), default=100),
        option("--jobs J", "pairs at a time, each in its own process", type=whole(1), default=1),
        option("--seed N", "seed of deals and sampling", type=whole(0), default=0),
        option(
            "--output -o FOLDER",
            "folder of results (default: runs/…); pairs with results in it are not played again",
        ),
        _JSON_AND_PROGRESS,
    ),
    "compare": command(
        "train several algorithms on one recipe, with several seeds each, and compare them",
        _RECIPE,
        _REAL,
        option("--algorithms A,B", "the algorithms to compare; LABEL=NAME names a row", required=True),
        option("--set A:key=value …", "a setting for one row, or a YAML file of `A: {algorithm: {…}}`"),
        option("--seeds N", "seeds for each algorithm", type=whole(1), default=5),
        option("--jobs N", "runs at a time, one thread each (default: the number of cores)", type=whole(1)),
        option("--run-dir DIR", "folder (default: runs/…); finished runs in it are kept as they are"),
        _JSON_AND_PROGRESS,
    ),
    "plot": command(
        "draw results for a paper: interquartile means, probabilities of improvement and curves, with intervals",
        positional(
            "results",
            "RESULTS",
            "folders of `kapelle compare`, each a task, or files of `kapelle eval --output`, each a run; LABEL=FILE names an evaluated team",
            nargs="+",
        ),
        option("--output -o FIGURE …", "file to write: .pdf, .png or .svg", required=True),
        option("--against tokens|step", "what curves are drawn over", default="tokens"),
        option(
            "--metric NAME",
            "what to draw: success, return or return/SEAT (default: success, or returns for a single task without success); "
            "if no run has a success, `success` draws returns",
        ),
        option("--seed N", "seed of the bootstrap", type=whole(0), default=0),
    ),
    "collect": command(
        "roll out training tasks and write their episodes for SFT, or graded answers for a verifier; or read a program's traces",
        *_PLAYER,
        option(
            "--for sft|dpo|verifier",
            "sft: episodes, turn by turn; dpo (with --recorded): only turns with both a better and a worse completion; verifier: correct and incorrect graded answers",
            dest="purpose",
            default="sft",
        ),
        option(
            "--out -o --output FILE",
            "file to write: JSON lines, compressed if it ends in .jsonl.zst, or one JSON array if it ends in .json",
        ),
        option(
            "--min-reward --filter-reward X",
            "sft: keep episodes with at least this reward (default: all that did not fail)",
            type=float,
        ),
        option(
            "--no-balance",
            "verifier: keep all distinct answers, in place of equally many correct and incorrect ones",
        ),
        option(
            "--recorded QUERY",
            "instead of sampling, take the run's recorded episodes that QUERY selects; the episodes page of `kapelle view` shows "
            "the query (outcome=right&from=10&re=carry); an empty query selects all training episodes",
        ),
        option("--traces PATH", "read a program's conversations from OpenTelemetry's spans (OTLP as JSON)"),
        option("--metric NAME", "traces: the evaluation that scores a call (default: any)"),
        option("--show FILE", "summarise a file of graded answers instead of collecting"),
        option("--tasks N", "training tasks to roll out (default: 200)", type=whole(1)),
        option("--samples K", "episodes for each task (default: 4)", type=whole(1)),
        option("--num-episodes -n N", "number of training tasks, with one episode each", type=whole(1)),
        _JSON,
    ),
    "export": command(
        "write trained weights for other programs",
        words("RUN", "a run directory, RUN@best or RUN@STEP"),
        option("--out FOLDER", "new folder to write (default: RUN-export)"),
        option("--merge", "merge the adapters into whole models; the same as --format hf"),
        option(
            "--format peft|hf|gguf-ready",
            "peft: adapters; hf: merged models; gguf-ready: merged models that llama.cpp's converter takes "
            "(default: peft)",
        ),
        option("--agent NAME …", "export only this agent's weights"),
        option("--license NAME", "licence on the model card, such as apache-2.0 (default: the base's)"),
        option("--push OWNER/NAME", "send the folder to this repository of a hub"),
        option("--public", "make a new repository public (default: private)"),
        option("--dry-run", "only list what would be written and sent"),
        _JSON,
    ),
    "exploit": command(
        "find out how much each agent of a run could gain against the others",
        words(
            "RUN …",
            "a run directory, RUN@best or RUN@STEP; then training settings of the response, such as optimizer.lr=5e-4",
        ),
        option("--steps N", "steps of training for each agent", type=whole(1), default=50),
        option("--games N", "unseen games for the measurement", type=whole(2), default=500),
        option("--agent NAME …", "train a response only for this agent"),
        option("--json", "print the result as JSON, with the curve of every response"),
    ),
    "play": command(
        "play a game in the terminal against a script, a solver or a trained team",
        words(
            "ENV|RUN …",
            "an environment, a recipe, an OpenSpiel game such as kuhn_poker, or a run directory; then "
            "settings such as environment.digits=1, with YAML values",
        ),
        option("--role N", "your role, counted from 1", type=whole(1), default=1),
        option(
            "--against WHO",
            "who plays the other roles: random (the environment's script), mcts, cfr, nash or a run directory "
            "(default: random; a run plays its own)",
        ),
        option("--seed S", "seed of the game's random events", type=int, default=0),
        option("--exact", "print exact values of the run's checkpoints instead: NashConv, returns"),
    ),
    "chat": command(
        "chat with a run's team, or with a model, in the terminal and read each agent's messages",
        words("RUN …", "a run directory, or a folder of a model or adapter; then settings for a model"),
        _PLAYER[1],
        option(
            "--environment -e NAME",
            "environment whose team the model plays (default: the model answers alone)",
        ),
        _REAL,
        option("--agent NAME", "chat with one agent alone (default: the whole team)"),
    ),
    "serve": command(
        "serve a run's team through an OpenAI-compatible chat completions API, its verifier as a scoring server, environments "
        "to runs on any machine, one environment to OpenEnv clients, or a base model to Tinker's clients",
        words(
            "[policy | reward] RUN | environments | openenv NAME | tinker MODEL",
            "what to serve (default: policy, the team), and its run directory or exported team; for environments their settings, "
            "name.key=value; for openenv an environment or recipe, whose settings are environment.key=value; for tinker a "
            "folder, a name on the hub or `embedded`, whose settings are model.key=value",
        ),
        option("--print vllm", "print commands by which vLLM serves an exported team", choices=("vllm",)),
        option("--record FOLDER", "record sessions of programs as episodes, once they post a reward"),
        option("--embedder MODEL", "a model of sentence-transformers for /v1/embeddings"),
        option(
            "--tool-form FORM",
            f"how agents call tools: {', '.join(TOOL_FORMS)} (default: as their chat template does, else hermes)",
            choices=TOOL_FORMS,
        ),
        option(
            "--name NAME",
            "name by which clients call the team, the verifier or the base model (default: its own)",
        ),
        option("--environments NAMES", "environments: which to serve, as name or name=what, …"),
        option(
            "--workers N",
            "environments: worker processes for episodes; 0 uses the server's process",
            type=whole(0),
            default=0,
        ),
        option(
            "--sessions N", "environments: maximum number of episodes at once", type=whole(1), default=4096
        ),
        option(
            "--idle S",
            "seconds without a call before a recorded session or a session of Tinker's client may be closed",
            type=positive,
            default=SESSION_IDLE,
        ),
        option(
            "--drain S",
            "environments: seconds for episodes to end after a signal",
            type=positive,
            default=30.0,
        ),
        option("--keys FILE", "tinker: file with a line `NAME KEY` for each client"),
        option("--adapters N", "tinker: maximum number of adapters of a client", type=whole(1), default=16),
        option("--folder FOLDER", "tinker: where states and weights are saved", default="tinker"),
        option("--replace NAMES", "environments: replace these on the server at --at"),
        option("--at HOST:PORT", "environments: the server of --replace"),
        option("--certificate FILE", "environments: PEM file for verifying the server at --at"),
        *_binding(None, " (default: 8000; environments: 50051)"),
        option(
            "--grpc-port PORT",
            "reward: port for gRPC as well; 0 picks a free one (default: HTTP only)",
            type=int,
        ),
        option("--calls N", "maximum number of calls in progress", type=whole(1), default=CALLS),
        option(
            "--batch N", "reward: maximum number of answers scored together", type=whole(1), default=BATCH
        ),
        option("--timeout S", "seconds that one call may take", type=positive, default=SECONDS),
    ),
    "view": command(
        "look at runs in a browser: curves, conversations and credit",
        words("RUNS", "run directories, or folders of runs (default: runs)"),
        option("--export FILE", "write one self-contained page of these runs instead of serving"),
        *_binding(7860),
    ),
    "runs": command(
        "list runs, show the result of one, annotate it, or go back to an earlier checkpoint",
        positional(
            "action",
            "ls|show|note|rollback",
            "list runs, show one, tag or annotate one, or return one to an earlier checkpoint",
            nargs="?",
        ),
        positional("place", "RUN", "a run directory; for ls a folder of runs (default: runs)", nargs="?"),
        option("--to STEP", "rollback: the step of the checkpoint to go back to", type=int),
        option("--dry-run", "rollback: only show what would be moved"),
        option("--text NOTE", "note: text that replaces the run's note"),
        option("--tag TAG …", "note: add a tag"),
        option("--untag TAG …", "note: remove a tag"),
        _JSON,
    ),
    "recipes": command(
        "list the built-in recipes, print one, or copy one to change it",
        positional("action", "ls|show|cp", "list them, print one, or copy one to a file", nargs="?"),
        positional("name", "NAME", "the recipe to print or copy", nargs="?"),
        positional("destination", "DEST", "file or folder (default: ./NAME.yaml)", nargs="?"),
        option("--json", "ls: print one JSON object"),
    ),
    "validate": command(
        "check a recipe and everything it names, or an environment alone, without loading a model",
        _RECIPE,
        option("--environment NAME", "check an environment alone: a name or module:Class"),
        option("--agents A,B", "the team of an environment that is checked alone, in order"),
        _REAL,
        option("--start", "start or call the MCP servers that the recipe names, and check their tools too"),
        option("--judge FILE", "compare the recipe's judges with graded answers {question, text, score}"),
        option("--json", "with --judge, print one JSON object"),
        option("--graph", "print the workflow, or a workflow file, as a Mermaid flowchart"),
    ),
    "data": command(
        "prepare a data set: write its train and test files once, for all runs",
        positional("action", "prepare", "write the files of a data set", choices=["prepare"]),
        positional("name", "NAME", "gsm8k, math, deepscaler, deepmath, anli or mbpp"),
        option("--out FOLDER", "new folder to write", required=True),
        option(
            "--source WHERE",
            "folder, file or `owner/name` on the Hugging Face hub (default: the data set's usual source)",
        ),
        option("--train A,B", "splits or files to train on, instead of the usual ones", default=""),
        option("--test A,B", "splits or files to test on, instead of the usual ones", default=""),
        option("--form jsonl|parquet", "file format", default="jsonl"),
        option(
            "--test-share X",
            "share of the rows to test on, where no test split is published",
            type=share,
            default=0.1,
        ),
        option(
            "--max-unusable X",
            "largest share of rows that may be unusable",
            type=share,
            default=0.01,
        ),
        option("--json", "print the manifest"),
    ),
    "info": command("show what is installed and what this machine has", _JSON),
}
