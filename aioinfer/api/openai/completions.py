"""`POST /v1/completions`."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Iterator, Sequence
from functools import partial
from statistics import fmean
from typing import Any, ClassVar, Literal

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from aioinfer.api.generation import Generation
from aioinfer.api.logprobs import (
    CompletionLogprobs,
    completion_logprobs,
    echoed_logprobs,
    formatted,
)
from aioinfer.api.openai import chunks
from aioinfer.api.prompts import Prompt, Prompts, cut, encode_prompts, max_uncut
from aioinfer.api.protocol import Int32, SamplingBody
from aioinfer.engine.frontend import Frontend
from aioinfer.engine.output import Delta, RequestOutput
from aioinfer.errors import FieldError, UnsupportedFieldError
from aioinfer.sampling_params import MAX_N, SamplingParams
from aioinfer.text.message_parser import ToolUse

#: OpenAI's default of `max_tokens` for completions, where neither the configuration nor the model
#: has one.
_DEFAULT_MAX_TOKENS = 16


#: Stands before CodeLlama's suffix while that is encoded, so that no space is put there.
_JOINT = "☺"


class CompletionRequest(SamplingBody, kw_only=True):
    """`POST /v1/completions`."""

    token_field: ClassVar[str] = "prompt"

    prompt: Prompts
    add_special_tokens: bool | None = None
    best_of: Int32 | None = None
    echo: bool | None = None
    logprobs: Int32 | None = None
    suffix: str | None = None

    def check(self) -> None:
        super().check()
        if self.best_of is not None:
            self._check_best_of(self.best_of, self.n or 1)
        if self.suffix:
            for name in ("echo", "truncate_prompt_tokens"):
                if getattr(self, name):
                    raise FieldError(name, "is not supported together with suffix")

    def beam_width(self) -> tuple[int, str]:
        return super().beam_width() if self.best_of is None else (self.best_of, "best_of")

    def _check_best_of(self, best_of: int, n: int) -> None:
        if not n <= best_of <= MAX_N:
            raise FieldError(
                "best_of",
                f"must be in [n, {MAX_N}], not {best_of}: the n best are returned, and n is {n}",
            )
        if self.stream and best_of > n:
            raise FieldError(
                "best_of", "above n cannot be streamed: which ones are best is known at the end"
            )

    def check_no_output(self) -> None:
        shows_prompt = self.echo or self.prompt_logprobs is not None
        if self.stream or self.use_beam_search or not shows_prompt:
            raise FieldError(
                "max_tokens",
                "may be 0 only with echo or prompt_logprobs, and without stream or a beam search",
            )

    def sampling_fields(self) -> dict[str, Any]:
        fields = super().sampling_fields()
        if self.logprobs is not None and self.echo:  # -1, which stands for all, is the most
            wanted = self.logprobs, self.prompt_logprobs or 0
            fields["prompt_logprobs"] = -1 if -1 in wanted else max(wanted)
        if fields.get("max_tokens") == 0:
            del fields["max_tokens"]
            fields["prompt_only"] = True
        return fields


class CompletionChoice(chunks.Choice, kw_only=True):
    """One completion, or in a chunk more of its text; with the ids of its prompt, which the first
    chunk has, where they are asked for."""

    text: str
    logprobs: CompletionLogprobs | None = None
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    prompt_logprobs: list[Any] | UnsetType | None = UNSET


class Completion(chunks.Chunk, kw_only=True):
    """The reply of `/v1/completions`, and an event of its stream."""

    object: Literal["text_completion"] = "text_completion"
    choices: Sequence[CompletionChoice] = ()


def _sampling_params(
    frontend: Frontend, body: CompletionRequest, prompt_len: int
) -> SamplingParams:
    """Returns the sampling parameters of a completion whose longest prompt has so many tokens."""
    fields = body.sampling_fields()
    has_default = frontend.defaults.max_tokens is not None or "prompt_only" in fields
    has_default |= body.n_predict is not None
    if "max_tokens" not in fields and not has_default:
        fields["max_tokens"] = min(_DEFAULT_MAX_TOKENS, max(1, frontend.max_model_len - prompt_len))
    marks = None if frontend.tokenizer is None else frontend.tokenizer.fill_in_middle
    if body.suffix and marks is not None and not body.ignore_eos:
        fields["stop_token_ids"] = [*fields.get("stop_token_ids", ()), *marks.ends]
    return frontend.defaults.sampling_params(**fields)


async def _with_suffix(frontend: Frontend, body: CompletionRequest, suffix: str) -> list[list[int]]:
    """Returns the prompts with the suffix behind the gap, in the model's format."""
    marks = frontend.require_tokenizer("suffix").fill_in_middle
    if marks is None:
        raise UnsupportedFieldError(
            "suffix",
            "needs a model that fills in the middle: this one's tokenizer has no tokens "
            "for it, such as <|fim_prefix|>",
        )
    if marks.suffix_is_joined:
        joint = await frontend.encode(_JOINT, False)
        after = (await frontend.encode(_JOINT + suffix, False))[len(joint) :]
    else:
        after = await frontend.encode(suffix, False)
    prompts = await encode_prompts(frontend, body.prompts(), "prompt", False)
    return [marks.arrange(prompt, after) for prompt in prompts]


