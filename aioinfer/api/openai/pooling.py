"""Endpoints of pooling requests: embeddings, pooled states, classes, scores and ranks. They are
admitted, limited, scheduled and logged as completions are. Vectors are lists of numbers, or base64
of little-endian float32.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import msgspec
import numpy as np
import orjson
from aiohttp import web
from msgspec import UNSET
from msgspec.structs import replace

from aioinfer.api.context import encode
from aioinfer.api.errors import json_response
from aioinfer.api.generation import Dialect, Generation
from aioinfer.api.http.logs import RECORD
from aioinfer.api.messages import template_messages
from aioinfer.api.openai import pooling_bodies as bodies
from aioinfer.api.prompts import cut, encode_prompts, max_uncut
from aioinfer.api.protocol import Prompt
from aioinfer.engine.output import Delta, RequestOutput
from aioinfer.engine.pooled_prompts import join_texts, max_kept
from aioinfer.engine.served_model import cosine_similarity
from aioinfer.errors import FieldError, GenerationError, RequestError
from aioinfer.ipc.sections import F32
from aioinfer.sampling_params import ALL_TOKENS, SamplingParams

#: Numbers that are made into JSON on the event loop, in a millisecond; more are in a thread.
_FEW_NUMBERS = 16_384


B = TypeVar("B", bound=bodies.PoolingBody)


class PoolingDialect(Dialect[B]):
    """The words of an endpoint whose reply is made of the pooled states of prompts.

    Attributes:
        param: the field that holds the inputs.
        pooling: how the model pools.
        second_texts: `SamplingParams.second_text` of each prompt, once these are made; empty where
            none is of two texts.
        usage: the tokens of all prompts, once these are made.
    """

    generates = False
    text_field = None
    id_prefix = "embd-"
    param = "input"
    second_texts: Sequence[int] = ()
    usage: bodies.EmbeddingUsage

    def __init__(self, request: web.Request, body: B):
        super().__init__(request, body)
        self.pooling = self.frontend.pooling

    @property
    def field_names(self) -> Mapping[str, str]:
        """See `Dialect.field_names`."""
        return {"prompt": self.param}

    def kind(self) -> str:
        """Returns how the prompts are pooled. Raises `RequestError` if the model cannot do it."""
        return self.pooling.params().pooling or "last"

    async def prompts(self) -> list[list[int]]:
        """Returns the token ids of each prompt. Raises `RequestError`."""
        raise NotImplementedError

    def reply(self, states: list[F32]) -> Any:
        """Returns the reply: the pooled state of each prompt, float32 [hidden_size], or [P,
        hidden_size] of all of its tokens, in words. A list of items is its last field, `data`."""
        raise NotImplementedError

    def vector(
        self,
        state: F32,
        size: int | None,
        normalize: bool | None,
        write: Callable[[F32], bytes] | None = None,
    ) -> Any:
        """Returns an embedding, the first `size` numbers of it, as JSON that `write` makes, by
        default a list. Of several [P, hidden_size] that is a list of lists."""
        return msgspec.Raw((write or numbers_json)(self.pooling.embedding(state, size, normalize)))

    def fields(self) -> dict[str, Any]:
        """Returns the fields that vLLM's replies have in common."""
        fields = {"id": self.id, "created": int(time.time())}
        return fields | {"model": self.model_name, "usage": self.usage}

    async def tokens(self, inputs: Sequence[Prompt], *, is_part: bool = False) -> list[list[int]]:
        """Returns the token ids of each input. With `is_part` they become parts of prompts: they
        have no special tokens, and are not cut. Raises `RequestError`."""
        frontend, body = self.frontend, self.body
        longest, special = max_uncut(body), body.add_special_tokens is not False and not is_part
        found = await encode_prompts(frontend, inputs, self.param, special, max_tokens=longest)
        room = frontend.max_model_len
        return found if is_part else [cut(frontend, body, ids, room) for ids in found]

    async def decode(self) -> Generation:
        """See `Dialect.decode`."""
        kind, prompts = self.kind(), await self.prompts()
        num_tokens = sum(map(len, prompts))
        if kind == ALL_TOKENS:
            self.frontend.check_states(num_tokens)
        self.usage = bodies.EmbeddingUsage(prompt_tokens=num_tokens, total_tokens=num_tokens)
        generation = self.generation(prompts, SamplingParams(temperature=0, pooling=kind))
        return dataclasses.replace(generation, second_texts=self.second_texts)

    async def respond(
        self, outputs: Sequence[RequestOutput], choices: Sequence[Delta]
    ) -> web.StreamResponse:
        """See `Dialect.respond`; a long reply comes in parts."""
        states = [output.pooled for output in outputs if output.pooled is not None]
        if len(states) < len(outputs):
            raise GenerationError("the request was ended before all of it was computed")
        if sum(state.size for state in states) <= _FEW_NUMBERS:
            return json_response(self.reply(states))
        parts = await asyncio.to_thread(lambda: _parts(self.reply(states)))
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.content_length = sum(map(len, parts))
        await response.prepare(self.request)
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
            self.pooling.check_dimensions(body.dimensions, frontend.hidden_size)
            prefix = self.pooling.prompt(body.prompt_name)
        given = body.prompts()
        if body.messages is not None:
            messages, options = await template_messages(body.messages), body.template_options()
            given = [await frontend.encode_chat(messages, max_tokens=max_uncut(body), **options)]
        return await self.tokens([prefix + i if isinstance(i, str) else i for i in given])


