"""A scheduler and a worker in one process, without an engine, and the greedy outputs of
transformers that theirs should equal."""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from aioinfer.config import (
    CacheConfig,
    Config,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from aioinfer.layers.parallel import ProcessGroups
from aioinfer.sampling_params import SamplingParams
from aioinfer.scheduler.features import StepFeature, StepFeatures
from aioinfer.scheduler.limits import SchedulerLimits
from aioinfer.scheduler.request import ForkGroup, Request
from aioinfer.scheduler.scheduler import Scheduler
from aioinfer.worker.features import ProposalRows, Rank, WorkerFeature
from aioinfer.worker.step_works import StepWorks
from aioinfer.worker.worker import Worker

NEW_TOKENS, SLOTS = 40, 6
GREEDY = SamplingParams(temperature=0.0)


class RandomLookahead(StepFeature):
    """Asks for up to `most` lookahead rows of each request, at random; in a part `rest` of the
    steps for none.

    Attributes:
        num_rows, num_kept: lookahead rows of all steps, and how many were kept.
    """

    name = "random_lookahead"
    looks_ahead = True

    def __init__(self, most: int, rest: float = 0.2):
        super().__init__(None)
        self._most, self._rest = most, rest
        self._rng = random.Random(3)
        self.num_rows = self.num_kept = 0

    def lookahead(self, decodes: Sequence[Request]) -> Mapping[Request, int] | None:
        if self._rng.random() < self._rest:
            return None
        return {request: self._rng.randrange(self._most + 1) for request in decodes}

    def take_lookahead(self, request: Request, rows: int, kept: int) -> None:
        self.num_rows += rows
        self.num_kept += kept


class KnownDrafts(WorkerFeature):
    """Proposes what requests are going to sample, and now and then something else.

    Args:
        texts: prompt and output of each request.
        vocab_size: of what else it proposes.
    """

    proposes = True

    def __init__(self, rank: Rank, texts: Sequence[Sequence[int]], vocab_size: int = 200):
        super().__init__(rank)
        self._vocab_size = vocab_size
        self._texts = [list(text) for text in texts]
        self._rng = random.Random(4)

    def propose(self, rows: ProposalRows) -> None:
        tokens = self.rank.slots.tokens
        for slot, base, offset in zip(*(each.tolist() for each in rows), strict=True):
            if not offset:
                continue
            known = tokens[slot, : base + 1].tolist()
            likely = [text for text in self._texts if text[: base + 1] == known]
            draft = self._rng.randrange(self._vocab_size)
            if likely and self._rng.random() < 0.8:
                text = self._rng.choice(likely)
                draft = text[base + offset] if base + offset < len(text) else draft
            tokens[slot, base + offset] = draft


def expected_outputs(
    folder: Path, prompts: list[list[int]], *, use_cache: bool = True
) -> list[list[int]]:
    """Returns the `NEW_TOKENS` greedy tokens of transformers after each prompt."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, use_cache=use_cache,
            max_new_tokens=NEW_TOKENS, pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
        outputs.append(output[0, len(prompt) :].tolist())
    return outputs


def generate(
    folder: Path, prompts: list[list[int]], n: int = 1, budget: int = 512, *,
    params: Sequence[SamplingParams] = (GREEDY,), ahead: RandomLookahead | None = None,
    texts: Sequence[Sequence[int]] = (), speculation: SpeculationConfig | None = None,
    **cache: Any,
) -> tuple[list[list[int]], Scheduler]:  # fmt: skip
    """Returns the output of each of the `n` requests a prompt, and the scheduler at rest.

    Args:
        params: of the prompts in turn.
        ahead: asks for lookahead rows; drafts come from `texts`, as in `KnownDrafts`.
        speculation: drafts come from there instead.
    """
    config = Config(
        model=ModelConfig(path=str(folder)),
        cache=CacheConfig(**{"cpu_memory_gib": 0.01, "block_size": 4} | cache),
        scheduler=SchedulerConfig(max_num_seqs=SLOTS, max_num_batched_tokens=budget),
        parallel=ParallelConfig(device="cpu", cpu_threads=1),
        speculation=speculation or SpeculationConfig(method="none" if ahead is None else "ngram"),
    )
    worker = Worker(config, folder, ProcessGroups.single())
    report = worker.load(lambda done, total: None)
    worker.allocate(report.num_blocks, 110)
    worker.warm_up()
    scheduler = Scheduler(
        SchedulerLimits(
            groups=report.groups, num_blocks=report.num_blocks, block_size=report.block_size,
            max_num_seqs=SLOTS, token_budget=budget, prefill_cap=budget,
            max_lookahead=config.max_lookahead,
        ),
        features=StepFeatures([] if ahead is None else [ahead]),
    )  # fmt: skip
    if ahead is not None and speculation is None:
        rank = worker.runner.works.all[0].rank
        worker.runner.works = StepWorks([KnownDrafts(rank, texts)])
    requests = []
    for number, prompt in enumerate(prompts):
        group = ForkGroup() if n > 1 else None
        for sibling in range(n):
            tokens, length = array("i", prompt), len(prompt)
            requests.append(
                Request(
                    str(len(requests)), tokens, length, params[number % len(params)],
                    length + NEW_TOKENS, sibling, group=group,
                )
            )  # fmt: skip
            scheduler.add(requests[-1])
    pending: deque[Any] = deque()
    while not scheduler.is_idle or pending:
        while scheduler.num_in_flight < 2 and (plan := scheduler.schedule()) is not None:
            pending.append(worker.runner.step(plan))
        scheduler.update(pending.popleft().wait())
    scheduler.check_integrity()
    assert scheduler.kv_cache.num_free == scheduler.kv_cache.num_blocks
    return [request.tokens[request.prompt_len :].tolist() for request in requests], scheduler


def prompts_that_begin_alike(count: int, vocab_size: int = 200) -> list[list[int]]:
    """Returns prompts of 2 to 69 tokens, of which many have a prefix in common."""
    rng = random.Random(1)
    stem = [rng.randrange(vocab_size) for _ in range(30)]
    return [
        stem[: rng.randrange(1, 31)]
        + [rng.randrange(vocab_size) for _ in range(rng.randrange(1, 40))]
        for _ in range(count)
    ]
