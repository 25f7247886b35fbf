"""The engine: requests in, deltas out, and between them the step loop, the heart of the system.

Everything here runs on one event loop. A turn of the step loop begins when a result arrives:

    result of step N-1 ─► scheduler.update ─► schedule N+1 ─► post it ─► detokenize and emit N-1's tokens

While it runs, the workers execute step N, so they never wait for text. The loop neither polls nor blocks:
results wake it through the executor, and new requests through `submit`. An idle engine does nothing.
"""

from __future__ import annotations

import asyncio
import random
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from aioinfer.config import Config, ModelConfig
from aioinfer.engine.generation import Choice, Generation, TokenLogprob
from aioinfer.engine.generation_defaults import GenerationDefaults
from aioinfer.engine.metrics import EngineMetrics
from aioinfer.engine.tokenizer import Tokenizer
from aioinfer.errors import EngineDeadError, GenerationError, RequestError
from aioinfer.executor.base import Executor, ProgressCallback, WorkerReport
from aioinfer.executor.factory import make_executor
from aioinfer.models.architecture import Architecture
from aioinfer.models.source import resolve_model
from aioinfer.sampling_params import SamplingParams
from aioinfer.scheduler.plan import StepResult
from aioinfer.scheduler.prefix_cache import extend_hashes, root_hash
from aioinfer.scheduler.request import ForkGroup, Request
from aioinfer.scheduler.scheduler import Scheduler, SchedulerLimits, StepOutput

T = TypeVar("T")
#: Token-id prompts up to this length are checked and hashed on the event loop (about 0.1 ms at most).
_SHORT_PROMPT = 1024
#: Tokens that are emitted in one go, in about 2 ms.
_PORTION = 256


