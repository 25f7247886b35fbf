"""Ollama's API as desktop clients know it: `/api/chat`, `/api/generate`, `/api/embed` and
`/api/embeddings`, and their bodies. `admin.info` has `/api/tags`, `/api/ps` and `/api/show`.

Streams are lines of JSON; replies are streamed unless `stream` is false.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from aiohttp import web
from msgspec import UNSET, Meta, Struct, UnsetType

from aioinfer.api import protocol
from aioinfer.api.context import encode, iso_time
from aioinfer.api.decoding import Body
from aioinfer.api.errors import json_response
from aioinfer.api.generation import Generation, MessageDialect, timings
from aioinfer.api.http.logs import RECORD
from aioinfer.api.logprobs import ScoredToken
from aioinfer.api.messages import (
    TemplateContent,
    converted,
    template_call,
    template_content,
    template_message,
)
from aioinfer.api.openai.pooling import EmbeddingBody, PoolingDialect
from aioinfer.engine.chat_turn import Turn, call_input, encode_turn, new_call_id
from aioinfer.engine.frontend import Frontend
from aioinfer.engine.output import StopReason
from aioinfer.engine.tools import NO_TOOLS, read_tools
from aioinfer.errors import FieldError, UnsupportedFieldError
from aioinfer.ipc.sections import F32
from aioinfer.media.source import MediaSource
from aioinfer.sampling_params import MAX_LOGPROBS, GrammarSpec
from aioinfer.text.message_blocks import Block, BlockKind
from aioinfer.text.message_parser import ToolUse


class Options(protocol.Parameters, kw_only=True, forbid_unknown_fields=True):
    """The options that count for a model that is loaded; `fields` has the others. Unknown ones are
    ignored, as Ollama's server does, but those that are nearly one of these.

    Attributes:
        ignored: options that Ollama has had, and that its server ignores today.
    """

    ignored: ClassVar[frozenset[str]] = frozenset(
        ("mirostat", "mirostat_eta", "mirostat_tau", "penalize_newline", "tfs_z")
    )
    sampling_names: ClassVar[Mapping[str, str]] = {
        "num_predict": "max_tokens", "repeat_penalty": "repetition_penalty",
    }  # fmt: skip

    num_predict: protocol.Int32 | None = None
    temperature: float | None = None
    top_k: protocol.Int32 | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: protocol.Int64 | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    repeat_last_n: protocol.Int32 | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


#: A `keep_alive` for which Ollama unloads a model at once.
_NO_TIME = re.compile(r"[-+]?0+(\.0*)?(ns|us|µs|ms|s|m|h)?")


class OllamaFunction(Struct, kw_only=True):
    """The function of a call."""

    name: str
    arguments: Mapping[str, Any] = {}


class OllamaCall(Struct, kw_only=True):
    """A call that the model has made."""

    id: str | None = None
    function: OllamaFunction


class OllamaMessage(Struct, kw_only=True):
    """A message of the conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = ""
    thinking: str | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    images: list[str] | None = None

    def for_template(self, where: str) -> dict[str, Any]:
        """Returns the message as chat templates read it; `where` is its place in the body."""
        return template_message(
            self.role,
            _with_pictures(self.content or "", self.images, where),
            [
                template_call(call.function.name, call.function.arguments, call.id or "")
                for call in self.tool_calls or ()
            ],
            name=self.tool_name,
            tool_call_id=self.tool_call_id,
            reasoning_content=self.thinking,
        )


def _with_pictures(text: str, images: Sequence[str] | None, where: str) -> TemplateContent:
    """Returns a content: the pictures (base64), and the text behind them."""
    places = enumerate(images or ())
    sources = [MediaSource(f"{where}images[{i}]", data, is_base64=True) for i, data in places]
    return template_content([*sources, text])


class Tagged:
    """A body with a model's name, in which Ollama's default tag may stand. Ollama's server ignores
    unknown fields."""

    __slots__ = ()
    ignored: ClassVar[Collection[str] | None] = ()

    def __post_init__(self: Any) -> None:
        if self.model is not None:
            self.model = self.model.removesuffix(":latest")


