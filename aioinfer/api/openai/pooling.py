"""Endpoints of pooling requests: embeddings, pooled states, classes, scores and ranks. They are
admitted, limited, scheduled and logged as completions are. Vectors are lists of numbers, or base64
of little-endian float32.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import msgspec
import numpy as np
import orjson
from aiohttp import web
from msgspec import UNSET
from msgspec.structs import replace

from aioinfer.api.admission import admit
from aioinfer.api.context import FRONTEND, encode, read_body
from aioinfer.api.delivery import collect, submitted
from aioinfer.api.errors import json_response, renamed
from aioinfer.api.generation import Generation, adapter_of
from aioinfer.api.http.logs import RECORD, request_id
from aioinfer.api.messages import template_messages
from aioinfer.api.openai import pooling_bodies as bodies
from aioinfer.api.prompts import Prompt, cut, encode_prompt, max_uncut
from aioinfer.engine.pooled_prompts import join_texts, max_kept
from aioinfer.engine.served_model import cosine_similarity
from aioinfer.errors import FieldError, GenerationError, RequestError
from aioinfer.ipc.sections import F32
from aioinfer.sampling_params import ALL_TOKENS, SamplingParams

#: Numbers that are made into JSON on the event loop, in a millisecond; more are in a thread.
_FEW_NUMBERS = 16_384


@dataclass(frozen=True, slots=True)
class Pooled:
    """The pooled states of a request's prompts, float32 [hidden_size] each, or [P, hidden_size] of
    all tokens, and the tokens of all prompts."""

    states: list[F32]
    num_tokens: int

    def usage(self) -> bodies.EmbeddingUsage:
        """Returns OpenAI's usage of embeddings."""
        return bodies.EmbeddingUsage(prompt_tokens=self.num_tokens, total_tokens=self.num_tokens)


B = TypeVar("B", bound=bodies.PoolingBody)


class PoolingDialect(Generic[B]):
    """An endpoint's words for one request: the prompts of its body, and the reply that their pooled
    states make. The docstring of a subclass describes the endpoint.

    Attributes:
        body_type, reply_type: the types of its bodies and of its replies.
        id_prefix: of its replies' ids.
        param: the field that holds the inputs.
        request, body, frontend, pooling: what is answered, and the model that answers.
        model: its name.
        second_texts: `SamplingParams.second_text` of each prompt, once these are made; empty where
            none is of two texts.
    """

    body_type: ClassVar[type[bodies.PoolingBody]]
    reply_type: ClassVar[Any]
    id_prefix: ClassVar[str] = "embd"
    param = "input"
    second_texts: Sequence[int] = ()

    def __init__(self, request: web.Request, body: B):
        self.request, self.body = request, body
        self.frontend = request.app[FRONTEND]
        self.pooling = self.frontend.pooling
        self.adapter = adapter_of(self.frontend, body)
        self.model = self.adapter or self.frontend.config.served_model_names[0]

    def kind(self) -> str:
        """Returns how the prompts are pooled. Raises `RequestError` if the model cannot do it."""
        return self.pooling.params().pooling or "last"

    async def prompts(self) -> list[list[int]]:
        """Returns the token ids of each prompt. Raises `RequestError`."""
        raise NotImplementedError

    def reply(self, pooled: Pooled) -> Any:
        """Returns the reply. A list of items is its last field, `data`."""
        raise NotImplementedError

    def fields(self, pooled: Pooled) -> dict[str, Any]:
        """Returns the fields that vLLM's replies have in common."""
        return {
            "id": f"{self.id_prefix}-{request_id(self.request)}",
            "created": int(time.time()),
            "model": self.model,
            "usage": pooled.usage(),
        }

    async def encode(self, inputs: Sequence[Prompt], *, is_part: bool = False) -> list[list[int]]:
        """Returns the token ids of each input. Raises `OverloadedError` before, if the queue is
        full, and `RequestError` naming the field.

        Args:
            is_part: the inputs become parts of prompts: they have no special tokens, and are not
                cut.
        """
        frontend, body = self.frontend, self.body
        admit(self.request, body.timeout_s, len(inputs))
        longest, special = max_uncut(body), body.add_special_tokens is not False and not is_part
        found = []
        with renamed({"prompt": self.param}):
            for each in inputs:
                ids = await encode_prompt(frontend, each, special, max_tokens=longest)
                if not is_part:
                    ids = cut(frontend, body, ids, frontend.max_model_len)
                found.append(ids)
        return found

    async def pool(self) -> Pooled:
        """Returns the pooled states of the prompts."""
        kind, prompts = self.kind(), await self.prompts()
        generation = Generation(
            f"{self.id_prefix}-{request_id(self.request)}",
            prompts,
            SamplingParams(temperature=0, pooling=kind, adapter=self.adapter),
            priority=self.body.priority,
            second_texts=self.second_texts,
        )
        num_tokens = sum(map(len, prompts))
        with renamed({"prompt": self.param}):
            if kind == ALL_TOKENS:
                self.frontend.check_states(num_tokens)
            async with submitted(self.request, generation) as found:
                await collect(found)
                states = [output.pooled for output in found if output.pooled is not None]
        if len(states) < len(prompts):
            raise GenerationError("the request was ended before all of it was computed")
        return Pooled(states, num_tokens)


