"""Endpoints of pooling requests: `/v1/embeddings`, `/pooling`, `/classify`, `/score` and `/rerank`.
They are admitted, limited, scheduled and logged as completions are.

Encoding of vectors in replies: as lists of numbers, or as base64 of little-endian float32.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
import orjson
from aiohttp import web
from msgspec import UNSET, Struct, UnsetType

from aioinfer.api.admission import admit
from aioinfer.api.context import FRONTEND, encode, read_body
from aioinfer.api.delivery import collect, submitted
from aioinfer.api.errors import json_response, renamed
from aioinfer.api.generation import Generation
from aioinfer.api.http.request_log import request_id
from aioinfer.api.messages import template_messages
from aioinfer.api.openai.pooling_bodies import (
    ClassifyRequest,
    EmbeddingBody,
    EmbeddingRequest,
    InputBody,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    PoolingBody,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    ScoringBody,
)
from aioinfer.api.prompts import Prompt, cut, encode_prompt, max_uncut
from aioinfer.engine.served_model import cosine_similarity
from aioinfer.errors import FieldError, GenerationError, RequestError
from aioinfer.ipc.sections import F32
from aioinfer.sampling_params import ALL_TOKENS, SamplingParams

if TYPE_CHECKING:
    from aioinfer.engine.frontend import Frontend
    from aioinfer.ipc.sections import F32

#: Numbers that are made into JSON on the event loop, in a millisecond; more are in a thread.
_FEW_NUMBERS = 16_384
#: Bytes of a reply that are joined and sent at once.
_PIECE_BYTES = 256 * 1024


class EmbeddingUsage(Struct, kw_only=True):
    """Tokens of a request without an output."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int | UnsetType = UNSET


class EmbeddingItem(Struct, kw_only=True):
    """The vector of an input: numbers, or their base64; with pooling "all" one for each token."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float | list[float]] | str


class Embeddings(Struct, kw_only=True):
    """The reply of `/v1/embeddings`."""

    object: Literal["list"] = "list"
    model: str
    usage: EmbeddingUsage
    data: list[EmbeddingItem] = []


class PooledReply(Struct, kw_only=True):
    """The fields that vLLM's replies to pooling requests have in common."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    usage: EmbeddingUsage


class PooledItem(Struct, kw_only=True):
    """The pooled state of an input, or the states of its tokens."""

    object: Literal["pooling"] = "pooling"
    index: int
    data: list[float | list[float]] | str


class PoolingReply(PooledReply, kw_only=True):
    """The reply of `/pooling`."""

    data: list[PooledItem] = []


class ClassifiedItem(Struct, kw_only=True):
    """The classes of an input: the likeliest, and the probability of each."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class Classes(PooledReply, kw_only=True):
    """The reply of `/classify`."""

    data: list[ClassifiedItem]


class ScoreItem(Struct, kw_only=True):
    """The score of a pair of texts."""

    index: int
    object: Literal["score"] = "score"
    score: float


class Scores(PooledReply, kw_only=True):
    """The reply of `/score`."""

    data: list[ScoreItem]


class RerankedDocument(Struct, kw_only=True):
    """A document of a request, by its place, with its relevance to the query."""

    index: int
    relevance_score: float
    document: dict[str, str] | UnsetType = UNSET


class Reranked(Struct, kw_only=True):
    """The reply of `/rerank` to `documents`, the most relevant first; `meta` is Cohere's, below
    `/v2`, which has neither `model` nor `usage`."""

    id: str
    results: list[RerankedDocument]
    model: str | UnsetType = UNSET
    usage: EmbeddingUsage | UnsetType = UNSET
    meta: dict[str, Any] | UnsetType = UNSET


class RerankedText(Struct, kw_only=True):
    """An item of the reply of `/rerank` to `texts`, as text-embeddings-inference has it."""

    index: int
    score: float
    text: str | UnsetType = UNSET


class OllamaEmbeddings(Struct, kw_only=True):
    """The reply of `/api/embed`: a vector for each input; durations are nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbedding(Struct, kw_only=True):
    """The reply of `/api/embeddings`."""

    embedding: list[float]


@dataclass(frozen=True, slots=True)
class Pooled:
    """The pooled states of a request's prompts, float32 [hidden_size] each, or [P, hidden_size] of
    all tokens, and the tokens of all prompts."""

    states: list[F32]
    num_tokens: int

    def usage(self) -> EmbeddingUsage:
        """Returns OpenAI's usage of embeddings."""
        return EmbeddingUsage(prompt_tokens=self.num_tokens, total_tokens=self.num_tokens)


