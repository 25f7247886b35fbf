"""The door to the model: text to token ids, checks, and the choice of the engine that takes a
request.

There is one `Frontend`, whatever `parallel.data_parallel_size` is: one tokenizer, one pool of
encoding threads, one set of the model's defaults, before one or several engines on the same event
loop. The HTTP handlers and `LLM` know nothing else.
"""

from __future__ import annotations

import asyncio
import random
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from aioinfer.checkpoint.source import resolve_model
from aioinfer.config import Config, ModelConfig
from aioinfer.engine.engine import Engine
from aioinfer.engine.metrics import LoopLag
from aioinfer.engine.output import Choice, Generation
from aioinfer.engine.router import Router
from aioinfer.errors import EngineDeadError, RequestError
from aioinfer.executor.base import Executor, ProgressCallback
from aioinfer.executor.factory import make_executor
from aioinfer.models.registry import load_model_config
from aioinfer.sampling_params import SamplingParams
from aioinfer.scheduler.prefix_cache import extend_hashes, root_hash
from aioinfer.scheduler.request import ForkGroup, Request
from aioinfer.text.generation_defaults import GenerationDefaults
from aioinfer.text.tokenizer import Tokenizer

T = TypeVar("T")
#: Token-id prompts up to this length are checked and hashed on the event loop (about 0.1 ms at
#: most).
_SHORT_PROMPT = 1024
#: Token ids that are converted in one go.
_CONVERTED = 16_384


