"""`POST /v1/chat/completions/batch`: several conversations in one body, answered side by side (vLLM
has it)."""

from __future__ import annotations

from functools import partial

from aiohttp import web

from aioinfer.api.admission import admit
from aioinfer.api.chat import choice_of, names_of_fields, turn_of
from aioinfer.api.context import FRONTEND, read_body
from aioinfer.api.delivery import collect, found_features, new_envelope, submitted
from aioinfer.api.errors import json_response, renamed
from aioinfer.api.protocol import BatchChatRequest
from aioinfer.engine.chat_turn import num_thought_tokens
from aioinfer.errors import RequestError


async def create_chat_batch(request: web.Request) -> web.StreamResponse:
    """Answers several conversations once each, with a choice for each in the reply."""
    frontend = request.app[FRONTEND]
    frontend.require_tokenizer("messages")
    body = await read_body(request, BatchChatRequest)
    chats = body.chats()
    admit(request, body.timeout_s, len(chats))
    envelope = new_envelope(request, "chatcmpl", "chat.completion", include_usage=False)
    with renamed(names_of_fields(chats[0])):
        turns = [await turn_of(frontend, chat) for chat in chats]
        params = turns[0].params
        if any(turn.params != params for turn in turns):
            raise RequestError(
                "the conversations must all begin the answer in the same way, with a thought or "
                "without",
                param="messages",
            )
        async with submitted(
            request,
            [turn.prompt for turn in turns],
            params,
            name=envelope.id,
            priority=body.priority,
            cache_salt=body.cache_salt,
        ) as outputs:
            count = partial(num_thought_tokens, frontend, turns[0])
            counts_thought = turns[0].parses and frontend.message_format.has_thoughts
            reply = await collect(outputs, count if counts_thought else None)
    names = None if body.return_tokens_as_token_ids else frontend.tokenizer
    choices = [
        await choice_of(
            frontend, names, turn, index, delta, chat.echoed(), with_ids=bool(body.return_token_ids)
        )
        | found_features(outputs[index], delta)
        for index, (turn, chat, delta) in enumerate(zip(turns, chats, reply.choices, strict=True))
    ]
    if body.return_token_ids:
        for choice, turn in zip(choices, turns, strict=True):
            choice["prompt_token_ids"] = turn.prompt
    return json_response(
        envelope.fields() | {"choices": choices, "usage": reply.usage, "prompt_logprobs": None}
    )
