"""scripts/bench_embeddings.py: the floor, and a short run of each form."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import bench_embeddings
from bench_embeddings import BGE_M3, flops_of, measure_floor

TINY: dict[str, Any] = BGE_M3 | {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "vocab_size": 100, "max_position_embeddings": 40, "dtype": "float32",
}  # fmt: skip


def test_the_floor_counts_what_torch_multiplies() -> None:
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import CONFIG_MAPPING, AutoModel

    fields = {name: value for name, value in TINY.items() if name != "architectures"}
    kind = fields.pop("model_type")
    model = AutoModel.from_config(CONFIG_MAPPING[kind](**fields, attn_implementation="eager"))
    base = model.encoder  # without the pooler
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        base(torch.randn(3, 20, 32))
    assert counter.get_total_flops() == flops_of(TINY, 3, 20)


def test_steps_of_whole_batches() -> None:
    found = measure_floor(TINY, 4, 12, 1, 1e9, {"parallel.executor": "inline"})
    assert found["steps_of_a_round"] == bench_embeddings.STEPS
    assert found["part"] == pytest.approx(found["floor_s"] / found["step_s"])
    assert found["tokens_per_s"] > 0
