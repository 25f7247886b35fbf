"""Endpoints of pooling requests: embeddings, pooled states and classes. They are admitted, limited,
scheduled and logged as completions are. Vectors are lists of numbers, or base64 of little-endian
float32. The names of fields are OpenAI's, and vLLM's for what OpenAI does not have. `scoring` has
scores and ranks, `ollama` and `llama_cpp` the embeddings of their APIs.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
import orjson
from aiohttp import web
from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import replace

from aioinfer.api import protocol
from aioinfer.api.context import encode
from aioinfer.api.errors import json_response
from aioinfer.api.generation import Dialect, Generation
from aioinfer.api.messages import Message, template_messages
from aioinfer.api.prompts import Prompt, Prompts, check_truncation, cut, encode_prompts, max_uncut
from aioinfer.api.protocol import template_options
from aioinfer.engine.output import Delta, RequestOutput
from aioinfer.errors import FieldError, GenerationError
from aioinfer.ipc.sections import F32
from aioinfer.sampling_params import ALL_TOKENS, SamplingParams

#: Numbers that are made into JSON on the event loop, in a millisecond; more are in a thread.
_FEW_NUMBERS = 16_384


class PoolingBody(protocol.PromptsBody, kw_only=True):
    """Base class of the bodies of pooling requests. `truncate_prompt_tokens` keeps the end of a
    text, as in vLLM, unless `truncation_side` is "right"."""

    add_special_tokens: bool | None = None
    truncate_prompt_tokens: protocol.Int32 | None = None
    truncation_side: Literal["left", "right"] | None = None
    user: protocol.Ignored = None

    def check(self) -> None:
        super().check()
        check_truncation(self.truncate_prompt_tokens)


class InputBody(PoolingBody, kw_only=True):
    """A body with an `input`: one or many texts, or one or many lists of token ids, or what
    `prompts` has beside these. Or with `messages`, a conversation, whose text under the chat
    template is the input (vLLM's form)."""

    input: Prompts | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self) -> None:
        super().check()
        self.check_one_of("input", "messages")
        if self.messages is not None:
            if self.add_special_tokens:
                raise FieldError(
                    "add_special_tokens", "goes with input: the chat template has its own"
                )
            protocol.check_messages(self.messages)

    @property
    def prompt_field(self) -> str:
        return "" if self.input is None else "input"


class EmbeddingBody(InputBody, kw_only=True):
    """A body whose inputs are embedded."""

    dimensions: protocol.Count | None = None
    prompt_name: str | None = None

    def check(self) -> None:
        super().check()
        if self.messages is not None and self.prompt_name is not None:
            raise FieldError(
                "prompt_name",
                "goes with input: messages are embedded as the chat template writes them",
            )


class EmbeddingRequest(EmbeddingBody, kw_only=True):
    """`POST /v1/embeddings`."""

    token_field: ClassVar[str] = "input"

    encoding_format: Literal["float", "base64"] | None = None
    normalize: bool | None = None
    use_activation: bool | None = None

    @property
    def normalizes(self) -> bool | None:
        """Whether vectors are to have length 1; None leaves it to the endpoint. `use_activation` is
        vLLM's name."""
        return self.use_activation if self.normalize is None else self.normalize


class PoolingRequest(EmbeddingRequest, kw_only=True):
    """`POST /pooling`."""

    pooling_type: Literal["last", "mean", "cls", "all"] | None = None
    task: Literal["embed", "token_embed"] | None = None

    def check(self) -> None:
        super().check()
        if self.task == "token_embed" and self.pooling_type not in (None, "all"):
            raise FieldError("pooling_type", "must be 'all' for token_embed: a vector a token")


class ClassifyRequest(InputBody, kw_only=True):
    """`POST /classify`."""

    token_field: ClassVar[str] = "input"


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