class OllamaBody(Tagged, protocol.GenerationBody, kw_only=True):
    """Base class of the bodies of chats and generations. `truncate` and `shift` say what is to
    become of a conversation that is too long: that is an error here, or ends the answer.
    `top_logprobs` without `logprobs` asks for nothing. A `keep_alive` of 0 without a prompt has the
    model unloaded, by which the reply is called; the server keeps it."""

    sampling_names: ClassVar[Mapping[str, str]] = {"logprobs": "", "top_logprobs": "logprobs"}

    format: Literal["", "json"] | dict[str, Any] | None = None
    options: Options | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    keep_alive: str | float | None = None
    shift: protocol.Ignored = None
    truncate: protocol.Ignored = None

    @property
    def streams(self) -> bool:
        """See `GenerationBody.streams`."""
        return self.stream is not False

    def check(self) -> None:
        """See `Body.check`."""
        options = self.options or Options()
        if (options.repeat_last_n or -1) != -1 and options.repeat_penalty not in (None, 1):
            raise UnsupportedFieldError(
                "options.repeat_last_n",
                "must be -1, for all tokens, or 0, for none: a penalty for the last ones alone is "
                "not supported",
            )

    def grammars(self) -> list[GrammarSpec]:
        """See `GenerationBody.grammars`."""
        if isinstance(self.format, dict):
            return [protocol.schema_grammar(self.format, "format")]
        return [GrammarSpec("json_object", param="format")] if self.format else []

    def sampling_fields(self) -> dict[str, Any]:
        """See `Parameters.sampling_fields`."""
        options = self.options or Options()
        fields = {"logprobs": 0} | super().sampling_fields() | options.sampling_fields()
        if not self.logprobs:
            del fields["logprobs"]
        if fields.get("max_tokens", 1) <= 0:  # -1 and -2 stand for as many as fit
            del fields["max_tokens"]
        if options.repeat_last_n == 0:
            fields.pop("repetition_penalty", None)
        return fields

    def template_kwargs(self) -> dict[str, Any] | None:
        """Returns the variables of the chat template."""
        effort = self.think if isinstance(self.think, str) else None
        thinks = self.think if effort is None else True
        return protocol.template_variables(None, enable_thinking=thinks, reasoning_effort=effort)


class OllamaChat(OllamaBody, kw_only=True):
    """`POST /api/chat`. Without messages it has the model loaded."""

    messages: list[OllamaMessage] | None = None
    tools: list[dict[str, Any]] | None = None

    def check(self) -> None:
        """See `Body.check`."""
        super().check()
        self.tool_use()

    def tool_use(self) -> ToolUse:
        """Returns the tools. Raises `RequestError` naming the place."""
        return read_tools(self.tools, None, parallel=None)

    def conversation(self) -> list[dict[str, Any]]:
        """Returns the messages as chat templates read them."""
        return [
            message.for_template(f"messages[{index}].")
            for index, message in enumerate(self.messages or ())
        ]


class OllamaGenerate(OllamaBody, kw_only=True):
    """`POST /api/generate`. Without a prompt it has the model loaded."""

    prompt: str = ""
    system: str | None = None
    raw: bool | None = None
    images: list[str] | None = None

    def conversation(self) -> list[dict[str, Any]]:
        """Returns the messages as chat templates read them."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        content = _with_pictures(self.prompt, self.images, "")
        return [*system, {"role": "user", "content": content}]


class ShowRequest(Tagged, Body, kw_only=True):
    """`POST /api/show`. `name` is the older name of `model`; there is no more to show than is
    shown, whatever `verbose` says."""

    name: str | None = None
    verbose: protocol.Ignored = None

    def __post_init__(self) -> None:
        self.model = self.model or self.name
        super().__post_init__()


class OllamaEmbedRequest(Tagged, EmbeddingBody, kw_only=True):
    """`POST /api/embed`. A text that is too long is embedded up to where it fits, unless `truncate`
    is false. `options` hold Ollama's settings of sampling and loading, which have no effect."""

    options: protocol.Ignored = None
    truncate: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.truncation_side is None:
            self.truncation_side = "right"
        if self.truncate is not False and self.truncate_prompt_tokens is None:
            self.truncate_prompt_tokens = -1


class OllamaEmbeddingsRequest(OllamaEmbedRequest, kw_only=True):
    """`POST /api/embeddings`, the older form: one text, named `prompt`."""

    input: str = msgspec.field(name="prompt")