ER = TypeVar("ER", bound=bodies.EmbeddingRequest)


class EmbeddingDialect(_InputDialect[ER]):
    """Embeds each input."""

    body_type = bodies.EmbeddingRequest
    reply_type: ClassVar[Any] = bodies.Embeddings

    def reply(self, states: list[F32]) -> Any:
        """See `PoolingDialect.reply`."""
        vectors = enumerate(self.vectors(states, self.body.normalizes))
        items = [bodies.EmbeddingItem(index=index, embedding=vector) for index, vector in vectors]
        return bodies.Embeddings(model=self.model_name, usage=self.usage, data=items)

    def vectors(self, states: list[F32], normalize: bool | None) -> Iterator[Any]:
        """Yields the JSON of each embedding: a list of numbers, or the text of its base64; of
        several [P, hidden_size] a list of lists, or one text."""
        write = to_base64 if self.body.encoding_format == "base64" else numbers_json
        return (self.vector(state, self.body.dimensions, normalize, write) for state in states)


class StatesDialect(EmbeddingDialect[bodies.PoolingRequest]):
    """Returns the pooled hidden state of each input, or the hidden state of each of its tokens.
    They are not normalized unless the request asks for it or names a `task`."""

    body_type = bodies.PoolingRequest
    reply_type = bodies.PoolingReply
    id_prefix = "pool-"

    def kind(self) -> str:
        """See `PoolingDialect.kind`."""
        takes_all = self.body.task != "embed"
        return self.pooling.params(self.body.kind, takes_all=takes_all).pooling or "last"

    def reply(self, states: list[F32]) -> Any:
        """See `PoolingDialect.reply`."""
        vectors = enumerate(self.vectors(states, bool(self.body.normalizes)))
        items = [bodies.PooledItem(index=index, data=vector) for index, vector in vectors]
        return bodies.PoolingReply(**self.fields(), data=items)


class OllamaEmbedDialect(_InputDialect[bodies.OllamaEmbedRequest]):
    """Embeds each input, in the shape of Ollama's `/api/embed`."""

    body_type = bodies.OllamaEmbedRequest
    reply_type = bodies.OllamaEmbeddings

    def reply(self, states: list[F32]) -> Any:
        """See `PoolingDialect.reply`."""
        return bodies.OllamaEmbeddings(
            model=self.model_name,
            embeddings=[self.vector(state, self.body.dimensions, True) for state in states],
            total_duration=round((time.perf_counter() - self.request[RECORD].arrived) * 1e9),
            load_duration=0,
            prompt_eval_count=self.usage.prompt_tokens,
        )


class OllamaEmbeddingDialect(_InputDialect[bodies.OllamaEmbeddingsRequest]):
    """Embeds one input, in the shape of Ollama's older `/api/embeddings`. Its clients normalise by
    themselves, and expect the vector as the model has it."""

    body_type = bodies.OllamaEmbeddingsRequest
    reply_type = bodies.OllamaEmbedding

    def reply(self, states: list[F32]) -> Any:
        """See `PoolingDialect.reply`."""
        vector = self.vector(states[0], self.body.dimensions, False)
        return bodies.OllamaEmbedding(embedding=vector)


