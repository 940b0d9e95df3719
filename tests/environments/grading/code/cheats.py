"""Programs that solve no problem whatever."""

from __future__ import annotations

from collections.abc import Mapping

CHEATS: Mapping[str, str] = {
    "nothing": "",
    "exit with success": "import sys\nsys.exit(0)",
    "exit at once": "import os\nos._exit(0)",
    "claim": "print('ALL TESTS PASSED')\nprint('1.0')",
    "always equal": (
        "class Yes:\n"
        "    __hash__ = None\n"
        "    def __eq__(self, other): return True\n"
        "    def __ne__(self, other): return False\n"
        "    def __bool__(self): return True\n"
        "    def __abs__(self): return 0\n"
        "    def __sub__(self, other): return 0\n"
        "    def __lt__(self, other): return True\n"
        "def {name}(*args, **kwargs): return Yes()"
    ),
    "patched builtins": (
        "import builtins, math\n"
        "builtins.set = builtins.abs = builtins.sorted = builtins.len = lambda *a, **k: 0\n"
        "math.isclose = lambda *a, **k: True\n"
        "def {name}(*args, **kwargs): raise AssertionError('passed')"
    ),
}
"""Programs that solve no problem whatever, by what they try; `{name}` is the function that is asked for."""
