"""Weights in the forms that kernels take them in are offloaded, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from aioinfer.layers import offload
from aioinfer.layers.backend import Offload
from benchlib.quantized_folder import Format, Groups, gptq, quantize_folder
from tests.cpu_transfers import CpuTransfers
from tests.kernels.bound_model import Bound, random_ids
from tests.tiny_models import tiny_model

extended = pytest.mark.extended
SIZES: dict[str, Any] = {
    "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "head_dim": 32,
    "num_attention_heads": 2, "num_hidden_layers": 5,
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("qwen3", "fp8"),
        pytest.param("qwen3", gptq(Groups(size=32, seed=3)), marks=extended),
        pytest.param("qwen3_moe", "fp8", marks=extended),
        pytest.param("qwen3_moe", gptq(Groups(size=32)), marks=extended),
        pytest.param("qwen3_moe", "auto", marks=extended),
        pytest.param("gpt_oss", "auto", marks=extended),
    ],
)
@torch.inference_mode()
def test_hidden_states_are_the_same(
    family: str, form: str | Format, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`form`: of the checkpoint, or in which its weights are loaded."""
    monkeypatch.setattr(offload, "MIN_BYTES", 2048)  # more than counters have
    folder = tiny_model(family, tmp_path / "dense", **SIZES)
    if isinstance(form, Format):
        folder, form = quantize_folder(folder, tmp_path / "quantized", form), "auto"
    given: dict[str, Any] = {"kernels": True, "quantization": form}
    plain = Bound(folder, **given)
    transfers = CpuTransfers(is_late=True)
    ours = Bound(folder, **given, offload=Offload(1, transfers))
    for starts, lengths in (([0, 0, 0], [3, 2, 4]), ([3, 2, 4], [1, 1, 1])):
        ids = random_ids(lengths)
        expected = plain.run(plain.step(starts, lengths, ids))
        torch.testing.assert_close(ours.run(ours.step(starts, lengths, ids)), expected)
    assert transfers.count == 2 * 3
    assert not expected.isnan().any()
