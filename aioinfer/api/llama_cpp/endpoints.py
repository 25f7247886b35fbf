"""The endpoints of llama.cpp's server that its clients use: `/completion`, `/infill`, `/embedding`,
`/apply-template`, `/props` and `/slots`. `tokenization` has `/tokenize` and `/detokenize`.

Errors come in llama.cpp's shape from `errors`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from aiohttp import web
from msgspec import Struct

from aioinfer import __version__
from aioinfer.api.admission import admit
from aioinfer.api.context import FRONTEND, encode, read_body, template_messages
from aioinfer.api.delivery import collect, deliver, submitted
from aioinfer.api.errors import json_response, local_path, renamed
from aioinfer.api.generation import Generation
from aioinfer.api.http.request_log import request_id
from aioinfer.api.llama_cpp.body import (
    InfillRequest,
    LlamaCompletion,
    LlamaEmbedding,
    Sampling,
)
from aioinfer.api.llama_cpp.replies import LlamaDialect
from aioinfer.api.openai.pooling import numbers_json
from aioinfer.api.prompts import encode_prompt
from aioinfer.api.protocol import ChatRequest, template_options
from aioinfer.engine.chat_turn import conversation_input
from aioinfer.errors import GenerationError, RequestError
from aioinfer.sampling_params import ALL_TOKENS, MAX_LOGIT_BIAS_VALUE, SamplingParams

if TYPE_CHECKING:
    from aioinfer.engine.frontend import Frontend

#: llama.cpp's names for a project and a file that have no name.
_PROJECT, _FILE = "project", "file"


class LlamaVectors(Struct, kw_only=True):
    """The vectors of an input of `/embedding`."""

    index: int
    embedding: list[list[float]]


class TemplateReply(Struct, kw_only=True):
    """The prompt that the chat template makes of a conversation."""

    prompt: str


class LlamaSlot(Struct, kw_only=True):
    """A place for a request that runs."""

    id: int
    n_ctx: int
    speculative: bool = False
    is_processing: bool


async def complete(request: web.Request) -> web.StreamResponse:
    """Completes each prompt."""
    frontend = request.app[FRONTEND]
    frontend.require_tokenizer("prompt")
    body = await read_body(request, LlamaCompletion)
    if local_path(request) == "/completions" and body.max_tokens is not None:
        raise RequestError(
            "max_tokens is n_predict at this path, which is llama.cpp's; OpenAI's completions are "
            "at /v1/completions",
            param="max_tokens",
            code="unsupported_parameter",
        )
    given = body.prompts()
    admit(request, body.timeout_s, len(given))
    prompts = [await encode_prompt(frontend, prompt) for prompt in given]
    params = await _sampling_params(frontend, body)
    return await _answer(request, body, prompts, params, is_single=body.is_single)


async def infill(request: web.Request) -> web.StreamResponse:
    """Generates the text between two texts, where the model has fill-in-the-middle tokens."""
    frontend = request.app[FRONTEND]
    frontend.require_tokenizer("input_prefix")
    body = await read_body(request, InfillRequest)
    admit(request, body.timeout_s)
    prompt, ends = await _infill_prompt(frontend, body)
    params = await _sampling_params(frontend, body, () if body.ignore_eos else ends)
    return await _answer(request, body, [prompt], params, is_single=(body.n_cmpl or 1) == 1)


async def embed(request: web.Request) -> web.StreamResponse:
    """Embeds each input: a list with a list of one vector for each, or of one for each token where
    the server is configured so (`pooling.type`)."""
    frontend = request.app[FRONTEND]
    body = await read_body(request, LlamaEmbedding)
    given = body.prompts()
    admit(request, body.timeout_s, len(given))
    prompts = [await encode_prompt(frontend, prompt) for prompt in given]
    params, name = frontend.pooling.params(takes_all=True), f"embd-{request_id(request)}"
    if params.pooling == ALL_TOKENS:
        with renamed({"prompt": "content" if body.input is None else "input"}):
            frontend.check_states(sum(map(len, prompts)))
    async with submitted(request, Generation(name, prompts, params)) as outputs:
        await collect(outputs)
        states = [output.pooled for output in outputs if output.pooled is not None]
    if len(states) < len(prompts):
        raise GenerationError("the request was ended before all of it was computed")

    def make() -> bytes:
        norm = None if body.embd_normalize is None else body.embd_normalize == 2
        if params.pooling == ALL_TOKENS:  # there they are as the model has them
            norm = bool(norm)
        items = []
        for index, state in enumerate(states):
            vectors = numbers_json(frontend.pooling.embedding(np.atleast_2d(state), None, norm))
            written: Any = msgspec.Raw(vectors)
            items.append(LlamaVectors(index=index, embedding=written))
        return encode(items)

    data = await asyncio.to_thread(make)
    return web.Response(body=data, content_type="application/json")


async def apply_template(request: web.Request) -> web.Response:
    """Returns the prompt that the chat template makes of a conversation, as text."""
    frontend = request.app[FRONTEND]
    tokenizer = frontend.require_tokenizer("messages")
    body = await read_body(request, ChatRequest)
    messages, options = await template_messages(body), template_options(body)
    shown, tools = await conversation_input(
        frontend, messages, body.tool_use(), options.pop("tools")
    )
    chat = await asyncio.to_thread(tokenizer.render_chat, shown, tools=tools, **options)
    data = await asyncio.to_thread(encode, TemplateReply(prompt=chat.text))
    return web.Response(body=data, content_type="application/json")


async def props(request: web.Request) -> web.Response:
    """Describes the server and the model, as far as clients look at it."""
    frontend = request.app[FRONTEND]
    tokenizer = frontend.tokenizer
    special = {} if tokenizer is None else tokenizer.describe()["special_tokens"]
    params = frontend.defaults.sampling_params()
    settings = LlamaCompletion(prompt="").settings(params)
    name = frontend.config.served_model_names[0]
    reply = {
        "default_generation_settings": {"n_ctx": frontend.max_model_len, "params": settings},
        "total_slots": len(_slots(frontend)),
        "model_alias": name,
        "model_path": frontend.config.model.path,
        "modalities": {"vision": False, "audio": False},
        "chat_template": "" if tokenizer is None else tokenizer.chat_template_text,
        "bos_token": special.get("bos_token", ""),
        "eos_token": special.get("eos_token", ""),
        "build_info": f"aioinfer {__version__}",
        "is_sleeping": False,
    }
    return json_response(reply)


async def slots(request: web.Request) -> web.Response:
    """Lists the slots of all engines, and which of them serve a request now."""
    frontend = request.app[FRONTEND]
    listed = [
        LlamaSlot(id=number, n_ctx=frontend.max_model_len, is_processing=is_busy)
        for number, is_busy in enumerate(_slots(frontend))
    ]
    return json_response(listed)


def _slots(frontend: Frontend) -> list[bool]:
    """Returns of each slot whether a request runs in it."""
    found: list[bool] = []
    for engine in frontend.engines:
        busy = {running.slot for running in engine.scheduler.running}
        found += [slot in busy for slot in range(engine.scheduler.limits.max_num_seqs)]
    return found


async def _sampling_params(
    frontend: Frontend, body: Sampling, ends: Sequence[int] = ()
) -> SamplingParams:
    """Returns the sampling parameters of a body; `ends` are further end tokens. With `ignore_eos`
    the model's end tokens never come, as with llama.cpp; elsewhere they are passed over."""
    fields = body.sampling_fields()
    biases = await _token_biases(frontend, body)
    if body.ignore_eos:
        biases |= dict.fromkeys(frontend.defaults.eos_token_ids, -MAX_LOGIT_BIAS_VALUE)
    if biases:
        fields["logit_bias"] = biases
    if ends:
        fields["stop_token_ids"] = tuple(ends)
    return frontend.defaults.sampling_params(**fields)


