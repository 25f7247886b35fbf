"""The words of `/v1/responses`: the response while it is generated, and the events of its stream.
`responses` answers with it, and `response_runs` in the background."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import orjson
from msgspec import Struct

from aioinfer.api.errors import describe
from aioinfer.api.event_stream import StreamState
from aioinfer.api.generation import named_event
from aioinfer.api.message_events import Block, BlockKind, MessageDialect
from aioinfer.api.openai.responses_body import ResponseRequest
from aioinfer.engine.chat_turn import Turn, new_call_id, num_thought_tokens
from aioinfer.errors import RequestError

if TYPE_CHECKING:
    from aioinfer.engine.frontend import Frontend


class ResponseUsage(Struct, kw_only=True):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class Response(Struct, kw_only=True):
    """The reply of `/v1/responses`, which repeats what was asked for. The first and the last event
    of a stream hold one."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    model: str
    background: bool
    conversation: dict[str, str] | None
    frequency_penalty: float
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    presence_penalty: float
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, str | None]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    user: Any
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    completed_at: int | None = None
    error: dict[str, Any] | None = None
    incomplete_details: dict[str, str] | None = None
    output: list[dict[str, Any]]
    usage: ResponseUsage | None = None


class ResponseDialect(MessageDialect):
    """The words of a response.

    Attributes:
        id: of the response.
    """

    def __init__(
        self,
        frontend: Frontend,
        body: ResponseRequest,
        turn: Turn,
        state: StreamState,
        keep: Callable[[Response], None],
    ):
        """`state` is the stream's state, if the reply is a stream: all ids are made of its key.
        `keep` stores the response when it has ended."""
        super().__init__(frontend, turn)
        self.id = f"resp_{state.key}"
        self._keep = keep
        self._number = 0  # of the next event
        self._num_logprobs = 0  # of the block's, that have been sent
        self._ids = random.Random(state.key)
        params, conversation = turn.params, body.conversation_id
        format = body.text.format if body.text is not None else None
        tools = [{"strict": None} | _plain(tool) for tool in body.tools or ()]
        self._fields: dict[str, Any] = {
            "id": self.id,
            "created_at": state.created,
            "model": frontend.config.served_model_names[0],
            "background": bool(body.background),
            "conversation": None if conversation is None else {"id": conversation},
            "frequency_penalty": params.frequency_penalty,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "presence_penalty": params.presence_penalty,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {
                "effort": body.reasoning.effort if body.reasoning else None,
                "summary": None,
            },
            "store": body.store is not False,
            "temperature": params.temperature,
            "text": {
                "format": {"type": "text"} if format is None else _plain(format),
                "verbosity": (body.text and body.text.verbosity) or "medium",
            },
            "tool_choice": body.tool_choice if body.tool_choice is not None else "auto",
            "tools": tools,
            "top_logprobs": body.num_logprobs or 0,
            "top_p": params.top_p,
            "truncation": body.truncation or "disabled",
            "user": body.user,
        }
        try:
            orjson.dumps(self._fields)
        except orjson.JSONEncodeError as error:
            raise RequestError("the body is nested too deeply to be repeated") from error

    def new_id(self, kind: BlockKind) -> str:
        """See `MessageDialect.new_id`; for a tool call, the id that its result names."""
        if kind == "call":
            return new_call_id(self._frontend, random_bytes=self._ids.randbytes)
        return f"{'msg' if kind == 'text' else 'rs'}_{self._ids.randbytes(16).hex()}"

    def response(
        self,
        reason: str | None = None,
        num_tokens: int = 0,
        error: dict[str, Any] | None = None,
        *,
        unfinished: Literal["queued", "in_progress", "cancelled"] = "in_progress",
    ) -> Response:
        """Returns the response with its blocks so far; without a reason for its end or an error its
        status is `unfinished`."""
        blocks = self.blocks.all
        reply = Response(
            **self._fields,
            status=unfinished if reason is None else "completed",
            error=error,
            output=[],
            usage=None if reason is None else self._usage(num_tokens),
        )
        if reason == "length":
            reply.status, reply.incomplete_details = "incomplete", {"reason": "max_output_tokens"}
        if error is not None:
            reply.status = "failed"
        if reply.status == "completed":
            reply.completed_at = int(time.time())
        last = reply.status if reply.status in ("completed", "in_progress") else "incomplete"
        reply.output = [
            _item(block, last if block is blocks[-1] else "completed") for block in blocks
        ]
        return reply

    def _usage(self, num_tokens: int) -> ResponseUsage:
        prompt = len(self.output.prompt_token_ids)
        (tokens,) = self.output.generated()
        thoughts = num_thought_tokens(self._frontend, self._turn, tokens)
        return ResponseUsage(
            input_tokens=prompt,
            input_tokens_details={"cached_tokens": self.output.num_cached_tokens},
            output_tokens=num_tokens,
            output_tokens_details={"reasoning_tokens": min(thoughts, num_tokens)},
            total_tokens=prompt + num_tokens,
        )

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return named_event({"type": f"response.{kind}", "sequence_number": number, **fields})

    def opening(self) -> bytes:
        """See `MessageDialect.opening`."""
        body = self.response()
        return self._event("created", response=body) + self._event("in_progress", response=body)

    def change(self, kind: str, block: Block, text: str) -> bytes:
        """See `MessageDialect.change`."""
        index = block.index
        place = {"item_id": _item_id(block), "output_index": index}
        if block.kind != "call":
            place["content_index"] = 0
        if kind == "start":
            self._num_logprobs = 0
            data = self._event(
                "output_item.added", output_index=index, item=_item(block, "in_progress")
            )
            return (
                data
                if block.kind == "call"
                else data + self._event("content_part.added", **place, part=_part(block))
            )
        name = {"call": "function_call_arguments", "text": "output_text"}.get(
            block.kind, "reasoning_text"
        )
        if kind == "delta":
            extra = {"logprobs": block.logprobs[self._num_logprobs :]}
            self._num_logprobs = len(block.logprobs)
            extra = extra if block.kind == "text" else {}
            return self._event(f"{name}.delta", **place, delta=text, **extra)
        if block.kind == "call":
            data = self._event(f"{name}.done", **place, name=block.name, arguments=block.text)
        else:
            extra = {"logprobs": block.logprobs} if block.kind == "text" else {}
            data = self._event(f"{name}.done", **place, text=block.text, **extra)
            data += self._event("content_part.done", **place, part=_part(block))
        return data + self._event(
            "output_item.done", output_index=index, item=_item(block, "completed")
        )

    def closing(self, reason: str, stop_reason: int | str | None, num_tokens: int) -> bytes:
        """See `MessageDialect.closing`."""
        body = self.message(reason, stop_reason, num_tokens)
        return self._event(body.status, response=body)

    def message(self, reason: str, stop_reason: int | str | None, num_tokens: int) -> Response:
        """See `MessageDialect.message`."""
        ended = self.response(reason, num_tokens)
        self._keep(ended)
        return ended

    def failed(self, error: Exception) -> Response:
        """Returns the response that an error has ended."""
        described = describe(error)[1].error
        cause = {"code": described.code or "server_error", "message": described.message}
        return self.response(error=cause)

    def failure(self, error: Exception) -> bytes:
        """See `Dialect.failure`."""
        return self._event("failed", response=self.failed(error))


def _plain(struct: Any) -> dict[str, Any]:
    return {
        name: value for name, value in msgspec.structs.asdict(struct).items() if value is not None
    }


def _part(block: Block) -> dict[str, Any]:
    """Returns the part of content that a block is."""
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {
        "type": "output_text",
        "text": block.text,
        "annotations": [],
        "logprobs": block.logprobs,
    }


def _item(block: Block, status: str) -> dict[str, Any]:
    """Returns the item of a block, with its content so far."""
    if block.kind == "call":
        return {
            "id": _item_id(block),
            "type": "function_call",
            "status": status,
            "call_id": block.id,
            "name": block.name,
            "arguments": block.text,
        }
    content = [_part(block)] if block.parts else []
    if block.kind == "reasoning":
        head: dict[str, Any] = {"type": "reasoning", "summary": []}
    else:
        head = {"type": "message", "role": "assistant"}
    return {"id": block.id, **head, "status": status, "content": content}


def _item_id(block: Block) -> str:
    return f"fc_{block.id.removeprefix('call_')}" if block.kind == "call" else block.id
