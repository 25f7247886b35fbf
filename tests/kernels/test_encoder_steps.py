"""Steps of encoders on a GPU, in Triton's interpreter: the runner pools what the runner on a CPU
does, with token types and without a KV cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from aioinfer.features.pooled_states.sections import CLS, LAST, MEAN, PooledRows, PooledStates
from aioinfer.features.token_states.sections import TokenStateRows, TokenStates
from aioinfer.ipc.plan import Admission, Admissions, StepPlan, StepResult
from aioinfer.sampling_params import SamplingParams
from aioinfer.worker.device import CpuDevice, Device
from aioinfer.worker.dummy_steps import DummySteps
from aioinfer.worker.features import Rank
from aioinfer.worker.gpu_device import GpuDevice
from aioinfer.worker.kv_tensors import KVTensors
from aioinfer.worker.runner import ModelRunner
from aioinfer.worker.slots import Slots
from aioinfer.worker.step_works import StepWorks
from tests.encoder_models import random_texts, tiny_encoder
from tests.kernels.bound_model import BLOCK_SIZE, CPU, Bound
from tests.kernels.test_gpu_device import no_cuda as no_cuda

LENGTHS = [9, 33, 1, 9]
#: Where the second text of each prompt begins.
SECOND = [4, 0, 0, 8]
HEADS = {"hidden_size": 32, "num_attention_heads": 2}


def make_runner(folder: Path, *, kernels: bool) -> ModelRunner:
    bound = Bound(folder, kernels=kernels)
    assert not bound.groups
    kv = KVTensors((), (), BLOCK_SIZE, torch.float32, CPU)
    slots = Slots(
        4, 60, BLOCK_SIZE, bound.model.vocabulary.vocab_size, CPU, 0, uses_kernels=kernels,
        has_token_types=bound.model.has_token_types,
    )  # fmt: skip
    works = StepWorks.load(Rank(bound.model, slots))
    device: Device = GpuDevice(bound.model, kv, slots, 80) if kernels else CpuDevice(slots, kv)
    return ModelRunner(bound.model, device, works)


def plan_of(vocab_size: int) -> StepPlan:
    admissions = [
        Admission(slot, np.array(text, np.int32), len(text), params, 0)
        for slot, (text, params) in enumerate(
            zip(
                random_texts(LENGTHS, vocab_size),
                [SamplingParams(temperature=0, second_text=start) for start in SECOND],
                strict=True,
            )
        )
    ]
    none, slots = np.empty(0, np.int32), np.arange(4, dtype=np.int32)
    ones = np.ones(4, np.int32)
    pooled = PooledRows(slots[:3], np.array([MEAN, CLS, LAST], np.int32), ones[:3])
    sections = [Admissions.of(admissions), pooled, TokenStateRows(slots[3:], ones[3:] * 9)]
    lengths = np.array(LENGTHS, np.int32)
    return StepPlan(0, slots, 0 * ones, lengths, ones, none, none, none, none, none, sections)


@pytest.mark.parametrize("family", ["bert", "mpnet", "modernbert"])
def test_a_step(family: str, tmp_path: Path) -> None:
    model = tiny_encoder(family, tmp_path, **HEADS)
    results: list[StepResult] = []
    for kernels in (True, False):
        runner = make_runner(tmp_path, kernels=kernels)
        vocab_size = model.config.vocab_size
        DummySteps(runner, 0, BLOCK_SIZE, vocab_size, 9, 16).run_all()
        results.append(runner.step(plan_of(vocab_size)).wait())
    for result in results:
        assert result.tokens.tolist() == [0] * 4
    for kind, name in ((PooledStates, "states"), (TokenStates, "states")):
        ours, expected = (getattr(result.section(kind), name) for result in results)
        assert np.allclose(ours, expected, atol=2e-5)
        assert np.isfinite(expected).all()
    # the types change what the first prompt becomes
    plain = make_runner(tmp_path, kernels=False)
    plan = plan_of(vocab_size)
    plan.admissions.records["second_text"] = 0
    pooled = plain.step(plan).wait().section(PooledStates)
    assert pooled is not None
    first = results[1].section(PooledStates)
    assert first is not None
    is_same = np.allclose(pooled.states[0], first.states[0], atol=1e-3)
    assert is_same == (family != "bert")
