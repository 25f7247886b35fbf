"""A tiny random Llama, hand-made plans, and a record of what an executor reports: for the tests of
both executors."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from safetensors.torch import save_file

from aioinfer.config import Config, SchedulerConfig, load_config
from aioinfer.executor.base import Executor, WorkerReport
from aioinfer.ipc.plan import Admission, Admissions, StepPlan, StepResult
from aioinfer.sampling_params import SamplingParams
from tests.plans import ids, make_plan

PROMPT = [5, 3, 17, 60, 2, 41]
_NONE = np.empty(0, np.int32)


def planning_ahead(settings: dict[str, Any]) -> AbstractContextManager[Any]:
    """Takes `scheduler__plan_ahead`, a constant, out of settings; an engine that is made within the
    block has it."""
    ahead = settings.pop("scheduler__plan_ahead", True)
    return mock.patch.object(SchedulerConfig, "plan_ahead", ahead)


def tiny_llama(folder: Path, *, inner: int = 64, seed: int = 0, num_layers: int = 1) -> Path:
    """Writes a Llama with random weights, and `inner` channels in its MLPs."""
    folder.mkdir(exist_ok=True)
    vocab, hidden, heads, kv_heads = 64, 32, 4, 2
    description = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32",
        "tie_word_embeddings": False,
        "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": num_layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
    }  # fmt: skip
    kv = hidden // heads * kv_heads
    layer = {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner), "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }  # fmt: skip
    shapes = {
        f"model.layers.{number}.{name}.weight": shape
        for number in range(num_layers)
        for name, shape in layer.items()
    }
    shapes |= {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    noise = torch.Generator().manual_seed(seed)
    weights = {name: torch.randn(shape, generator=noise) * 0.5 for name, shape in shapes.items()}
    (folder / "config.json").write_text(json.dumps(description))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def tiny_config(
    folder: Path, *, executor: str = "auto", tensor_parallel_size: int = 1, **settings: Any
) -> Config:
    return load_config(
        None,
        {
            "model.path": str(folder), "cache.block_size": 4, "cache.num_blocks": 32,
            "scheduler.max_num_seqs": 4, "scheduler.max_num_batched_tokens": 64,
            "parallel.cpu_threads": 1, "parallel.device": "cpu", "parallel.executor": executor,
            "parallel.tensor_parallel_size": tensor_parallel_size,
        }
        | settings,
    )  # fmt: skip


class Run:
    """An executor and all that it reported."""

    def __init__(self, executor: Executor):
        self.executor = executor
        self.results: list[StepResult] = []
        self.failures: list[Exception] = []
        self.progress: list[tuple[str, int, int]] = []
        self.threads: set[int] = set()
        self._reported = asyncio.Event()

    async def start(self) -> WorkerReport:
        return await self.executor.start(
            self._take, self._fail, lambda *arguments: self.progress.append(arguments)
        )

    def _take(self, result: StepResult) -> None:
        self.threads.add(threading.get_ident())
        self.results.append(result)
        self._reported.set()

    def _fail(self, error: Exception) -> None:
        self.threads.add(threading.get_ident())
        self.failures.append(error)
        self._reported.set()

    async def wait_for_results(self, count: int) -> None:
        async with asyncio.timeout(30):
            while len(self.results) < count:
                assert not self.failures, self.failures
                self._reported.clear()
                await self._reported.wait()

    async def wait_for_failure(self) -> str:
        async with asyncio.timeout(30):
            while not self.failures:
                self._reported.clear()
                await self._reported.wait()
        return str(self.failures[0])


def prefill_plan(step_id: int) -> StepPlan:
    """Admits `PROMPT` to slot 0, with room for eight tokens in blocks 7, 3."""
    admission = Admission(0, ids(*PROMPT), len(PROMPT), SamplingParams(temperature=0), 0)
    growth = [(0, 0, 7), (0, 1, 3), (0, 2, 9)]
    return make_plan(step_id, [(0, 0, len(PROMPT), 1)], growth, [Admissions.of([admission])])


def long_prefill_plan(step_id: int, length: int) -> StepPlan:
    """Admits a prompt of `length` tokens to slot 1, in the first blocks."""
    admission = Admission(1, np.zeros(length, np.int32), length, SamplingParams(temperature=0), 0)
    growth = [(1, block, block) for block in range(-(-length // 4))]
    return make_plan(step_id, [(1, 0, length, 1)], growth, [Admissions.of([admission])])


def decode_plan(step_id: int, position: int) -> StepPlan:
    return make_plan(step_id, [(0, position, 1, 1)])


def broken_plan(step_id: int) -> StepPlan:
    """Names a slot that does not exist."""
    return make_plan(step_id, [(4000, 0, 1, 1)])


async def greedy(run: Run, count: int) -> list[int]:
    """Returns what follows `PROMPT`: all plans are posted at once, as the scheduler does when it
    plans ahead."""
    begin = len(run.results)
    run.executor.post(prefill_plan(begin))
    for number in range(1, count):
        run.executor.post(decode_plan(begin + number, len(PROMPT) + number - 1))
    await run.wait_for_results(begin + count)
    results = run.results[begin:]
    assert [result.step_id for result in results] == list(range(begin, begin + count))
    return [int(result.tokens[0]) for result in results]
