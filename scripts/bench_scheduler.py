"""Measures the scheduler: planning and update, in microseconds a step, for many decoding requests.

Production objects with prefix caching, penalties, stop tokens and planning ahead; the worker's
results are random tokens that end no request. Prints the median over the steps of several runs.

    python scripts/bench_scheduler.py [--requests 512] [--steps 400] [--runs 5]
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from array import array

import numpy as np

from aioinfer.ipc.plan import StepPlan, StepResult
from aioinfer.sampling_params import SamplingParams
from aioinfer.scheduler.limits import SchedulerLimits
from aioinfer.scheduler.request import Request
from aioinfer.scheduler.scheduler import Scheduler


def decoding_scheduler(requests: int, steps: int) -> tuple[Scheduler, StepPlan]:
    """Returns a scheduler whose requests all decode, and its first decode step, posted and
    unanswered."""
    blocks = requests * ((128 + steps) // 16 + 2)
    scheduler = Scheduler(
        SchedulerLimits(
            num_blocks=(blocks,),
            block_size=16,
            max_num_seqs=requests,
            token_budget=requests * 128,
            prefill_cap=requests * 128,
        )
    )
    params = SamplingParams(temperature=0.8, top_p=0.9, presence_penalty=0.5, stop=("###",))
    for number in range(requests):
        prompt = array("i", np.random.default_rng(number).integers(3, 40_000, 128).tolist())
        scheduler.add(
            Request(str(number), prompt, 128, params, 128 + steps + 10, number, frozenset({2, 0}))
        )
    prefill, plan = scheduler.schedule(), scheduler.schedule()
    assert prefill is not None
    assert plan is not None
    scheduler.update(StepResult(prefill.step_id, np.full(requests, 7, np.int32)))
    return scheduler, plan


def measure(requests: int, steps: int) -> tuple[float, float]:
    """Returns the medians (plan, update) in microseconds over `steps` steps."""
    scheduler, last = decoding_scheduler(requests, steps)
    tokens = np.random.default_rng(0).integers(3, 40_000, (steps, requests)).astype(np.int32)
    planning, updating = [], []
    gc.collect()
    gc.freeze()
    for step in range(steps):
        begin = time.perf_counter()
        plan = scheduler.schedule()
        planned = time.perf_counter()
        scheduler.update(StepResult(last.step_id, tokens[step]))
        planning.append(planned - begin)
        updating.append(time.perf_counter() - planned)
        assert plan is not None
        assert len(plan.slots) == requests
        last = plan
    return statistics.median(planning) * 1e6, statistics.median(updating) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    figures = [measure(options.requests, options.steps) for _ in range(options.runs)]
    plan, update = (statistics.median(f[i] for f in figures) for i in (0, 1))
    print(
        f"{options.requests} decoding requests: plan {plan:.0f} us, update {update:.0f} us, "
        f"together {plan + update:.0f} us a step"
    )


if __name__ == "__main__":
    main()
