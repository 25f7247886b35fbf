"""Replies of `/completion` and `/infill` as llama.cpp's server writes them, whole and streamed.

A stream has an event for each token, and a last event with all fields of a whole reply except the
text. It ends without `[DONE]`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from aioinfer.api.context import encode
from aioinfer.api.errors import LlamaError, describe
from aioinfer.api.generation import ChoiceWriter, Dialect, error_event, timings
from aioinfer.api.llama_cpp.body import Sampling
from aioinfer.api.logprobs import LOWEST, formatted

if TYPE_CHECKING:
    from aioinfer.engine.frontend import Frontend
    from aioinfer.engine.output import Delta, RequestOutput
    from aioinfer.features.logprobs.planning import TokenLogprob

StopType = Literal["none", "eos", "limit", "word"]


class LlamaToken(Struct, kw_only=True):
    """An event of a stream: a token, or how much of the prompt is computed."""

    index: int
    content: str
    tokens: list[int]
    stop: bool = False
    id_slot: int = -1
    tokens_predicted: int
    tokens_evaluated: int
    completion_probabilities: list[dict[str, Any]] | UnsetType = UNSET
    timings: dict[str, float] | UnsetType = UNSET
    prompt_progress: Mapping[str, float] | UnsetType = UNSET


class LlamaReply(Struct, kw_only=True):
    """The reply of `/completion` and `/infill`; with `response_fields` only these members. It is
    the last event of a stream, without the text."""

    index: int
    content: str
    tokens: list[int]
    id_slot: int = -1
    stop: bool = True
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    generation_settings: Mapping[str, Any]
    prompt: str
    has_new_line: bool
    truncated: bool
    stop_type: StopType
    stopping_word: str
    tokens_cached: int
    timings: dict[str, float]
    completion_probabilities: list[dict[str, Any]] | UnsetType = UNSET


class LlamaDialect(Dialect):
    """The words of llama.cpp's server."""

    def __init__(
        self,
        frontend: Frontend,
        body: Sampling,
        prompts: Sequence[str],
        num_each: int,
        *,
        is_single: bool,
    ):
        """Makes the words of a reply.

        Args:
            frontend: of the model.
            body: of the request.
            prompts: the texts of the prompts.
            num_each: how many sequences each has.
            is_single: whether the whole reply is one object, not a list of them.
        """
        self._tokenizer = frontend.require_tokenizer("prompt")
        self._model = frontend.config.served_model_names[0]
        self._body, self._prompts, self._num_each = body, prompts, num_each
        self._is_single = is_single

    def choice(self, output: RequestOutput, sequence: int, index: int) -> LlamaWriter:
        """See `Dialect.choice`."""
        return LlamaWriter(self, self._body, output, sequence, index)

    def progress(self, output: RequestOutput, index: int, news: Mapping[str, float]) -> bytes:
        """See `Dialect.progress`."""
        event = LlamaToken(
            index=index,
            content="",
            tokens=[],
            tokens_predicted=0,
            tokens_evaluated=len(output.prompt_token_ids),
            prompt_progress=news,
        )
        return _event(event)

    def failure(self, error: Exception) -> bytes:
        """See `Dialect.failure`."""
        return error_event(LlamaError.of(*describe(error)))

    async def whole(self, outputs: Sequence[RequestOutput], choices: Sequence[Delta]) -> Any:
        """See `Dialect.whole`."""
        found = []
        for index, delta in enumerate(choices):
            tokens, output = delta.logprobs or (), outputs[index // self._num_each]
            scores = await formatted(tokens, partial(self.probabilities, tokens)) or UNSET
            ended = delta.finish_reason or "", delta.stop_reason
            count = len(delta.token_ids)
            has_line = "\n" in delta.text
            reply = self.reply(output, delta.index, index, count, has_line, *ended)
            reply.content, reply.completion_probabilities = delta.text, scores
            if self._body.return_tokens:
                reply.tokens = delta.token_ids
            found.append(self.shown(reply))
        return found[0] if self._is_single else found

    def reply(
        self,
        output: RequestOutput,
        sequence: int,
        index: int,
        num_tokens: int,
        has_line: bool,
        reason: str,
        stop_reason: int | str | None,
    ) -> LlamaReply:
        """Returns the reply of a sequence without its text.

        Args:
            output, sequence, index: as `choice` has them.
            num_tokens: tokens that it has.
            has_line: whether it has a line break.
            reason, stop_reason: of its end, see `Delta`.
        """
        body, num_prompt = self._body, len(output.prompt_token_ids)
        word = stop_reason if isinstance(stop_reason, str) else ""
        kinds: dict[str, StopType] = {
            "stop": "word" if isinstance(stop_reason, str) else "eos",
            "length": "limit",
        }
        return LlamaReply(
            index=index,
            content="",
            tokens=[],
            model=self._model,
            tokens_predicted=num_tokens,
            tokens_evaluated=num_prompt,
            generation_settings=body.settings(output.params),
            prompt=self._prompts[index // self._num_each],
            has_new_line=has_line,
            truncated=reason == "length" and body.max_length is None,
            stop_type=kinds.get(reason, "none"),
            stopping_word=word,
            tokens_cached=num_prompt + max(0, num_tokens - 1),
            timings=timings(output, sequence, num_tokens),
        )

    def shown(self, reply: LlamaReply) -> LlamaReply | dict[str, Any]:
        """Returns a reply, or the members of it that the request asks for."""
        if not self._body.response_fields:
            return reply
        return dict(_members(msgspec.to_builtins(reply), self._body.response_fields))

    def probabilities(self, tokens: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        """Returns the log-probabilities of tokens; as probabilities, where the request asks for the
        probabilities after sampling, of which one is 1."""
        found = []
        for token in tokens:
            if self._body.post_sampling_probs:
                top = [self._named(i) | {"prob": float(i == token.token_id)} for i, _ in token.top]
                found.append(self._named(token.token_id) | {"prob": 1.0, "top_probs": top})
            else:
                top = [self._named(i) | {"logprob": max(value, LOWEST)} for i, value in token.top]
                own = {"logprob": max(token.logprob, LOWEST), "top_logprobs": top}
                found.append(self._named(token.token_id) | own)
        return found

    def _named(self, token: int) -> dict[str, Any]:
        text, data = self._tokenizer.token_text(token)
        return {"id": token, "token": text, "bytes": list(data)}


class LlamaWriter(ChoiceWriter):
    """Writes a sequence, an event a token: the text of all tokens of a delta goes with the last of
    them. The reply without text follows the last delta."""

    def __init__(self, dialect: LlamaDialect, body: Sampling, output: RequestOutput, *place: int):
        """`place` is the number of the sequence in the output, and among all of the request."""
        self._dialect, self._body, self._output = dialect, body, output
        self._sequence, self._index = place
        self._has_line = False

    def events(self, delta: Delta) -> bytes:
        """See `ChoiceWriter.events`."""
        parts, last = [], len(delta.token_ids) - 1
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
                scores = self._dialect.probabilities([delta.logprobs[place]])
                event.completion_probabilities = scores
            if self._body.timings_per_token:
                event.timings = timings(self._output, self._sequence, self.num_tokens)
            parts.append(_event(event))
        self._has_line |= "\n" in delta.text
        if delta.finish_reason is not None:
            ended = self._output, self._sequence, self._index, self.num_tokens, self._has_line
            reply = self._dialect.reply(*ended, delta.finish_reason, delta.stop_reason)
            parts.append(_event(self._dialect.shown(reply)))
        return b"".join(parts)


def _members(reply: Mapping[str, Any], paths: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yields the existing members at paths such as `generation_settings/n_predict`."""
    for path in paths:
        value: Any = reply
        for name in path.split("/"):
            if not isinstance(value, Mapping) or name not in value:
                break
            value = value[name]
        else:
            yield path, value


def _event(fields: Any) -> bytes:
    return b"data: " + encode(fields) + b"\n\n"