async def answer_pooled(
    request: web.Request, kind: type[PoolingDialect[Any]]
) -> web.StreamResponse:
    """Answers a request in a dialect; a long reply in parts. Raises what `read_body` and
    `PoolingDialect.pool` do."""
    body = await read_body(request, kind.body_type)
    dialect = kind(request, body)
    pooled = await dialect.pool()
    if sum(state.size for state in pooled.states) <= _FEW_NUMBERS:
        return json_response(dialect.reply(pooled))
    parts = await asyncio.to_thread(lambda: _parts(dialect.reply(pooled)))
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    response.content_length = sum(map(len, parts))
    await response.prepare(request)
    for part in parts:
        await response.write(part)
    return response


def _parts(reply: Any) -> list[bytes]:
    """Returns a reply as JSON, its items one by one: other threads run between two of them."""
    if not getattr(reply, "data", None):
        return [encode(reply)]
    first, *others = reply.data
    head = encode(replace(reply, data=[])).removesuffix(b"]}")
    return [head + encode(first), *(b"," + encode(item) for item in others), b"]}"]


IB = TypeVar("IB", bound=bodies.InputBody)


class _InputDialect(PoolingDialect[IB]):
    """An endpoint whose inputs are texts, token ids or a conversation. Inputs that are embedded are
    behind the prompt that the body names."""

    async def prompts(self) -> list[list[int]]:
        """See `PoolingDialect.prompts`."""
        body, frontend, prefix = self.body, self.frontend, ""
        if isinstance(body, bodies.EmbeddingBody):
            size = self.pooling.embedding_size(frontend.hidden_size)
            if body.dimensions is not None and body.dimensions > size:
                raise FieldError(
                    "dimensions", f"is {body.dimensions}, and this model's embeddings have {size}"
                )
            prefix = self.pooling.prompt(body.prompt_name)
        given = body.inputs()
        if body.messages is not None:
            messages, options = await template_messages(body.messages), body.template_options()
            given = [await frontend.encode_chat(messages, max_tokens=max_uncut(body), **options)]
        return await self.encode([prefix + i if isinstance(i, str) else i for i in given])


ER = TypeVar("ER", bound=bodies.EmbeddingRequest)


class EmbeddingDialect(_InputDialect[ER]):
    """Embeds each input."""

    body_type = bodies.EmbeddingRequest
    reply_type: ClassVar[Any] = bodies.Embeddings

    def reply(self, pooled: Pooled) -> Any:
        """See `PoolingDialect.reply`."""
        vectors = enumerate(self.vectors(pooled, self.body.normalizes))
        items = [bodies.EmbeddingItem(index=index, embedding=vector) for index, vector in vectors]
        return bodies.Embeddings(model=self.model, usage=pooled.usage(), data=items)

    def vectors(self, pooled: Pooled, normalize: bool | None) -> Iterator[Any]:
        """Yields the JSON of each embedding: a list of numbers, or the text of its base64; of
        several [P, hidden_size] a list of lists, or one text."""
        written = to_base64 if self.body.encoding_format == "base64" else numbers_json
        for state in pooled.states:
            found = self.pooling.embedding(state, self.body.dimensions, normalize)
            yield msgspec.Raw(written(np.ascontiguousarray(found)))