async def create_embeddings(request: web.Request) -> web.StreamResponse:
    """Embeds each input."""
    body = await read_body(request, EmbeddingRequest)
    pooling = request.app[FRONTEND].pooling
    pooled = await _pool_inputs(request, body, pooling.params(), "embd")
    make = _encoder(request.app[FRONTEND], body, normalize=body.normalizes)
    head = Embeddings(model=_name(request), usage=pooled.usage())
    return await _send(
        request,
        head,
        pooled.states,
        lambda index, state: EmbeddingItem(index=index, embedding=make(state)),
    )


async def embed_for_ollama(request: web.Request) -> web.StreamResponse:
    """Embeds each input, in the shape of Ollama's `/api/embed`; under `/api/embeddings` one."""
    is_older = request.path.endswith("/embeddings")
    began = time.perf_counter_ns()
    body = await read_body(request, OllamaEmbeddingsRequest if is_older else OllamaEmbedRequest)
    frontend = request.app[FRONTEND]
    pooled = await _pool_inputs(request, body, frontend.pooling.params(), "embd")

    def make() -> bytes:
        embed = frontend.pooling.embedding
        # older clients normalise by themselves, and expect the vector as the model has it
        found = [embed(s, body.dimensions, not is_older) for s in pooled.states]
        written: list[Any] = [msgspec.Raw(numbers_json(vector)) for vector in found]
        if is_older:
            return encode(OllamaEmbedding(embedding=written[0]))
        return encode(
            OllamaEmbeddings(
                model=_name(request),
                embeddings=written,
                total_duration=time.perf_counter_ns() - began,
                load_duration=0,
                prompt_eval_count=pooled.num_tokens,
            )
        )

    numbers = sum(map(len, pooled.states))
    data = make() if numbers <= _FEW_NUMBERS else await asyncio.to_thread(make)
    return web.Response(body=data, content_type="application/json")


async def create_pooling(request: web.Request) -> web.StreamResponse:
    """Returns the pooled hidden state of each input, or the hidden state of each of its tokens.
    They are not normalized unless the request asks for it or names a `task`."""
    body = await read_body(request, PoolingRequest)
    params = request.app[FRONTEND].pooling.params(body.kind, takes_all=body.task != "embed")
    pooled = await _pool_inputs(request, body, params, "pool")
    make = _encoder(request.app[FRONTEND], body, normalize=bool(body.normalizes))
    head = PoolingReply(**_head(request, "pool"), usage=pooled.usage())
    return await _send(
        request,
        head,
        pooled.states,
        lambda index, state: PooledItem(index=index, data=make(state)),
    )


async def classify(request: web.Request) -> web.StreamResponse:
    """Returns the classes of each input, where the model has a classification head."""
    frontend = request.app[FRONTEND]
    body = await read_body(request, ClassifyRequest)
    head = frontend.pooling.head
    if head is None:
        raise RequestError(
            "this model has no classification head: /classify needs a checkpoint of an "
            "architecture that ends in ForSequenceClassification",
            param="model",
        )
    inputs = await _inputs(frontend, body)
    pooled = await pool(request, body.priority, await _encode(request, body, inputs), "last", "cls")
    data = []
    for index, state in enumerate(pooled.states):
        found = head.probabilities(state)
        data.append(
            ClassifiedItem(
                index=index,
                label=head.labels[int(found.argmax())],
                probs=found.tolist(),
                num_classes=len(found),
            )
        )
    return json_response(Classes(**_head(request, "classify"), data=data, usage=pooled.usage()))


async def score(request: web.Request) -> web.StreamResponse:
    """Returns how similar the texts of each pair are."""
    body = await read_body(request, ScoreRequest)
    first, second = body.texts()
    scores, num_tokens = await _similarities(request, body, first, second, "text_2")
    data = [ScoreItem(index=index, score=value) for index, value in enumerate(scores)]
    usage = EmbeddingUsage(prompt_tokens=num_tokens, total_tokens=num_tokens, completion_tokens=0)
    return json_response(Scores(**_head(request, "score"), data=data, usage=usage))


