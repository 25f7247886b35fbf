"""Entry point for offline use: the same engine as the server's, called like a function.

The engine lives on an event loop of its own in a background thread, so that `LLM` works in scripts,
in notebooks and inside other event loops alike.
"""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, cast

from rich.progress import Progress, TaskID

from aioinfer.config import Config, load_config
from aioinfer.engine.frontend import Frontend
from aioinfer.engine.output import RequestOutput, TokenLogprob
from aioinfer.engine.pooling import cosine_similarity
from aioinfer.errors import GenerationError, RequestError
from aioinfer.ipc.sections import F32
from aioinfer.sampling_params import SamplingParams
from aioinfer.scheduler.prompt_rows import PromptScores
from aioinfer.startup import StartupDisplay

T = TypeVar("T")
Prompt = str | Sequence[int]
#: Prompts that are encoded concurrently and then admitted at once: enough to fill the first step.
_BATCH = 64


@dataclass(slots=True)
class Completion:
    """One completion of a prompt.

    Attributes:
        text, token_ids: what was generated; an end token is part of the tokens only.
        logprobs: one for each token, if they were requested.
        finish_reason: "stop", "length" or "abort".
        stop_reason: the string, or the token id of `stop_token_ids`, that ended the text; None at
            the model's own end token.
        num_preemptions: how often its KV blocks were taken away and computed anew.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_preemptions: int = 0


@dataclass(slots=True)
class Output:
    """What `generate` returns for a prompt.

    Attributes:
        prompt_token_ids: the prompt as the model saw it.
        completions: n of them.
        num_cached_tokens: prompt tokens whose KV blocks were in the prefix cache.
        num_prefill_steps: the steps that it took to compute the prompt.
        prompt_scores: the log-probabilities of the prompt's tokens, under `prompt_logprobs`.
        pooled: the pooled hidden state of the prompt, under `pooling`.
    """

    prompt_token_ids: list[int]
    completions: list[Completion]
    num_cached_tokens: int
    num_prefill_steps: int
    prompt_scores: PromptScores | None = None
    pooled: F32 | None = None

    @property
    def text(self) -> str:
        """The text of the first completion."""
        return self.completions[0].text

    @property
    def token_ids(self) -> list[int]:
        """The tokens of the first completion."""
        return self.completions[0].token_ids


class LLM:
    """A model for offline use. Close it, or use it as a context manager, to end its workers.

    Args:
        model: what `model.path` may be: a folder, a GGUF file, a hub id, or `package:NAME/FILE`.
        config: a TOML file to start from.
        settings: further configuration by dotted key, such as `{"cache.block_size": 32}`.
        progress: show progress bars and the start-up table (on stderr).
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        config: str | Path | None = None,
        settings: Mapping[str, Any] | None = None,
        progress: bool = True,
    ):
        overrides = dict(settings or {})
        if model is not None:
            overrides["model.path"] = str(model)
        self._launch(_without_prefill_cap(load_config(config, overrides)), progress)

    @classmethod
    def of(cls, config: Config, *, progress: bool = True) -> LLM:
        """Returns a model with a whole configuration as it is. Raises as `LLM` does."""
        llm = cls.__new__(cls)
        llm._launch(config, progress)
        return llm

    def _launch(self, config: Config, progress: bool) -> None:
        self.config = config
        self._progress = progress
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="aioinfer", daemon=True)
        self._thread.start()
        try:
            with StartupDisplay(quiet=not progress) as display:
                self.frontend: Frontend = self._call(
                    Frontend.launch(self.config, display.on_progress)
                )
        except BaseException:
            _stop_loop(self._loop, self._thread)
            raise
        if progress:
            display.show(
                [engine.report for engine in self.frontend.engines], self.config.served_model_names
            )
        self._close = weakref.finalize(self, _close, self.frontend, self._loop, self._thread)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priorities: Sequence[int] | None = None,
    ) -> list[Output]:
        """Completes prompts together and returns their outputs in the same order.

        Args:
            prompts: one or many, each a text or token ids.
            params: for all, or one for each; the model's own defaults if missing.
            priorities: one for each, under `scheduler.policy = "priority"`.

        Raises:
            RequestError: one of them is wrong; the others are aborted.
            EngineDeadError: a worker died.
        """
        many = _as_list(prompts)
        given = params if params is not None else self.frontend.defaults.sampling_params()
        each = [given] * len(many) if isinstance(given, SamplingParams) else list(given)
        return self._call(self._generate(many, each, priorities or [0] * len(many)))

    def chat(
        self,
        conversations: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Any,
    ) -> list[Output]:
        """Answers one conversation (a list of messages), or many, under the model's chat template.

        `options` are those of `Tokenizer.encode_chat`, such as `tools`. Otherwise as `generate`.
        """
        many = (
            [conversations]
            if conversations and isinstance(conversations[0], Mapping)
            else conversations
        )
        tokenizer = self.frontend.require_tokenizer("messages")
        encoded = [
            tokenizer.encode_chat(cast(Sequence[Mapping[str, Any]], c), **options) for c in many
        ]
        return self.generate(encoded, params)

    def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        pooling: str | None = None,
    ) -> list[F32]:
        """Returns the embedding of each text, float32 [dimensions], in the same order.

        Args:
            texts: one or many, each a text or token ids.
            prompt_name: a prompt of the model's that stands before each text; the model's default
                if missing.
            dimensions: keep so many of the first values; all if missing.
            normalize: whether an embedding's length is 1; as the model does it if missing.
            pooling: "last", "mean" or "cls"; as the model does it if missing.

        Raises:
            RequestError: one of them is wrong; the others are aborted.
            EngineDeadError: a worker died.
        """
        model = self.frontend.pooling
        hidden_size, prompt = self.frontend.hidden_size, model.prompt(prompt_name)
        if dimensions is not None and not 1 <= dimensions <= hidden_size:
            raise RequestError(
                f"dimensions must be in [1, {hidden_size}], not {dimensions}", param="dimensions"
            )
        states = self._pooled(_as_list(texts), prompt, model.params(pooling))
        return [model.embedding(state, dimensions, normalize) for state in states]

    def score(self, queries: str | Sequence[str], documents: Sequence[str]) -> list[float]:
        """Returns the similarity of each pair of texts, or of one query to each document: the
        cosine of the angle between their embeddings.

        Raises what `embed` does, and ValueError if there are as many of neither.
        """
        first = [queries] * len(documents) if isinstance(queries, str) else list(queries)
        if len(first) != len(documents):
            raise ValueError(f"{len(first)} queries and {len(documents)} documents")
        model = self.frontend.pooling
        unique = list(dict.fromkeys(first))
        found = self._pooled(unique, model.prompt_of("query"), model.params())
        of_query = dict(zip(unique, found, strict=True))
        prompt = model.prompt_of("document", "passage")
        states = self._pooled(list(documents), prompt, model.params())
        return [cosine_similarity(of_query[q], s) for q, s in zip(first, states, strict=True)]

    def _pooled(self, inputs: Sequence[Prompt], prompt: str, params: SamplingParams) -> list[F32]:
        """Returns the pooled states of inputs, with `prompt` before those that are texts."""
        texts = [prompt + each if isinstance(each, str) else each for each in inputs]
        count = len(texts)
        found = self._call(self._generate(texts, [params] * count, [0] * count))
        states = [output.pooled for output in found if output.pooled is not None]
        if len(states) < count:
            raise GenerationError("a request was ended before all of it was computed")
        return states

    async def _generate(
        self, prompts: list[Prompt], params: list[SamplingParams], priorities: Sequence[int]
    ) -> list[Output]:
        with Progress(disable=not self._progress, transient=True) as progress:
            task = progress.add_task("generating", total=len(prompts))
            async with asyncio.TaskGroup() as group:
                tasks = []
                requests = zip(prompts, params, priorities, strict=True)
                while some := list(islice(requests, _BATCH)):
                    arrived = time.perf_counter()
                    constraints = [await self.frontend.compile(each) for _, each, _ in some]
                    prepared = await asyncio.gather(
                        *(self.frontend.prepare(prompt) for prompt, _, _ in some)
                    )
                    for prompt, constraint, (_, sampling, priority) in zip(
                        prepared, constraints, some, strict=True
                    ):
                        output = self.frontend.admit(
                            prompt, sampling, constraint, priority=priority, arrived=arrived
                        )
                        tasks.append(group.create_task(_collect(output, progress, task)))
        return [t.result() for t in tasks]

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the engine's loop; an interrupt here cancels it there."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except ExceptionGroup as group:
            raise group.exceptions[0] from group
        except BaseException:
            future.cancel()
            raise

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the engine's event loop, for what is built on `frontend`, and returns
        its result. Raises what it raises."""
        return self._call(work)

    def close(self) -> None:
        """Ends the workers. Safe to call twice."""
        self._close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Returns one prompt or many as a list."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [cast(Prompt, prompts)]
    return list(cast(Sequence[Prompt], prompts))


def _without_prefill_cap(config: Config) -> Config:
    """Lifts the cap on prefill tokens beside decodes unless the configuration sets one: the cap
    keeps streams smooth, and offline nobody reads a stream."""
    if config.scheduler.max_prefill_tokens_beside_decode is not None:
        return config
    scheduler = replace(
        config.scheduler, max_prefill_tokens_beside_decode=config.scheduler.max_num_batched_tokens
    )
    return replace(config, scheduler=scheduler)


async def _collect(output: RequestOutput, progress: Progress, task: TaskID) -> Output:
    """Returns all of a request's output. Aborts the request if the caller is cancelled."""
    completions = [Completion() for _ in range(output.params.n)]
    try:
        async for delta in output:
            completion = completions[delta.index]
            completion.text += delta.text
            completion.token_ids += delta.token_ids
            if delta.logprobs:
                completion.logprobs = (completion.logprobs or []) + delta.logprobs
            completion.finish_reason, completion.stop_reason = (
                delta.finish_reason,
                delta.stop_reason,
            )
    finally:
        output.abort()
    progress.advance(task)
    requests = [sequence.request for sequence in output.sequences]
    for completion, request in zip(completions, requests, strict=True):
        completion.num_preemptions = request.num_preemptions
    return Output(
        output.prompt_token_ids,
        completions,
        output.num_cached_tokens,
        requests[0].num_prefill_steps,
        output.prompt_scores,
        output.pooled,
    )


def _close(frontend: Frontend, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    asyncio.run_coroutine_threadsafe(frontend.close(), loop).result()
    _stop_loop(loop, thread)


def _stop_loop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
