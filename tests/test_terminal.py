"""Messages that are typed and pasted on a real terminal, and answers as they come."""

from __future__ import annotations

import io
import os
import pty
import select
import subprocess
import sys
import time

import pytest
from rich.console import Console

from aioinfer.cli.terminal import MarkdownView, _Tail

ANSWER = """\
One line
and another: <b>x</b> costs 3 < 4.

1. first

2. second

    of two paragraphs

```python
a = 1

b = 2
```

The *end*.\x1b[31m"""


def shown(*pieces: str) -> str:
    """Returns what is left of an answer on a terminal that is 60 columns wide."""
    console = Console(file=io.StringIO(), width=60, force_terminal=False)
    view = MarkdownView(console)
    for piece in pieces:
        view.text(piece)
    view.end("")
    return "".join(f"{line.rstrip()}\n" for line in console.file.getvalue().splitlines())


def test_an_answer_is_the_same_however_it_comes() -> None:
    whole = shown(ANSWER)
    assert shown(*ANSWER) == whole
    assert shown(*ANSWER.splitlines(keepends=True)) == whole
    lines = whole.splitlines()
    assert lines[:2] == ["One line", "and another: <b>x</b> costs 3 < 4."]
    assert " 1 first" in lines
    assert " 2 second" in lines
    assert "   of two paragraphs" in lines
    start = next(number for number, line in enumerate(lines) if "a = 1" in line)
    assert "b = 2" in lines[start + 2]
    assert lines[-1] == "The end.[31m", "an answer does not steer the terminal"


def test_thoughts_and_calls_stand_apart() -> None:
    console = Console(file=io.StringIO(), width=60)
    view = MarkdownView(console)
    view.thought("Let me ")
    view.thought("look.")
    view.text("The answer:")
    view.call("find", '{"a"')
    view.call(None, ": 1}")
    view.end("3 tokens")
    lines = [line.rstrip() for line in console.file.getvalue().splitlines() if line.strip()]
    assert lines == ["Let me look.", "The answer:", '[calls find] {"a": 1}', "3 tokens"]


def test_a_block_that_is_taller_than_the_screen_shows_its_end() -> None:
    console = Console(file=io.StringIO(), width=60, height=10, force_terminal=True)
    console.print(_Tail("```\n" + "".join(f"line {number}\n" for number in range(50))), end="")
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 8
    assert any("line 49" in line for line in lines)


READ = """
import sys
{first}
from aioinfer.cli.terminal import MessageReader
reader = MessageReader()
while (text := reader.read()) is not None:
    print("got", repr(text), flush=True)
"""


def typed(first: str, *keys: bytes) -> list[str]:
    """Returns the messages that a process reads, by its own account, from a terminal on which
    `keys` are pressed, each when it prompts."""
    controller, device = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", READ.format(first=first)],
        stdin=device, stdout=device, stderr=device, env=os.environ | {"TERM": "xterm"},
    )  # fmt: skip
    os.close(device)
    output, keys_left, until = b"", [*keys, b"\x04"], time.monotonic() + 30
    with process, os.fdopen(controller, "rb", buffering=0) as terminal:
        prompts = 0
        while process.poll() is None and time.monotonic() < until:
            if keys_left and output.count(b"> ") > prompts:
                prompts = output.count(b"> ")
                os.write(controller, keys_left.pop(0))
            if select.select([controller], [], [], 0.1)[0]:
                try:
                    output += terminal.read(4096)
                except OSError:  # the other side is closed
                    break
        process.kill()
    return [line for line in output.decode().splitlines() if line.startswith("got ")]


def test_a_paste_is_one_message() -> None:
    readline = pytest.importorskip("readline")
    if "libedit" in (readline.__doc__ or ""):
        pytest.skip("libedit does not mark pastes")
    paste = b"\x1b[200~one\ntwo\n\nthree\n\x1b[201~\r"
    assert typed("", b"hello\r", paste) == ["got 'hello'", r"got 'one\ntwo\n\nthree'"]


def test_lines_that_come_at_once_are_one_message_where_pastes_are_not_marked() -> None:
    found = typed("sys.modules['readline'] = None", b"hello\n", b"one\ntwo\nthree\n")
    assert found == ["got 'hello'", r"got 'one\ntwo\nthree'"]
