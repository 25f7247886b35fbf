"""Plans that nobody asked for: those by which a worker warms up and measures its memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from aioinfer.ipc.masks import ConstrainedRows
from aioinfer.ipc.plan import Admission, Admissions, StepPlan
from aioinfer.ipc.sections import Section
from aioinfer.sampling_params import MAX_LOGPROBS, SamplingParams

#: A request that uses all of the sampler.
EVERYTHING = SamplingParams(
    top_k=5,
    top_p=0.9,
    repetition_penalty=1.1,
    logit_bias={0: 1.0},
    logprobs=MAX_LOGPROBS,
    min_tokens=9,
)


def trial_admission(
    slot: int, length: int, params: SamplingParams, banned: tuple[int, ...] = ()
) -> Admission:
    """Returns the admission of a prompt of `length` zeros."""
    return Admission(slot, np.zeros(length, np.int32), length, params, 0, banned)


def trial_plan(
    lengths: list[int],
    start: int,
    block_size: int,
    num_groups: int = 1,
    max_num_seqs: int = 0,
    admissions: Sequence[Admission] = (),
    num_masked: int = 0,
    num_blocks: int | None = None,
) -> StepPlan:
    """Returns a plan in which slot i computes `lengths[i]` tokens from `start` and samples the next
    one, the last `num_masked` of them under a mask.

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
    sections: list[Section] = [Admissions.of(admissions)] if admissions else []
    if num_masked:
        sections.append(ConstrainedRows(np.arange(rows - num_masked, rows, dtype=np.int32)))
    return StepPlan(
        -1, np.arange(rows, dtype=np.int32), starts, np.array(lengths, np.int32), samples,
        (firsts + slots).reshape(-1), np.tile(indices, num_groups), np.tile(blocks, num_groups),
        none, none, sections,
    )  # fmt: skip