class StatesDialect(EmbeddingDialect[bodies.PoolingRequest]):
    """Returns the pooled hidden state of each input, or the hidden state of each of its tokens.
    They are not normalized unless the request asks for it or names a `task`."""

    body_type = bodies.PoolingRequest
    reply_type = bodies.PoolingReply
    id_prefix = "pool"

    def kind(self) -> str:
        """See `PoolingDialect.kind`."""
        takes_all = self.body.task != "embed"
        return self.pooling.params(self.body.kind, takes_all=takes_all).pooling or "last"

    def reply(self, pooled: Pooled) -> Any:
        """See `PoolingDialect.reply`."""
        vectors = enumerate(self.vectors(pooled, bool(self.body.normalizes)))
        items = [bodies.PooledItem(index=index, data=vector) for index, vector in vectors]
        return bodies.PoolingReply(**self.fields(pooled), data=items)


class OllamaEmbedDialect(_InputDialect[bodies.OllamaEmbedRequest]):
    """Embeds each input, in the shape of Ollama's `/api/embed`."""

    body_type = bodies.OllamaEmbedRequest
    reply_type = bodies.OllamaEmbeddings

    def reply(self, pooled: Pooled) -> Any:
        """See `PoolingDialect.reply`."""
        embed, size = self.pooling.embedding, self.body.dimensions
        vectors: list[Any] = [
            msgspec.Raw(numbers_json(embed(state, size, True))) for state in pooled.states
        ]
        return bodies.OllamaEmbeddings(
            model=self.model,
            embeddings=vectors,
            total_duration=round((time.perf_counter() - self.request[RECORD].arrived) * 1e9),
            load_duration=0,
            prompt_eval_count=pooled.num_tokens,
        )


class OllamaEmbeddingDialect(_InputDialect[bodies.OllamaEmbeddingsRequest]):
    """Embeds one input, in the shape of Ollama's older `/api/embeddings`. Its clients normalise by
    themselves, and expect the vector as the model has it."""

    body_type = bodies.OllamaEmbeddingsRequest
    reply_type = bodies.OllamaEmbedding

    def reply(self, pooled: Pooled) -> Any:
        """See `PoolingDialect.reply`."""
        vector = self.pooling.embedding(pooled.states[0], self.body.dimensions, False)
        written: Any = msgspec.Raw(numbers_json(vector))
        return bodies.OllamaEmbedding(embedding=written)


class ClassifyDialect(_InputDialect[bodies.ClassifyRequest]):
    """Returns the classes of each input, where the model has a classification head."""

    body_type = bodies.ClassifyRequest
    reply_type = bodies.Classes
    id_prefix = "classify"

    def kind(self) -> str:
        """See `PoolingDialect.kind`."""
        if self.pooling.head is None:
            raise RequestError(
                "this model has no classification head: /classify needs a checkpoint of an "
                "architecture that ends in ForSequenceClassification",
                param="model",
            )
        return self.pooling.head.pooling

    def reply(self, pooled: Pooled) -> Any:
        """See `PoolingDialect.reply`."""
        head = self.pooling.head
        assert head is not None
        items = []
        for index, state in enumerate(pooled.states):
            probs = head.probabilities(state)
            label = head.labels[int(probs.argmax())]
            items.append(
                bodies.ClassifiedItem(
                    index=index, label=label, probs=probs.tolist(), num_classes=len(probs)
                )
            )
        return bodies.Classes(**self.fields(pooled), data=items)


SB = TypeVar("SB", bound=bodies.ScoringBody)


