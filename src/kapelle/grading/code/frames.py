"""What the code of a test that waits for a call does with its result.

Standard library only: the file is copied into sandboxes as it stands.
"""

from __future__ import annotations

import opcode
import re
from types import FrameType

_UNUSED = re.compile(r"POP_TOP|POP_JUMP_\w*IF_(?:NOT_)?NONE")
_CACHE = opcode.opmap.get("CACHE", 0)


def is_unused(caller: FrameType) -> bool:
    """Return whether the result of the call that a frame waits for is dropped, or only asked whether it is None."""
    code, place = caller.f_code.co_code, caller.f_lasti + 2
    while place < len(code) and code[place] == _CACHE:
        place += 2
    return _UNUSED.fullmatch(opcode.opname[code[place]]) is not None


def awaits_end(caller: FrameType) -> bool:
    """Return whether a frame that calls `next` may see the end: it names StopIteration, has a default, or is no function.

    In a function that `map` calls, the end would end what the tests iterate over.
    """
    code = caller.f_code
    alone = (
        opcode.opname[code.co_code[caller.f_lasti]] in ("CALL", "PRECALL")
        and code.co_code[caller.f_lasti + 1] == 1
    )
    return not alone or code.co_name == "<module>" or "StopIteration" in code.co_names
