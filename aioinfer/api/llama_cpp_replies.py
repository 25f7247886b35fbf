"""Replies of `/completion` and `/infill` as llama.cpp's server writes them, whole and streamed.

A stream has an event for each token, and a last event with all fields of a whole reply except the
text. It ends without `[DONE]`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

from aioinfer.api.delivery import together
from aioinfer.api.errors import describe, llama_cpp_error
from aioinfer.api.event_stream import EventStream
from aioinfer.api.llama_cpp_body import Sampling
from aioinfer.api.logprobs import LOWEST, formatted
from aioinfer.api.prompt_progress import ProgressReader
from aioinfer.api.timings import timings
from aioinfer.engine.output import Delta

if TYPE_CHECKING:
    from aioinfer.engine.frontend import Frontend
    from aioinfer.engine.output import RequestOutput
    from aioinfer.features.logprobs.planning import TokenLogprob
    from aioinfer.text.tokenizer import Tokenizer


class LlamaReply:
    """Reply for one sequence of an output: the events of a stream, or the whole object."""

    def __init__(
        self,
        frontend: Frontend,
        body: Sampling,
        output: RequestOutput,
        place: tuple[int, int],
        prompt: str,
    ):
        """`place` is the number of the sequence in the output, and among all of the request;
        `prompt` is the text of the prompt."""
        self._tokenizer: Tokenizer = frontend.require_tokenizer("prompt")
        self._model = frontend.config.served_model_names[0]
        self._body, self._output, self._prompt = body, output, prompt
        self._sequence, self._index = place
        self._num_tokens = 0
        self._has_line = False

    def events(self, delta: Delta) -> Iterator[Mapping[str, Any]]:
        """Yields the events of a delta, a token at a time: the text of all of its tokens goes with
        the last of them. The last delta is followed by the reply without text."""
        last = len(delta.token_ids) - 1
        for place, token in enumerate(delta.token_ids):
            self._num_tokens += 1
            event = {
                "index": self._index,
                "content": delta.text if place == last else "",
                "tokens": [token],
                "stop": False,
                "id_slot": -1,
                "tokens_predicted": self._num_tokens,
                "tokens_evaluated": len(self._output.prompt_token_ids),
            }
            if delta.logprobs:
                event["completion_probabilities"] = self._probabilities([delta.logprobs[place]])
            if self._body.timings_per_token:
                event["timings"] = self._timings()
            yield event
        self._has_line |= "\n" in delta.text
        if delta.finish_reason is not None:
            end = Delta(
                delta.index, finish_reason=delta.finish_reason, stop_reason=delta.stop_reason
            )
            yield self.whole(end)

    def progress(self, news: Mapping[str, float]) -> Mapping[str, Any]:
        """Returns the event that reports the progress of the prompt."""
        return {
            "index": self._index,
            "content": "",
            "tokens": [],
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": 0,
            "tokens_evaluated": len(self._output.prompt_token_ids),
            "prompt_progress": news,
        }

    def whole(self, delta: Delta) -> Mapping[str, Any]:
        """Returns the whole reply, with the text and the tokens of `delta`, the last delta."""
        body, output, num_prompt = self._body, self._output, len(self._output.prompt_token_ids)
        self._num_tokens += len(delta.token_ids)
        is_word = isinstance(delta.stop_reason, str)
        kinds = {"stop": "word" if is_word else "eos", "length": "limit"}
        reply = {
            "index": self._index,
            "content": delta.text,
            "tokens": delta.token_ids if body.return_tokens else [],
            "id_slot": -1,
            "stop": True,
            "model": self._model,
            "tokens_predicted": self._num_tokens,
            "tokens_evaluated": num_prompt,
            "generation_settings": body.settings(output.params),
            "prompt": self._prompt,
            "has_new_line": self._has_line or "\n" in delta.text,
            "truncated": delta.finish_reason == "length" and body.max_length is None,
            "stop_type": kinds.get(delta.finish_reason or "", "none"),
            "stopping_word": delta.stop_reason if is_word else "",
            "tokens_cached": num_prompt + max(0, self._num_tokens - 1),
            "timings": self._timings(),
        }
        if delta.logprobs:
            reply["completion_probabilities"] = self._probabilities(delta.logprobs)
        if not body.response_fields:
            return reply
        return dict(_members(reply, body.response_fields))

    def _timings(self) -> dict[str, float]:
        return timings(self._output, self._sequence, self._num_tokens)

    def _probabilities(self, tokens: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
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


async def stream_replies(
    request: web.Request, outputs: Sequence[RequestOutput], replies: Sequence[Sequence[LlamaReply]]
) -> web.StreamResponse:
    """Sends the events of all outputs as their deltas come; `replies[i]` belong to the sequences of
    `outputs[i]`."""
    response = EventStream(request, outputs)
    await response.prepare(request)

    async def send(output: RequestOutput, each: Sequence[LlamaReply]) -> None:
        progress = ProgressReader(output)
        async for delta in output:
            if (news := progress.news()) is not None:
                await response.write(_event(each[0].progress(news)))
            events = partial(_events, each[delta.index], delta)
            await response.write_delta(delta, await formatted(delta.logprobs or (), events))

    try:
        await together([send(*pair) for pair in zip(outputs, replies, strict=True)])
    except ConnectionError:  # the client is gone
        raise
    except Exception as error:
        await response.write_failure(error, _event(llama_cpp_error(*describe(error))))
    return response


def _events(reply: LlamaReply, delta: Delta) -> bytes:
    return b"".join(_event(event) for event in reply.events(delta))


def _event(fields: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(fields) + b"\n\n"
