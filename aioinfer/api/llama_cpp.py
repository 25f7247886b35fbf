"""The endpoints of llama.cpp's server that its clients use: `/completion`, `/embedding`,
`/apply-template`, `/props` and `/slots`, and their bodies. `tokenization` has `/tokenize` and
`/detokenize`.

A stream has an event for each token, and a last event with all fields of a whole reply except the
text; it ends without `[DONE]`. Errors come in llama.cpp's shape from `errors`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from aiohttp import web
from msgspec import UNSET, Meta, Struct, UnsetType

from aioinfer import __version__
from aioinfer.api import protocol
from aioinfer.api.context import encode, frontend_of
from aioinfer.api.generation import (
    ChoiceWriter,
    Generation,
    TextDialect,
    Timings,
    data_event,
    timings,
)
from aioinfer.api.logprobs import LikelyToken, formatted, likely_fields
from aioinfer.api.messages import template_messages
from aioinfer.api.openai.chat import ChatRequest
from aioinfer.api.openai.pooling import PoolingBody, PoolingDialect
from aioinfer.api.prompts import MEDIA_MARKER, MediaPrompt, MediaPrompts, encode_prompts, is_single
from aioinfer.engine.chat_turn import conversation_input
from aioinfer.engine.frontend import Frontend
from aioinfer.engine.output import Delta, RequestOutput
from aioinfer.errors import FieldError
from aioinfer.features.logprobs.planning import TokenLogprob
from aioinfer.ipc.sections import F32
from aioinfer.sampling_params import MAX_LOGIT_BIAS_VALUE, MAX_SORTED_LOGPROBS, SamplingParams
from aioinfer.text.message_parser import ToolUse

#: Parameters that have llama.cpp's names here, too.
_SAME_NAMES = "temperature top_k top_p min_p presence_penalty frequency_penalty stop ignore_eos"
_PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
StopType = Literal["none", "eos", "limit", "word"]


class LlamaCompletion(protocol.CommonSampling, kw_only=True):
    """`POST /completion`.

    Fields of methods that are not supported (`dry_multiplier`, `mirostat`, `xtc_probability` and
    the like) are refused unless they switch their method off (`fields.REFUSED`); the other
    parameters of these methods are taken and have no effect.
    """

    token_field: ClassVar[str] = "prompt"
    ignored: ClassVar[Collection[str] | None] = ()  # as by llama.cpp's server
    sampling_names: ClassVar[Mapping[str, str]] = {
        "n_predict": "max_tokens", "n_probs": "logprobs", "repeat_penalty": "repetition_penalty",
        "logit_bias": "",
    }  # fmt: skip

    prompt: MediaPrompts
    n_predict: protocol.Int32 | None = None
    repeat_penalty: float | None = None
    repeat_last_n: protocol.Int32 | None = None
    logit_bias: list[tuple[int | str, float | bool]] | dict[str, float | bool] | None = None
    n_probs: Annotated[int, Meta(ge=0, le=MAX_SORTED_LOGPROBS)] | None = None
    return_tokens: bool | None = None

    def check(self) -> None:
        """See `Body.check`."""
        super().check()
        self.grammars()
        others = self.presence_penalty, self.frequency_penalty
        has_penalties = any(others) or self.repeat_penalty not in (None, 1)
        if self.repeat_last_n not in (None, 0, -1) and has_penalties:
            raise FieldError(
                "repeat_last_n", "must be -1 or 0: penalties count all of the text, or are off"
            )

    @property
    def max_length(self) -> int | None:
        """The length of the output in tokens; None for as much as fits."""
        return None if self.n_predict is None or self.n_predict < 0 else self.n_predict

    def sampling_fields(self) -> dict[str, Any]:
        """See `Parameters.sampling_fields`; without `logit_bias`, whose texts have to be
        encoded."""
        fields, length = super().sampling_fields(), self.max_length
        without = {
            "max_tokens": not length,
            "logprobs": not self.n_probs,
            "seed": self.seed == -1,  # which stands for any
            **dict.fromkeys(_PENALTIES, self.repeat_last_n == 0),
        }
        fields = {name: value for name, value in fields.items() if not without.get(name)}
        if self.temperature is not None:
            fields["temperature"] = max(0.0, self.temperature)
        return fields | ({"prompt_only": True} if length == 0 else {})

    async def biases(self, frontend: Frontend) -> dict[int, float]:
        """Returns what is added to the logits by token: the bias of a text goes to each of its
        tokens, and `false` stands for never. With `ignore_eos` the model's end tokens never come,
        as with llama.cpp; elsewhere they are passed over."""
        given, found = self.logit_bias or [], dict[int, float]()
        pairs: list[Any] = list(given.items()) if isinstance(given, dict) else given
        for token, bias in pairs:
            if isinstance(token, str) and isinstance(given, dict) and token.isdecimal():
                token = int(token)
            tokens = [token] if isinstance(token, int) else await frontend.encode(token, False)
            value = -MAX_LOGIT_BIAS_VALUE if bias is False else float(bias)
            found |= dict.fromkeys(tokens, value)
        if self.ignore_eos:
            found |= dict.fromkeys(frontend.defaults.eos_token_ids, -MAX_LOGIT_BIAS_VALUE)
        return found


class LlamaEmbedding(PoolingBody, kw_only=True):
    """`POST /embedding`."""

    token_field: ClassVar[str] = "content"
    ignored: ClassVar[Collection[str] | None] = ()

    content: MediaPrompts | None = None
    input: MediaPrompts | None = None

    def check(self) -> None:
        """See `Body.check`."""
        self.check_one_of("content", "input")
        super().check()

    @property
    def prompt_field(self) -> str:
        """See `PromptsBody.prompt_field`."""
        return "input" if self.content is None else "content"


class LlamaBias(Struct, kw_only=True):
    """What is added to the logit of a token; null for a token that never comes, since JSON has no
    infinity."""

    token: int
    bias: float | None


class LlamaSettings(Struct, kw_only=True):
    """The effective parameters of a generation."""

    n_predict: int
    max_tokens: int
    seed: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_last_n: int = -1
    repeat_penalty: float
    presence_penalty: float
    frequency_penalty: float
    stop: Sequence[str]
    ignore_eos: bool
    stream: bool
    n_probs: int
    post_sampling_probs: bool = False
    grammar: str
    logit_bias: list[LlamaBias]


class LlamaScore(LikelyToken, kw_only=True):
    """The log-probability of a token."""

    id: int


class LlamaScored(LlamaScore, kw_only=True):
    """A token of the output, with the likeliest tokens in its place."""

    top_logprobs: list[LlamaScore]


class LlamaToken(Struct, kw_only=True):
    """An event of a stream: a token."""

    index: int
    content: str
    tokens: list[int]
    stop: bool = False
    id_slot: int = -1
    tokens_predicted: int
    tokens_evaluated: int
    completion_probabilities: list[LlamaScored] | UnsetType = UNSET


class LlamaReply(LlamaToken, kw_only=True):
    """The reply of `/completion`. It is the last event of a stream, without the text."""

    content: str = ""
    tokens: list[int] = []
    stop: bool = True
    model: str
    generation_settings: LlamaSettings
    prompt: str
    has_new_line: bool = False
    truncated: bool
    stop_type: StopType
    stopping_word: str
    tokens_cached: int
    timings: Timings


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


class LlamaDefaults(Struct, kw_only=True):
    """The size of the context, and the parameters of a request that brings none."""

    n_ctx: int
    params: LlamaSettings


class LlamaProps(Struct, kw_only=True):
    """The reply of `/props`."""

    default_generation_settings: LlamaDefaults
    total_slots: int
    model_alias: str
    model_path: str
    modalities: dict[str, bool]
    media_marker: str = MEDIA_MARKER
    chat_template: str
    bos_token: str
    eos_token: str
    build_info: str
    is_sleeping: bool = False


class LlamaEmbedDialect(PoolingDialect[LlamaEmbedding]):
    """Embeds each input: a list with a list of one vector for each, or of one for each token where
    the server is configured so (`pooling.type`)."""

    body_type = LlamaEmbedding
    reply_type = list[LlamaVectors]

    def kind(self) -> str:
        """See `PoolingDialect.kind`."""
        return self.pooling.params(takes_all=True).pooling or "last"

    def reply(self, states: list[F32]) -> list[LlamaVectors]:
        """See `PoolingDialect.reply`."""
        shape = -1, self.frontend.hidden_size
        # vectors of tokens are as the model has them
        vectors = (
            self.vector(s.reshape(shape), None, None if s.ndim == 1 else False) for s in states
        )
        return [LlamaVectors(index=index, embedding=each) for index, each in enumerate(vectors)]


async def apply_template(request: web.Request, body: ChatRequest) -> TemplateReply:
    """Returns the prompt that the chat template makes of a conversation, as text, with llama.cpp's
    marker for each picture or sound, and without the token (BOS) that `/completion` puts before
    it."""
    frontend = frontend_of(request)
    messages, options = await template_messages(body.messages), protocol.template_options(body)
    use, tools = body.tool_use(), options.pop("tools")
    shown, tools = await conversation_input(frontend, messages, use, tools)
    prompt = await frontend.render_chat(shown, MEDIA_MARKER, tools=tools, **options)
    tokenizer = frontend.require_tokenizer()
    prompt = prompt.removeprefix(tokenizer.decode(tokenizer.special_tokens.prefix, False))
    written: Any = msgspec.Raw(await asyncio.to_thread(encode, prompt))
    return TemplateReply(prompt=written)


async def props(request: web.Request) -> LlamaProps:
    """Describes the server and the model, as far as clients look at it."""
    frontend = frontend_of(request)
    tokenizer, modalities = frontend.tokenizer, frontend.input_modalities
    special = {} if tokenizer is None else tokenizer.describe()["special_tokens"]
    settings = _settings(LlamaCompletion(prompt=""), frontend.defaults.sampling_params())
    return LlamaProps(
        default_generation_settings=LlamaDefaults(n_ctx=frontend.max_model_len, params=settings),
        total_slots=sum(e.scheduler.limits.max_num_seqs for e in frontend.engines),
        model_alias=frontend.config.name,
        model_path=frontend.config.model.path,
        modalities={"vision": "image" in modalities, "audio": "audio" in modalities},
        chat_template="" if tokenizer is None else tokenizer.chat_template_text,
        bos_token=special.get("bos_token", ""),
        eos_token=special.get("eos_token", ""),
        build_info=f"aioinfer {__version__}",
    )


async def slots(request: web.Request) -> list[LlamaSlot]:
    """Lists the slots of all engines, and which of them serve a request now."""
    frontend, listed = frontend_of(request), list[LlamaSlot]()
    for engine in frontend.engines:
        busy = {running.slot for running in engine.scheduler.running}
        listed += [
            LlamaSlot(id=len(listed) + i, n_ctx=frontend.max_model_len, is_processing=i in busy)
            for i in range(engine.scheduler.limits.max_num_seqs)
        ]
    return listed


def _settings(body: LlamaCompletion, params: SamplingParams) -> LlamaSettings:
    length = -1 if body.max_length is None else body.max_length
    return LlamaSettings(
        n_predict=length,
        max_tokens=length,
        seed=-1 if params.seed is None else params.seed,
        repeat_penalty=params.repetition_penalty,
        **{name: getattr(params, name) for name in _SAME_NAMES.split()},
        stream=body.streams,
        n_probs=body.n_probs or 0,
        grammar=body.grammar or "",
        logit_bias=[
            LlamaBias(token=token, bias=None if bias == -MAX_LOGIT_BIAS_VALUE else bias)
            for token, bias in params.logit_bias.items()
        ],
    )


class LlamaDialect(TextDialect[LlamaCompletion]):
    """Completes each prompt."""

    body_type = LlamaCompletion
    # one prompt has one reply, several have a list
    reply_type = LlamaReply | list[LlamaReply]
    event_types = (LlamaToken, LlamaReply)
    text_field = "prompt"
    id_prefix = "cmpl-"

    @classmethod
    async def encode(
        cls, frontend: Frontend, body: LlamaCompletion, use: ToolUse
    ) -> list[list[int]]:
        """See `TextDialect.encode`."""
        return await encode_prompts(frontend, body.prompts(), cls.text_field)

    async def decode(self) -> Generation:
        """See `Dialect.decode`."""
        body, frontend = self.body, self.frontend
        prompts = await self.encode(frontend, body, body.tool_use())
        fields = body.sampling_fields() | {"logit_bias": await body.biases(frontend)}
        self._tokenizer = tokenizer = frontend.require_tokenizer("prompt")
        self._texts = await asyncio.to_thread(
            lambda: [
                # not thousands of placeholders
                given.prompt_string
                if isinstance(given, MediaPrompt)
                else tokenizer.decode(prompt, False)
                for given, prompt in zip(body.prompts(), prompts, strict=True)
            ]
        )
        return self.generation(prompts, frontend.defaults.sampling_params(**fields))

    def choice(self, output: RequestOutput, index: int) -> LlamaWriter:
        """See `Dialect.choice`."""
        return LlamaWriter(self, output, index)

    async def whole(self, outputs: Sequence[RequestOutput], choices: Sequence[Delta]) -> Any:
        """See `Dialect.whole`."""
        found = []
        for index, delta in enumerate(choices):
            tokens, count = delta.logprobs or (), len(delta.token_ids)
            reply = self.reply(outputs[index], index, count, delta)
            scores = await formatted(tokens, partial(self.probabilities, tokens))
            reply.completion_probabilities = scores or UNSET
            reply.content, reply.has_new_line = delta.text, "\n" in delta.text
            if self.body.return_tokens:
                reply.tokens = delta.token_ids
            found.append(reply)
        return found[0] if is_single(self.body.prompt) else found

    def reply(self, output: RequestOutput, index: int, num_tokens: int, last: Delta) -> LlamaReply:
        """Returns the reply to a prompt, without its text and what is known of it.

        Args:
            output: of the prompt.
            index: its number.
            num_tokens: tokens that the text has.
            last: its end.
        """
        reason, word = last.finish_reason or "", last.stop_reason
        kinds: dict[str, StopType] = {
            "stop": "word" if isinstance(word, str) else "eos", "length": "limit",
        }  # fmt: skip
        num_prompt = len(output.prompt_token_ids)
        return LlamaReply(
            index=index,
            model=self.model_name,
            tokens_predicted=num_tokens,
            tokens_evaluated=num_prompt,
            generation_settings=_settings(self.body, output.params),
            prompt=self._texts[index],
            truncated=reason == "length" and self.body.max_length is None,
            stop_type=kinds.get(reason, "none"),
            stopping_word=word if isinstance(word, str) else "",
            tokens_cached=num_prompt + max(0, num_tokens - 1),
            timings=timings(output, 0, num_tokens),
        )

    def probabilities(self, tokens: Sequence[TokenLogprob]) -> list[LlamaScored]:
        """Returns the log-probabilities of tokens."""
        return [
            LlamaScored(
                **self._fields(token.token_id, token.logprob),
                top_logprobs=[LlamaScore(**self._fields(*top)) for top in token.top],
            )
            for token in tokens
        ]

    def _fields(self, token: int, logprob: float) -> dict[str, Any]:
        return {"id": token} | likely_fields(self._tokenizer, token, logprob)


class LlamaWriter(ChoiceWriter):
    """Writes the text of a prompt, an event a token: the text of all tokens of a delta goes with
    the last of them. The reply without text follows the last delta."""

    def __init__(self, dialect: LlamaDialect, output: RequestOutput, index: int):
        self._dialect, self._output, self._index = dialect, output, index
        self._has_line = False

    def events(self, delta: Delta) -> bytes:
        """See `ChoiceWriter.events`."""
        parts, last, dialect = [], len(delta.token_ids) - 1, self._dialect
        for place, token in enumerate(delta.token_ids):
            self.num_tokens += 1
            event = LlamaToken(
                index=self._index,
                content=delta.text if place == last else "",
                tokens=[token],
                tokens_predicted=self.num_tokens,
                tokens_evaluated=len(self._output.prompt_token_ids),
            )
            if delta.logprobs:
                event.completion_probabilities = dialect.probabilities([delta.logprobs[place]])
            parts.append(data_event(event))
        self._has_line |= "\n" in delta.text
        if delta.finish_reason is not None:
            reply = dialect.reply(self._output, self._index, self.num_tokens, delta)
            reply.has_new_line = self._has_line
            parts.append(data_event(reply))
        return b"".join(parts)
