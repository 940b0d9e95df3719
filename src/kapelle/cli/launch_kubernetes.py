"""A manifest for Kubernetes: an indexed job whose pods meet at the first one; no operator is needed."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kapelle.cli.launch import Job
from kapelle.errors import ConfigError

HEAD = """\
# Trains with kapelle. Submit it with `kubectl apply -f THIS_FILE`. A pod that fails is started again and continues the run.
#
# It was made from a template and has not been run. The image holds kapelle, torch and what the recipe names (models, data,
# modules of your own); the recipe's own files are in the ConfigMap. Keys of endpoints and judges belong into a Secret
# that you add to the container as `envFrom`.
"""
PORT = 29500
LOST = """\
#
# Without --volume CLAIM the run lies in its pod and is lost with it.
"""
RECIPES = "/recipe"
"""Where the files of the recipe lie in a container."""
MOST_BYTES = 1 << 20
"""Most bytes of a ConfigMap."""
STOPPING_S = 120
"""Seconds that a pod which is asked to stop has to save."""


def manifest(job: Job) -> str:
    """Return the manifest of a job; ConfigError without an image, or for files that do not fit into it."""
    if job.image is None:
        raise ConfigError("Pods need an image that holds kapelle: add --image REGISTRY/NAME:TAG.")
    found, words = _recipe_files(job)
    things = [_job(job, words, mounts=bool(found))]
    labels = {"app.kubernetes.io/name": "kapelle", "app.kubernetes.io/instance": job.name}
    if job.nodes > 1:
        port = {"name": "rendezvous", "port": PORT}
        spec = {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"job-name": job.name},
            "ports": [port],
        }
        things.insert(0, {"apiVersion": "v1", "kind": "Service", "metadata": {}, "spec": spec})
    if found:
        things.insert(0, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {}, "data": found})
    for thing in things:
        thing["metadata"] = {"name": job.name, "labels": labels}
    return (HEAD if job.volume else HEAD + LOST) + _dumped(things)


def _dumped(things: Sequence[Mapping[str, Any]]) -> str:
    """Return documents as YAML, texts of several lines as blocks."""
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, text)
    dumped: str = yaml.dump_all(things, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)
    return dumped


def _recipe_files(job: Job) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the texts of the recipe's files by name, and the words of `kapelle train` that name them there."""
    texts: dict[str, str] = {}
    words = list(job.train)
    for number, file in enumerate(job.files):
        path = Path(file)
        if path.is_file():
            name = f"{number}-{''.join(c if c.isalnum() and c.isascii() else '-' for c in path.stem)}.yaml"
            texts[name] = path.read_text("utf-8")
            words[number] = f"{RECIPES}/{name}"
    if sum(len(text.encode()) for text in texts.values()) > MOST_BYTES:
        raise ConfigError(
            "The recipe's files are larger than a ConfigMap may be (1 MiB). Put them into the image and name them there."
        )
    return texts, tuple(words)


def _job(job: Job, words: tuple[str, ...], *, mounts: bool) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": job.nodes,
        "parallelism": job.nodes,
        "backoffLimit": 3 * job.nodes,
        **({} if job.seconds is None else {"activeDeadlineSeconds": job.seconds}),
        "template": {"spec": _pod(job, words, mounts=mounts)},
    }
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {}, "spec": spec}


def _pod(job: Job, words: tuple[str, ...], *, mounts: bool) -> dict[str, Any]:
    runs = {"emptyDir": {}} if job.volume is None else {"persistentVolumeClaim": {"claimName": job.volume}}
    volumes: list[dict[str, Any]] = [
        {"name": "runs", **runs},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
    ]
    places: list[dict[str, Any]] = [
        {"name": "runs", "mountPath": "/runs"},
        {"name": "shared-memory", "mountPath": "/dev/shm"},  # noqa: S108 - the containers' own
    ]
    if mounts:
        volumes.append({"name": "recipe", "configMap": {"name": job.name}})
        places.append({"name": "recipe", "mountPath": RECIPES, "readOnly": True})
    container = {
        "name": "kapelle",
        "image": job.image,
        "command": ["/bin/sh", "-c", _unexpanded(_shell(job, words))],
        **_resources(job),
        "volumeMounts": places,
    }
    return {
        **({"subdomain": job.name} if job.nodes > 1 else {}),
        "restartPolicy": "OnFailure",
        "terminationGracePeriodSeconds": STOPPING_S,
        "containers": [container],
        "volumes": volumes,
    }


def _shell(job: Job, words: tuple[str, ...]) -> str:
    start = "kapelle train"
    if job.nodes * job.processes > 1:
        head = f"{job.name}-0.{job.name}" if job.nodes > 1 else "localhost"
        start = (
            f"torchrun --nnodes {job.nodes} --nproc-per-node {job.processes} --rdzv-id {job.name} "
            f"--rdzv-backend c10d --rdzv-endpoint {head}:{PORT} -m kapelle train"
        )
    return (
        f"if [ -e {shlex.quote(job.run_dir + '/config.yaml')} ]; then set -- --resume; fi\n"
        f'exec {start} {shlex.join(words)} "$@"\n'
    )


def _unexpanded(text: str) -> str:
    """Return a text that Kubernetes hands on as it is: it would replace $(NAME), and $$ stands for one $."""
    return text.replace("$", "$$") if "$(" in text or "$$" in text else text


def _resources(job: Job) -> dict[str, Any]:
    wanted: dict[str, Any] = {}
    if job.cpus is not None:
        wanted["cpu"] = job.cpus * job.processes
    if job.memory_gb is not None:
        wanted["memory"] = f"{job.memory_gb}G"
    limits = {"nvidia.com/gpu": job.gpus} if job.gpus else {}
    asked = {name: each for name, each in (("requests", wanted), ("limits", limits)) if each}
    return {"resources": asked} if asked else {}
