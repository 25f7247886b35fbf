"""The JSON of a response of `/v1/responses` while it is generated, and the events of its stream.
`responses` answers with it, and `response_runs` in the background."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import orjson

from aioinfer.api.blocks import Block, BlockKind
from aioinfer.api.errors import describe
from aioinfer.api.event_stream import StreamState
from aioinfer.api.responses_body import ResponseRequest
from aioinfer.api.turn_stream import BlockEvents, named_event
from aioinfer.engine.chat_turn import Turn, new_call_id, num_thought_tokens
from aioinfer.errors import RequestError

if TYPE_CHECKING:
    from aioinfer.engine.frontend import Frontend
    from aioinfer.engine.output import RequestOutput
    from aioinfer.text.message_parser import MessageParser
    from aioinfer.text.tokenizer import Tokenizer


class Reply:
    """A response while it is generated.

    Attributes:
        id: of the response.
        output: what the engine generates for it.
    """

    output: RequestOutput

    def __init__(self, frontend: Frontend, body: ResponseRequest, turn: Turn, state: StreamState):
        """`state` is the stream's state, if the reply is a stream: all ids are made of its key."""
        self.id = f"resp_{state.key}"
        self._ids = random.Random(state.key)
        self._frontend, self._turn = frontend, turn
        params, conversation = turn.params, body.conversation_id
        format = body.text.format if body.text is not None else None
        tools = [{"strict": None} | _plain(tool) for tool in body.tools or ()]
        self._fields: dict[str, Any] = {
            "id": self.id,
            "object": "response",
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
        """Returns the id of a block; for a tool call, the id that its result names."""
        if kind == "call":
            return new_call_id(self._frontend, random_bytes=self._ids.randbytes)
        return f"{'msg' if kind == 'text' else 'rs'}_{self._ids.randbytes(16).hex()}"

    def body(
        self,
        blocks: Sequence[Block],
        reason: str | None = None,
        num_tokens: int = 0,
        error: dict[str, Any] | None = None,
        *,
        unfinished: str = "in_progress",
    ) -> dict[str, Any]:
        """Returns the response; without a reason for its end or an error its status is
        `unfinished`."""
        status = unfinished if reason is None else "completed"
        incomplete = None
        if reason == "length":
            status, incomplete = "incomplete", {"reason": "max_output_tokens"}
        if error is not None:
            status = "failed"
        last = status if status in ("completed", "in_progress") else "incomplete"
        items = [_item(block, last if block is blocks[-1] else "completed") for block in blocks]
        ended = {} if reason is None else {"usage": self._usage(num_tokens)}
        return {
            **self._fields,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": error,
            "incomplete_details": incomplete,
            "output": items,
            "usage": None,
            **ended,
        }

    def _usage(self, num_tokens: int) -> dict[str, Any]:
        prompt = len(self.output.prompt_token_ids)
        (tokens,) = self.output.generated()
        thoughts = num_thought_tokens(self._frontend, self._turn, tokens)
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": self.output.num_cached_tokens},
            "output_tokens": num_tokens,
            "output_tokens_details": {"reasoning_tokens": min(thoughts, num_tokens)},
            "total_tokens": prompt + num_tokens,
        }


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


class ResponseEvents(BlockEvents):
    """The events of a response."""

    def __init__(
        self,
        reply: Reply,
        parser: MessageParser,
        keep: Callable[[dict[str, Any]], None],
        tokenizer: Tokenizer | None,
    ):
        """`keep` stores the response when it has ended; `tokenizer` gives the texts of tokens."""
        super().__init__(parser, reply.new_id, tokenizer)
        self._reply = reply
        self._keep = keep
        self._number = 0
        self._num_logprobs = 0  # of the block's, that have been sent

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return named_event({"type": f"response.{kind}", "sequence_number": number, **fields})

    def opening(self) -> bytes:
        body = self._reply.body(())
        return self._event("created", response=body) + self._event("in_progress", response=body)

    def change(self, kind: str, block: Block, text: str) -> bytes:
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

    def closing(self, reason: str, stop_reason: int | str | None) -> bytes:
        body = self._reply.body(self.blocks.all, reason, self.num_tokens)
        self._keep(body)
        return self._event(body["status"], response=body)

    def failed(self, error: Exception) -> dict[str, Any]:
        """Returns the response that an error has ended."""
        described = describe(error)[1]["error"]
        cause = {"code": described["code"] or "server_error", "message": described["message"]}
        return self._reply.body(self.blocks.all, error=cause)

    def failure(self, error: Exception) -> bytes:
        return self._event("failed", response=self.failed(error))
