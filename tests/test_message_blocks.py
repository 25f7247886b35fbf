"""Blocks of a message: which of the tokens their texts consist of."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioinfer.api.logprobs import ScoredToken
from aioinfer.text.formats.registry import message_format
from aioinfer.text.message_blocks import Block, Blocks
from aioinfer.text.message_parser import ToolUse

USE = ToolUse([{"name": "add", "parameters": {}}], "auto")
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def read(pieces: list[bytes]) -> list[Block]:
    """Returns the blocks of a text whose tokens have these bytes, each of which brings the
    characters that are complete with it."""
    parser = message_format("", {}, "hermes", "think").parser(USE, in_thought=False)
    blocks = Blocks(lambda kind: kind)
    text, so_far = "", b""
    for piece in pieces:
        so_far += piece
        whole = so_far.decode("utf-8", "ignore")
        entry = ScoredToken(token="", logprob=0.0, bytes=list(piece), top_logprobs=[])
        for _ in blocks.take(parser.feed(whole[len(text) :]), entry):
            pass
        text = whole
    for _ in blocks.take(parser.flush()):
        pass
    return blocks.all


def tokens(block: Block) -> list[bytes]:
    return [bytes(entry.bytes) for entry in block.logprobs]


@pytest.mark.parametrize(
    ("pieces", "wanted"),
    [
        ([b"Par", b"is", b"."], [[b"Par", b"is", b"."]]),
        # the thought has the same words, and the marker has the answer's letter
        (
            [b"<think>", b"Paris", b"</think>", b"\n\n", b"Paris", b" it", b" is"],
            [[], [b"Paris", b" it", b" is"]],
        ),
        ([b"<think>", b"x", b"</think>", b"\n\n", b"t"], [[], [b"t"]]),
        # held back as if a call began, and released
        ([b"a ", b"<", b"tool", b" b"], [[b"a ", b"<", b"tool", b" b"]]),
        # halves of a character, and one that is never completed
        ([b"a", b"\xf0\x9f", b"\x8e\x89", b"b"], [[b"a", b"\xf0\x9f", b"\x8e\x89", b"b"]]),
        ([b"Let me see.", b"\n\n", CALL.encode()], [[b"Let me see."], []]),
        # a token may hold a marker's end and a text's beginning
        ([b"<think>", b"x</think>\n\nHello", b" you"], [[], [b"x</think>\n\nHello", b" you"]]),
    ],
)
def test_tokens_of_texts(pieces: list[bytes], wanted: list[list[bytes]]) -> None:
    assert [tokens(block) for block in read(pieces)] == wanted


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from(["a", "b ", "<", "tool_call", "</think>", "é", "\n"]), max_size=12),
    st.integers(1, 4),
)
def test_each_text_is_in_its_tokens(words: list[str], size: int) -> None:
    whole = "".join(words).encode()
    pieces = [whole[i : i + size] for i in range(0, len(whole), size)]
    for block in read(pieces):
        if block.kind == "text":
            assert block.text.encode() in b"".join(tokens(block))
            assert len(b"".join(tokens(block))) <= len(block.text.encode()) + 20