async def rerank(request: web.Request) -> web.StreamResponse:
    """Returns documents by falling relevance to a query, in Jina's shape, under `/v2` in Cohere's,
    and for `texts` in the shape of text-embeddings-inference."""
    body = await read_body(request, RerankRequest)
    texts = body.contents()
    param = "documents" if body.texts is None else "texts"
    scores, num_tokens = await _similarities(request, body, [body.query], texts, param)
    best = sorted(range(len(texts)), key=lambda index: -scores[index])[: body.top_n]
    if body.texts is not None:
        return json_response(
            [
                RerankedText(
                    index=index,
                    score=scores[index],
                    text=texts[index] if body.return_text else UNSET,
                )
                for index in best
            ]
        )
    is_cohere = request.path.endswith("/v2/rerank")
    shows = not is_cohere if body.return_documents is None else body.return_documents
    results = [
        RerankedDocument(
            index=index,
            relevance_score=scores[index],
            document={"text": texts[index]} if shows else UNSET,
        )
        for index in best
    ]
    reply = Reranked(id=f"rerank-{request_id(request)}", results=results)
    if is_cohere:
        tokens = {"input_tokens": num_tokens, "output_tokens": 0}
        reply.meta = {"api_version": {"version": "2"}, "tokens": tokens}
    else:
        reply.model = _name(request)
        reply.usage = EmbeddingUsage(prompt_tokens=num_tokens, total_tokens=num_tokens)
    return json_response(reply)


# -------------------------------------------------------------------- pooling


async def _pool_inputs(
    request: web.Request, body: EmbeddingBody, params: SamplingParams, prefix: str
) -> Pooled:
    frontend = request.app[FRONTEND]
    if body.dimensions is not None and body.dimensions > frontend.hidden_size:
        raise FieldError(
            "dimensions",
            f"is {body.dimensions}, and this model's embeddings have {frontend.hidden_size}",
        )
    prompt = frontend.pooling.prompt(body.prompt_name)
    given = await _inputs(frontend, body)
    inputs = [prompt + each if isinstance(each, str) else each for each in given]
    return await pool(
        request,
        body.priority,
        await _encode(request, body, inputs),
        params.pooling or "last",
        prefix,
    )


async def _inputs(frontend: Frontend, body: InputBody) -> list[Prompt]:
    """Returns the inputs of a body, the token ids of a conversation."""
    if body.messages is None:
        return body.inputs()
    messages, options = await template_messages(body.messages), body.template_options()
    return [await frontend.encode_chat(messages, max_tokens=max_uncut(body), **options)]


async def _encode(
    request: web.Request, body: PoolingBody, inputs: Sequence[Prompt], param: str = "input"
) -> list[list[int]]:
    """Returns the token ids of each input. Raises `OverloadedError` before, if the queue is
    full, and `RequestError` naming `param`."""
    frontend = request.app[FRONTEND]
    admit(request, body.timeout_s, len(inputs))
    longest, special = max_uncut(body), body.add_special_tokens is not False
    found = []
    with renamed({"prompt": param}):
        for each in inputs:
            ids = await encode_prompt(frontend, each, special, max_tokens=longest)
            found.append(cut(frontend, body, ids, frontend.max_model_len))
    return found


async def pool(
    request: web.Request,
    priority: int | None,
    prompts: Sequence[list[int]],
    kind: str,
    prefix: str,
    param: str = "input",
) -> Pooled:
    """Returns the pooled states of prompts (token ids)."""
    params = SamplingParams(temperature=0, pooling=kind)
    name = f"{prefix}-{request_id(request)}"
    with renamed({"prompt": param}):
        if kind == ALL_TOKENS:
            request.app[FRONTEND].check_states(sum(map(len, prompts)))
        generation = Generation(name, prompts, params, priority=priority)
        async with submitted(request, generation) as found:
            await collect(found)
            states = [output.pooled for output in found]
    whole = [state for state in states if state is not None]
    if len(whole) < len(states):
        raise GenerationError("the request was ended before all of it was computed")
    return Pooled(whole, sum(map(len, prompts)))


