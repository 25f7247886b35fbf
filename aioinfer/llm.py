"""Entry point for offline use: the same engine as the server's, called like a function, with lists
of prompts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, cast

from rich.progress import Progress, TaskID

from aioinfer.background import BackgroundModel
from aioinfer.engine.chat_turn import conversation_turn, parse_message
from aioinfer.engine.logprobs import TokenLogprob
from aioinfer.engine.output import RequestOutput
from aioinfer.engine.pooling import cosine_similarity
from aioinfer.errors import GenerationError
from aioinfer.ipc.sections import F32
from aioinfer.sampling_params import BeamSearchParams, SamplingParams
from aioinfer.scheduler.prompt_rows import PromptScores

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
        cumulative_logprob: of all tokens, in the output of a beam search.
        message: of a chat, what the text means, as OpenAI's chat has it: `role`, `content`, and
            `reasoning_content` and `tool_calls` if there are any. It can go into the next
            conversation.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_preemptions: int = 0
    cumulative_logprob: float | None = None
    message: dict[str, Any] | None = None


@dataclass(slots=True)
class Output:
    """What `generate` returns for a prompt.

    Attributes:
        prompt_token_ids: the prompt as the model saw it.
        completions: n of them.
        num_cached_tokens: prompt tokens whose KV blocks were in the prefix cache.
        num_prefill_steps: the steps that it took to compute the prompt.
        prompt_scores: the log-probabilities of the prompt's tokens, under `prompt_logprobs`.
        pooled: the pooled hidden state of the prompt, under `pooling`; with "all" those of all its
            tokens, float32 [tokens, hidden_size].
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
        many = as_list(prompts)
        each = self._for_each(params, len(many))
        return self.run(self._generate(many, each, priorities or [0] * len(many)))

    def chat(
        self,
        conversations: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: Any = None,
        parallel_tool_calls: bool | None = None,
        **options: Any,
    ) -> list[Output]:
        """Answers one conversation (a list of messages), or many, under the model's chat template.
        Each completion has a `message`; its `text` is what the model wrote.

        Args:
            conversations: messages as OpenAI's chat has them.
            params: as for `generate`; a `grammar` is that of the answer.
            tools, tool_choice, parallel_tool_calls: as OpenAI's chat has them; calls are held to
                the schemas of their functions.
            options: those of `Tokenizer.encode_chat`, such as `template_kwargs`.

        Raises what `generate` does.
        """
        many = (
            [conversations]
            if conversations and isinstance(conversations[0], Mapping)
            else conversations
        )
        given = cast(Sequence[Sequence[Mapping[str, Any]]], many)
        options |= {
            "tools": tools,
            "tool_choice": tool_choice,
            "parallel_tool_calls": parallel_tool_calls,
        }
        return self.run(self._chat(given, self._for_each(params, len(given)), options))

    def _for_each(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        """Returns the parameters of each of `count` requests."""
        given = params if params is not None else self.frontend.defaults.sampling_params()
        return [given] * count if isinstance(given, SamplingParams) else list(given)

    async def _chat(
        self,
        conversations: Sequence[Sequence[Mapping[str, Any]]],
        params: Sequence[SamplingParams],
        options: Mapping[str, Any],
    ) -> list[Output]:
        turns = [
            await conversation_turn(self.frontend, messages, each, **options)
            for messages, each in zip(conversations, params, strict=True)
        ]
        prompts: list[Prompt] = [turn.prompt for turn in turns]
        outputs = await self._generate(prompts, [turn.params for turn in turns], [0] * len(turns))
        for turn, output in zip(turns, outputs, strict=True):
            for completion in output.completions:
                message = await parse_message(self.frontend, turn, completion.text)
                completion.message = message.to_dict()
        return outputs

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams | Sequence[BeamSearchParams],
    ) -> list[Output]:
        """Returns the likeliest outputs of each prompt that a beam search finds, the best first.

        It is `generate` with `SamplingParams.beam_search`; raises what that does.
        """
        each = (
            params.sampling_params()
            if isinstance(params, BeamSearchParams)
            else [one.sampling_params() for one in params]
        )
        return self.generate(prompts, each)

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
        model.check_dimensions(dimensions, self.frontend.hidden_size)
        prompt = model.prompt(prompt_name)
        states = self._pooled(as_list(texts), prompt, model.params(pooling))
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
        found = self.run(self._generate(texts, [params] * count, [0] * count))
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


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Returns one prompt or many as a list."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [cast(Prompt, prompts)]
    return list(cast(Sequence[Prompt], prompts))


async def _collect(output: RequestOutput, progress: Progress, task: TaskID) -> Output:
    """Returns all of a request's output. Aborts the request if the caller is cancelled."""
    completions = [Completion() for _ in range(output.params.n)]
    try:
        for delta in await output.collect():
            completions[delta.index] = Completion(
                delta.text,
                delta.token_ids,
                delta.logprobs,
                delta.finish_reason,
                delta.stop_reason,
                cumulative_logprob=delta.cumulative_logprob,
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
    )
