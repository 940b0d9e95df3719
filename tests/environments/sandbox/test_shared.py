from __future__ import annotations

import os

import pytest
from tests.support.programs import output_of

from kapelle.environments.sandbox.bubblewrap import Bubblewrap


def test_a_fork_has_its_own_pool_and_does_not_use_its_parents(sandbox: Bubblewrap) -> None:
    program = (
        "import os, sys\n"
        "from kapelle.environments.sandbox import Limits, run\n"
        "from kapelle.environments.sandbox.pool import shared_pool\n"
        "pool = shared_pool('bubblewrap', Limits(), 1)\n"
        "assert pool.wait_until_warm()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    own = shared_pool('bubblewrap', Limits(), 1)\n"
        "    works = own is not pool and run(own, {}, [own.python, '-c', 'print(1)']).ok\n"
        "    sys.exit(not works)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "assert run(pool, {}, [pool.python, '-c', 'print(1)']).ok\n"
        "assert pool.wait_until_warm()\n"
        "for task in os.listdir('/proc/self/task'):\n"
        "    print(open(f'/proc/self/task/{task}/children').read())\n"
    )
    for number in output_of(program).split():
        with pytest.raises(ProcessLookupError):
            os.kill(int(number), 0)
