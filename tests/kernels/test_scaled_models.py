"""Models of weights of one byte over the kernels, beside the same in plain torch."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from aioinfer.kernels import quantize as quantization
from aioinfer.kernels.few_rows_dense import MAX_ROWS
from aioinfer.kernels.gated_product import interleave
from aioinfer.kernels.quantize import ScaledInputs, quantize
from aioinfer.kernels.symmetric_memory import SymmetricBuffer
from safetensors.torch import load_file

from aioinfer.layers import offload
from aioinfer.layers.backend import Backend, Offload
from aioinfer.layers.formats import make_weight
from aioinfer.layers.formats.base import Epilogue
from aioinfer.layers.formats.kernel_scaled import KernelScaledWeight
from aioinfer.layers.formats.scaled import ScaledWeight
from aioinfer.layers.formats.schemes import Quantization, ScaledScheme
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.layers.shards import Shard, Source
from aioinfer.layers.tensor_memory import find_tensors
from aioinfer.models.weight_update import WeightUpdate
from tests.cpu_transfers import CpuTransfers
from tests.kernels.bound_model import Bound, assert_close, random_ids
from tests.kernels.peer_processes import run_ranks
from tests.kernels.test_decoder_kernels import all_reduce_layout, rank_states
from tests.scaled_models import layouts, write, write_dequantized
from tests.test_rank_memory import memory_of_host
from tests.tiny_models import tiny_model

SIZES = {
    "vocab_size": 100, "hidden_size": 128, "intermediate_size": 144, "head_dim": 32,
    "num_attention_heads": 4, "num_hidden_layers": 1,
}  # fmt: skip
#: One step of many rows, and one of few.
MANY, FEW = ([0, 0, 0], [9, 5, 12]), ([9, 5, 12], [1, 1, 5])


@pytest.mark.parametrize(
    ("layout", "family"),
    [("float channel", "llama"), ("float block", "qwen3"), ("float weights alone", "gemma2")],
)
@torch.inference_mode()
def test_a_prefill_and_decodes(layout: str, family: str, tmp_path: Path) -> None:
    """As the dequantized model: nearly for several rows, whose activations are quantized, and but
    for the order of sums for one."""
    extra = {"attention_bias": True, "mlp_bias": True} if family == "llama" else {}
    folder, plain = tmp_path / "quantized", tmp_path / "plain"
    tiny_model(family, folder, **SIZES, **extra)
    shutil.copytree(folder, plain)
    write_dequantized(plain, write(folder, layouts((128, 128))[layout]))
    ours, expected = Bound(folder, kernels=True), Bound(plain, kernels=False)
    weight = ours.model.layers[0].parts[1].gate_up.weight
    assert isinstance(weight, KernelScaledWeight)
    assert weight.matrix.values.dtype in (torch.float8_e4m3fn, torch.int8)
    for starts, lengths in (MANY, FEW):
        assert (sum(lengths) > MAX_ROWS) == (lengths == MANY[1])
        ids = random_ids(lengths)
        theirs = expected.run(expected.step(starts, lengths, ids))
        hidden = ours.run(ours.step(starts, lengths, ids))
        exact = layout == "float weights alone"
        error = (hidden - theirs).norm() / theirs.norm()
        assert error < (1e-4 if exact else 0.1)
        for cache, other in zip(ours.kv, expected.kv, strict=True):  # the same keys for both
            cache.copy_(other)
    one = torch.randn(1, SIZES["intermediate_size"])
    products = [
        bound.model.layers[0].parts[1].down.weight.multiply(one) for bound in (ours, expected)
    ]
    assert_close(*products)


def quantized_states(
    memory: SymmetricBuffer, folder: Path
) -> tuple[list[torch.Tensor], list[bool]]:
    """Returns `rank_states`, and of each launch of `quantize` whether it had a norm."""
    launches = []

    def note(x: torch.Tensor, *arguments: Any, **options: Any) -> ScaledInputs:
        launches.append(options.get("norm_weight") is not None)
        return quantize(x, *arguments, **options)

    quantization.quantize = note  # in a process of its own
    return rank_states(memory, folder, 4), launches


@pytest.mark.parametrize(
    "layout", [pytest.param("float channel", marks=pytest.mark.extended), "float block"]
)
def test_two_ranks_over_symmetric_memory(layout: str, tmp_path: Path) -> None:
    """The all-reduces quantize what they norm; the parts of products are quantized on each rank."""
    sizes = {"vocab_size": 101, "head_dim": 64, "num_attention_heads": 4, "hidden_size": 128}
    folder, plain = tmp_path / "quantized", tmp_path / "plain"
    tiny_model("qwen3", folder, **sizes, intermediate_size=256, num_key_value_heads=2)
    shutil.copytree(folder, plain)
    write_dequantized(plain, write(folder, layouts((128, 128))[layout]))
    nothing = torch.zeros(0, dtype=torch.uint8)
    alone = SymmetricBuffer(nothing, torch.zeros(1, dtype=torch.int64), 0, 1)
    expected = rank_states(alone, plain, 4)
    ranks = run_ranks(2, all_reduce_layout(2, 4).nbytes, quantized_states, folder)
    for states, launches in ranks:
        assert launches
        assert not any(launches)
        for state, of_first, of_one in zip(states, ranks[0][0], expected, strict=True):
            assert torch.equal(state, of_first), "the ranks must have the same bits"
            assert (state - of_one).norm() < 0.15 * of_one.norm()


@pytest.mark.parametrize("place", ["device", "asleep", "host"])
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("deepseek_v3", "fp8"),
        ("qwen3", "int8"),
        pytest.param("deepseek_v3", "int8", marks=pytest.mark.extended),
        pytest.param("falcon", "fp8", marks=pytest.mark.extended),
    ],
)
@torch.inference_mode()
def test_weights_are_quantized_again_in_their_memory(
    family: str, kind: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With gate and up interleaved, experts, and latents whose projection is dequantized; after
    sleep at level 2, and with layers on the host."""
    monkeypatch.setattr(offload, "MIN_BYTES", 2048)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 5}
    first, second = (
        tiny_model(family, tmp_path / str(seed), seed=seed, **sizes) for seed in (0, 1)
    )
    models = [
        Bound(
            folder, kernels=True, quantization=kind,
            offload=Offload(1, CpuTransfers()) if place == "host" else None,
        ).model
        for folder in (first, second)
    ]  # fmt: skip
    ours = models[0]
    if place == "asleep":
        memory = memory_of_host(monkeypatch)
        memory.take_weights([ours])
        memory.begin_service()
    addresses = [each.data_ptr() for each in weights_of(ours)]
    if place == "asleep":
        memory.sleep(WeightUpdate(ours).release())
        memory.wake_up(["weights"])
    update = WeightUpdate(ours)
    if place == "host":
        for each in load_file(second / "model.safetensors").items():
            update.take([each])
        update.finish()
        hosts = [[each.host for each in model.offloaded._layers] for model in models]
        assert all(map(torch.equal, *hosts))
    else:
        update.read(second)
        pairs = zip(*map(weights_of, models), strict=True)
        assert all(torch.equal(found.float(), wanted.float()) for found, wanted in pairs)
    assert addresses == [each.data_ptr() for each in weights_of(ours)]


