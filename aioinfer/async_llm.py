"""The engine for asyncio programs: requests come and go, and each is an asynchronous iterator.

It runs on the caller's event loop, without HTTP. `LLM` is for scripts without a loop, `LLMEngine`
for programs that take steps themselves; `create_app` adds the HTTP server to the same engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from io import StringIO
from itertools import count, repeat
from pathlib import Path
from types import TracebackType
from typing import Any
from weakref import WeakValueDictionary

from aioinfer.arguments import (
    Conversation,
    GivenParams,
    GivenPrompt,
    Prompt,
    as_chat_options,
    as_conversation,
    as_params,
    as_prompt,
    make_config,
)
from aioinfer.engine.chat_turn import MessageBuilder, Turn, conversation_turn
from aioinfer.engine.frontend import Frontend
from aioinfer.engine.model_control import Mode, Tag
from aioinfer.engine.output import Delta, RequestOutput
from aioinfer.engine.pooled_prompts import cross_prompt, cut_text
from aioinfer.engine.served_model import cosine_similarity
from aioinfer.errors import EngineDeadError, GenerationError, RequestError
from aioinfer.features.adapters.serving import Serving as Adapters
from aioinfer.ipc.sections import F32
from aioinfer.llm import CompletionOutput, Output
from aioinfer.sampling_params import SamplingParams
from aioinfer.startup import StartupDisplay


class StreamedCompletion(CompletionOutput):
    """A completion while it is generated. Its text and its message are joined when they are
    read."""

    __slots__ = ("_message", "_text", "builder")

    def __init__(self, builder: MessageBuilder | None = None, **fields: Any):
        """`builder` makes the message of a chat; `fields` are the fields of `CompletionOutput`."""
        self.builder = builder
        super().__init__(**fields)

    def append(self, text: str) -> None:
        """Adds to the text."""
        self._text.write(text)

    @property
    def text(self) -> str:
        """See `CompletionOutput`."""
        return self._text.getvalue()

    @text.setter
    def text(self, text: str) -> None:
        self._text = StringIO()  # appending to a string copies all of it
        self._text.write(text)

    @property
    def message(self) -> dict[str, Any] | None:
        """See `CompletionOutput`."""
        return self._message if self.builder is None else self.builder.as_dict

    @message.setter
    def message(self, message: dict[str, Any] | None) -> None:
        self._message = message


@dataclass(slots=True)
class StreamedOutput(Output):
    """The output of a request while it is generated.

    Attributes:
        request_id: of the request.
        is_finished: whether nothing more will come.
        error: why it failed, if it did; only `LLMEngine.step` returns such.
    """

    request_id: str = ""
    is_finished: bool = False
    error: Exception | None = None

    @property
    def finished(self) -> bool:
        """vLLM's name for `is_finished`."""
        return self.is_finished

    def snapshot(self) -> StreamedOutput:
        """Returns a copy that does not change any more."""
        completions = [
            replace(
                c,
                token_ids=c.token_ids[:],
                logprobs=c.logprobs and c.logprobs[:],
                message=deepcopy(c.message),
                features=deepcopy(c.features),
            )
            for c in self.completions
        ]
        return replace(self, completions=completions)