class Answer(Struct, kw_only=True):
    """The message of a line of `/api/chat`."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaCall] | UnsetType = UNSET


class Line(Struct, kw_only=True):
    """The reply of `/api/chat`, which has a `message`, and of `/api/generate`, which has a
    `response`. A stream is lines of these. The last line, and a reply in one piece, have the counts
    of tokens and the durations, in nanoseconds. `logprobs` are of the tokens of its text."""

    model: str
    created_at: str
    message: Answer | UnsetType = UNSET
    response: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    logprobs: list[ScoredToken] | UnsetType = UNSET
    done: bool = False
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


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


class OllamaDialect(MessageDialect[OllamaChat | OllamaGenerate]):
    """Ollama's words: lines of JSON. A call is one line: its arguments are an object."""

    content_type = "application/x-ndjson"
    reply_type = Line
    event_types = (Line,)
    id_prefix = "ollama-"

    @classmethod
    async def encode(
        cls, frontend: Frontend, body: OllamaChat | OllamaGenerate, use: ToolUse
    ) -> list[list[int]]:
        """See `TextDialect.encode`."""
        if isinstance(body, OllamaGenerate) and body.raw:
            if body.images:
                raise FieldError("images", "have no place in a raw prompt")
            return [await frontend.encode(body.prompt)]
        tools = body.tools if isinstance(body, OllamaChat) else None
        variables = body.template_kwargs()
        given = (body.messages or ()) if isinstance(body, OllamaChat) else ()
        messages = await converted((each.tool_calls for each in given), body.conversation)
        return [await encode_turn(frontend, messages, use, tools, template_kwargs=variables)]

    async def decode(self) -> Generation | web.StreamResponse:
        """See `Dialect.decode`. Clients send a request for nothing to have a model loaded."""
        body = self.body
        if not (body.messages if isinstance(body, OllamaChat) else body.prompt):
            reason = "unload" if _NO_TIME.fullmatch(str(body.keep_alive)) else "load"
            return json_response(self._line(done=True, done_reason=reason))
        if isinstance(body, OllamaChat) or not body.raw:
            return await super().decode()
        params = self.frontend.defaults.sampling_params(**body.sampling_fields())
        self.turn = Turn(await self.prompt(NO_TOOLS), params, NO_TOOLS, parses=False)
        return self.generation([self.turn.prompt], params)

    def new_id(self, kind: BlockKind) -> str:
        """See `MessageDialect.new_id`."""
        return new_call_id(self.frontend)

    def change(self, kind: str, block: Block, text: str) -> bytes:
        """See `MessageDialect.change`."""
        if block.kind == "call":
            return self._event(self._line(calls=[block])) if kind == "stop" else b""
        if kind != "delta":
            return b""
        if block.kind != "text":
            return self._event(self._line(thinking=text))
        new = block.logprobs and block.new_logprobs()
        return self._event(self._line(text, logprobs=new or UNSET))

    def closing(self, reason: str, stop_reason: StopReason, num_tokens: int) -> bytes:
        """See `MessageDialect.closing`."""
        return self._event(self._line(**self._end(reason, num_tokens)))

    def message(self, reason: str, stop_reason: StopReason, num_tokens: int) -> Line:
        """See `MessageDialect.message`."""
        blocks = self.blocks.all
        texts = "".join(block.text for block in blocks if block.kind == "text")
        thoughts = "".join(block.text for block in blocks if block.kind == "reasoning")
        calls = [block for block in blocks if block.kind == "call"]
        logprobs = [token for block in blocks for token in block.logprobs]
        line = self._line(texts, thoughts or UNSET, calls, logprobs=logprobs or UNSET)
        return msgspec.structs.replace(line, **self._end(reason, num_tokens))

    @staticmethod
    def _event(line: Line) -> bytes:
        return encode(line) + b"\n"

    def _line(
        self,
        content: str = "",
        thinking: str | UnsetType = UNSET,
        calls: Sequence[Block] = (),
        **fields: Any,
    ) -> Line:
        name, now = self.model_name, iso_time(time.time())
        line = Line(model=name, created_at=now, **fields)
        if not isinstance(self.body, OllamaChat):
            line.response, line.thinking = content, thinking
            return line
        line.message = Answer(content=content, thinking=thinking)
        if calls:
            line.message.tool_calls = [
                OllamaCall(
                    id=call.id,
                    function=OllamaFunction(name=call.name, arguments=call_input(call.text)),
                )
                for call in calls
            ]
        return line

    def _end(self, reason: str, num_tokens: int) -> dict[str, Any]:
        measured = timings(self.output, 0, num_tokens)
        return {
            "done": True,
            "done_reason": reason,
            "total_duration": _since_arrival(self.request),
            "load_duration": 0,
            "prompt_eval_count": len(self.output.prompt_token_ids),
            "prompt_eval_duration": _nanoseconds(measured.prompt_ms),
            "eval_count": num_tokens,
            "eval_duration": _nanoseconds(measured.predicted_ms),
        }


class ChatDialect(OllamaDialect):
    """Answers a conversation."""

    body_type = OllamaChat


class GenerateDialect(OllamaDialect):
    """Answers a prompt as a conversation of one message, or completes it if it is `raw`."""

    body_type = OllamaGenerate
    text_field = "prompt"


class EmbedDialect(PoolingDialect[OllamaEmbedRequest]):
    """Embeds each input, in the shape of Ollama's `/api/embed`."""

    body_type = OllamaEmbedRequest
    reply_type = OllamaEmbeddings

    def reply(self, states: list[F32]) -> Any:
        """See `PoolingDialect.reply`."""
        return OllamaEmbeddings(
            model=self.model_name,
            embeddings=[self.vector(state, self.body.dimensions, True) for state in states],
            total_duration=_since_arrival(self.request),
            load_duration=0,
            prompt_eval_count=self.usage.prompt_tokens,
        )


class EmbeddingDialect(PoolingDialect[OllamaEmbeddingsRequest]):
    """Embeds one input, in the shape of Ollama's older `/api/embeddings`. Its clients normalise by
    themselves, and expect the vector as the model has it."""

    body_type = OllamaEmbeddingsRequest
    reply_type = OllamaEmbedding

    def reply(self, states: list[F32]) -> Any:
        """See `PoolingDialect.reply`."""
        vector = self.vector(states[0], self.body.dimensions, False)
        return OllamaEmbedding(embedding=vector)


def _since_arrival(request: web.Request) -> int:
    """Returns the nanoseconds since a request came."""
    return _nanoseconds((time.perf_counter() - request[RECORD].arrived) * 1e3)


def _nanoseconds(milliseconds: float) -> int:
    # clients divide by it, and the last token may be the first
    return max(1, round(milliseconds * 1e6))