def weights_of(model: Any) -> list[torch.Tensor]:
    return [each for each in find_tensors(form.layer for form in model.forms) if each.numel()]


@pytest.mark.extended
@torch.inference_mode()
def test_latent_attention(tmp_path: Path) -> None:
    """As DeepSeek-V3's checkpoints: projections that are merged end within blocks, and that from
    latents to keys and values is dequantized. Activations of one row alone are not quantized."""
    folder, plain = tmp_path / "quantized", tmp_path / "plain"
    latents = {
        "q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 96, "qk_rope_head_dim": 32,
        "v_head_dim": 64, "num_key_value_heads": 4, "first_k_dense_replace": 1,
    }  # fmt: skip
    tiny_model("deepseek_v3", folder, **SIZES, **latents)
    shutil.copytree(folder, plain)
    write_dequantized(plain, write(folder, layouts((128, 128))["fp8 block"]))
    ours, expected = Bound(folder, kernels=True), Bound(plain, kernels=False)
    assert isinstance(ours.model.layers[0].parts[0].down.weight, KernelScaledWeight)
    for starts, lengths in (MANY, FEW):
        ids = random_ids(lengths)
        theirs = expected.run(expected.step(starts, lengths, ids))
        hidden = ours.run(ours.step(starts, lengths, ids))
        assert (hidden - theirs).norm() < 0.1 * theirs.norm()
        ours.kv[0].copy_(expected.kv[0])
    one = torch.randn(1, SIZES["hidden_size"])
    assert_close(*(b.model.layers[0].parts[0].down.weight.multiply(one) for b in (ours, expected)))