async def _similarities(
    request: web.Request,
    body: ScoringBody,
    first: list[str],
    second: list[str],
    param: str,
) -> tuple[list[float], int]:
    """Returns the score of each pair of texts, of which `first` may be one for all, and the tokens
    that it took: by the classification head of a cross-encoder, else the cosine of the angle
    between their embeddings. Of the texts only `max_tokens_per_query` and `max_tokens_per_doc`
    tokens count, if they are given and not 0."""
    pooling = request.app[FRONTEND].pooling
    head = pooling.head
    is_cross_encoder = head is not None and len(head.labels) == 1
    query, document = ("", "") if is_cross_encoder else (
        pooling.prompt_of("query"), pooling.prompt_of("document", "passage")
    )  # fmt: skip
    beginnings = await _encode(request, body, [query + text for text in first], param)
    endings = await _encode(request, body, [document + text for text in second], param)
    if body.max_tokens_per_query:
        beginnings = [ids[: body.max_tokens_per_query] for ids in beginnings]
    if body.max_tokens_per_doc:
        endings = [ids[: body.max_tokens_per_doc] for ids in endings]
    if head is not None and is_cross_encoder:
        beginnings *= len(endings) if len(beginnings) == 1 else 1
        pairs = [one + other for one, other in zip(beginnings, endings, strict=True)]
        pooled = await pool(request, body.priority, pairs, "last", "score", param)
        return [float(head.probabilities(s)[0]) for s in pooled.states], pooled.num_tokens
    kind = pooling.params().pooling or "last"
    pooled = await pool(request, body.priority, beginnings + endings, kind, "score", param)
    ones, others = pooled.states[: len(first)], pooled.states[len(first) :]
    ones *= len(others) if len(ones) == 1 else 1
    return [cosine_similarity(*pair) for pair in zip(ones, others, strict=True)], pooled.num_tokens


# -------------------------------------------------------------------- replies


def _name(request: web.Request) -> str:
    return request.app[FRONTEND].config.served_model_names[0]


def _head(request: web.Request, prefix: str) -> dict[str, Any]:
    """Returns the fields that vLLM's replies of this kind have in common."""
    return {
        "id": f"{prefix}-{request_id(request)}",
        "created": int(time.time()),
        "model": _name(request),
    }


def _encoder(
    frontend: Frontend, body: EmbeddingRequest, *, normalize: bool | None
) -> Callable[[F32], Any]:
    """Returns a function that makes the JSON of an embedding: a list of numbers, or the text of its
    base64; of several [P, hidden_size] a list of lists, or one text."""
    pooling, dimensions = frontend.pooling, body.dimensions

    def make(state: F32) -> msgspec.Raw:
        found = np.ascontiguousarray(pooling.embedding(state, dimensions, normalize))
        if body.encoding_format == "base64":
            return msgspec.Raw(to_base64(found))
        return msgspec.Raw(numbers_json(found))

    return make


async def _send(
    request: web.Request,
    reply: Embeddings | PoolingReply,
    states: Sequence[F32],
    item: Callable[[int, F32], EmbeddingItem | PooledItem],
) -> web.StreamResponse:
    """Sends a reply with an item for each state, which `item` makes of its number and it; a long
    reply in pieces. `data`, which is empty yet, is the last field."""

    def make() -> list[bytes]:
        parts = [encode(reply).removesuffix(b"]}")]
        for index, state in enumerate(states):
            parts += [b"," if index else b"", encode(item(index, state))]
        return _merged([*parts, b"]}"])

    numbers = sum(state.size for state in states)
    parts = make() if numbers <= _FEW_NUMBERS else await asyncio.to_thread(make)
    if len(parts) == 1:
        return web.Response(body=parts[0], content_type="application/json")
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    response.content_length = sum(map(len, parts))
    await response.prepare(request)
    for part in parts:
        await response.write(part)
    return response


def _merged(parts: Sequence[bytes]) -> list[bytes]:
    """Joins bytes to pieces of about `_PIECE_BYTES`."""
    merged: list[bytes] = []
    waiting: list[bytes] = []
    length = 0
    for part in parts:
        waiting.append(part)
        length += len(part)
        if length >= _PIECE_BYTES:
            merged.append(b"".join(waiting))
            waiting, length = [], 0
    return [*merged, b"".join(waiting)] if waiting else merged


#: Bytes that are encoded at once, a multiple of three: 0.1 ms.
_BASE64_BYTES = 3 * 2**16


def to_base64(vector: F32) -> bytes:
    """Returns the numbers of a vector, float32 [size], or of several one behind the other, as a
    JSON text of base64."""
    data = memoryview(vector.astype("<f4").tobytes())
    starts = range(0, len(data), _BASE64_BYTES)
    # other threads run between two pieces
    pieces = [base64.b64encode(data[start : start + _BASE64_BYTES]) for start in starts]
    return b"".join([b'"', *pieces, b'"'])


def numbers_json(vectors: F32) -> bytes:
    """Returns a vector, float32 [size], or several of them [P, size], as JSON."""
    if vectors.ndim == 1:
        return orjson.dumps(vectors, option=orjson.OPT_SERIALIZE_NUMPY)
    # other threads run between two of them
    rows = [orjson.dumps(each, option=orjson.OPT_SERIALIZE_NUMPY) for each in vectors]
    return b"[" + b",".join(rows) + b"]"
