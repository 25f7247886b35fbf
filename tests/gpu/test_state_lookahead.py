"""Lookahead rows over layers with a state on a GPU: the kernels of the gated delta rule, of Kimi
delta attention, Mamba-2 and short convolutions at the sizes of models against float64 recurrences,
and texts of random models that are those of plain runs."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from delta_cases import DeltaCase
from engine_settings import worker_of
from lookahead_cases import MOST, Ahead, convolve, lookahead, mamba
from mamba_cases import MambaCase
from random_models import random_model
from test_delta import KIMI, REAL
from test_speculation import (
    PARAMS,
    PROMPTS,
    TOKENS,
    VOCAB_SIZE,
    count_kept_drafts,
    equal_texts,
    look_always_ahead,
    propose_known_drafts,
    running,
)

from aioinfer import SamplingParams
from aioinfer.worker.gpu_device import GpuDevice

#: Sizes that the kernels have, of small models.
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "initializer_range": 0.05, "eos_token_id": None,
    "max_position_embeddings": 1024, "head_dim": 64, "num_attention_heads": 2,
    "num_key_value_heads": 2, "hidden_size": 128,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {"linear_key_head_dim": 16, "linear_value_head_dim": 16},
    "qwen3_next": {"mlp_only_layers": [0, 1], "linear_value_head_dim": 16},
    "kimi_linear": {"linear_head_dim": 24, "mlp_layer_types": ["dense", "dense"]},
    "bamba": {"mamba_d_head": 16},  # twice the hidden size by 16 heads
    "falcon_h1": {},
    "lfm2": {},
}


def some_slots(count: int) -> list[Ahead]:
    """Returns slots anywhere in their blocks, with padding and prompts among them."""
    rng = random.Random(count)
    slots = []
    for _ in range(count):
        start = rng.choice([0, 1, 40, 58, 60, 62, 63, 64, 127, 300])
        pending = rng.randint(0, MOST) if start else 0
        slots.append(Ahead(start, pending, rng.randint(1, MOST + 1)))
        if not rng.randrange(6):
            slots.append(Ahead(0, 0, 1, is_padding=True))
    return slots


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", [REAL, replace(REAL, key_heads=8), KIMI], ids=str)
def test_rows_of_many_slots(case: DeltaCase, state_dtype: torch.dtype) -> None:
    """Also beside prompts, which the launch leaves alone."""
    torch.manual_seed(0)
    case = replace(case, state_dtype=state_dtype)
    is_wide = state_dtype == torch.float32
    for slots, has_starts in (
        ([Ahead(63, pending, count) for pending in range(MOST + 1) for count in (1, 3, 6)], False),
        (some_slots(60), False),
        ([*some_slots(20), Ahead(70, 0, 1, 90), Ahead(0, 0, 1, 5)], True),
    ):
        output, windows, matrices = lookahead(case, slots, has_starts=has_starts)
        assert output < (4e-3 if is_wide else 1e-2)
        assert windows == 0
        assert matrices < (1e-5 if is_wide else 8e-3)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_mamba(state_dtype: torch.dtype) -> None:
    """At Nemotron's sizes."""
    torch.manual_seed(0)
    case = MambaCase(
        torch.bfloat16, "cuda", groups=8, heads=64, head_size=64, state_size=128, block_size=64,
        state_dtype=state_dtype,
    )  # fmt: skip
    is_wide = state_dtype == torch.float32
    for slots, has_starts in (
        ([Ahead(63, pending, count) for pending in range(MOST + 1) for count in (1, 3, 6)], False),
        ([*some_slots(20), Ahead(70, 0, 1, 90), Ahead(0, 0, 1, 5)], True),
    ):
        output, matrices = mamba(case, slots, has_starts=has_starts)
        assert output < (1e-5 if is_wide else 1e-2)
        assert matrices < (1e-5 if is_wide else 8e-3)
        for channels, has_replayed in ((64 * 64 + 2 * 8 * 128, True), (2000, False)):
            of_output, windows = convolve(
                case, slots, channels, has_starts=has_starts, has_replayed=has_replayed
            )
            assert of_output < 4e-3
            assert windows == 0


@pytest.mark.parametrize(
    "settings",
    [
        {}, {"parallel__cuda_graphs": False}, {"scheduler__max_num_seqs": 3},
        {"scheduler__max_num_batched_tokens": 64}, {"cache__state_dtype": "bfloat16"},
    ],
    ids=["graphs", "no graphs", "three at a time", "chunks beside drafts", "bfloat16"],
)  # fmt: skip
@pytest.mark.parametrize("family", MODELS)
def test_text_is_that_of_a_plain_run(
    family: str, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and seeded, with drafts of which most are right, and a second turn that begins with a
    state behind the first answer."""
    random_model(tmp_path, family=family, **{**SMALL, **MODELS[family]})
    shared = {key: value for key, value in settings.items() if key.startswith("cache")}
    with running(tmp_path, **shared) as llm:
        expected = llm.generate(PROMPTS, PARAMS)
    propose_known_drafts(expected, monkeypatch)
    greedy = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=8)
    with running(tmp_path, speculation__method="ngram", **settings) as llm:
        worker = worker_of(llm)
        assert llm.frontend.engines[0].report.max_lookahead > 0
        kept = count_kept_drafts(look_always_ahead(llm))
        outputs = llm.generate(PROMPTS, PARAMS)
        further = [
            [*prompt, *output.token_ids] for prompt, output in zip(PROMPTS, outputs, strict=True)
        ]
        again = llm.generate(further, greedy)
        device = worker.runner.device
        assert isinstance(device, GpuDevice)
        assert bool(device.graphs.lookahead.graphs) == settings.get("parallel__cuda_graphs", True)
        assert worker.compilations is None or worker.compilations.names == []
    assert all(len(output.token_ids) == TOKENS for output in outputs)
    assert equal_texts(outputs, expected) >= len(expected) - 2
    assert kept[1] > 0.1 * kept[0] > 100, kept
    with running(tmp_path, **shared) as llm:
        assert equal_texts(again, llm.generate(further, greedy)) >= len(again) - 2
