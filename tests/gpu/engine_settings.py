"""How the engines of the tests on GPUs are configured, and what the tests ask of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from aioinfer import LLM
from aioinfer.executor.inline import InlineExecutor
from aioinfer.llm import Output
from aioinfer.worker.worker import Worker
from tests.executor_runs import planning_ahead

NEEDS_TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
NEEDS_FOUR = pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs 4 GPUs")
TWO_RANKS = {"parallel__executor": "multiprocess", "parallel__tensor_parallel_size": 2}
TWO_STAGES = {"parallel__executor": "multiprocess", "parallel__pipeline_parallel_size": 2}
#: Ways to execute the same requests.
WAYS = [
    pytest.param({}, id="graphs"),
    pytest.param({"parallel__cuda_graphs": False}, id="no graphs"),
    pytest.param({"parallel__executor": "multiprocess"}, id="a process"),
    pytest.param({"cache__num_blocks": 12}, id="preempted"),
    pytest.param({"scheduler__max_num_seqs": 1}, id="one at a time"),
    pytest.param(TWO_RANKS, id="two ranks", marks=[NEEDS_TWO, pytest.mark.timeout(300)]),
]


def engine_settings(**settings: Any) -> dict[str, Any]:
    """Returns a configuration by `section.key`: small, in float32 and without a prefix cache, but
    for `settings` (`section__key`)."""
    defaults = {
        "parallel__device": "cuda",
        "model__dtype": "float32",
        "model__max_model_len": 1024,
        "scheduler__max_num_seqs": 64,
        "cache__num_blocks": 400,
        "cache__gpu_memory_utilization": 0.97,  # tests run side by side
        "cache__enable_prefix_caching": False,
    }
    return {key.replace("__", "."): value for key, value in (defaults | settings).items()}


@contextmanager
def _unwatched() -> Iterator[None]:
    """The kernels that an engine compiles when it starts are not counted by the watch of another
    one in this process, which goes on at the end."""
    knobs = triton.knobs.runtime
    watching, knobs.jit_post_compile_hook = knobs.jit_post_compile_hook, None
    try:
        yield
    finally:
        knobs.jit_post_compile_hook = watching


@contextmanager
def inline_llm(folder: Path, **settings: Any) -> Iterator[LLM]:
    """An engine in this process unless `settings` differ; checks its device, and at the end its
    scheduler and that no kernel was compiled while it served."""
    ahead = planning_ahead(settings)
    merged = engine_settings(**{"parallel__executor": "inline"} | settings)
    with ahead, _unwatched(), LLM(str(folder), settings=merged, progress=False) as llm:
        (engine,) = llm.frontend.engines
        assert ("cpu" in engine.report.device) == (merged["parallel.device"] == "cpu")
        yield llm
        engine.scheduler.check_integrity()
        inline = engine._workers.executor
        if isinstance(inline, InlineExecutor) and inline._worker.compilations is not None:
            check_nothing_was_compiled(llm)


def worker_of(llm: LLM) -> Worker:
    """Returns the worker of an engine in this process."""
    inline = llm.frontend.engines[0]._workers.executor
    assert isinstance(inline, InlineExecutor)
    return inline._worker


def has_graphs(llm: LLM) -> bool:
    """Whether an engine in this process replays CUDA graphs for decode steps. The memory that they
    took does not tell: other processes use the GPU as well."""
    graphs = worker_of(llm)._graphs
    return graphs is not None and bool(graphs.decode.graphs)


def check_nothing_was_compiled(llm: LLM) -> None:
    """Checks that no kernel was compiled since the warm-up, and ends the watch."""
    watch = worker_of(llm).compilations
    assert watch is not None
    assert watch.names == [], watch.names  # pytest does not rewrite the assertions of this module
    watch.stop()


def tokens_of(outputs: Sequence[Output]) -> list[list[int]]:
    """Returns the tokens of each output's first sequence."""
    return [output.token_ids for output in outputs]


def check_logprobs(one: Output, other: Output) -> None:
    """Of tokens that are as likely either may come first: the values are compared rank by rank, and
    by token."""
    mine, theirs = one.completions[0].logprobs or [], other.completions[0].logprobs or []
    assert len(mine) == len(theirs) == len(one.token_ids)
    for entry, wanted in zip(mine, theirs, strict=True):
        assert entry.token_id == wanted.token_id
        assert entry.logprob == pytest.approx(wanted.logprob, abs=1e-3)
        values = [value for _, value in wanted.top]
        assert [value for _, value in entry.top] == pytest.approx(values, abs=1e-3)
        known = dict(wanted.top)
        for token, value in entry.top:
            assert value == pytest.approx(known.get(token, value), abs=1e-3)
