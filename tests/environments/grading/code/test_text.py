from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kapelle.environments.grading.code.programs import program_of


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\nx = 1\n```", "x = 1\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```Py\nx = 1\n```", "x = 1\n"),
        ("Look:\n  ```python3\n  x = 1\n  ```\nDone.", "x = 1\n"),
        ("```python\nx = 1\n```\nNo:\n```python\nx = 2\n```", "x = 2\n"),
        ("```python\nx = 1\n```\nIt prints\n```text\n1\n```", "x = 1\n"),
        ("```python\nx = '``'\ny = '```'\n```", "x = '``'\ny = '```'\n"),
        ("```python\r\nx = 1\r\ny = 2\r\n```", "x = 1\ny = 2\n"),
        ("<think>```python\nx = 1\n```</think>```python\nx = 2\n```", "x = 2\n"),
        ("```python\nx = 1\n```<|im_end|>\n```python\nx = 2\n```", "x = 1\n"),
        ("```python\nx = 1\n```\n<|im_end|>\n```python\nx = 2\n```", "x = 1\n"),
        ("x = 1\ny = 2", "x = 1\ny = 2"),
        ("x = '−²'", "x = '−²'"),
        ("```python\nx = 1", "x = 1"),
        ("```python\nx = 1\n```\n```python\nx = 2", "x = 2"),
        # A sample of its output, or of its use, is not the program.
        ("```python\nprint(1)\n```\nIt prints\n```\n1\n```", "print(1)\n"),
        ("```\nprint(1)\n```\nIt prints\n```\n1\n```", "print(1)\n"),
        ("```\nprint(1)\n```\nIt prints\n```\nHello, you!\n```", "print(1)\n"),
        ("```\nprint([1])\n```\nIt prints\n```\n[1]\n```", "print([1])\n"),
        ("```python\ndef f(): pass\n```\nUse it:\n```python\nf()\n```", "def f(): pass\n"),
        ("```python\ndef f(): pass\n```\nUse it:\n```python\n>>> f()\n```", "def f(): pass\n"),
        ("```python\ndef f(): pass\n```\nBetter:\n```python\ndef f(): return f\n```", "def f(): return f\n"),
        ("```\n    return x\n```", "    return x\n"),
        # Fences as Markdown has them.
        ('```python title="a.py"\nx = 1\n```', "x = 1\n"),
        ("```python {linenos=1}\nx = 1\n```", "x = 1\n"),
        ("```{.python}\nx = 1\n```", "x = 1\n"),
        ("1. Do\n\n   ```python\n   if x:\n       y = 1\n   ```\n2. Done", "if x:\n    y = 1\n"),
        ("- ```python\n  if x:\n      y = 1\n  ```", "if x:\n    y = 1\n"),
        ("~~~python\nx = '\n```\n'\n~~~", "x = '\n```\n'\n"),
        ("````python\nx = '\n```\n'\n````", "x = '\n```\n'\n"),
        ("````python\nx = '\n```\n'\n`````", "x = '\n```\n'\n"),
        ("```python\nx = '\n~~~\n'\n```", "x = '\n~~~\n'\n"),
        (
            '```python\ndef f():\n    """\n    ```\n    f()\n    ```\n    """\n```',
            'def f():\n    """\n    ```\n    f()\n    ```\n    """\n',
        ),
        ("```python\nx = 1\n   ```\nDone.", "x = 1\n"),
        ("```python\nx = '\n``` not the end\n'\n```", "x = '\n``` not the end\n'\n"),
        ("> It is\n> ```python\n> if x:\n>     y = 1\n> ```", "if x:\n    y = 1\n"),
        ("1. Do\n   - that:\n     ~~~ python\n     x = 1\n     ~~~", "x = 1\n"),
        ("Here:\n    ```python\n    x = 1\n    ```", "    x = 1\n"),
        ("<answer>\n```python\nx = 1\n```\n</answer>", "x = 1\n"),
        ("``` python copy\nx = 1\n```", "x = 1\n"),
        ("With ```x = 2``` inside\n```python\nx = 1\n```", "x = 1\n"),
        ("```rust\nfn main() {}\n```", None),
        ("```python\n\n```", None),
        ("", None),
        ("  \n", None),
        ("<think>x = 1", None),
        ("x" * 200_001, None),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_the_last_block_of_python_is_the_program(text: str, program: str | None) -> None:
    assert program_of(text) == program


@given(
    st.lists(st.sampled_from(["```", "```python", "x = 1", "", "<think>", "</think>", " ```"]), max_size=12)
)
def test_what_is_found_was_written_and_holds_no_fence(lines: list[str]) -> None:
    program = program_of("\n".join(lines))
    if program is not None:
        assert {line for line in program.split("\n") if line} <= set(lines)
        assert "```" not in program.split("\n")
