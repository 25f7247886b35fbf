"""Encoder–decoders on a GPU: tokens in float32 are those of transformers, in steps of prompts and
decodes together, by the kernels or in plain torch, and decodes are replayed from graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_settings import engine_settings

from aioinfer import LLM, SamplingParams
from aioinfer.config import MediaConfig
from aioinfer.executor.inline import InlineExecutor
from aioinfer.worker.gpu_device import GpuDevice
from tests.source_models import reference_output, save_model
from tests.test_source_models import TURNS, as_prompt

TOKENS = 24
PARAMS = SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=0)
#: With heads of 64 the kernels compute attention; with heads of 16 it is plain torch.
SHAPES: dict[str, dict[bool, dict[str, Any]]] = {
    "whisper": {
        True: {"d_model": 128, "encoder_attention_heads": 2, "decoder_attention_heads": 2},
        False: {},
    },
    "bart": {
        True: {"d_model": 128, "encoder_attention_heads": 2, "decoder_attention_heads": 2},
        False: {},
    },
    "flan_t5": {False: {}},  # biases by distance are computed in plain torch
}


@pytest.mark.parametrize(
    ("name", "kernels"), [(name, kernels) for name, given in SHAPES.items() for kernels in given]
)
def test_tokens_are_transformers_s(
    name: str, kernels: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MediaConfig, "encoder_budget", 200)
    model = save_model(name, tmp_path, **SHAPES[name][kernels])
    settings = engine_settings(
        parallel__executor="inline", scheduler__max_num_batched_tokens=96,
        cache__enable_prefix_caching=True, model__max_model_len=128,
    )  # fmt: skip
    turns = [*TURNS[name], *TURNS[name]]
    llm = LLM(str(tmp_path), progress=False, settings=settings)
    try:
        prompts = [as_prompt(llm, turn) for turn in turns]
        outputs = llm.run(llm._generate(prompts, [PARAMS] * len(turns), [0] * len(turns)))
        executor = llm.frontend.engines[0]._workers.executor
        assert isinstance(executor, InlineExecutor)
        device = executor._worker.runner.device
        assert isinstance(device, GpuDevice)
        assert bool(device.graphs.decode.graphs) == kernels
    finally:
        llm.close()
    for (start, source), output in zip(turns, outputs, strict=True):
        expected = reference_output(model, name, start, source, TOKENS)
        found = [each.logprob for each in output.completions[0].logprobs or ()]
        assert output.token_ids == expected.tokens
        assert found == pytest.approx(expected.logprobs, abs=2e-3)


def test_the_kernel_reads_pages_as_torch_does() -> None:
    """More tokens than a launch has rows, sources of several lengths, and padding."""
    from aioinfer.ipc.kv_spec import SourceSpec
    from aioinfer.layers.backend import Backend
    from aioinfer.layers.cross_attention import SourceLengths, make_cross_attention
    from aioinfer.layers.kernel_attention import AttentionPlans
    from aioinfer.layers.layer import LayerCache
    from aioinfer.layers.maker import LayerMaker
    from aioinfer.layers.parallel import ParallelGroup
    from aioinfer.layers.step import GroupInputs, HostRows, Step, StepInputs

    torch.manual_seed(0)
    device, dtype, blocks, heads, size = torch.device("cuda"), torch.float32, 5, 3, 64
    make = LayerMaker(Backend.of(device, dtype, ParallelGroup.single()), heads * size, 512, 1e-5)
    lengths = SourceLengths(device)
    layer = make_cross_attention(
        make, "a", num_heads=heads, head_size=size, source_size=48, max_len=200, norm=None,
        lengths=lengths,
    )  # fmt: skip
    (spec,) = layer.kv_specs
    assert isinstance(spec, SourceSpec)
    shape = 2, blocks, spec.num_pages * 64, heads, size
    cache = torch.randn(shape, device=device)
    tables = torch.tensor([[3, 0], [1, 0], [4, 0], [2, 0]], dtype=torch.int32, device=device)
    counts, seq_lens = [1, 1, 300, 2], [5, 9, 300, 7]
    starts = torch.tensor([0, 1, 2, 302, 304], dtype=torch.int32, device=device)
    ids = torch.zeros(304, dtype=torch.int32, device=device)
    group = GroupInputs(ids.long(), tables)
    inputs = StepInputs(
        ids, ids, starts, torch.tensor(seq_lens, dtype=torch.int32, device=device), (group,)
    )
    step = Step(inputs, 2, host=HostRows(counts, seq_lens))
    queries = torch.randn(304, heads, size, device=device)
    plans = AttentionPlans(8, 512, dtype)
    layer.bind([LayerCache(spec, cache, 0, 16)], plans)
    lengths.of_blocks.copy_(torch.tensor([1, 200, 64, 65, 13]))
    plans.fill(step)
    assert layer._plan is not None
    found = layer._attend_with_kernel(queries, layer._plan)
    expected = layer._attend_in_torch(queries, step)
    assert torch.allclose(found, expected, atol=1e-5)