class Engine:
    """One model being served. Made by `launch`; all methods are called on its event loop."""

    scheduler: Scheduler
    report: WorkerReport
    tokenizer: Tokenizer
    defaults: GenerationDefaults
    max_model_len: int
    vocab_size: int

    def __init__(self, config: Config, executor: Executor):
        self.config = config
        self.dead_reason: str | None = None
        self.metrics = EngineMetrics()
        self._executor = executor
        self._pipeline_depth = 2 if config.scheduler.plan_ahead else 1
        self._choices: dict[Request, Choice] = {}
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="tokenize")
        self._seeds = random.Random(config.model.seed)
        self._request_numbers = count()
        self._turn_is_due = False
        self._emission: Iterator[None] = iter(())
        self._emit_s = 0.0
        self._dead = asyncio.Event()
        self._drained = asyncio.Event()

    # ---------------------------------------------------------------- life

    @classmethod
    async def launch(cls, config: Config, on_progress: ProgressCallback = lambda phase, done, total: None) -> Engine:
        """Finds the model, starts the workers and loads the tokenizer meanwhile.

        Raises:
            ConfigError: the configuration does not go with the model or the machine.
            EngineDeadError: a worker failed to start.
        """
        begin = time.perf_counter()
        folder = await asyncio.to_thread(_find_model, config)
        resolved = time.perf_counter()
        engine = cls(config, make_executor(config, folder))
        loading = asyncio.ensure_future(engine._in_thread(lambda: engine._load_text_side(folder)))
        try:
            report = await engine._executor.start(engine._turn, engine._die, on_progress)
            await loading
            engine._require_alive()
        except BaseException:
            loading.cancel()
            await engine.close()
            raise
        report.phases[:0] = [("find the model", resolved - begin)]
        report.phases.append(("in all", time.perf_counter() - begin))
        engine._open(report)
        return engine

    def _load_text_side(self, folder: Path) -> None:
        """Loads, in a thread, what the workers do not need."""
        model = self.config.model
        tokenizer_folder = folder if model.tokenizer is None else resolve_model(ModelConfig(path=model.tokenizer, load_format="dummy"))
        self.tokenizer = Tokenizer.load(tokenizer_folder, model.chat_template)
        self.defaults = GenerationDefaults.load(folder, self.tokenizer)
        self.vocab_size = Architecture.load(folder).vocab_size

    def _open(self, report: WorkerReport) -> None:
        """Makes the scheduler for what the workers can hold."""
        self.report = report
        self.max_model_len = report.max_model_len
        self.scheduler = Scheduler(
            SchedulerLimits(
                num_blocks=report.num_blocks,
                block_size=report.block_size,
                max_num_seqs=self.config.scheduler.max_num_seqs,
                token_budget=self.config.scheduler.max_num_batched_tokens,
                prefill_cap=self.config.max_prefill_tokens_beside_decode,
                prefix_caching=self.config.cache.enable_prefix_caching,
                by_priority=self.config.scheduler.policy == "priority",
            )
        )

    def is_healthy(self) -> bool:
        """Whether requests can be served."""
        return self.dead_reason is None

    async def wait_dead(self) -> None:
        """Returns when a worker has died or hung; `dead_reason` says how."""
        await self._dead.wait()

    async def drain(self, timeout_s: float) -> bool:
        """Waits until no request is left, or for `timeout_s` seconds. Returns whether none is."""
        if self._choices:
            self._drained.clear()
            try:
                await asyncio.wait_for(self._drained.wait(), timeout_s)
            except TimeoutError:
                return False
        return True

    async def close(self) -> None:
        """Fails what still runs and ends the workers."""
        self._fail_all("the server is shutting down")
        await self._executor.shutdown()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def stats(self) -> dict[str, float]:
        """Returns the state of queues and cache, and totals since the start."""
        totals = self.scheduler.stats
        return {
            "running": len(self.scheduler.running),
            "waiting": self.scheduler.num_waiting,
            "kv_cache_usage": self.scheduler.pool.usage,
            "steps": totals.steps,
            "preemptions": totals.preemptions,
            "prefix_tokens_queried": totals.prefix_queried,
            "prefix_tokens_hit": totals.prefix_hit,
            "wasted_rows": totals.wasted_rows,
        }

    # ---------------------------------------------------------------- the step loop

    def _turn(self, result: StepResult) -> None:
        """A turn: take a result, plan and post the next step, and only then make text of the result's tokens.

        The time that this takes is noted with the next turn: it may go on after this one.
        """
        came = time.perf_counter()
        self._emit_portions(all_of_them=True)  # those of the step before, before their requests change
        began, emitted_s, self._emit_s = time.perf_counter(), self._emit_s, 0.0
        output = self.scheduler.update(result)
        updated = time.perf_counter()
        self._fill_pipeline()
        self.metrics.take_tokens(output.requests, output.tokens, came)
        self.metrics.take_turn(result, updated - began, emitted_s)
        self._emission = self._emit(output, result)
        self._emit_portions()

    def _fill_pipeline(self) -> None:
        self._turn_is_due = False
        try:
            while self.scheduler.num_in_flight < self._pipeline_depth and self.dead_reason is None:
                began = time.perf_counter()
                plan = self.scheduler.schedule()
                if plan is None:
                    return
                planned = time.perf_counter()
                self._executor.post(plan)
                self.metrics.take_plan(plan, planned - began, time.perf_counter() - planned)
                if plan.admissions:
                    self.metrics.take_admissions(self.scheduler.running, (one.slot for one in plan.admissions), planned)
        except Exception as error:  # a step that cannot be posted would leave every request waiting for ever
            self._die(EngineDeadError(f"a step could not be planned or posted: {error!r}"))

    def _kick(self) -> None:
        """Fills the pipeline once the event loop has handled what is ready: requests that arrive together share a step."""
        if not self._turn_is_due:
            self._turn_is_due = True
            asyncio.get_running_loop().call_soon(self._fill_pipeline)

    def _emit_portions(self, *, all_of_them: bool = False) -> None:
        """Emits a portion of a step's tokens, and the next one when the event loop has looked at what else is there."""
        began = time.perf_counter()
        try:
            for _ in self._emission:
                if not all_of_them:
                    asyncio.get_running_loop().call_soon(self._emit_portions)
                    break
        except Exception as error:
            self._die(EngineDeadError(f"tokens could not be handed on: {error!r}"))
        self._emit_s += time.perf_counter() - began

    def _emit(self, output: StepOutput, result: StepResult) -> Iterator[None]:
        """Hands each new token to its completion, and ends the requests whose text ran into a stop string.

        Yields between two portions of the tokens, so that many streams do not keep new requests waiting.
        """
        stopped = False
        choices, has_logprobs = self._choices, len(result.logprobs) > 0
        for number, (request, token, row) in enumerate(zip(output.requests, output.tokens, output.rows, strict=True), 1):
            choice = choices.get(request)
            if choice is None:
                continue  # aborted, or its generation failed, earlier in this round
            if token < 0:
                self._fail(choice.generation, GenerationError("the model's logits held NaN"))
                continue
            try:
                stop = choice.take(token, _logprob(result, row, token, request.params) if has_logprobs else None)
            except Exception as error:  # one request's text must not end the others
                self._fail(choice.generation, GenerationError(f"the tokens could not be turned into text: {error!r}"))
                continue
            if stop is not None:
                self.scheduler.finish(request, "stop", stop)
                stopped = True
            if request.finish_reason is not None:
                self._forget(request, request.finish_reason)
            if number % _PORTION == 0:
                yield
        if stopped:
            self._kick()

    def _forget(self, request: Request, outcome: str) -> None:
        self._choices.pop(request, None)
        self.metrics.end(request, outcome)
        if not self._choices:
            self._drained.set()

    # ---------------------------------------------------------------- requests

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of `text`, encoded in a thread. Raises `RequestError`."""
        return await self._in_thread(lambda: self.tokenizer.encode(text, add_special_tokens))

    async def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Returns the token ids of a conversation under the model's chat template. Raises `RequestError`."""
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
        if priority and self.config.scheduler.policy != "priority":
            raise RequestError("priority needs the server's scheduler.policy to be 'priority'", param="priority")
        token_ids = await self.encode(prompt, add_special_tokens) if isinstance(prompt, str) else prompt
        prepare = self._prepare_prompt
        tokens, hashes = prepare(token_ids) if len(token_ids) <= _SHORT_PROMPT else await self._in_thread(lambda: prepare(token_ids))
        self._require_alive()
        max_len = self._check_lengths(len(tokens), params)
        self._check_token_ids(params)
        generation = Generation(
            request_id or f"request-{next(self._request_numbers)}",
            token_ids if isinstance(token_ids, list) else list(token_ids),
            params,
            self._abort,
        )
        self._queue(generation, tokens, hashes, max_len, priority, arrived)
        return generation

    def _prepare_prompt(self, token_ids: Sequence[int]) -> tuple[array[int], list[bytes]]:
        """Returns a prompt as an int32 array, checked, with its block hashes."""
        if not token_ids:
            raise RequestError("the prompt is empty", param="prompt")
        try:
            tokens = array("i", token_ids)
        except (TypeError, OverflowError) as error:
            raise RequestError(f"the prompt must hold token ids: {error}", param="prompt") from error
        values = np.frombuffer(tokens, np.int32)  # a long prompt is not to hold the interpreter, which the event loop needs
        if values.min() < 0 or values.max() >= self.vocab_size:
            raise RequestError(f"the prompt holds a token id outside of 0 to {self.vocab_size - 1}", param="prompt")
        hashes: list[bytes] = []
        if self.config.cache.enable_prefix_caching:
            extend_hashes(hashes, tokens, self.report.block_size, root_hash())
        return tokens, hashes

    def _check_lengths(self, prompt_len: int, params: SamplingParams) -> int:
        """Returns the length at which a request ends. Raises `RequestError` if it could never fit."""
        room = self.max_model_len - prompt_len
        if room < 1:
            raise RequestError(
                f"the prompt has {prompt_len} tokens; the longest that leaves room for one more is {self.max_model_len - 1}",
                param="prompt",
                code="context_length_exceeded",
            )
        wanted = room if params.max_tokens is None else params.max_tokens
        if wanted > room:
            raise RequestError(
                f"max_tokens is {wanted}, but beside the prompt's {prompt_len} tokens only {room} fit into {self.max_model_len}",
                param="max_tokens",
                code="context_length_exceeded",
            )
        if params.min_tokens > wanted:
            raise RequestError(f"min_tokens is {params.min_tokens}, but at most {wanted} tokens fit", param="min_tokens")
        return prompt_len + wanted

    def _check_token_ids(self, params: SamplingParams) -> None:
        for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
            if any(not 0 <= token < self.vocab_size for token in ids):
                raise RequestError(f"{name} holds a token id outside of 0 to {self.vocab_size - 1}", param=name)

    def _queue(self, generation: Generation, tokens: array[int], hashes: list[bytes], max_len: int, priority: int, arrived: float) -> None:
        """Adds the n requests of a generation to the scheduler."""
        params = generation.params
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(64)
        end_tokens = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(self.defaults.eos_token_ids))
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
                hashes[:],
                group=group,
            )
            detokenizer = self.tokenizer.detokenizer(generation.prompt_token_ids, params.skip_special_tokens)
            choice = Choice(index, request, generation, detokenizer)
            generation.choices.append(choice)
            self._choices[request] = choice
            self.metrics.begin(request, arrived, counts_prompt=index == 0)
            self.scheduler.add(request)
        self._kick()

    def _abort(self, generation: Generation, reason: str = "abort") -> None:
        """Ends a generation's requests; their blocks are free for the plan that is drawn up next."""
        for choice in generation.choices:
            self.scheduler.finish(choice.request, reason)
            self._forget(choice.request, reason)  # what the scheduler had finished already, too: its text failed
        self._kick()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    # ---------------------------------------------------------------- failure

    def _require_alive(self) -> None:
        if self.dead_reason is not None:
            raise EngineDeadError(self.dead_reason)

    def _fail(self, generation: Generation, error: Exception) -> None:
        """Ends one generation with an error; the others go on."""
        self._abort(generation, "error")
        generation.fail(error)

    def _die(self, error: Exception) -> None:
        """Ends everything: a worker died or hung."""
        self._fail_all(str(error))
        self._dead.set()

    def _fail_all(self, reason: str) -> None:
        if self.dead_reason is None:
            self.dead_reason = reason
        for choice in list(self._choices.values()):
            choice.generation.fail(EngineDeadError(self.dead_reason))
        self._choices.clear()
        self.metrics.end_all("error")
        self._drained.set()


def _find_model(config: Config) -> Path:
    """Returns the model's folder, after a check that costs nothing yet: whether the workers can share the model."""
    folder = resolve_model(config.model)
    Architecture.load(folder).check_tensor_parallel(config.parallel.tensor_parallel_size)
    return folder


def _logprob(result: StepResult, row: int, token: int, params: SamplingParams) -> TokenLogprob | None:
    if params.logprobs is None:
        return None
    top = zip(result.top_tokens[row, : params.logprobs].tolist(), result.top_logprobs[row, : params.logprobs].tolist(), strict=True)
    return TokenLogprob(token, float(result.logprobs[row]), list(top))
