"""Models with quantized experts, and gpt-oss, over the kernels: what they give beside the same in
plain torch, how they are loaded, and what ranks have of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from aioinfer.kernels.expert_configs import SCANNED_TOKENS
from aioinfer.kernels.expert_weights import PackedExperts, ScaledExperts, format_name

from aioinfer.layers.expert_stacks import StackedExperts, _best_run, interleaved_order
from aioinfer.layers.kernel_experts import KernelMixtureMLP
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.layers.residual import ResidualStream
from benchlib.quantized_folder import Format, Groups, awq, gptq, packed, quantize_folder, scaled
from tests.kernels.bound_model import Bound, assert_close, random_ids
from tests.mxfp4_models import quantize_experts
from tests.paged_model import UnsummedGroup
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.extended

SIZES: dict[str, Any] = {
    "vocab_size": 100, "hidden_size": 128, "head_dim": 64, "num_attention_heads": 2,
    "num_key_value_heads": 1, "num_hidden_layers": 1,
}  # fmt: skip
#: By a name: the format of a checkpoint, that of its experts in kernels, and whether activations
#: are quantized for several tokens.
FORMATS: dict[str, tuple[Format, str, bool]] = {
    "float8 channels": (scaled("fp8"), "scaled", True),
    "float8 blocks": (scaled("fp8", 128), "blocks", True),
    "gptq": (gptq(Groups(size=32)), "integers", False),
    "gptq in order of activations": (
        gptq(Groups(size=32, is_symmetric=False, seed=3)), "plain", False
    ),
    "awq": (awq(64), "integers", False),
    "packed": (packed(Groups(size=None)), "integers", False),
    "int8": (scaled("int8"), "scaled", False),
}  # fmt: skip


def stacked_of(bound: Bound) -> StackedExperts:
    mixture = bound.model.layers[0].parts[1]
    assert isinstance(mixture, KernelMixtureMLP)
    return mixture.stacked


def mixed(bound: Bound, x: torch.Tensor) -> torch.Tensor:
    """Returns what the experts of the first layer add for x."""
    mixture = bound.model.layers[0].parts[1]
    stream = ResidualStream(torch.zeros_like(x), bound.backend)
    if isinstance(mixture, KernelMixtureMLP):
        mixture._add(stream, x, mixture._route(x, buckets=len(x) > SCANNED_TOKENS))
        return stream.hidden
    return mixture._mix(x)


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("name", FORMATS)
@torch.inference_mode()
def test_experts_of_a_quantized_checkpoint(name: str, tmp_path: Path) -> None:
    """As the dequantized ones in plain torch, for one token, a few, and in buckets."""
    format, expected, quantizes = FORMATS[name]
    hidden = 256 if expected == "blocks" else 128
    sizes = SIZES | {"hidden_size": hidden, "moe_intermediate_size": 160 if hidden == 256 else 48}
    dense = tiny_model("qwen3_moe", tmp_path / "dense", **sizes)
    folder = quantize_folder(dense, tmp_path / "quantized", format)
    ours, plain = (Bound(folder, kernels=use) for use in (True, False))
    stacked = stacked_of(ours)
    assert [format_name(weight) for weight in (stacked.gate_up, stacked.down)] == [expected] * 2
    for tokens in (1, 3, 17):
        x = torch.randn(tokens, hidden)
        limit = 0.08 if quantizes and tokens > 1 else 1e-4
        assert relative(mixed(ours, x), mixed(plain, x)) < limit


@pytest.mark.parametrize("is_mxfp4", [False, True])
@torch.inference_mode()
def test_gpt_oss(is_mxfp4: bool, tmp_path: Path) -> None:
    """A prefill and decodes: biases of routers and experts, and the clamped activation."""
    tiny_model("gpt_oss", tmp_path, **SIZES, intermediate_size=96)
    if is_mxfp4:
        quantize_experts(tmp_path, tmp_path)
    ours, plain = (Bound(tmp_path, kernels=use, fill=torch.nan) for use in (True, False))
    stacked = stacked_of(ours)
    assert isinstance(stacked.gate_up, PackedExperts) == is_mxfp4
    assert ours.model.supports_graphs
    for starts, lengths in (([0, 0, 0], [9, 5, 8]), ([9, 5, 8], [1, 1, 1])):
        ids = random_ids(lengths)
        expected = plain.run(plain.step(starts, lengths, ids))
        assert_close(ours.run(ours.step(starts, lengths, ids)), expected)
    assert ours.model.weights_bytes >= stacked.held_bytes


@torch.inference_mode()
def test_bfloat16_is_quantized_while_it_is_loaded(tmp_path: Path) -> None:
    """`model.quantization`: as the same checkpoint, quantized before."""
    dense = tiny_model("qwen3_moe", tmp_path / "dense", **SIZES)
    written = quantize_folder(dense, tmp_path / "quantized", scaled("fp8"))
    ours = stacked_of(Bound(dense, kernels=True, quantization="fp8"))
    theirs = stacked_of(Bound(written, kernels=True))
    for one, other in ((ours.gate_up, theirs.gate_up), (ours.down, theirs.down)):
        assert isinstance(one, ScaledExperts)
        assert isinstance(other, ScaledExperts)
        assert torch.equal(one.values.view(torch.uint8), other.values.view(torch.uint8))
        assert torch.equal(one.scales, other.scales)


def ranks_of(folder: Path, count: int, *, by_expert: bool) -> list[Bound]:
    groups = [ParallelGroup.single(), *(UnsummedGroup(rank, count) for rank in range(count))]
    return [
        Bound(folder, kernels=True, group=group, expert_parallel=by_expert and group.size > 1)
        for group in groups
    ]


@pytest.mark.parametrize("by_expert", [False, True])
@pytest.mark.parametrize("name", ["float8 channels", "float8 blocks", "awq"])
@torch.inference_mode()
def test_two_ranks_add_up(name: str, by_expert: bool, tmp_path: Path) -> None:
    sizes = SIZES | {"moe_intermediate_size": 256}
    dense = tiny_model("qwen3_moe", tmp_path / "dense", **sizes)
    folder = quantize_folder(dense, tmp_path / "quantized", FORMATS[name][0])
    whole, *ranks = ranks_of(folder, 2, by_expert=by_expert)
    kept = sum(stacked_of(rank).down.nbytes for rank in ranks)
    assert kept < 1.2 * stacked_of(whole).down.nbytes
    x = torch.randn(1, 128)
    parts = [mixed(one, x) for one in (whole, *ranks)]
    assert_close(torch.stack(parts[1:]).sum(0), parts[0])


@pytest.mark.parametrize(("count", "by_expert"), [(2, False), (4, False), (2, True)])
@torch.inference_mode()
def test_ranks_of_gpt_oss_have_whole_blocks(count: int, by_expert: bool, tmp_path: Path) -> None:
    """160 channels are five blocks, which neither two nor four ranks have in equal parts."""
    sizes = {"intermediate_size": 160, "num_key_value_heads": 4, "num_attention_heads": 4}
    tiny_model("gpt_oss", tmp_path, **SIZES | sizes)
    quantize_experts(tmp_path, tmp_path)
    whole, *ranks = ranks_of(tmp_path, count, by_expert=by_expert)
    channels = [stacked_of(rank).down.shape[2] for rank in ranks]
    expected = {2: [64, 96], 4: [32, 32, 32, 64]}
    assert channels == ([160, 160] if by_expert else expected[count])
    x = torch.randn(2, 128)
    parts = [mixed(one, x) for one in (whole, *ranks)]
    assert_close(torch.stack(parts[1:]).sum(0), parts[0])


def test_runs_are_as_long_as_they_can_be_without_padding() -> None:
    assert [_best_run(inputs, 128) for inputs in (256, 384, 192, 768, 2048)] == [64, 32, 64, 64, 64]
    assert [_best_run(128, group) for group in (None, 64, 32)] == [32, 32, 32]


def test_rows_are_interleaved_by_eight() -> None:
    apart, in_turns = (interleaved_order(16, in_turns=turns).tolist() for turns in (False, True))
    assert apart[:24] == [*range(8), *range(16, 24), *range(8, 16)]
    assert in_turns[:24] == [*range(0, 16, 2), *range(1, 16, 2), *range(16, 32, 2)]