class ClassifyDialect(_InputDialect[bodies.ClassifyRequest]):
    """Returns the classes of each input, where the model has a classification head."""

    body_type = bodies.ClassifyRequest
    reply_type = bodies.Classes
    id_prefix = "classify-"

    def kind(self) -> str:
        """See `PoolingDialect.kind`."""
        if self.pooling.head is None:
            raise RequestError(
                "this model has no classification head: /classify needs a checkpoint of an "
                "architecture that ends in ForSequenceClassification",
                param="model",
            )
        return self.pooling.head.pooling

    def reply(self, states: list[F32]) -> Any:
        """See `PoolingDialect.reply`."""
        head = self.pooling.head
        assert head is not None
        items = []
        for index, state in enumerate(states):
            probs = head.probabilities(state)
            label = head.labels[int(probs.argmax())]
            items.append(
                bodies.ClassifiedItem(
                    index=index, label=label, probs=probs.tolist(), num_classes=len(probs)
                )
            )
        return bodies.Classes(**self.fields(), data=items)


SB = TypeVar("SB", bound=bodies.ScoringBody)


class _Scoring(PoolingDialect[SB]):
    """An endpoint that scores pairs of texts: by the classification head of a cross-encoder, else
    by the cosine of the angle between their embeddings. Of the texts only `max_tokens_per_query`
    and `max_tokens_per_doc` tokens count, if they are given and not 0."""

    id_prefix = "score-"
    #: The field of the first side, as `param` is that of the second.
    first_param: str

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
            ids = await self.tokens([prompt + text for text in texts], is_part=is_part)
            sides.append([each[:most] for each in ids] if most else ids)
        first, second = sides
        self._num_first = len(first)
        if not is_cross:
            if not all(first):
                raise FieldError(self.first_param, "is empty")
            return first + second
        first *= len(second) if len(first) == 1 else 1
        frontend = self.frontend
        kept = max_kept(frontend, body.truncate_prompt_tokens, frontend.max_model_len)
        pairs = [join_texts(frontend, *both, kept) for both in zip(first, second, strict=True)]
        self.second_texts = [pair.second_text for pair in pairs]
        return [pair.ids for pair in pairs]

    def scores(self, states: list[F32]) -> list[float]:
        """Returns the score of each pair."""
        if (head := self.pooling.cross_encoder) is not None:
            scores: list[float] = head.probabilities(np.stack(states))[:, 0].tolist()
            return scores
        ones, others = states[: self._num_first], states[self._num_first :]
        ones *= len(others) if len(ones) == 1 else 1
        return [cosine_similarity(*pair) for pair in zip(ones, others, strict=True)]


class ScoreDialect(_Scoring[bodies.ScoreRequest]):
    """Returns how similar the texts of each pair are."""

    body_type = bodies.ScoreRequest
    reply_type = bodies.Scores

    def __init__(self, request: web.Request, body: bodies.ScoreRequest):
        super().__init__(request, body)
        self.first_param, self.param = body.sides()

    def texts(self) -> tuple[list[str], list[str]]:
        """See `_Scoring.texts`."""
        first, second = self.body.sides().values()
        return first, second

    def reply(self, states: list[F32]) -> Any:
        """See `PoolingDialect.reply`."""
        scores = enumerate(self.scores(states))
        data = [bodies.ScoreItem(index=index, score=value) for index, value in scores]
        reply = bodies.Scores(**self.fields(), data=data)
        reply.usage.completion_tokens = 0
        return reply


class RerankDialect(_Scoring[bodies.RerankRequest]):
    """Returns documents by falling relevance to a query, in Jina's shape, under `/v2` in Cohere's,
    and for `texts` in the shape of text-embeddings-inference."""

    body_type = bodies.RerankRequest
    reply_type = bodies.Reranked | list[bodies.RerankedText]
    id_prefix = "rerank-"
    first_param = "query"

    def __init__(self, request: web.Request, body: bodies.RerankRequest):
        super().__init__(request, body)
        self.param = "documents" if body.texts is None else "texts"

    def texts(self) -> tuple[list[str], list[str]]:
        """See `_Scoring.texts`."""
        return [self.body.query], self.body.contents()

    def reply(self, states: list[F32]) -> Any:
        """See `PoolingDialect.reply`."""
        body, texts, scores = self.body, self.body.contents(), self.scores(states)
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
        reply = bodies.Reranked(id=self.id, results=results)
        if is_cohere:
            tokens = {"input_tokens": self.usage.prompt_tokens, "output_tokens": 0}
            reply.meta = {"api_version": {"version": "2"}, "tokens": tokens}
        else:
            reply.model, reply.usage = self.model_name, self.usage
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
