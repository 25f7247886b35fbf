"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from aiohttp import web

from aioinfer.api.admission import admit
from aioinfer.api.context import FRONTEND, read_body
from aioinfer.api.delivery import (
    ChoiceEvents,
    CollectedOutput,
    collect,
    found_features,
    new_envelope,
    stream,
    submitted,
    usage,
)
from aioinfer.api.errors import json_response, renamed
from aioinfer.api.logprobs import chat_logprobs, formatted
from aioinfer.api.message_events import MessageEvents, finish_reason
from aioinfer.api.object_store import checked_metadata
from aioinfer.api.prompt_logprobs import prompt_logprobs
from aioinfer.api.prompts import chat_prompt, with_token_ids
from aioinfer.api.protocol import ChatRequest
from aioinfer.api.sse import ChunkTemplate, Envelope, role_event
from aioinfer.api.stored_chats import RecordedChoice, keep_chat
from aioinfer.engine.chat_turn import (
    Turn,
    make_parser,
    make_turn,
    new_call_id,
    num_thought_tokens,
    parse_message,
)

if TYPE_CHECKING:
    from aioinfer.engine.frontend import Frontend
    from aioinfer.engine.output import Delta, RequestOutput
    from aioinfer.features.logprobs.planning import TokenLogprob
    from aioinfer.text.tokenizer import Tokenizer


async def create_chat_completion(request: web.Request) -> web.StreamResponse:
    """Answers a conversation n times.

    Without `max_tokens`, in the request or as a default, an answer may be as long as fits.
    """
    frontend = request.app[FRONTEND]
    frontend.require_tokenizer("messages")
    body = await read_body(request, ChatRequest)
    admit(request, body.timeout_s)
    with renamed(_names_of_fields(body)):
        return await _answer(request, frontend, body)


async def _answer(
    request: web.Request, frontend: Frontend, body: ChatRequest
) -> web.StreamResponse:
    if body.store:
        checked_metadata(body.metadata)
    turn = await _turn_of(frontend, body)
    envelope = new_envelope(
        request,
        "chatcmpl",
        "chat.completion.chunk" if body.stream else "chat.completion",
        include_usage=body.include_usage,
        continuous_usage=body.continuous_usage,
    )
    count_thought = None
    if turn.parses and frontend.message_format.has_thoughts:
        count_thought = partial(num_thought_tokens, frontend, turn)
    shown_ids = turn.prompt if body.return_token_ids else None
    names = None if body.return_tokens_as_token_ids else frontend.tokenizer
    async with submitted(
        request,
        [turn.prompt],
        turn.params,
        name=envelope.id,
        priority=body.priority,
        cache_salt=body.cache_salt,
    ) as outputs:
        if body.stream:
            choices = _stream_choices(frontend, names, envelope, turn, shown_ids, body.echoed())
            recorded = [RecordedChoice(*each) for each in enumerate(choices)] if body.store else []

            async def keep() -> None:
                deltas = [choice.delta.join() for choice in recorded]
                count = sum(choice.num_tokens for choice in recorded)
                reply = CollectedOutput(deltas, usage(outputs, count, count_thought))
                whole = await _whole(frontend, body, envelope, turn, reply, outputs[0])
                keep_chat(request, body, whole)

            return await stream(
                request,
                envelope,
                outputs,
                [recorded or choices],
                count_thought,
                with_timings=bool(body.timings_per_token),
                before_end=keep if recorded else None,
            )
        reply = await collect(outputs, count_thought)
    whole = await _whole(frontend, body, envelope, turn, reply, outputs[0])
    if body.store:
        keep_chat(request, body, whole)
    return json_response(whole)


