"""One step of the model: from a `StepPlan` to the tokens sampled, on any device.

The worker calls `ModelRunner.step` for each plan, in order. The sampled tokens are written back
into the slots, where the next step finds them: the host sends no token twice and none that a step
sampled. `Device` has what differs between CPUs and GPUs.

On a GPU a step that only decodes is one CUDA graph, from the growth of block tables to the sampled
tokens, replayed for the next larger captured number of rows; `step_graphs` has these and the other
graphs. Rows with penalties, biases or logits processors are sampled again after the replay, from
the graph's logits. So are late rows (of constrained requests), once their message has come. (A
graph without sampling would save some 50 us of such a step, and take a second set of graphs.) Of a
step with prompts the layers are a graph, all but the last, for the next larger captured number of
tokens: launched one by one, their kernels cost the host more time than a small model's cost the
GPU. The host waits for nothing but such messages, so that the next step can be launched behind this
one.

Pipeline stages receive before a step and send behind it, around the graphs and not in them: the
stream of the stage before is copied into the buffer that the graphs read. So a stage may receive
and send while it computes another step. The last stage samples, and calls the features of a plan;
the first takes the tokens of its rows from the tokens that the last has sampled. A receive of
tokens is posted behind all that the tokens depend on: a kernel that waits for another GPU may hold
up the loading of modules and the freeing of memory on its own, and with them the kernels launched
behind it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from aioinfer.ipc.lookahead import LookaheadRows
from aioinfer.ipc.plan import StepPlan, StepResult
from aioinfer.layers.residual import ResidualStream
from aioinfer.layers.step import Step
from aioinfer.models.causal_lm import CausalLM
from aioinfer.worker.device import Device
from aioinfer.worker.features import AwaitMessage, PendingSection, SampledStep
from aioinfer.worker.sampler import Sampler
from aioinfer.worker.stage_links import StageLinks
from aioinfer.worker.step_works import StepCalls, StepWorks, sections_of


@dataclass(slots=True)
class PendingResult:
    """The result of a step that has been launched.

    Attributes:
        step_id: the plan's.
        tokens: int32 [S] on the host, the sampled tokens, as in `StepResult`.
        pending: its sections.
        arrived: recorded behind the copies to the host; None on a CPU.
        busy_ns: nanoseconds that the host spent on the step, less those spent waiting for a message
            or another stage. Of a pipeline stage on a GPU the device's time counts: see `span`.
        span: recorded before and after the computation of a pipeline stage on a GPU.
    """

    step_id: int
    tokens: torch.Tensor
    pending: Sequence[PendingSection]
    arrived: torch.cuda.Event | None
    busy_ns: int = 0
    span: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    def wait(self) -> StepResult:
        """Returns the result once it has reached the host."""
        if self.arrived is not None:
            self.arrived.synchronize()
        if self.span is not None:
            received, computed = self.span
            computed.synchronize()
            self.busy_ns = int(received.elapsed_time(computed) * 1e6)
        tokens = self.tokens.numpy().copy()
        return StepResult(self.step_id, tokens, sections_of(self.pending), self.busy_ns)


class ModelRunner:
    """Runs one rank's model over its KV cache.

    Attributes:
        model: the rank's part of the model, bound to the device's KV cache.
        device: with the slots and the KV cache.
        slots: the running requests.
        works: the worker halves of the features; by default none.
        links: to the other stages of a pipeline, if there are any.
        samples: whether the runner samples, and calls all features of a plan: the last stage does.
        sampler: samples.
    """

    def __init__(
        self,
        model: CausalLM,
        device: Device,
        works: StepWorks | None = None,
        links: StageLinks | None = None,
    ):
        self.model = model
        self.device = device
        self.slots = device.slots
        self.works = works or StepWorks()
        self.links = links
        self.samples = links is None or links.is_last
        self.sampler = Sampler(device.slots, model.vocabulary, device.results)

    @torch.inference_mode()
    def step(self, plan: StepPlan, await_message: AwaitMessage | None = None) -> PendingResult:
        """Executes a plan, or launches it on a GPU: applies it to slots and KV blocks, computes its
        rows, and samples a token for each sampled row, late rows last. A stage that does not sample
        returns no tokens. Without a head there is a 0 for each."""
        began = time.perf_counter_ns()
        device, links = self.device, self.links
        self.works.begin(plan)
        device.begin(plan)
        plan = device.resolve(plan)
        calls = self.works.of(plan, samples=self.samples)
        waited_before, received = 0, None
        if links is not None:
            waited_before, received = links.waited_ns, self._receive(plan, links)
        hidden: torch.Tensor | None
        computed: SampledStep | None = None
        replays = device.has_decode_graph(plan) and calls.suit_graphs
        if replays:
            hidden, logits = device.replay_decode(plan, calls.late)
        else:
            hidden, logits, computed = self._launch(plan, calls)
        count = waited_ns = 0
        if logits is not None:
            count = len(logits)
            waited_ns = self._sample(plan, calls, logits, await_message, is_sampled=replays)
            if calls:
                calls.read_tokens(logits, device.tokens(count))
        elif not self.model.scores_tokens:  # in the place of sampled tokens, which are dropped
            count = int(np.count_nonzero(plan.samples))
            device.tokens(count).zero_()
        if computed is not None:
            self.works.follow(computed)
        if self.samples:
            calls.pending += self.works.read_step(plan.step_id)
        result = PendingResult(plan.step_id, *device.fetch(count, calls.pending))
        if links is not None:
            ended = device.record_time()
            if received is not None and ended is not None:
                result.span = received, ended
            self._send(plan, links, hidden, count)
            waited_ns += links.waited_ns - waited_before
        result.busy_ns = time.perf_counter_ns() - began - waited_ns
        return result

    def _receive(self, plan: StepPlan, links: StageLinks) -> torch.cuda.Event | None:
        """Receives what the step begins with from other stages; returns when that was, on a GPU."""
        if links.is_first:
            links.enter_tokens(plan, self.slots)
        elif plan.num_tokens:
            self.device.hold(links.receive(plan, self.device.taps))
        return self.device.record_time()

    def _send(
        self, plan: StepPlan, links: StageLinks, hidden: torch.Tensor | None, count: int
    ) -> None:
        """Sends what other stages need of the step: hidden states [T, hidden_size] to the next one,
        or `count` sampled tokens to the first, which will receive them."""
        if links.is_last:
            if count:
                links.return_tokens(plan, self.device.tokens(count), self.slots)
        elif hidden is not None:
            links.send(plan, hidden, self.device.taps)
        if links.is_first:
            links.expect_tokens(plan)
        self.works.pass_on(plan.step_id)

    def _launch(
        self, plan: StepPlan, calls: StepCalls
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, SampledStep | None]:
        """Computes a step, or launches it kernel by kernel: the layers from a graph if there is one
        for so many tokens. Returns the hidden states, the logits [S, local_size] of the sampled
        rows, and the step for features that follow it; None where there are none."""
        model, device = self.model, self.device
        device.apply(plan, calls.late)
        if not len(plan.slots):
            if not device.replay_idle():
                model.take_part()
            return None, None, None
        follows, computed = False, None
        if plan.section(LookaheadRows) is not None:
            self.works.propose(device.proposal_rows(plan))
            follows = self.works.follow_steps
        every = calls.need_all_tokens or (follows and self.works.read_all_hidden)
        step = device.prepare(plan, every_token=every)
        calls.change_inputs(step)
        hidden = self.compute(step, every_token=every)
        if follows:
            computed = device.sampled_step(plan, step, hidden)
        calls.read_hidden(hidden, has_all_tokens=every)
        count = int(np.count_nonzero(plan.samples)) if self.samples else 0
        if not count or not model.scores_tokens:
            return hidden, None, computed
        if every:
            tokens = device.last_tokens(plan)
            last = hidden.index_select(0, tokens)
            if not model.finishes_with_hidden_states:
                return hidden, model.logits_of(last, tokens), computed
            return hidden, model.logits(last, device.logits_buffer(count), tokens), computed
        return hidden, model.logits(hidden, device.logits_buffer(count)), computed

    def compute(self, step: Step, *, every_token: bool = False) -> torch.Tensor:
        """Returns the hidden states of a step that is prepared, as `CausalLM.finish` or, for
        `every_token`, `CausalLM.finish_all` does."""
        model = self.model
        model.plan(step)
        stream = self.device.replay_layers(step)
        if stream is None:
            stream = self.begin(step)
        return model.finish_all(step, stream) if every_token else model.finish(step, stream)

    def begin(self, step: Step, out: torch.Tensor | None = None) -> ResidualStream:
        """Computes all layers but the model's last; see `CausalLM.begin`."""
        received = self.device.received
        if received is not None:
            received = received[: len(step.inputs.input_ids)]
        return self.model.begin(step, out, received)

    def _sample(
        self,
        plan: StepPlan,
        calls: StepCalls,
        logits: torch.Tensor,
        await_message: AwaitMessage | None,
        *,
        is_sampled: bool,
    ) -> int:
        """Samples a token for each row of `logits` [S, local_size]; late rows after all others,
        once their message has come. `is_sampled`: a graph has sampled by temperature and filters.

        Returns nanoseconds that the message was waited for.
        """
        slot_ids, positions, late = plan.slots, plan.starts + plan.lengths, calls.late
        if not is_sampled:
            rows = np.flatnonzero(plan.samples)
            slot_ids, positions = slot_ids[rows], positions[rows]
        flags = self.slots.current_flags(slot_ids, positions)
        if late is not None:
            flags[late] = 0
        adjust = calls.adjuster_of_others(len(logits))
        if is_sampled:
            has_others = adjust is not None or self.sampler.needs(flags)
        else:
            has_others = late is None or len(late) < len(logits)
        if has_others:
            # logits that a feature reads afterwards stay as they are
            sampling, in_place = self.device.sampled_rows(slot_ids, positions), not calls
            self.sampler.sample(
                logits, sampling, flags, late=late, adjust=adjust, in_place=in_place
            )
        if late is None:
            return 0
        slot_ids, positions = slot_ids[late], positions[late]
        sampling = self.device.late_rows(slot_ids, positions, late)
        assert sampling.places is not None
        changed, waited_ns = calls.late_logits(logits, sampling.places, await_message)
        flags = self.slots.current_flags(slot_ids, positions)
        self.sampler.sample(changed, sampling, flags, adjust=calls.adjuster(late), in_place=True)
        return waited_ns
