"""Dummy steps: plans of made-up requests, executed on a runner that no request uses yet.

The worker runs them to measure the memory of its largest step, to compile and warm up, and to
measure and check a KV cache in float8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from aioinfer.ipc.lookahead import LookaheadRows
from aioinfer.ipc.masks import mask_words
from aioinfer.ipc.plan import I32, Admission, Admissions, StepPlan
from aioinfer.ipc.sections import Section
from aioinfer.sampling_params import SamplingParams
from aioinfer.worker.runner import ModelRunner

#: A request that uses all of the sampler.
EVERYTHING = SamplingParams(
    top_k=5,
    top_p=0.9,
    repetition_penalty=1.1,
    logit_bias={0: 1.0},
    min_tokens=9,
)


def dummy_admission(
    slot: int, length: int, params: SamplingParams, banned: tuple[int, ...] = ()
) -> Admission:
    """Returns the admission of a prompt of `length` zeros."""
    return Admission(slot, np.zeros(length, np.int32), length, params, 0, banned)


def dummy_plan(
    lengths: list[int],
    start: int,
    block_size: int,
    num_groups: int = 1,
    max_num_seqs: int = 0,
    admissions: Sequence[Admission] = (),
    features: Sequence[Section] = (),
    num_blocks: int | None = None,
) -> StepPlan:
    """Returns a plan in which slot i computes `lengths[i]` tokens from `start` and samples the next
    one, with the sections `features`.

    Admitted requests get their KV blocks one after the other from block 0 on, in each of
    `num_groups` groups; after `num_blocks` of them from block 0 on again, so that requests write
    over each other's keys.
    """
    rows, none = len(lengths), np.empty(0, np.int32)
    starts, samples = np.full(rows, start, np.int32), np.ones(rows, np.int32)
    counts = [-(-len(admission.tokens) // block_size) for admission in admissions]
    slots = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    indices = np.concatenate([none, *(np.arange(count, dtype=np.int32) for count in counts)])
    blocks = np.arange(sum(counts), dtype=np.int32)
    if num_blocks is not None:
        blocks %= num_blocks
    firsts = np.arange(num_groups, dtype=np.int32)[:, None] * max_num_seqs
    sections = [*([Admissions.of(admissions)] if admissions else []), *features]
    return StepPlan(
        -1, np.arange(rows, dtype=np.int32), starts, np.array(lengths, np.int32), samples,
        (firsts + slots).reshape(-1), np.tile(indices, num_groups), np.tile(blocks, num_groups),
        none, none, sections,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class DummySteps:
    """Executes dummy plans on a runner that no request uses yet.

    Attributes:
        runner: of the rank.
        num_groups: the KV groups of the whole model.
        block_size: tokens a KV block.
        vocab_size: of the model's logits.
        fewest_blocks: KV blocks of the group that has the fewest, on all ranks: every stage of a
            pipeline has to execute the same plans.
        max_tokens: of a step.
    """

    runner: ModelRunner
    num_groups: int
    block_size: int
    vocab_size: int
    fewest_blocks: int
    max_tokens: int

    def run_all(self) -> None:
        """Executes prefill steps and a decode step in which requests use all of the sampler, one of
        them with all features, and forgets them."""
        runner, slots = self.runner, self.runner.slots
        rows = min(2, len(slots.tokens), self.fewest_blocks, self.max_tokens)
        prompt_len = self._short_prompt(rows)
        greedy = dummy_admission(1, prompt_len, SamplingParams(temperature=0))
        admissions = [dummy_admission(0, prompt_len, EVERYTHING, banned=(1,)), greedy][:rows]
        lengths = [prompt_len] * rows
        self.run(self._admit(lengths, admissions))
        sections = runner.works.dummy_sections(range(rows), lengths)
        self.run(self._admit(lengths, admissions, sections))
        if drafting := self._lookahead_rows(rows):  # not every step is one that a drafter follows
            self.run(self._admit(lengths, admissions, [*sections, *drafting]))
        if prompt_len < min(self.block_size, slots.max_model_len):
            self.run(dummy_plan([1] * rows, prompt_len, self.block_size))
        if runner.device.results.shape[1] > len(slots.tokens) and prompt_len + 2 < min(
            self.block_size, slots.max_model_len
        ):
            for late in ([], runner.works.late_sections(2)):
                self.run(self._lookahead_plan(prompt_len, late))
        slots.reset()
        runner.device.kv.zero(rows)

    def _lookahead_plan(self, start: int, features: Sequence[Section]) -> StepPlan:
        """Returns a plan in which the first slot computes its token at `start` and a draft, with
        the sections of features."""
        plan = dummy_plan([1, 1], start, self.block_size)
        plan.slots[:] = 0
        plan.starts[1] += 1
        ones = np.ones(2, np.int32)
        rows = LookaheadRows(np.arange(2, dtype=np.int32), ones, self.block_size * ones)
        plan.sections = [rows, *features]
        return plan

    def run_prompt(self, tokens: I32) -> None:
        """Executes a prefill step of one prompt, and forgets the request; its keys and values in
        the first KV blocks stay."""
        count = len(tokens)
        admission = Admission(0, tokens, count, SamplingParams(temperature=0), 0, ())
        self.runner.step(self._admit([count], [admission])).wait()
        self.runner.slots.reset()

    @torch.inference_mode()
    def score_prompt(self, tokens: I32) -> torch.Tensor:
        """Computes one prompt, of a model on one rank, and forgets the request. Returns the
        log-probabilities of the token behind each of its tokens, float32 [T, V] on the host."""
        runner, count = self.runner, len(tokens)
        model, device = runner.model, runner.device
        plan = self._admit([count], [Admission(0, tokens, count, SamplingParams(), 0, ())])
        runner.works.begin(plan)
        device.begin(plan)
        device.apply(plan, None)
        step = device.prepare(plan, every_token=True)
        hidden = runner.compute(step, every_token=True)
        numbers = torch.arange(count, device=hidden.device)
        logits = model.logits_of(hidden, numbers).float()
        _, _, arrived = device.fetch(0, [])
        if arrived is not None:
            arrived.synchronize()
        runner.slots.reset()
        return logits.log_softmax(-1).cpu()

    def largest_plan(self, lengths: list[int]) -> StepPlan:
        """Returns the plan that computes prompts of these lengths, of requests that use all of the
        sampler (float32 logits, counts of tokens) and of the features. They have `fewest_blocks` KV
        blocks together: their results are never read."""
        admissions = [
            dummy_admission(slot, length, EVERYTHING, banned=(1,))
            for slot, length in enumerate(lengths)
        ]
        rows = len(lengths)
        sections = self.runner.works.dummy_sections(range(rows), lengths)
        features = [*sections, *self._lookahead_rows(rows)]
        return self._admit(lengths, admissions, features, self.fewest_blocks)

    def run(self, plan: StepPlan) -> None:
        """Executes a plan; a message that late rows wait for has all bits set."""
        self.runner.step(plan, self._all_bits).wait()

    def _lookahead_rows(self, rows: int) -> list[Section]:
        """Returns the section by which a drafter drafts behind a step without drafts; none without
        a drafter."""
        works, links, none = self.runner.works, self.runner.links, np.zeros(rows, np.int32)
        if not works.follow_steps and (links is None or not links.num_drafts):
            return []
        return [LookaheadRows(none, none + 1, none + self.runner.slots.max_model_len)]

    def _short_prompt(self, rows: int) -> int:
        """Returns a number of tokens after which a decode step needs no further KV block, unless
        blocks have one token, and which a step has for each of `rows` rows."""
        longest = min(self.block_size - 1, self.runner.slots.max_model_len - 1)
        return max(1, min(8, longest, self.max_tokens // rows))

    def _admit(
        self,
        lengths: list[int],
        admissions: list[Admission],
        features: Sequence[Section] = (),
        num_blocks: int | None = None,
    ) -> StepPlan:
        """Returns a `dummy_plan` from the first token on."""
        slots = len(self.runner.slots.tokens)
        return dummy_plan(
            lengths, 0, self.block_size, self.num_groups, slots, admissions, features, num_blocks
        )

    def _all_bits(self, plan: StepPlan, count: int) -> I32:
        """Implements `features.AwaitMessage` for dummy steps: as masks, every token is allowed."""
        return np.full((count, mask_words(self.vocab_size)), -1, np.int32)
