"""Entry point for offline use: the same engine as the server's, called like a function, with lists
of prompts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from rich.progress import Progress, TaskID

from aioinfer.arguments import (
    Conversation,
    GivenParams,
    GivenPrompt,
    Message,
    Prompt,
    as_chat_options,
    as_conversations,
    as_pairs,
    as_prompts,
    check_count,
    params_of_each,
)
from aioinfer.background import BackgroundModel
from aioinfer.engine.chat_turn import Turn, conversation_turn, parse_message
from aioinfer.engine.output import RequestOutput
from aioinfer.engine.pooled_prompts import cross_prompt, cut_text
from aioinfer.engine.served_model import cosine_similarity
from aioinfer.errors import GenerationError, OverloadedError
from aioinfer.features.adapters.serving import Serving as Adapters
from aioinfer.features.logprobs.planning import TokenLogprob
from aioinfer.features.prompt_logprobs.planning import PromptScores
from aioinfer.ipc.sections import F32
from aioinfer.sampling_params import BeamSearchParams, SamplingParams

#: Prompts that are encoded concurrently and then admitted at once: enough to fill the first step.
_BATCH = 64

#: Prompts, with the parameters and the priority of each.
Requests = list[tuple[Prompt, SamplingParams, int]]


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a prompt.

    Attributes:
        text, token_ids: the output; an end token is part of the tokens only.
        logprobs: one for each token, if they were requested.
        finish_reason: "stop", "length" or "abort".
        stop_reason: the string, or the token id of `stop_token_ids`, that ended the text; None at
            the model's own end token.
        num_preemptions: how often it was preempted: its KV blocks were taken away and recomputed.
        cumulative_logprob: of all tokens, in the output of a beam search.
        message: of a chat, the text parsed into a message, as OpenAI's chat has it: `role`,
            `content`, and `reasoning_content` and `tool_calls` if there are any. It can go into the
            next conversation.
        features: what step features of other packages have found, by the feature's name.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_preemptions: int = 0
    cumulative_logprob: float | None = None
    message: dict[str, Any] | None = None
    features: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Output:
    """The output of a prompt, as `generate` returns it.

    Attributes:
        prompt_token_ids: the prompt as the model saw it.
        completions: n of them.
        num_cached_tokens: prompt tokens found in the prefix cache.
        num_prefill_steps: the steps that it took to compute the prompt.
        prompt_scores: the log-probabilities of the prompt's tokens, under `prompt_logprobs`.
        pooled: the pooled hidden state of the prompt, under `pooling`; with "all" the hidden states
            of all its tokens, float32 [tokens, hidden_size].
        weight_versions: of the weights that computed it, oldest first.
    """

    prompt_token_ids: list[int]
    completions: list[CompletionOutput]
    num_cached_tokens: int
    num_prefill_steps: int
    prompt_scores: PromptScores | None = None
    pooled: F32 | None = None
    weight_versions: Sequence[str] = ()

    @property
    def text(self) -> str:
        """The text of the first completion."""
        return self.completions[0].text

    @property
    def outputs(self) -> list[CompletionOutput]:
        """vLLM's name for `completions`."""
        return self.completions

    @property
    def message(self) -> dict[str, Any] | None:
        """The message of the first completion, of a chat."""
        return self.completions[0].message

    @property
    def token_ids(self) -> list[int]:
        """The tokens of the first completion."""
        return self.completions[0].token_ids