B = TypeVar("B", bound=PoolingBody)


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
    usage: EmbeddingUsage

    def __init__(self, request: web.Request, body: B):
        super().__init__(request, body)
        self.pooling = self.frontend.pooling
        self.param = body.prompt_field or self.param

    @property
    def field_names(self) -> Mapping[str, str]:
        """See `Dialect.field_names`."""
        return {"prompt": self.param}

    def kind(self) -> str:
        """Returns how the prompts are pooled. Raises `RequestError` if the model cannot do it."""
        return self.pooling.params().pooling or "last"

    async def prompts(self) -> list[list[int]]:
        """Returns the token ids of each prompt, by default those of the body's inputs or of its
        conversation. Inputs that are embedded are behind the prompt that the body names. Raises
        `RequestError`."""
        frontend, prefix = self.frontend, ""
        body: PoolingBody = self.body
        if isinstance(body, EmbeddingBody):
            self.pooling.check_dimensions(body.dimensions, frontend.hidden_size)
            prefix = self.pooling.prompt(body.prompt_name)
        given = body.prompts()
        if isinstance(body, InputBody) and body.messages is not None:
            messages, options = await template_messages(body.messages), template_options(body)
            options["add_generation_prompt"] = bool(body.add_generation_prompt)  # no answer follows
            given = [await frontend.encode_chat(messages, max_tokens=max_uncut(body), **options)]
        return await self.tokens([prefix + i if isinstance(i, str) else i for i in given])

    def reply(self, states: list[F32]) -> Any:
        """Returns the reply: the pooled state of each prompt, float32 [hidden_size], or [P,
        hidden_size] of all of its tokens, in words. A list of items is its last field, `data`."""
        raise NotImplementedError

    def vector(
        self, state: F32, size: int | None, normalize: bool | None, encoding: str | None = None
    ) -> Any:
        """Returns an embedding, the first `size` numbers of it, as JSON: a list of numbers, or the
        text of its base64. Of several [P, hidden_size] that is a list of lists, or one text."""
        write = to_base64 if encoding == "base64" else numbers_json
        return msgspec.Raw(write(self.pooling.embedding(state, size, normalize)))

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
        self.usage = EmbeddingUsage(prompt_tokens=num_tokens, total_tokens=num_tokens)
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


ER = TypeVar("ER", bound=EmbeddingRequest)


class EmbeddingDialect(PoolingDialect[ER]):
    """Embeds each input."""

    body_type = EmbeddingRequest
    reply_type: ClassVar[Any] = Embeddings

    def reply(self, states: list[F32]) -> Any:
        """See `PoolingDialect.reply`."""
        vectors = enumerate(self.vectors(states, self.body.normalizes))
        items = [EmbeddingItem(index=index, embedding=vector) for index, vector in vectors]
        return Embeddings(model=self.model_name, usage=self.usage, data=items)

    def vectors(self, states: list[F32], normalize: bool | None) -> Iterator[Any]:
        """Yields the JSON of each embedding; see `vector`."""
        size, encoding = self.body.dimensions, self.body.encoding_format
        return (self.vector(state, size, normalize, encoding) for state in states)


class StatesDialect(EmbeddingDialect[PoolingRequest]):
    """Returns the pooled hidden state of each input, or the hidden state of each of its tokens.
    They are not normalized unless the request asks for it or names a `task`."""

    body_type = PoolingRequest
    reply_type = PoolingReply
    id_prefix = "pool-"

    def kind(self) -> str:
        """See `PoolingDialect.kind`."""
        task = self.body.task
        kind = "all" if task == "token_embed" else self.body.pooling_type
        return self.pooling.params(kind, takes_all=task != "embed").pooling or "last"

    def reply(self, states: list[F32]) -> Any:
        """See `PoolingDialect.reply`."""
        asked = self.body.normalizes
        vectors = enumerate(
            self.vectors(states, self.body.task is not None if asked is None else asked)
        )
        items = [PooledItem(index=index, data=vector) for index, vector in vectors]
        return PoolingReply(**self.fields(), data=items)


class ClassifyDialect(PoolingDialect[ClassifyRequest]):
    """Returns the classes of each input, where the model has a classification head."""

    body_type = ClassifyRequest
    reply_type = Classes
    id_prefix = "classify-"

    def kind(self) -> str:
        """See `PoolingDialect.kind`."""
        if self.pooling.head is None:
            needed = "an architecture that ends in ForSequenceClassification"
            raise FieldError("model", f"has no classes: /classify needs {needed}")
        return self.pooling.head.pooling

    def reply(self, states: list[F32]) -> Any:
        """See `PoolingDialect.reply`."""
        head = self.pooling.head
        assert head is not None
        items = []
        for index, state in enumerate(states):
            probs = head.probabilities(state)
            label, values = head.labels[int(probs.argmax())], probs.tolist()
            item = ClassifiedItem(index=index, label=label, probs=values, num_classes=len(values))
            items.append(item)
        return Classes(**self.fields(), data=items)