async def _token_biases(frontend: Frontend, body: Sampling) -> dict[int, float]:
    """Returns `logit_bias` by token: the bias of a text goes to each of its tokens."""
    found: dict[int, float] = {}
    for token, bias in body.biases():
        if isinstance(token, int):
            found[token] = bias
            continue
        found |= dict.fromkeys(await frontend.encode(token, False), bias)
    return found


async def _infill_prompt(
    frontend: Frontend, body: InfillRequest
) -> tuple[list[int], tuple[int, ...]]:
    """Returns the fill-in-the-middle prompt of a body, and the tokens that end the generated text.

    Raises `RequestError` for a model without tokens for it.
    """
    marks = frontend.require_tokenizer("input_prefix").fill_in_middle
    if marks is None:
        raise RequestError(
            "/infill needs a model that fills in the middle: this one's tokenizer has no tokens "
            "for it, such as <|fim_prefix|>",
            code="unsupported_parameter",
        )

    async def encode(text: str) -> list[int]:
        return await frontend.encode(text, False)

    extra: list[int] = []
    if body.input_extra and marks.repository is not None:
        extra += [marks.repository, *await encode(f"{_PROJECT}\n")]
    for number, file in enumerate(body.input_extra or ()):
        name = file.filename or f"{_FILE}{number}"
        if marks.file is None:
            extra += await encode(f"\n\n--- {name} ---\n\n")
        else:
            extra += [marks.file, *await encode(f"{name}\n")]
        extra += await encode(file.text)
    if body.input_extra and marks.file is not None:
        extra += [marks.file, *await encode(f"{_FILE}\n")]
    before = await encode(body.input_prefix) + await encode(body.prompt)
    ids = marks.arrange(before, await encode(body.input_suffix))
    start = len(marks.begin)
    return [*ids[:start], *extra, *ids[start:]], marks.ends


async def _answer(
    request: web.Request,
    body: Sampling,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    *,
    is_single: bool,
) -> web.StreamResponse:
    frontend, name = request.app[FRONTEND], f"cmpl-{request_id(request)}"
    decode = frontend.require_tokenizer("prompt").decode
    texts = await asyncio.to_thread(lambda: [decode(prompt, False) for prompt in prompts])
    generation = Generation(name, prompts, params, streams=bool(body.stream))
    dialect = LlamaDialect(frontend, body, texts, params.n, is_single=is_single)
    return await deliver(request, generation, dialect)