def _best(candidates: Sequence[Delta], best_of: int, params: SamplingParams) -> Sequence[Delta]:
    """Returns the n of each prompt's `best_of` candidates whose tokens have the highest mean
    log-probability, the best first (OpenAI's rule)."""
    if best_of == params.n:
        return candidates
    best: list[Delta] = []
    for first in range(0, len(candidates), best_of):
        group = sorted(candidates[first : first + best_of], key=_mean_logprob, reverse=True)
        best += group[: params.n]
    if params.logprobs is None:
        for delta in best:
            delta.logprobs = None
    return best


def _mean_logprob(delta: Delta) -> float:
    found = [token.logprob for token in delta.logprobs or ()]
    return fmean(found) if found else -math.inf


async def _text_of(frontend: Frontend, prompt: Prompt, ids: Sequence[int]) -> str:
    """Returns the text of a prompt that was given as one text, or else of its token ids."""
    if isinstance(prompt, str):
        return prompt
    return await asyncio.to_thread(frontend.require_tokenizer("echo").decode, ids, False)


class CompletionWriter(chunks.ChunkWriter):
    """Writes a choice that may begin with its prompt, and the log-probabilities of that, which are
    known with the first delta. A token whose text is held back has a chunk too, so that clients can
    count tokens."""

    def __init__(self, dialect: CompletionDialect, output: RequestOutput, index: int):
        super().__init__(dialect, output, index)
        self.empty = CompletionChoice(index=index, text="")
        self._echo = dialect.echoes[index // output.params.n]
        self._num_top = dialect.body.logprobs
        # has the log-probabilities of the prompt, if they are shown
        self._is_scored = dialect.body.echo and self._num_top is not None
        self._echo_logprobs: CompletionLogprobs | None = None
        self._text_offset = 0  # in the choice's text, of the next delta

    async def open(self) -> None:
        """See `ChoiceWriter.open`."""
        scores = self._output.prompt_scores
        if self._is_scored and scores is not None:
            self._is_scored, num_top = False, self._num_top or 0
            self._echo_logprobs = await echoed_logprobs(self._names, scores, num_top, ())
            self._text_offset = len(self._echo)

    def opening(self) -> Iterator[bytes]:
        """See `ChunkWriter.opening`."""
        if self._echo:
            yield self.event(replace(self.shown(self._echo), logprobs=self._echo_logprobs))

    def fields(self, delta: Delta) -> dict[str, Any]:
        """See `ChunkWriter.fields`; the first chunk has the ids of the prompt."""
        found = super().fields(delta)
        if self._prompt_token_ids:
            found["prompt_token_ids"], self._prompt_token_ids = self._prompt_token_ids, ()
        return found

    def shown(self, text: str) -> chunks.Choice:
        """See `ChunkWriter.shown`."""
        return replace(self.empty, text=text)

    def logprobs(self, delta: Delta) -> CompletionLogprobs:
        """See `ChunkWriter.logprobs`."""
        offset, self._text_offset = self._text_offset, self._text_offset + len(delta.text)
        return completion_logprobs(self._names, delta.logprobs or (), offset)


class CompletionDialect(chunks.ChunkDialect[CompletionRequest]):
    """Completes each prompt n times.

    Attributes:
        echoes: the texts that the choices of each prompt begin with.
    """

    body_type = CompletionRequest
    reply_type = Completion
    text_field = None
    id_prefix = "cmpl-"
    writer_type = CompletionWriter
    event_types = (Completion,)

    @property
    def with_ids(self) -> bool:
        """See `ChunkDialect.with_ids`; without a tokenizer there is nothing else."""
        return super().with_ids or self.frontend.tokenizer is None

    @classmethod
    async def encode(
        cls, frontend: Frontend, body: CompletionRequest, use: ToolUse
    ) -> list[list[int]]:
        """See `TextDialect.encode`."""
        if body.suffix:
            return await _with_suffix(frontend, body, body.suffix)
        limit, specials = max_uncut(body), body.add_special_tokens is not False
        ids = await encode_prompts(frontend, body.prompts(), "prompt", specials, max_tokens=limit)
        if limit is None:
            return ids
        kept = body.prompt_room(frontend.max_model_len)
        return [cut(frontend, body, prompt, kept) for prompt in ids]

    async def decode(self) -> Generation:
        """See `Dialect.decode`."""
        body, frontend = self.body, self.frontend
        # all are encoded before the first is queued: a wrong one leaves nothing to be aborted
        ids = await self.encode(frontend, body, body.tool_use())
        self._params = params = _sampling_params(frontend, body, max(map(len, ids)))
        self.echoes = [""] * len(ids)
        if body.echo:
            given = body.prompts() if body.truncate_prompt_tokens is None else ids
            pairs = zip(given, ids, strict=True)
            self.echoes = [await _text_of(frontend, *pair) for pair in pairs]
        # of a beam search `best_of` is the width: it returns the n best itself
        best_of = None if body.use_beam_search else body.best_of
        self._num_candidates = best_of or params.n
        if self._num_candidates > params.n:
            logprobs = params.logprobs or 0
            params = dataclasses.replace(params, n=self._num_candidates, logprobs=logprobs)
        return self.generation(ids, params)

    async def whole(self, outputs: Sequence[RequestOutput], choices: Sequence[Delta]) -> Completion:
        """See `Dialect.whole`."""
        n = self._params.n
        num_tokens = sum(len(choice.token_ids) for choice in choices)
        best = _best(choices, self._num_candidates, self._params)
        of_prompts = [await self.prompt_fields(output) for output in outputs]
        return Completion(
            **self.envelope,
            choices=[
                CompletionChoice(
                    text=self.echoes[index // n] + delta.text,
                    logprobs=await self._logprobs(outputs[index // n], delta),
                    **of_prompts[index // n],
                    **self.choice_fields(outputs[index // n], index, delta),
                )
                for index, delta in enumerate(best)
            ],
            usage=chunks.usage(outputs, num_tokens),
        )

    async def _logprobs(self, output: RequestOutput, delta: Delta) -> CompletionLogprobs | None:
        """Returns the log-probabilities of a choice, its echoed prompt included."""
        scores, body = output.prompt_scores, self.body
        generated = delta.logprobs or ()
        if body.logprobs is not None and body.echo and scores is not None:
            return await echoed_logprobs(self.names, scores, body.logprobs, generated)
        if not generated:
            return None
        return await formatted(generated, partial(completion_logprobs, self.names, generated, 0))
