"""Messages of choices: their blocks, and how they are built while text comes."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioinfer.api.logprobs import ScoredToken
from aioinfer.api.messages import Message, Role
from aioinfer.async_llm import StreamedCompletion
from aioinfer.engine.chat_turn import MessageBuilder, Turn
from aioinfer.engine.frontend import Frontend
from aioinfer.errors import RequestError
from aioinfer.sampling_params import SamplingParams
from aioinfer.text.formats.registry import message_format
from aioinfer.text.message_blocks import Block, Blocks
from aioinfer.text.message_parser import ToolUse


def message(**fields: Any) -> Message:
    made = msgspec.convert({"role": "user", "content": "x"} | fields, Message)
    made.check("messages[0]")
    return made


def tool_call(arguments: Any) -> dict[str, Any]:
    return {"id": "call-1", "type": "function", "function": {"name": "add", "arguments": arguments}}


@pytest.mark.parametrize("role", get_args(Role))
def test_roles(role: str) -> None:
    # templates do not know the newer name of the system's role, and the older one of the tool's
    assert message(role=role).for_template() == {
        "role": {"developer": "system", "function": "tool"}.get(role, role),
        "content": "x",
    }


def test_text_parts_are_joined_by_newlines() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert message(content=parts).for_template()["content"] == "one\ntwo"


def test_only_an_assistant_may_have_no_content() -> None:
    found = message(role="assistant", content=None).for_template()
    assert found == {"role": "assistant", "content": ""}
    with pytest.raises(RequestError, match="content is missing") as caught:
        message(role="tool", content=None)
    assert caught.value.param == "messages[0].content"


@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}])
def test_arguments_of_calls_are_objects(arguments: Any) -> None:
    rendered = message(
        role="assistant", content=None, tool_calls=[tool_call(arguments)]
    ).for_template()
    assert rendered["tool_calls"] == [tool_call({"a": 1})]


@pytest.mark.parametrize("arguments", ["", None])
def test_a_call_without_arguments(arguments: str | None) -> None:
    rendered = message(role="assistant", tool_calls=[tool_call(arguments)]).for_template()
    assert rendered["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize("arguments", ["{", '{"city": "Par', "[1]", "5", '{"a":' * 100_000])
def test_arguments_that_are_no_object_do_not_end_a_conversation(arguments: str) -> None:
    """A call that `max_tokens` has cut off comes back in the history."""
    made = message(role="assistant", tool_calls=[tool_call(arguments)])
    assert made.for_template()["tool_calls"] == [tool_call({"invalid_json": arguments})]


def test_a_refusal_is_what_the_assistant_has_said() -> None:
    parts = [{"type": "text", "text": "Well."}, {"type": "refusal", "refusal": "No."}]
    assert message(role="assistant", content=parts).for_template()["content"] == "Well.\nNo."
    alone = message(role="assistant", content=None, refusal="No.")
    assert alone.for_template() == {"role": "assistant", "content": "No."}
    with pytest.raises(RequestError) as caught:
        message(role="user", content=[parts[1]])
    assert caught.value.param == "messages[0].content[0]"


def test_the_older_form_of_calls() -> None:
    function = {"name": "add", "arguments": '{"a": 1}'}
    call = message(role="assistant", content=None, function_call=function).for_template()
    assert call["tool_calls"] == [
        {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    ]
    result = message(role="function", name="add", content=None).for_template()
    assert result == {"role": "tool", "name": "add", "content": ""}


def test_the_answer_of_a_tool() -> None:
    fields = {"role": "tool", "content": "3", "tool_call_id": "call-1", "name": "add"}
    assert message(**fields).for_template() == fields


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


ADDING = ToolUse([{"name": "add", "parameters": {"type": "object"}}], "auto")
CALLED = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
TEXTS = [
    "", "Hello", "<think>\nHm.\n</think>\n\nHello", CALLED,
    f"<think>\nHm\n</think>\n{CALLED}{CALLED.replace('2', '3')}",
]  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_the_dict_grows_to_the_message(text: str) -> None:
    format = message_format("", {}, "hermes", "think")
    frontend = cast(Frontend, SimpleNamespace(message_format=format))
    turn = Turn([1], SamplingParams(), ADDING, parses=True)
    builder = MessageBuilder(frontend, turn)
    as_dict: dict[str, Any] = builder.as_dict
    for place, piece in enumerate(text, 1):
        builder.feed(piece, ended=place == len(text))
        assert builder.as_dict is as_dict
        assert as_dict == builder.message.to_dict()
    assert len(builder.message.calls) == text.count("<tool_call>")
    assert bool(builder.message.reasoning) == ("Hm" in text)


def test_a_streamed_completion_joins_what_is_read() -> None:
    completion = StreamedCompletion()
    for piece in ("Two", "", " and", " two"):
        completion.append(piece)
    assert completion.text == "Two and two"
    completion.append(" are")
    copied = replace(completion, message={"role": "assistant"})
    completion.append(" four")
    assert (copied.text, copied.message) == ("Two and two are", {"role": "assistant"})
    assert (completion.text, completion.message) == ("Two and two are four", None)
    assert completion != copied
    assert completion == StreamedCompletion(text="Two and two are four")