class RequestStream:
    """A request under way. Iterate over it for its output; ending the iteration early does not end
    the request, `abort` does.

    Attributes:
        request_id: of the request.
    """

    def __init__(
        self,
        request_id: str,
        output: RequestOutput,
        *,
        deltas: bool,
        builders: Sequence[MessageBuilder] = (),
    ):
        """With `deltas` each item holds only the new part, else all so far. `builders` make the
        messages of the completions of a chat."""
        self.request_id = request_id
        self._output = output
        self._deltas = deltas
        self._builders = builders
        self._last = self._new()

    def _new(self) -> StreamedOutput:
        builders = self._builders or repeat(None, self._output.params.n)
        completions: list[CompletionOutput] = [StreamedCompletion(builder) for builder in builders]
        return StreamedOutput(
            self._output.prompt_token_ids, completions, 0, 0, request_id=self.request_id
        )

    @property
    def is_finished(self) -> bool:
        """Whether the request has ended; its last output may not have been read."""
        return self._output.is_finished

    def abort(self) -> None:
        """Ends the request; its iterator ends without further output."""
        self._output.abort()

    def __aiter__(self) -> AsyncIterator[StreamedOutput]:
        return self

    async def __anext__(self) -> StreamedOutput:
        """Waits for new tokens.

        Raises:
            EngineDeadError, GenerationError: the request has failed.
        """
        delta = await anext(self._output)
        if self._deltas:
            self._last = self._new()
        self._take(delta)
        return self._last

    def _take(self, delta: Delta) -> None:
        completion = self._last.completions[delta.index]
        assert isinstance(completion, StreamedCompletion)
        completion.append(delta.text)
        completion.token_ids += delta.token_ids
        if delta.logprobs:
            completion.logprobs = completion.logprobs or []
            completion.logprobs += delta.logprobs
        completion.finish_reason, completion.stop_reason = delta.finish_reason, delta.stop_reason
        if self._builders:
            builder = self._builders[delta.index]
            builder.feed(delta.text, ended=delta.finish_reason is not None)
        completion.cumulative_logprob = delta.cumulative_logprob
        completion.features = self._output.features(delta.index)
        sequences = self._output.sequences  # one, of a beam search
        request = sequences[min(delta.index, len(sequences) - 1)].request
        completion.num_preemptions = request.num_preemptions
        self._last.num_cached_tokens = self._output.num_cached_tokens
        self._last.weight_versions = tuple(self._output.weight_versions)
        self._last.num_prefill_steps = self._output.sequences[0].request.num_prefill_steps
        self._last.prompt_scores = self._output.prompt_scores
        self._last.is_finished = self._output.is_finished and not self._output.has_deltas