async def _whole(
    frontend: Frontend,
    body: ChatRequest,
    envelope: Envelope,
    turn: Turn,
    reply: CollectedOutput,
    output: RequestOutput,
) -> dict[str, Any]:
    """Returns a reply in one piece."""
    names = None if body.return_tokens_as_token_ids else frontend.tokenizer
    scores, num_top, of_prompt = output.prompt_scores, body.prompt_logprobs, None
    if num_top is not None and scores is not None:
        of_prompt = await prompt_logprobs(names, scores, num_top)
    with_ids = bool(body.return_token_ids)
    choices = [
        await _choice_of(frontend, names, turn, index, delta, body.echoed(), with_ids=with_ids)
        | found_features(output, delta)
        for index, delta in enumerate(reply.choices)
    ]
    whole = envelope.fields() | {"object": "chat.completion", "choices": choices}
    whole |= {"usage": reply.usage, "prompt_logprobs": of_prompt}
    return whole | ({"prompt_token_ids": turn.prompt} if with_ids else {})


async def _turn_of(frontend: Frontend, body: ChatRequest) -> Turn:
    """Encodes the conversation of a body. Raises `RequestError`."""
    fields, use = await with_token_ids(frontend, body.sampling_fields()), body.tool_use()
    prompt = await chat_prompt(frontend, body, use)
    shows_thoughts = body.include_reasoning is not False
    return await make_turn(
        frontend,
        prompt,
        fields,
        use,
        shows_thoughts=shows_thoughts,
        thought_budget=body.thought_budget,
    )


def _names_of_fields(body: ChatRequest) -> dict[str, str]:
    """Returns the client's names for parameters that the engine may reject."""
    length = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    return {"prompt": "messages", "max_tokens": length, "logprobs": "top_logprobs"}


def _stream_choices(
    frontend: Frontend,
    tokenizer: Tokenizer | None,
    envelope: Envelope,
    turn: Turn,
    prompt_token_ids: list[int] | None,
    echo: str,
) -> list[ChoiceEvents]:
    """Returns the events of n choices, which begin with `echo`; they hold token ids where
    `prompt_token_ids` are given. Without a tokenizer, log-probabilities name ids."""

    def format_logprobs(tokens: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
        return chat_logprobs(tokenizer, tokens)

    def events(index: int) -> ChoiceEvents:
        opening = role_event(envelope, index, prompt_token_ids)
        with_ids = prompt_token_ids is not None
        template = ChunkTemplate.for_chat(envelope, index)
        if echo:
            opening += template.chunk(echo)
        if not turn.parses:
            return ChoiceEvents(template, opening, format_logprobs, returns_token_ids=with_ids)
        return MessageEvents(
            envelope,
            index,
            make_parser(frontend, turn),
            partial(new_call_id, frontend),
            format_logprobs,
            opening=opening,
            returns_token_ids=with_ids,
        )

    return [events(index) for index in range(turn.params.n)]


async def _choice_of(
    frontend: Frontend,
    tokenizer: Tokenizer | None,
    turn: Turn,
    index: int,
    delta: Delta,
    echo: str,
    *,
    with_ids: bool,
) -> dict[str, Any]:
    """Returns a choice of a reply: the message, whose content begins with `echo`, and the ids and
    log-probabilities of its tokens."""
    reason = delta.finish_reason
    message: dict[str, Any] = {"role": "assistant", "content": echo + delta.text, "refusal": None}
    if turn.parses:
        parsed = await parse_message(frontend, turn, delta.text)
        content = echo + parsed.content
        message["content"] = content or (None if parsed.calls or parsed.reasoning else "")
        if parsed.reasoning:
            message["reasoning_content"] = message["reasoning"] = parsed.reasoning
        if parsed.calls:
            message["tool_calls"] = [call.to_dict() for call in parsed.calls]
            reason = finish_reason(reason or "stop", len(parsed.calls))
    tokens = delta.logprobs or ()
    logprobs = await formatted(tokens, partial(chat_logprobs, tokenizer, tokens))
    choice = {
        "index": index,
        "message": message,
        "logprobs": logprobs if tokens else None,
        "finish_reason": reason,
        "stop_reason": delta.stop_reason,
    }
    return choice | {"token_ids": delta.token_ids} if with_ids else choice