def _no_progress(phase: str, done: int, total: int) -> None:
    """Tells nobody."""


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A prompt that was looked through.

    Attributes:
        token_ids: of the prompt.
        tokens: the same, as int32.
        hashes: of its KV blocks, the same on every engine; empty without a prefix cache.
    """

    token_ids: list[int]
    tokens: array[int]
    hashes: list[bytes]


class Frontend:
    """One model being served. Made by `launch`; all methods are called on its event loop.

    Attributes:
        engines: the replicas of the model, by number.
        tokenizer, defaults, vocab_size: what the model's files say.
        max_model_len: the most tokens of a request, on whatever engine.
        dead_reason: why no request can be served any more, or None.
        loop_lag: how late the event loop is.
    """

    tokenizer: Tokenizer
    defaults: GenerationDefaults
    max_model_len: int
    vocab_size: int

    def __init__(self, config: Config, executors: Sequence[Executor]):
        """Makes an engine for each executor. Nothing runs before `start`."""
        self.config = config
        self.dead_reason: str | None = None
        self.engines = [
            Engine(number, config, executor, self._die) for number, executor in enumerate(executors)
        ]
        self.loop_lag = LoopLag(lambda: not all(engine.is_idle for engine in self.engines))
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="tokenize")
        self._seeds = random.Random(config.model.seed)
        self._request_numbers = count()
        self._dead = asyncio.Event()

    # ---------------------------------------------------------------- life

    @classmethod
    async def launch(cls, config: Config, on_progress: ProgressCallback = _no_progress) -> Frontend:
        """Finds the model, starts the workers of all engines side by side, and loads the tokenizer
        meanwhile.

        Raises:
            ConfigError: the configuration does not go with the model or the machine.
            EngineDeadError: a worker failed to start.
        """
        begin = time.perf_counter()
        folder = await asyncio.to_thread(_find_model, config)
        resolved = time.perf_counter()
        frontend = cls(
            config,
            [
                make_executor(config, folder, number)
                for number in range(config.parallel.data_parallel_size)
            ],
        )
        try:
            await frontend.start(folder, on_progress)
        except BaseException:
            await frontend.close()
            raise
        for engine in frontend.engines:
            engine.report.phases[:0] = [("find the model", resolved - begin)]
            engine.report.phases.append(("in all", time.perf_counter() - begin))
        return frontend

    async def start(self, folder: Path, on_progress: ProgressCallback = _no_progress) -> None:
        """Starts the engines and loads the text side.

        The first failure cancels what is left of it; then `close` is due.
        """
        try:
            async with asyncio.TaskGroup() as group:
                deaths = group.create_task(self._raise_death())
                starts = [group.create_task(self._in_thread(lambda: self._load_text_side(folder)))]
                # all load the same weights at the same time: the bar of the first stands for all
                starts += [
                    group.create_task(e.start(on_progress if not e.number else _no_progress))
                    for e in self.engines
                ]
                await asyncio.wait(starts)
                deaths.cancel()
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        self._require_alive()
        self.max_model_len = min(engine.report.max_model_len for engine in self.engines)
        self._router = Router([engine.scheduler for engine in self.engines])

    async def _raise_death(self) -> None:
        await self._dead.wait()
        self._require_alive()

    def _load_text_side(self, folder: Path) -> None:
        """Loads, in a thread, what the workers do not need."""
        model = self.config.model
        tokenizer_folder = (
            folder
            if model.tokenizer is None
            else resolve_model(ModelConfig(path=model.tokenizer, load_format="dummy"))
        )
        self.tokenizer = Tokenizer.load(tokenizer_folder, model.chat_template)
        self.defaults = GenerationDefaults.load(folder, self.tokenizer)
        self.vocab_size = load_model_config(
            folder, trust_remote_code=model.trust_remote_code
        ).vocab_size

    def is_healthy(self) -> bool:
        """Whether requests can be served."""
        return self.dead_reason is None

    async def wait_dead(self) -> None:
        """Returns when a worker has died or hung; `dead_reason` says which and how."""
        await self._dead.wait()

    async def drain(self, timeout_s: float) -> bool:
        """Waits until no request is left, or for `timeout_s` seconds. Returns whether none is."""
        try:
            async with asyncio.timeout(timeout_s):
                while busy := [engine for engine in self.engines if not engine.is_idle]:
                    await busy[0].wait_idle()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Fails what still runs and ends the workers."""
        self._end_all("the server is shutting down")
        await asyncio.gather(*(engine.shutdown() for engine in self.engines))
        self._threads.shutdown(wait=False, cancel_futures=True)

    def stats(self) -> dict[str, float]:
        """Returns the state of queues and cache, and totals since the start, of all engines
        together."""
        schedulers = [engine.scheduler for engine in self.engines]
        totals = [scheduler.stats for scheduler in schedulers]
        return {
            "running": sum(len(scheduler.running) for scheduler in schedulers),
            "waiting": sum(scheduler.num_waiting for scheduler in schedulers),
            "kv_cache_usage": sum(scheduler.kv_cache.usage for scheduler in schedulers)
            / len(schedulers),
            "steps": sum(total.steps for total in totals),
            "preemptions": sum(total.preemptions for total in totals),
            "prefix_tokens_queried": sum(total.prefix_queried for total in totals),
            "prefix_tokens_hit": sum(total.prefix_hit for total in totals),
            "wasted_rows": sum(total.wasted_rows for total in totals),
        }

    # ---------------------------------------------------------------- requests

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of `text`, encoded in a thread. Raises `RequestError`."""
        return await self._in_thread(lambda: self.tokenizer.encode(text, add_special_tokens))

    async def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Returns the token ids of a conversation under the model's chat template.

        Raises `RequestError`.
        """
        return await self._in_thread(lambda: self.tokenizer.encode_chat(messages, **options))

    async def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        add_special_tokens: bool = True,
        priority: int = 0,
        request_id: str | None = None,
    ) -> Generation:
        """Queues a request and returns its generation. Cancelling it leaves nothing behind.

        Args:
            prompt: text, or token ids as they are.
            params: how to choose tokens and when to end.
            add_special_tokens: whether encoding text adds the tokenizer's BOS and the like.
            priority: lower goes first; only under `scheduler.policy = "priority"`.
            request_id: for messages; made up if missing.

        Raises:
            RequestError: the request is at fault or could never fit.
            EngineDeadError: the engine is gone.
        """
        arrived = time.perf_counter()
        self._require_alive()
        prepared = await self.prepare(prompt, add_special_tokens)
        return self.admit(
            prepared, params, priority=priority, request_id=request_id, arrived=arrived
        )

    async def prepare(
        self, prompt: str | Sequence[int], add_special_tokens: bool = True
    ) -> PreparedPrompt:
        """Does what of `submit` takes long, if it does in a thread. Raises `RequestError`."""
        token_ids = (
            await self.encode(prompt, add_special_tokens) if isinstance(prompt, str) else prompt
        )
        if len(token_ids) <= _SHORT_PROMPT:
            return self._prepare_prompt(token_ids)
        return await self._in_thread(lambda: self._prepare_prompt(token_ids))

    def admit(
        self,
        prompt: PreparedPrompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        request_id: str | None = None,
        arrived: float,
    ) -> Generation:
        """Does the rest of `submit`. What is admitted without a wait in between shares a step.

        Args:
            arrived: when the request did, of `time.perf_counter`.
        """
        self._require_alive()
        if priority and self.config.scheduler.policy != "priority":
            raise RequestError(
                "priority needs the server's scheduler.policy to be 'priority'", param="priority"
            )
        max_len = self._check_lengths(len(prompt.tokens), params)
        self._check_token_ids(params)
        # nothing waits from here on: the loads by which the engine is chosen are those that the
        # request finds
        route = self._router.route(len(prompt.tokens), prompt.hashes, params.n)
        engine = self.engines[route.engine]
        generation = Generation(
            request_id or f"request-{next(self._request_numbers)}",
            prompt.token_ids,
            params,
            engine.abort,
        )
        self._make_choices(generation, prompt, max_len, priority, route.num_tokens)
        self._router.promise(route, generation.choices[0].request)
        engine.add(generation, arrived)
        self.loop_lag.watch()
        return generation

    def _prepare_prompt(self, token_ids: Sequence[int]) -> PreparedPrompt:
        """Converts, checks and hashes a prompt. Raises `RequestError`."""
        if not token_ids:
            raise RequestError("the prompt is empty", param="prompt")
        try:
            tokens = array("i")
            # in pieces: the interpreter changes threads between, not within
            for start in range(0, len(token_ids), _CONVERTED):
                tokens.extend(array("i", token_ids[start : start + _CONVERTED]))
        except (TypeError, OverflowError) as error:
            raise RequestError(
                f"the prompt must hold token ids: {error}", param="prompt"
            ) from error
        # a long prompt is not to hold the interpreter, which the event loop needs
        values = np.frombuffer(tokens, np.int32)
        if values.min() < 0 or values.max() >= self.vocab_size:
            raise RequestError(
                f"the prompt holds a token id outside of 0 to {self.vocab_size - 1}", param="prompt"
            )
        hashes: list[bytes] = []
        if self.engines[0].scheduler.kv_cache.prefix_caching:
            extend_hashes(hashes, tokens, self.engines[0].report.block_size, root_hash())
        return PreparedPrompt(
            token_ids if isinstance(token_ids, list) else list(token_ids), tokens, hashes
        )

    def _check_lengths(self, prompt_len: int, params: SamplingParams) -> int:
        """Returns the length at which a request ends.

        Raises `RequestError` if it could never fit.
        """
        room = self.max_model_len - prompt_len
        if room < 1:
            raise RequestError(
                f"the prompt has {prompt_len} tokens; the longest that leaves room for one more "
                f"is {self.max_model_len - 1}",
                param="prompt",
                code="context_length_exceeded",
            )
        wanted = room if params.max_tokens is None else params.max_tokens
        if wanted > room:
            raise RequestError(
                f"max_tokens is {wanted}, but beside the prompt's {prompt_len} tokens only {room} "
                f"fit into {self.max_model_len}",
                param="max_tokens",
                code="context_length_exceeded",
            )
        if params.min_tokens > wanted:
            raise RequestError(
                f"min_tokens is {params.min_tokens}, but at most {wanted} tokens fit",
                param="min_tokens",
            )
        return prompt_len + wanted

    def _check_token_ids(self, params: SamplingParams) -> None:
        for name, ids in (
            ("logit_bias", params.logit_bias),
            ("stop_token_ids", params.stop_token_ids),
        ):
            if any(not 0 <= token < self.vocab_size for token in ids):
                raise RequestError(
                    f"{name} holds a token id outside of 0 to {self.vocab_size - 1}", param=name
                )

    def _make_choices(
        self,
        generation: Generation,
        prompt: PreparedPrompt,
        max_len: int,
        priority: int,
        num_expected: int,
    ) -> None:
        """Makes the n requests of a generation; `num_expected` tokens of the prompt are likely to
        be in the cache."""
        params, tokens = generation.params, prompt.tokens
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(64)
        end_tokens = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else frozenset(self.defaults.eos_token_ids)
        )
        group = ForkGroup() if params.n > 1 else None
        for index in range(params.n):
            request = Request(
                generation.request_id,
                tokens[:],
                len(tokens),
                params,
                max_len,
                (seed + index) % 2**64,
                end_tokens,
                priority,
                prompt.hashes[:],
                group=group,
                # the first computes the prompt for all
                num_expected=num_expected if index == 0 else len(tokens) - 1,
            )
            detokenizer = self.tokenizer.detokenizer(
                generation.prompt_token_ids, params.skip_special_tokens
            )
            generation.choices.append(Choice(index, request, generation, detokenizer))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    # ---------------------------------------------------------------- failure

    def _require_alive(self) -> None:
        if self.dead_reason is not None:
            raise EngineDeadError(self.dead_reason)

    def _die(self, reason: str) -> None:
        """Ends everything, the other engines included: a worker of one of them died or hung."""
        self._end_all(reason)
        self._dead.set()

    def _end_all(self, reason: str) -> None:
        if self.dead_reason is None:
            self.dead_reason = reason
        for engine in self.engines:
            engine.end_all(self.dead_reason)


def _find_model(config: Config) -> Path:
    """Returns the model's folder, after a check that costs nothing yet: whether the workers can
    share the model."""
    folder = resolve_model(config.model)
    load_model_config(
        folder, trust_remote_code=config.model.trust_remote_code
    ).check_tensor_parallel(config.parallel.tensor_parallel_size)
    return folder