class AsyncLLM:
    """A model for asyncio programs. Made by `launch`; any number of tasks of its event loop may use
    it at the same time, and their requests share the steps.

    Attributes:
        frontend: the engines, as `create_app` takes them.
    """

    def __init__(self, frontend: Frontend):
        """Uses engines that run already, which stay the caller's to close."""
        if isinstance(frontend, str | Path):
            raise TypeError(f"write `await AsyncLLM.launch({str(frontend)!r})`")
        self.frontend = frontend
        self._is_closed = False
        # requests that have a reader, by id, and ids of requests that are being queued
        self._streams: WeakValueDictionary[str, RequestStream] = WeakValueDictionary()
        self._coming: set[str] = set()
        self._numbers = count()

    @classmethod
    async def launch(
        cls,
        model: str | None = None,
        *,
        config: str | Path | None = None,
        settings: Mapping[str, Any] | None = None,
        progress: bool = True,
        **arguments: Any,
    ) -> AsyncLLM:
        """Starts the workers and loads the model; see `BackgroundModel` for the arguments.

        Raises:
            ConfigError: the configuration does not go with the model or the machine.
            EngineDeadError: a worker failed to start.
        """
        loaded = make_config(model, config, settings, arguments)
        with StartupDisplay(quiet=not progress) as display:
            frontend = await Frontend.launch(loaded, display.on_progress)
        if progress:
            display.show([e.report for e in frontend.engines], loaded.served_model_names)
        return cls(frontend)

    async def add_request(
        self,
        prompt: GivenPrompt,
        params: GivenParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        deltas: bool = False,
    ) -> RequestStream:
        """Queues a request and returns its output, to be iterated over.

        Args:
            prompt: a text or token ids, or a dict with either as vLLM has it.
            params: `SamplingParams` or a dict of their fields; the model's own defaults if missing.
            request_id: a name for `abort`; made up if missing.
            priority: lower goes first.
            deltas: whether each output holds only the new part; else the same object comes again
                and again, and holds all so far.

        Raises:
            RequestError: the request is wrong, or one of this id is under way.
            EngineDeadError: the workers are gone, or this model is closed.
        """
        self._require_open()
        given = self._params(params)
        return await self._add(as_prompt(prompt), given, None, request_id, priority, deltas)

    async def add_chat(
        self,
        messages: Conversation,
        params: GivenParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        deltas: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: Any = None,
        parallel_tool_calls: bool | None = None,
        **options: Any,
    ) -> RequestStream:
        """Queues a conversation to be answered, as `add_request` does. Each output's completions
        have a `message`, all of it so far, also with `deltas`: one dict, which grows.

        Args:
            messages: as OpenAI's chat has them, or a user's message as a text.
            params: as for `add_request`; a `grammar` is the answer's.
            request_id, priority, deltas: as for `add_request`.
            tools, tool_choice, parallel_tool_calls: as OpenAI's chat has them.
            options: passed to `Tokenizer.render_chat`, such as `template_kwargs`.
        """
        self._require_open()
        turn = await conversation_turn(
            self.frontend,
            as_conversation(messages),
            self._params(params),
            tools=tools,
            tool_choice=tool_choice,
            parallel_tool_calls=parallel_tool_calls,
            **as_chat_options(options),
        )
        return await self._add(turn.prompt, turn.params, turn, request_id, priority, deltas)

    def _params(self, params: GivenParams | None) -> SamplingParams:
        """Returns the parameters of a request, the model's own defaults where none are given."""
        return self.frontend.defaults.sampling_params() if params is None else as_params(params)

    def _require_open(self) -> None:
        if self._is_closed:
            raise EngineDeadError("this AsyncLLM is closed: launch another one")

    async def _add(
        self,
        prompt: Prompt,
        params: SamplingParams,
        turn: Turn | None,
        request_id: str | None,
        priority: int,
        deltas: bool,
    ) -> RequestStream:
        request_id = f"request-{next(self._numbers)}" if request_id is None else request_id
        known = self._streams.get(request_id)
        if request_id in self._coming or (known is not None and not known.is_finished):
            raise RequestError(f"a request of the id {request_id!r} is under way")
        self._coming.add(request_id)
        try:
            output = await self.frontend.submit(
                prompt, params, priority=priority, request_id=request_id
            )
        finally:
            self._coming.discard(request_id)
        builders = []
        if turn is not None:
            builders = [MessageBuilder(self.frontend, turn) for _ in range(params.n)]
        stream = RequestStream(request_id, output, deltas=deltas, builders=builders)
        self._streams[request_id] = stream
        return stream

    async def generate(
        self,
        prompt: GivenPrompt,
        params: GivenParams | None = None,
        request_id: str | None = None,
        *,
        sampling_params: GivenParams | None = None,
        priority: int = 0,
        deltas: bool = False,
    ) -> AsyncIterator[StreamedOutput]:
        """Yields the output of a request as it comes; see `add_request`. The request ends with the
        iteration: close this generator (`contextlib.aclosing`) to leave it early.
        `sampling_params` is vLLM's name for `params`."""
        given = sampling_params if params is None else params
        stream = await self.add_request(
            prompt, given, request_id=request_id, priority=priority, deltas=deltas
        )
        try:
            async for output in stream:
                yield output
        finally:
            stream.abort()

    async def chat(
        self,
        messages: Conversation,
        params: GivenParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        deltas: bool = False,
        **options: Any,
    ) -> AsyncIterator[StreamedOutput]:
        """Yields the answer to a conversation as it comes, as `generate` does; see `add_chat`."""
        stream = await self.add_chat(
            messages, params, request_id=request_id, priority=priority, deltas=deltas, **options
        )
        try:
            async for output in stream:
                yield output
        finally:
            stream.abort()

    async def encode(
        self, prompt: GivenPrompt, pooling: str | None = None, *, priority: int = 0
    ) -> F32:
        """Returns the pooled hidden state of a prompt (a text or token ids), float32 [hidden_size],
        or the hidden states of all its tokens, [tokens, hidden_size].

        Args:
            prompt: a text or token ids.
            pooling: "last", "mean" or "cls", or "all" for all tokens; as the model does it if
                missing.
            priority: as for `add_request`.

        Raises:
            RequestError: the prompt or `pooling` is wrong.
            EngineDeadError: the workers are gone.
            GenerationError: the request was ended before all of it was computed.
        """
        params = self.frontend.pooling.params(pooling, takes_all=True)
        return await self._pool(as_prompt(prompt), params, priority)

    async def _pool(self, prompt: Prompt, params: SamplingParams, priority: int = 0) -> F32:
        self._require_open()
        output = await self.frontend.submit(prompt, params, priority=priority)
        try:
            await output.collect()
        finally:
            output.abort()
        if output.pooled is None:
            raise GenerationError("a request was ended before all of it was computed")
        return output.pooled

    async def embed(
        self,
        text: GivenPrompt,
        *,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        pooling: str | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> F32:
        """Returns the embedding of a text, float32 [dimensions]. Embeddings that are asked for
        together (`asyncio.gather`) share steps. For arguments and errors see `LLM.embed`."""
        model = self.frontend.pooling
        model.check_dimensions(dimensions, self.frontend.hidden_size)
        before, params = model.prompt(prompt_name), model.params(pooling)
        prompt = as_prompt(text)
        prompt = before + prompt if isinstance(prompt, str) else prompt
        prompt = await cut_text(self.frontend, prompt, truncate_prompt_tokens)
        state = await self._pool(prompt, params)
        return model.embedding(state, dimensions, normalize)

    async def score(self, query: str, document: str) -> float:
        """Returns the similarity of two texts, as `LLM.score` does."""
        model = self.frontend.pooling
        if (head := model.cross_encoder) is not None:
            state = await self._pool(*await cross_prompt(self.frontend, query, document))
            return float(head.probabilities(state)[0])
        kind = model.params().pooling
        first, second = await asyncio.gather(
            self.encode(model.prompt_of("query") + query, kind),
            self.encode(model.prompt_of("document", "passage") + document, kind),
        )
        return cosine_similarity(first, second)

    def abort(self, request_id: str) -> bool:
        """Aborts a request: its iterator gets the tokens generated so far, with "abort" as the
        finish reason. Returns whether there was one that had not ended."""
        return self.frontend.abort(lambda known: known == request_id) > 0

    def pause(self) -> None:
        """Lets all requests wait until `resume`; new ones are taken."""
        self.frontend.control.pause_now()

    def resume(self) -> None:
        """Goes on with all requests."""
        self.frontend.control.resume()

    @property
    def is_paused(self) -> bool:
        """Whether requests wait for `resume`."""
        return self.frontend.control.is_paused

    async def sleep(self, level: int = 1, mode: Mode = "keep") -> None:
        """See `LLM.sleep`."""
        await self.frontend.control.sleep(level, mode)

    async def wake_up(self, tags: Sequence[Tag] | None = None) -> None:
        """See `LLM.wake_up`."""
        await self.frontend.control.wake_up(tags)

    async def update_weights(
        self, folder: str | Path, *, version: str | None = None, mode: Mode = "keep"
    ) -> None:
        """See `LLM.update_weights`."""
        await self.frontend.control.update_from_disk(Path(folder), version=version, mode=mode)

    @property
    def is_sleeping(self) -> bool:
        """Whether weights or KV cache have no memory on the device."""
        return self.frontend.control.sleep_level > 0

    async def load_adapter(self, name: str, path: str) -> None:
        """See `LLM.load_adapter`."""
        await self.frontend.variants.of(Adapters).add(name, path)

    async def add_adapter(
        self, name: str, tensors: Mapping[str, Any], config: Mapping[str, Any]
    ) -> None:
        """See `LLM.add_adapter`."""
        await self.frontend.variants.of(Adapters).add_tensors(name, tensors, config)

    def unload_adapter(self, name: str) -> None:
        """See `LLM.unload_adapter`."""
        self.frontend.variants.of(Adapters).remove(name)

    def reset_prefix_cache(self) -> None:
        """Empties the prefix cache, after a change in the meaning of prompts, say."""
        self.frontend.reset_prefix_cache()

    async def close(self) -> None:
        """Ends requests that run, with an error, and the workers. Safe to call twice."""
        self._is_closed = True
        await self.frontend.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