class _Scoring(PoolingDialect[SB]):
    """An endpoint that scores pairs of texts: by the classification head of a cross-encoder, else
    by the cosine of the angle between their embeddings. Of the texts only `max_tokens_per_query`
    and `max_tokens_per_doc` tokens count, if they are given and not 0."""

    id_prefix = "score"

    def texts(self) -> tuple[list[str], list[str]]:
        """Returns the texts of both sides; the first may be one for all."""
        raise NotImplementedError

    def kind(self) -> str:
        """See `PoolingDialect.kind`."""
        head = self.pooling.cross_encoder
        return super().kind() if head is None else head.pooling

    async def prompts(self) -> list[list[int]]:
        """See `PoolingDialect.prompts`."""
        pooling, body = self.pooling, self.body
        is_cross = pooling.cross_encoder is not None
        before = ("", "") if is_cross else (
            pooling.prompt_of("query"), pooling.prompt_of("document", "passage")
        )  # fmt: skip
        is_part = is_cross and self.frontend.is_encoder
        sides = []
        for prompt, texts, most in zip(
            before, self.texts(), (body.max_tokens_per_query, body.max_tokens_per_doc), strict=True
        ):
            ids = await self.encode([prompt + text for text in texts], is_part=is_part)
            sides.append([each[:most] for each in ids] if most else ids)
        first, second = sides
        self._num_first = len(first)
        if not is_cross:
            return first + second
        first *= len(second) if len(first) == 1 else 1
        frontend = self.frontend
        kept = max_kept(frontend, body.truncate_prompt_tokens, frontend.max_model_len)
        pairs = [join_texts(frontend, *both, kept) for both in zip(first, second, strict=True)]
        self.second_texts = [pair.second_text for pair in pairs]
        return [pair.ids for pair in pairs]

    def scores(self, pooled: Pooled) -> list[float]:
        """Returns the score of each pair."""
        if (head := self.pooling.cross_encoder) is not None:
            scores: list[float] = head.probabilities(np.stack(pooled.states))[:, 0].tolist()
            return scores
        ones, others = pooled.states[: self._num_first], pooled.states[self._num_first :]
        ones *= len(others) if len(ones) == 1 else 1
        return [cosine_similarity(*pair) for pair in zip(ones, others, strict=True)]


class ScoreDialect(_Scoring[bodies.ScoreRequest]):
    """Returns how similar the texts of each pair are."""

    body_type = bodies.ScoreRequest
    reply_type = bodies.Scores
    param = "text_2"

    def texts(self) -> tuple[list[str], list[str]]:
        """See `_Scoring.texts`."""
        return self.body.texts()

    def reply(self, pooled: Pooled) -> Any:
        """See `PoolingDialect.reply`."""
        scores = enumerate(self.scores(pooled))
        data = [bodies.ScoreItem(index=index, score=value) for index, value in scores]
        reply = bodies.Scores(**self.fields(pooled), data=data)
        reply.usage.completion_tokens = 0
        return reply


class RerankDialect(_Scoring[bodies.RerankRequest]):
    """Returns documents by falling relevance to a query, in Jina's shape, under `/v2` in Cohere's,
    and for `texts` in the shape of text-embeddings-inference."""

    body_type = bodies.RerankRequest
    reply_type = bodies.Reranked | list[bodies.RerankedText]

    def __init__(self, request: web.Request, body: bodies.RerankRequest):
        super().__init__(request, body)
        self.param = "documents" if body.texts is None else "texts"

    def texts(self) -> tuple[list[str], list[str]]:
        """See `_Scoring.texts`."""
        return [self.body.query], self.body.contents()

    def reply(self, pooled: Pooled) -> Any:
        """See `PoolingDialect.reply`."""
        body, texts, scores = self.body, self.body.contents(), self.scores(pooled)
        best = sorted(range(len(texts)), key=lambda index: -scores[index])[: body.top_n]
        if body.texts is not None:
            return [
                bodies.RerankedText(
                    index=i, score=scores[i], text=texts[i] if body.return_text else UNSET
                )
                for i in best
            ]
        is_cohere = self.request.path.endswith("/v2/rerank")
        shows = not is_cohere if body.return_documents is None else body.return_documents
        documents = [{"text": texts[i]} if shows else UNSET for i in best]
        results = [
            bodies.RerankedDocument(index=i, relevance_score=scores[i], document=document)
            for i, document in zip(best, documents, strict=True)
        ]
        reply = bodies.Reranked(id=f"rerank-{request_id(self.request)}", results=results)
        if is_cohere:
            tokens = {"input_tokens": pooled.num_tokens, "output_tokens": 0}
            reply.meta = {"api_version": {"version": "2"}, "tokens": tokens}
        else:
            reply.model, reply.usage = self.model, pooled.usage()
        return reply


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