@torch.inference_mode()
def test_products_are_launched_before_the_first_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of a step, for every tile that the number of rows selects, and no other."""
    write(tiny_model("qwen3", tmp_path, **SIZES), layouts((128, 128))["float block"])
    bound = Bound(tmp_path, kernels=True)
    weight = bound.model.layers[0].parts[1].gate_up.weight
    cases = [(rows, None) for rows in (1, 2, 9, 17, 33, 65, 129, 257, 1024)]
    assert weight.warm_up_cases("gated") == cases
    starts, lengths = MANY
    bound.run(bound.step(starts, lengths, random_ids(lengths)))
    found: list[tuple[int, bool, bool]] = []
    launch = KernelScaledWeight.launch

    def note(self: KernelScaledWeight, candidate: Any, x: Any, epilogue: Epilogue) -> torch.Tensor:
        found.append((len(x), epilogue.gate is not None, epilogue.add_to is not None))
        return launch(self, candidate, x, epilogue)

    few = [(1, None), (2, None), (17, None)]  # one row of which no step was
    monkeypatch.setattr(KernelScaledWeight, "warm_up_cases", lambda self, operation: few)
    monkeypatch.setattr(KernelScaledWeight, "launch", note)
    bound.model.backend.choices.warm_up()
    # queries, keys and values, attention's output, gate and up, the MLP's output
    kinds = [(False, False), (False, True), (True, False), (False, True)]
    assert found == [(rows, *kind) for kind in kinds for rows in (2, 17)]


WHOLE, BLOCKS = Shard.whole(256), ScaledScheme("fp8", (128, 128), inputs="none")


@pytest.mark.parametrize(
    ("rows", "columns", "interleaved", "run"),
    [
        (WHOLE, WHOLE, False, 128),
        (WHOLE, Shard(128, 128, 256), True, 8),  # an even number of blocks for a rank
        (Shard(100, 104, 256), WHOLE, False, 1),  # rows that begin within a block
    ],
)
def test_scales_of_blocks_follow_the_rows(
    rows: Shard, columns: Shard, interleaved: bool, run: int
) -> None:
    """The product of a rank's part, written where it is wanted."""
    weight = kernel_weight(rows, columns, BLOCKS)
    assert isinstance(weight, KernelScaledWeight)
    weight.values.copy_(torch.randn(weight.values.shape) * 50)
    weight.scales.uniform_(0.5, 2.0)
    expected = weight.dequantized()
    if interleaved:
        weight.row_order = interleave(torch.arange(rows.size))
        expected = interleave(expected)
    weight.finalize()
    assert weight.matrix.rows_per_scale == run
    assert weight.matrix.is_paired == interleaved
    for count in (3,) if run == 1 else (MAX_ROWS + 1,):
        x, out = torch.randn(count, columns.size), torch.full((count, rows.size), torch.nan)
        assert weight.multiply(x, Epilogue(out=out)) is out
        torch.testing.assert_close(out, x @ expected.T, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize(("features", "is_paired"), [(512, True), (384, True), (352, False)])
def test_scales_of_gate_and_up_within_128_rows(features: int, is_paired: bool) -> None:
    """One of the gate and one of up, if 64 rows of up lie in one block as those of the gate do."""
    weight = kernel_weight(Shard.whole(features), WHOLE, BLOCKS)
    assert isinstance(weight, KernelScaledWeight)
    weight.row_order = interleave(torch.arange(features))
    weight.finalize()
    assert weight.matrix.is_paired == is_paired


@pytest.mark.parametrize(
    ("columns", "scheme"),
    [
        (Shard(64, 64, 128), BLOCKS),  # begins within a block
        (Shard.whole(256), ScaledScheme("fp8", (128, 64))),
        (Shard.whole(200), ScaledScheme("int8")),
    ],
)
def test_what_kernels_do_not_take_is_dequantized(columns: Shard, scheme: ScaledScheme) -> None:
    assert type(kernel_weight(WHOLE, columns, scheme)) is ScaledWeight


def kernel_weight(rows: Shard, columns: Shard, scheme: ScaledScheme) -> ScaledWeight:
    backend = Backend(torch.device("cpu"), torch.float32, ParallelGroup.single(), has_kernels=True)
    model = Quantization("test", [(["Linear"], scheme)])
    weight = make_weight([Source("x", rows)], columns, backend, model)
    assert isinstance(weight, ScaledWeight)
    return weight