class LLM(BackgroundModel):
    """A model for offline use; see `BackgroundModel` for its arguments."""

    def generate(
        self,
        prompts: GivenPrompt | Sequence[GivenPrompt],
        params: GivenParams | Sequence[GivenParams] | None = None,
        *,
        sampling_params: GivenParams | Sequence[GivenParams] | None = None,
        priorities: Sequence[int] | None = None,
        use_tqdm: bool = True,
    ) -> list[Output]:
        """Completes prompts together and returns their outputs in the same order.

        Args:
            prompts: one or many, each a text or token ids, or a dict with either as vLLM has it.
            params: `SamplingParams`, or a dict of their fields, for all, or one for each; the
                model's own defaults if missing.
            sampling_params: vLLM's name for `params`.
            priorities: one for each; lower goes first.
            use_tqdm: whether to show progress; none is shown with the model's `progress=False`.

        Raises:
            RequestError: one of them is wrong; the others are aborted.
            EngineDeadError: a worker died, or this model is closed.
        """
        many = as_prompts(prompts)
        each = self._for_each(sampling_params if params is None else params, len(many))
        if priorities is not None:
            check_count("priorities", priorities, len(many))
        return self.run(self._generate(many, each, priorities or [0] * len(many), use_tqdm))

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: GivenParams | Sequence[GivenParams] | None = None,
        *,
        sampling_params: GivenParams | Sequence[GivenParams] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: Any = None,
        parallel_tool_calls: bool | None = None,
        use_tqdm: bool = True,
        **options: Any,
    ) -> list[Output]:
        """Answers a conversation, or many, under the model's chat template. Each completion has a
        `message`; its `text` is the model's output as it is.

        Args:
            messages: of one conversation or of each, as OpenAI's chat has them; a text stands for
                a user's message.
            params, sampling_params, use_tqdm: as for `generate`; a `grammar` is the answer's.
            tools, tool_choice, parallel_tool_calls: as OpenAI's chat has them; calls are held to
                the schemas of their functions.
            options: passed to `Tokenizer.render_chat`, such as `template_kwargs`.

        Raises the errors of `generate`.
        """
        many = as_conversations(messages)
        each = self._for_each(sampling_params if params is None else params, len(many))
        given = as_chat_options(options) | {
            "tools": tools,
            "tool_choice": tool_choice,
            "parallel_tool_calls": parallel_tool_calls,
        }
        return self.run(self._chat(many, each, given, use_tqdm))

    def _for_each(
        self, params: GivenParams | Sequence[GivenParams] | None, count: int
    ) -> list[SamplingParams]:
        """Returns the parameters of each of `count` requests."""
        given = params if params is not None else self.frontend.defaults.sampling_params()
        return params_of_each(given, count)

    async def _chat(
        self,
        conversations: Sequence[Sequence[Message]],
        params: Sequence[SamplingParams],
        options: Mapping[str, Any],
        shows_progress: bool,
    ) -> list[Output]:
        turns: list[Turn] = []
        running: list[asyncio.Task[Output]] = []

        async def batches() -> AsyncIterator[Requests]:
            """Encodes conversations while others run. Where pictures use all memory, waits until
            one has its answer, and its pictures are freed."""
            some: Requests = []
            for messages, each in zip(conversations, params, strict=True):
                while True:
                    try:
                        turn = await conversation_turn(self.frontend, messages, each, **options)
                        break
                    except OverloadedError:
                        if not some and all(task.done() for task in running):
                            raise
                    if some:
                        yield some
                        some = []
                    unanswered = [task for task in running if not task.done()]
                    await asyncio.wait(unanswered, return_when=asyncio.FIRST_COMPLETED)
                some.append((turn.prompt, turn.params, 0))
                turn = replace(turn, prompt=[])
                turns.append(turn)
                if len(some) == _BATCH:
                    yield some
                    some = []
            yield some

        outputs = await self._run(batches(), running, len(conversations), shows_progress)
        for turn, output in zip(turns, outputs, strict=True):
            for completion in output.completions:
                message = await parse_message(self.frontend, turn, completion.text)
                completion.message = message.to_dict()
        return outputs

    def load_adapter(self, name: str, path: str) -> None:
        """Adds an adapter (LoRA), which requests have by `SamplingParams.adapter`; in the place of
        one with its name. Raises `ConfigError` if it does not go with the model.

        Args:
            path: a folder as peft saves it, a hub id or `package:NAME/FOLDER`.
        """
        self.run(self.frontend.variants.of(Adapters).add(name, path))

    def add_adapter(self, name: str, tensors: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        """Adds an adapter that is in memory, as `load_adapter` does: of a trainer, say. Requests
        that come from now on have it; no key of one before it is used for them.

        Args:
            tensors: by the names of peft's state dict.
            config: the content of `adapter_config.json`, as peft's `LoraConfig.to_dict` has it.
        """
        self.run(self.frontend.variants.of(Adapters).add_tensors(name, tensors, config))

    def unload_adapter(self, name: str) -> None:
        """Removes an adapter. Raises `RequestError` if there is none of this name."""

        async def remove() -> None:
            self.frontend.variants.of(Adapters).remove(name)

        self.run(remove())

    def beam_search(
        self,
        prompts: GivenPrompt | Sequence[GivenPrompt],
        params: BeamSearchParams | Sequence[BeamSearchParams],
    ) -> list[Output]:
        """Returns the likeliest outputs of each prompt that a beam search finds, the best first.

        It is `generate` with these parameters, and raises the same errors.
        """
        return self.generate(prompts, params)

    def embed(
        self,
        texts: GivenPrompt | Sequence[GivenPrompt],
        *,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        pooling: str | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[F32]:
        """Returns the embedding of each text, float32 [dimensions], in the same order.

        Args:
            texts: one or many, each a text or token ids.
            prompt_name: a prompt of the model's that stands before each text; the model's default
                if missing.
            dimensions: keep so many of the first values; all if missing.
            normalize: whether an embedding's length is 1; as the model does it if missing.
            pooling: "last", "mean" or "cls"; as the model does it if missing.
            truncate_prompt_tokens: keep so many tokens of a text at most, -1: as many as fit; a
                text that is too long is refused if missing.

        Raises:
            RequestError: one of them is wrong; the others are aborted.
            EngineDeadError: a worker died.
        """
        model = self.frontend.pooling
        model.check_dimensions(dimensions, self.frontend.hidden_size)
        prompt = model.prompt(prompt_name)
        params, kept = model.params(pooling), truncate_prompt_tokens
        states = self._pooled(as_prompts(texts), prompt, params, kept)
        return [model.embedding(state, dimensions, normalize) for state in states]

    def score(self, queries: str | Sequence[str], documents: str | Sequence[str]) -> list[float]:
        """Returns the similarity of each pair of texts, or of one query to each document: what a
        cross-encoder gives them, or the cosine of the angle between their embeddings.

        Raises the errors of `embed`; `RequestError` too if there are as many of neither.
        """
        pairs = as_pairs(queries, documents)
        model = self.frontend.pooling
        if (head := model.cross_encoder) is not None:
            states = self.run(self._cross_states(pairs))
            return [float(head.probabilities(state)[0]) for state in states]
        unique = list(dict.fromkeys(query for query, _ in pairs))
        found = self._pooled(unique, model.prompt_of("query"), model.params())
        of_query = dict(zip(unique, found, strict=True))
        prompt = model.prompt_of("document", "passage")
        states = self._pooled([document for _, document in pairs], prompt, model.params())
        return [
            cosine_similarity(of_query[query], state)
            for (query, _), state in zip(pairs, states, strict=True)
        ]

    def _pooled(
        self,
        inputs: Sequence[Prompt],
        prompt: str,
        params: SamplingParams,
        kept: int | None = None,
    ) -> list[F32]:
        """Returns the pooled states of inputs, with `prompt` before each input that is a text, each
        cut to `kept` tokens as by `truncate_prompt_tokens`."""
        texts = [prompt + each if isinstance(each, str) else each for each in inputs]

        async def pool() -> list[F32]:
            cut = texts
            if kept is not None:
                cut = [await cut_text(self.frontend, text, kept) for text in texts]
            return await self._states(cut, [params] * len(cut))

        return self.run(pool())

    async def _cross_states(self, pairs: Sequence[tuple[str, str]]) -> list[F32]:
        """Returns the pooled states of pairs of texts for the model's head."""
        made = [await cross_prompt(self.frontend, *pair) for pair in pairs]
        return await self._states([ids for ids, _ in made], [params for _, params in made])

    async def _states(self, prompts: list[Prompt], params: Sequence[SamplingParams]) -> list[F32]:
        """Returns the pooled states of prompts."""
        found = await self._generate(prompts, params, [0] * len(prompts))
        states = [output.pooled for output in found if output.pooled is not None]
        if len(states) < len(prompts):
            raise GenerationError("a request was ended before all of it was computed")
        return states

    async def _generate(
        self,
        prompts: list[Prompt],
        params: Sequence[SamplingParams],
        priorities: Sequence[int],
        shows_progress: bool = True,
    ) -> list[Output]:
        async def batches() -> AsyncIterator[Requests]:
            requests = zip(prompts, params, priorities, strict=True)
            while some := list(islice(requests, _BATCH)):
                yield some

        return await self._run(batches(), [], len(prompts), shows_progress)

    async def _run(
        self,
        batches: AsyncIterator[Requests],
        running: list[asyncio.Task[Output]],
        total: int,
        shows_progress: bool,
    ) -> list[Output]:
        """Runs requests as they come, in batches, and returns all of their outputs.

        Args:
            batches: of requests.
            running: gets the task of each request.
            total: how many requests there are, to show the progress.
            shows_progress: whether to, unless the model shows none.
        """
        is_quiet = not (self._progress and shows_progress)
        with Progress(disable=is_quiet, transient=True) as progress:
            task = progress.add_task("generating", total=total)
            async with asyncio.TaskGroup() as group:
                async for some in batches:
                    async for output in self._admit(some):
                        running.append(group.create_task(_collect(output, progress, task)))
                    some.clear()  # prompts may have pictures
        return [each.result() for each in running]

    async def _admit(self, requests: Requests) -> AsyncIterator[RequestOutput]:
        """Submits requests, which share steps, and yields their outputs."""
        arrived = time.perf_counter()
        constraints = [await self.frontend.compile(params) for _, params, _ in requests]
        prepared = await asyncio.gather(
            *(self.frontend.prepare(prompt, params=params) for prompt, params, _ in requests)
        )
        for prompt, constraint, (_, params, priority) in zip(
            prepared, constraints, requests, strict=True
        ):
            yield self.frontend.admit(
                prompt, params, constraint, priority=priority, arrived=arrived
            )


async def _collect(output: RequestOutput, progress: Progress, task: TaskID) -> Output:
    """Returns all of a request's output. Aborts the request if the caller is cancelled."""
    completions = [CompletionOutput() for _ in range(output.params.n)]
    try:
        for delta in await output.collect():
            completions[delta.index] = CompletionOutput(
                delta.text,
                delta.token_ids,
                delta.logprobs,
                delta.finish_reason,
                delta.stop_reason,
                cumulative_logprob=delta.cumulative_logprob,
                features=output.features(delta.index),
            )
    finally:
        output.abort()
    progress.advance(task)
    requests = [sequence.request for sequence in output.sequences]
    for index, completion in enumerate(completions):  # a beam search has one request
        completion.num_preemptions = requests[min(index, len(requests) - 1)].num_preemptions
    return Output(
        output.prompt_token_ids,
        completions,
        output.num_cached_tokens,
        requests[0].num_prefill_steps,
        output.prompt_scores,
        output.pooled,
        tuple(output.weight_versions),
    )
