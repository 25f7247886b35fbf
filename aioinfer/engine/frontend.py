"""Entry point for requests: tokenizes, validates, and routes to an engine.

There is one `Frontend`, whatever `parallel.data_parallel_size` is: one tokenizer, one set of
encoding threads and one set of the model's defaults, in front of one or several engines on the same
event loop. The HTTP handlers and `LLM` use nothing else of this package.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path

from aioinfer.config import Config
from aioinfer.engine.encoding import PreparedPrompt
from aioinfer.engine.engine import Engine
from aioinfer.engine.metrics import LoopLag
from aioinfer.engine.model_control import ModelControl
from aioinfer.engine.output import KnownDelta, RequestOutput
from aioinfer.engine.prompt_maker import PromptMaker
from aioinfer.engine.recovery import OUTAGE_RETRY_S, EngineState, Lockstep, no_progress
from aioinfer.engine.router import Router, relocate
from aioinfer.engine.sequence_maker import RequestLimits, SequenceMaker
from aioinfer.engine.served_model import find_model, with_speculation
from aioinfer.errors import EngineDeadError, NotReadyError
from aioinfer.executor.base import Executor, ProgressCallback
from aioinfer.executor.factory import can_restart, make_executor
from aioinfer.executor.torchrun import follow
from aioinfer.features import load_halves
from aioinfer.features.masks.planning import Planning as Masks
from aioinfer.features.serving import ServingFeatures
from aioinfer.ipc.anonymous_file import RendezvousFiles
from aioinfer.sampling_params import SamplingParams
from aioinfer.scheduler.handover import Handover
from aioinfer.scheduler.request import ONE_FLOW, Flow
from aioinfer.text.constraints import CompiledConstraint
from aioinfer.text.restrictions import ParallelFiller

_log = logging.getLogger(__name__)


class Frontend(PromptMaker):
    """One model being served. Made by `launch`; all methods are called on its event loop.

    Attributes:
        engines: the replicas of the model, by number.
        dead_reason: why no request can be served any more, or None.
        loop_lag: how late the event loop is.
        control: pauses the model, and has it sleep.
        on_request_asleep: called when a request is queued while the model sleeps.
    """

    def __init__(
        self,
        config: Config,
        executors: Sequence[Executor],
        new_executor: Callable[[int], Executor] | None = None,
    ):
        """Makes an engine for each executor. Nothing runs before `start`.

        `new_executor` makes an executor for the engine of a number, after its workers were lost;
        without it, workers are not restarted.
        """
        variants = ServingFeatures(config, lambda: [e.features for e in self.engines])
        super().__init__(config, variants)
        self.dead_reason: str | None = None
        self.engines = [
            Engine(
                number,
                config,
                executor,
                self._handle_death,
                None if new_executor is None else partial(new_executor, number),
            )
            for number, executor in enumerate(executors)
        ]
        for engine in self.engines:
            engine.recovery.on_outage = partial(self._handle_outage, engine)
        if config.parallel.data_parallel_attention:
            lockstep = Lockstep()
            for engine in self.engines:
                lockstep.join(engine.recovery, engine.plan_soon)
                engine.lockstep = lockstep
        self.control = ModelControl(self.engines)
        self.on_request_asleep: Callable[[], None] = lambda: None
        self._is_started = False
        self.loop_lag = LoopLag(lambda: not all(engine.is_idle for engine in self.engines))
        self._request_numbers = count()
        self._dead = asyncio.Event()

    # ---------------------------------------------------------------- life

    @classmethod
    async def launch(cls, config: Config, on_progress: ProgressCallback = no_progress) -> Frontend:
        """Finds the model, starts the workers of all engines side by side, and loads the tokenizer
        meanwhile. Under torchrun, the processes of all ranks but the first become workers here, and
        end without returning.

        Raises:
            ConfigError: the configuration does not go with the model or the machine.
            EngineDeadError: a worker failed to start.
        """
        follow(config, find_model)
        begin = time.perf_counter()
        on_progress("find the model", 0, 0)
        folder = await asyncio.to_thread(find_model, config)
        config = await asyncio.to_thread(with_speculation, config, folder)
        for half in ("planning", "serving"):
            await asyncio.to_thread(load_halves, half, tuple(config.model.features))
        resolved = time.perf_counter()
        on_progress("start the workers", 0, 0)
        shares = config.parallel.data_parallel_attention
        files = RendezvousFiles(config.parallel.data_parallel_size) if shares else None
        make = partial(make_executor, config, find=find_model, rendezvous_files=files)

        def new_executor(number: int) -> Executor:
            return make(frontend.control.note_start(number) or folder, number)

        executors = [make(folder, n) for n in range(config.parallel.data_parallel_size)]
        frontend = cls(config, executors, new_executor if can_restart(config) else None)
        try:
            await frontend.start(folder, on_progress)
        except BaseException:
            await frontend.close()
            raise
        for engine in frontend.engines:
            engine.report.phases[:0] = [("find the model", resolved - begin)]
            engine.report.phases.append(("in all", time.perf_counter() - begin))
        return frontend

    async def start(self, folder: Path, on_progress: ProgressCallback = no_progress) -> None:
        """Starts the engines, and loads the tokenizer and the model's defaults meanwhile.

        The first failure cancels the rest and is raised; then the caller has to `close`.
        """
        try:
            await self._start_engines(folder, on_progress)
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        self._require_alive()
        self.control.set_folder(folder)
        self.max_model_len = min(engine.report.max_model_len for engine in self.engines)
        self._router = Router(
            [engine.scheduler for engine in self.engines],
            lambda number: self.engines[number].state,
        )
        self._limits = RequestLimits(
            self._model,
            self.config.scheduler,
            [engine.scheduler for engine in self.engines],
            self.max_model_len,
        )
        features = self.engines[0].features
        self._sequences = SequenceMaker(
            self._model, self.config.scheduler, features, self.config.model.seed
        )
        has_cache = self.engines[0].scheduler.kv_cache.prefix_caching
        self.make_encoder(self.engines[0].report.block_size if has_cache else None)
        self._is_started = True
        for engine in self.engines:
            engine.features.of(Masks).filler = ParallelFiller()
            engine.recovery.begin_service()

    async def _start_engines(self, folder: Path, on_progress: ProgressCallback) -> None:
        """Starts the engines, and loads the tokenizer once their workers load weights: threads that
        load it hold the interpreter, and would keep workers from being started, a second with a
        vocabulary of 150 000."""
        are_loading = [asyncio.Event() for _ in self.engines]

        def note_progress(number: int, phase: str, done: int, total: int) -> None:
            if phase == "load weights":
                are_loading[number].set()
            if number == 0:  # all load the same weights at the same time
                on_progress(phase, done, total)

        async def start_engine(engine: Engine) -> None:
            await engine.start(partial(note_progress, engine.number))
            are_loading[engine.number].set()

        async def load_text_side() -> None:
            for is_loading in are_loading:
                await is_loading.wait()
            await self._threads.run(lambda: self._load_for_engines(folder))

        async with asyncio.TaskGroup() as group:
            deaths = group.create_task(self._raise_death())
            starts = [group.create_task(start_engine(engine)) for engine in self.engines]
            starts.append(group.create_task(self.variants.start(folder)))
            starts.append(group.create_task(load_text_side()))
            await asyncio.wait(starts)
            deaths.cancel()

    async def _raise_death(self) -> None:
        await self._dead.wait()
        self._require_alive()

    def _load_for_engines(self, folder: Path) -> None:
        """Loads what prompts need, and builds what grammars need: up to 2 s beside the loading of
        the weights, and 0.1 GB for a vocabulary of 150 000. Else the first request with a grammar
        would have to, and all streams would pause meanwhile.

        The event loop waits for the grammars' table, and the workers would for the loop, once they
        have loaded their weights. So this comes before the chat template."""
        self._load_text_side(folder).prepare()
        if self.tokenizer is not None:
            self.tokenizer.prepare()

    def is_healthy(self) -> bool:
        """Whether an engine lives: it serves, or its workers are being restarted."""
        return self.dead_reason is None

    def is_ready(self) -> bool:
        """Whether an engine serves. While none does and one lives, requests are taken and wait."""
        return any(engine.state is EngineState.SERVING for engine in self.engines)

    async def wait_dead(self) -> None:
        """Returns when the last engine is dead; `dead_reason` describes it."""
        await self._dead.wait()

    async def drain(self, timeout_s: float) -> bool:
        """Waits until no request is left, or for `timeout_s` seconds. Returns whether none is."""
        try:
            async with asyncio.timeout(timeout_s):
                while busy := [engine for engine in self.engines if not engine.is_idle]:
                    await busy[0].requests.wait_idle()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Ends running requests with an error, and ends the workers."""
        self._end_all("the server is shutting down")
        await asyncio.gather(*(engine.shutdown() for engine in self.engines))
        self._shutdown()

    def abort(self, is_meant: Callable[[str], bool]) -> int:
        """Aborts the requests with ids for which `is_meant` is true: their readers get the tokens
        generated so far, with "abort" as the finish reason. Returns how many there were."""
        found = [
            (engine, output)
            for engine in self.engines
            for output in engine.requests.outputs()
            if is_meant(output.request_id)
        ]
        for engine, output in found:
            engine.cut_short(output)
        return len(found)

    def reset_prefix_cache(self) -> None:
        """Empties the prefix cache: prompts are computed from scratch."""
        for engine in self.engines:
            if engine.state is not EngineState.DEAD:
                engine.scheduler.kv_cache.reset_prefix_cache()

    def stats(self) -> dict[str, float]:
        """Returns the state of queues and cache, and totals since the start, of all engines
        together."""
        schedulers = [engine.scheduler for engine in self.engines]
        totals = [scheduler.stats for scheduler in schedulers]
        return {
            "running": sum(scheduler.num_running for scheduler in schedulers),
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

    async def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        add_special_tokens: bool = True,
        priority: int = 0,
        request_id: str | None = None,
        flow: Flow = ONE_FLOW,
        cache_salt: str = "",
        known: Sequence[KnownDelta] = (),
        handover: Handover | None = None,
        retain_s: float = 0.0,
    ) -> RequestOutput:
        """Queues a request and returns its output, to be iterated over. Cancelling this call leaves
        nothing behind.

        Args:
            prompt: text, or token ids as they are.
            params: the sampling parameters.
            add_special_tokens: whether encoding text adds the tokenizer's BOS and the like.
            priority: lower goes first.
            request_id: for messages; made up if missing.
            flow: the requests that it shares a part of the server with.
            cache_salt: prompts share KV blocks only under the same one.
            known: the part of the output that the client has already, from another server.
            handover: the KV blocks of the prompt that another server has.
            retain_s: for how long its KV blocks are evicted last after its end, in seconds.

        Raises:
            RequestError: the request is wrong or could never fit, or the model sleeps.
            GenerationError: `known` does not go with the request.
            EngineDeadError: the engine is gone.
        """
        arrived = time.perf_counter()
        self._require_alive()
        constraint = await self.compile(params)
        prepared = await self.prepare(prompt, add_special_tokens, cache_salt, params)
        return self.admit(
            prepared,
            params,
            constraint,
            priority=priority,
            request_id=request_id,
            flow=flow,
            arrived=arrived,
            known=known,
            handover=handover,
            retain_s=retain_s,
        )

    def admit(
        self,
        prompt: PreparedPrompt,
        params: SamplingParams,
        constraint: CompiledConstraint | None = None,
        *,
        priority: int = 0,
        request_id: str | None = None,
        flow: Flow = ONE_FLOW,
        arrived: float,
        known: Sequence[KnownDelta] = (),
        handover: Handover | None = None,
        retain_s: float = 0.0,
    ) -> RequestOutput:
        """The second half of `submit`, without a wait: requests that are admitted one after the
        other share a step.

        Args:
            prompt: the result of `prepare` for `params`.
            constraint: the result of `compile` for `params`.
            arrived: when the request did, of `time.perf_counter`.
        """
        self._require_alive()
        self.control.check_admits()
        assert (constraint is not None) == params.is_restricted, "`compile` comes first"
        if params.stop:
            self.require_tokenizer("stop")
        if params.pooling is None:
            self._model.check_generates()
        max_len = self._limits.end_of(len(prompt.tokens), params)
        self._limits.check_logprobs(len(prompt.tokens), max_len - len(prompt.tokens), params)
        self._limits.check_token_ids(params)
        output = RequestOutput(
            request_id or f"request-{next(self._request_numbers)}", prompt.token_ids, params
        )
        self._sequences.make(output, prompt, constraint, max_len, priority, flow)
        first = output.sequences[0].request
        for sequence in output.sequences:
            sequence.request.retain_s = retain_s
        # no `await` from here on: the request meets the same loads by which it is routed
        may_hit = all(use.max_cached != 0 for use in first.uses)
        hashes = prompt.hashes if may_hit else []
        route = self._router.route(len(prompt.tokens), hashes, params.num_sequences)
        engine = self.engines[route.engine]
        first.num_expected, first.handover = route.num_tokens, handover
        output.on_abort = engine.requests.abort
        output.weight_versions = [engine.weight_version]
        output.restore(known)
        self._router.promise(route, first)
        engine.add(output, arrived)
        self.loop_lag.watch()
        if self.control.sleep_level:
            self.on_request_asleep()
        return output

    def offer(self, output: RequestOutput) -> Handover | None:
        """Returns the KV blocks of a prompt that was computed, which another server may read; None
        if there are none."""
        stores = (engine.scheduler.kv_cache.store for engine in self.engines)
        request = output.sequences[0].request
        offers = [store.offer(request) for store in stores if store is not None]
        found = [offer for offer in offers if offer is not None]
        return max(found, key=lambda offer: offer.num_blocks, default=None)

    # ---------------------------------------------------------------- failure

    def _require_alive(self) -> None:
        if self.dead_reason is not None:
            raise EngineDeadError(self.dead_reason)

    def _handle_death(self, engine: Engine, reason: str) -> None:
        """Ends everything once no engine lives, or one dies while they start; until then the other
        engines go on, and take over the requests of the dead one."""
        engine.turn.set()  # nothing waits for it any more
        living = [engine for engine in self.engines if engine.state is not EngineState.DEAD]
        if self._is_started and living:
            moved, ended = self._relocate(engine, reason)
            _log.error(
                "%s; this engine is dead, and %d of %d go on; of its requests %d were moved to "
                "them, and %d ended",
                reason, len(living), len(self.engines), moved, ended,
            )  # fmt: skip
            return
        self._end_all(reason)
        self._dead.set()

    def _handle_outage(self, engine: Engine, reason: str) -> None:
        """Has engines that serve take over the requests of one whose workers do not come back;
        ends the requests where none serves."""
        if self.is_ready():
            self._relocate(engine, reason)
        else:
            for output in engine.requests.outputs():
                engine.requests.fail(output, NotReadyError(reason, retry_after_s=OUTAGE_RETRY_S))
        engine.turn.set()

    def _relocate(self, engine: Engine, reason: str) -> tuple[int, int]:
        return relocate(engine, self.engines, self._router, self.config.scheduler, reason)

    def _end_all(self, reason: str) -> None:
        if self.dead_reason is None:
            self.dead_reason = reason
        for engine in self.engines:
            engine.recovery.end_all(self.dead_reason)
