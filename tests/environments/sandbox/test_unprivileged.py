"""The sandbox of an ordinary user: no root anywhere, the same containment."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from tests.environments.sandbox.test_hostile import Host, host

import kapelle
from kapelle.environments.sandbox.bubblewrap import Bubblewrap

__all__ = ["host"]

USER = 23456

COUNTS = """
import os
from kapelle.environments.sandbox.bubblewrap import Bubblewrap
from kapelle.environments.sandbox.contract import Limits
from kapelle.environments.sandbox.session import run
box = Bubblewrap()
limits = Limits(processes=8, wall_s=5.0)
program = '''
import os, time
made = 0
try:
    for _ in range(20):
        if os.fork() == 0:
            time.sleep(1); os._exit(0)
        made += 1
except OSError:
    pass
print(made, os.getuid())
'''
result = run(box, {"p.py": program.encode()}, [box.python, "p.py"], limits=limits)
print(os.getuid(), result.stdout.decode().split(), result.limit)
print([layer.name for layer in box.layers() if not layer.present])
"""

ATTACKS = """
import json, sys
from kapelle.environments.sandbox.bubblewrap import Bubblewrap
from kapelle.environments.sandbox.session import run
from tests.environments.sandbox.hostile.channels import CHANNELS
from tests.environments.sandbox.hostile.files import FILES
from tests.environments.sandbox.hostile.kernel import KERNEL
from tests.environments.sandbox.hostile.machine import MACHINE
from tests.environments.sandbox.hostile.processes import PROCESSES
from tests.environments.sandbox.hostile.resources import RESOURCES
from tests.environments.sandbox.hostile.unseen import UNSEEN
from tests.environments.sandbox.hostile.whole import WHOLE
fill = json.loads(sys.argv[1])
box, through = Bubblewrap(), []
programs = {**RESOURCES, **PROCESSES, **FILES, **KERNEL, **WHOLE, **MACHINE, **CHANNELS, **UNSEEN}
for name, hostile in programs.items():
    text = hostile.source
    for key, value in fill.items():
        text = text.replace(b"{%s}" % key.encode(), str(value).encode())
    for _ in range(2 if hostile.again else 1):
        result = run(box, {"program.py": text}, [box.python, "program.py"], limits=hostile.limits)
        if b"ESCAPED" in result.stdout or (result.limit or "end") not in hostile.ends:
            through.append([name, result.limit, result.stdout.decode(errors="replace")[-300:]])
print(json.dumps([len(programs), through]))
"""


@pytest.fixture(scope="module")
def library(sandbox: Bubblewrap, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sandbox's code that every user can read; the project itself may lie in a private folder."""
    if os.geteuid() != 0:
        pytest.skip("this whole run is an unprivileged user's already")
    folder = tmp_path_factory.mktemp("library")
    for parent in itertools.takewhile(
        lambda one: one != Path(tempfile.gettempdir()), (folder, *folder.parents)
    ):
        parent.chmod(0o755)
    source = Path(kapelle.__file__).parent
    for package in ("runtime", "environments/sandbox"):
        shutil.copytree(source / package, folder / "kapelle" / package)
    shutil.copy(source / "errors.py", folder / "kapelle")
    (folder / "kapelle" / "__init__.py").touch()
    (folder / "kapelle" / "environments" / "__init__.py").touch()
    shutil.copytree(
        Path(__file__).parent / "hostile", folder / "tests" / "environments" / "sandbox" / "hostile"
    )
    return folder


def as_user(sandbox: Bubblewrap, library: Path, program: str, *arguments: str) -> str:
    done = subprocess.run(
        [sandbox.python, "-c", program, *arguments],
        user=USER,
        group=USER,
        extra_groups=[],
        env={"PYTHONPATH": str(library), "PYTHONDONTWRITEBYTECODE": "1"},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_process_limit_counts_one_sandbox(sandbox: Bubblewrap, library: Path) -> None:
    first, second = as_user(sandbox, library, COUNTS).splitlines()
    assert first == f"{USER} ['7', '1000'] None"
    assert second == "['user id per run', 'cgroups']"


@pytest.mark.sandbox_full
def test_every_hostile_program_is_contained(sandbox: Bubblewrap, library: Path, host: Host) -> None:
    fill = json.dumps({"secret": str(host.secret), "port": host.port, "socket": host.socket})
    assert json.loads(as_user(sandbox, library, ATTACKS, fill)) == [110, []]
