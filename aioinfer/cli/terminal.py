"""The terminal of `aioinfer chat`: reads messages, and shows an answer while it comes.

In a pipe a line is a message, and answers are written as they are. On a terminal several lines that
are pasted are one message, and answers are rendered as Markdown.
"""

from __future__ import annotations

import re
import select
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

#: Further lines of a paste are there this soon, where the terminal does not mark its end.
_PASTE_S = 0.05
#: Times a second that the block which is still coming is drawn.
_DRAWS_PER_S = 12
#: Control characters but tab and newline: a model must not steer the terminal.
_CONTROLS = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])
#: A place where a Markdown block ends and another begins that is not part of it.
_BLOCK_END = re.compile(r"\n[ \t]*\n+(?=\S)")
_FENCE = re.compile(r"^ {0,3}(```+|~~~+)", re.MULTILINE)


class MessageReader:
    """Reads messages from stdin."""

    def __init__(self) -> None:
        self._is_terminal = sys.stdin.isatty()
        self._marks_pastes = self._is_terminal and _mark_pastes()

    def read(self) -> str | None:
        """Returns the next message without blanks around it, None at the end of the input. Ctrl-C
        drops the text that was typed."""
        while True:
            try:
                text = input("> " if self._is_terminal else "")
                while self._is_terminal and not self._marks_pastes and _has_more():
                    text += "\n" + input()
                return text.strip()
            except EOFError:
                return None
            except KeyboardInterrupt:
                write("\n")


def _mark_pastes() -> bool:
    """Gives `input` a history and has the terminal mark pasted text (bracketed paste). Returns
    whether it does: GNU readline can, libedit cannot."""
    with suppress(ImportError):
        import readline

        if "libedit" not in (readline.__doc__ or ""):
            readline.parse_and_bind("set enable-bracketed-paste on")
            return True
    return False


def _has_more() -> bool:
    return bool(select.select([sys.stdin], [], [], _PASTE_S)[0])


def write(text: str) -> None:
    """Writes to stdout at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


class AnswerView(Protocol):
    """Shows one answer as it comes."""

    def thought(self, text: str) -> None:
        """Shows more of the model's thoughts."""

    def call(self, name: str | None, arguments: str) -> None:
        """Shows the name of a tool call, where one begins, and more of its arguments."""

    def text(self, text: str) -> None:
        """Shows more of the answer itself."""

    def end(self, figures: str) -> None:
        """Shows the rest of the answer, and on a terminal its figures."""


def make_view() -> AnswerView:
    """Returns the view that fits stdout: Markdown for a terminal, plain text otherwise."""
    if not sys.stdout.isatty():
        return PlainView()
    from rich.console import Console

    return MarkdownView(Console())


class PlainView:
    """An answer as it is, for pipes."""

    def thought(self, text: str) -> None:
        """See `AnswerView`."""
        write(text)

    def call(self, name: str | None, arguments: str) -> None:
        """See `AnswerView`."""
        write((f"\n[calls {name}] " if name else "") + arguments)

    def text(self, text: str) -> None:
        """See `AnswerView`."""
        write(text)

    def end(self, figures: str) -> None:
        """See `AnswerView`."""
        write("\n")


class MarkdownView:
    """An answer as Markdown. Blocks that are complete are printed for good, and the last one, which
    is still coming, is drawn again as it grows: its end, if it is taller than the screen."""

    def __init__(self, console: Console):
        self._console = console
        self._live: Live | None = None
        self._block = ""
        self._needs_newline = False
        self._has_blocks = False

    def thought(self, text: str) -> None:
        """See `AnswerView`."""
        self._write_dim(text)

    def call(self, name: str | None, arguments: str) -> None:
        """See `AnswerView`."""
        self._write_dim((f"\n[calls {name}] " if name else "") + arguments)

    def text(self, text: str) -> None:
        """See `AnswerView`."""
        self._block += text.translate(_CONTROLS)
        while (end := _end_of_block(self._block)) is not None:
            rest = self._block[end:].lstrip("\n")
            self._block = self._block[:end]
            self._finish_block()
            self._block = rest
        if not self._block.strip():
            return
        if self._live is None:
            from rich.live import Live

            self._begin_block()
            # drawn by a thread of its own: a fast model's tokens do not wait for the terminal
            self._live = Live(
                console=self._console, transient=True, refresh_per_second=_DRAWS_PER_S
            )
            self._live.start()
        self._live.update(_Tail(self._block))

    def end(self, figures: str) -> None:
        """See `AnswerView`."""
        self._finish_block()
        if self._needs_newline:
            self._console.print()
        if figures:
            self._console.print(figures, style="dim", markup=False, highlight=False)

    def _begin_block(self) -> None:
        if self._needs_newline:
            self._console.print()
            self._needs_newline = False
        if self._has_blocks:
            self._console.print()
        self._has_blocks = True

    def _finish_block(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        elif self._block.strip():
            self._begin_block()
        if self._block.strip():
            self._console.print(_markdown(self._block))
        self._block = ""

    def _write_dim(self, text: str) -> None:
        self._finish_block()
        text = text.translate(_CONTROLS)
        self._console.print(
            text, style="dim", end="", markup=False, highlight=False, soft_wrap=True
        )
        self._needs_newline = bool(text) or self._needs_newline


class _Tail:
    """The last lines of a text in Markdown, as many as fit on the screen."""

    def __init__(self, text: str):
        self._text = text

    def __rich_console__(self, console: Console, options: Any) -> Any:
        from rich.segment import Segment

        content = _markdown(self._text)
        lines = console.render_lines(content, options.update(height=None), pad=False)
        for line in lines[-max(1, console.height - 2) :]:
            yield from line
            yield Segment.line()


def _end_of_block(text: str) -> int | None:
    """Returns where the first Markdown block of a text ends, if another one follows that does not
    belong to it: nothing within a fence, and no indented continuation of a list."""
    for found in _BLOCK_END.finditer(text):
        fences = _FENCE.findall(text[: found.start() + 1])
        if not _is_open(fences):
            return found.start()
    return None


def _is_open(fences: list[str]) -> bool:
    """Whether the last of these fences, in order, opens code that none of them closes."""
    opening = ""
    for fence in fences:
        if not opening:
            opening = fence
        elif fence.startswith(opening):
            opening = ""
    return bool(opening)


def _markdown(text: str) -> RenderableType:
    """Returns Markdown that keeps the layout of a chat's answer: line breaks stay, and tags of HTML
    are text."""
    from markdown_it import MarkdownIt
    from rich.markdown import Markdown

    rendered = Markdown("")
    parser = MarkdownIt("commonmark", {"html": False}).enable("strikethrough").enable("table")
    rendered.parsed = parser.parse(text)
    for token in rendered.parsed:
        for child in token.children or ():
            if child.type == "softbreak":
                child.type = "hardbreak"
    return rendered
