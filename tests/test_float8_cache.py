"""The KV cache in float8: what is stored and read, its scales from checkpoints and by calibration,
its size, and that a model computes with it what one computes that rounds keys and values alike."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from aioinfer.errors import ConfigError
from aioinfer.ipc.kv_spec import AttentionSpec, group_layers
from aioinfer.layers.backend import Backend
from aioinfer.layers.kv_cache import FLOAT8, AttentionShape, KVCache, KVScales
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.layers.rotary import RopeConfig, RotaryTable, apply_rope
from aioinfer.layers.shards import Shard
from aioinfer.layers.torch_attention import TorchAttention
from aioinfer.models.kv_scales import has_float8_cache, load_kv_scales
from aioinfer.models.quantization import read_quantization
from aioinfer.models.registry import build_model
from aioinfer.worker import cache_check
from aioinfer.worker.cache_check import check_loss, expected_loss, text_tokens
from aioinfer.worker.kv_calibration import MARGIN, calibrate
from tests.paged_model import CPU, PagedModel, load_model, make_step
from tests.rounded_attention import rounding_model
from tests.test_fallback import load as load_fallback
from tests.test_fallback import save as save_fallback
from tests.test_models import TEXTS
from tests.test_torch_attention import BATCHES, KV_HEADS, Batch
from tests.test_worker import load, make_worker
from tests.test_worker import load as load_worker
from tests.tiny_models import tiny_model

SCHEME = {"type": "float", "num_bits": 8, "strategy": "tensor", "symmetric": True}


def make_scales(heads: int = KV_HEADS, module: str = "") -> KVScales:
    scales = KVScales(module, Shard.whole(heads), CPU)
    scales.set(torch.linspace(0.01, 0.3, heads), torch.linspace(0.2, 0.004, heads))
    return scales


# ------------------------------------------------------------------------ layers


class Float8Batch(Batch):
    """A batch over a cache in float8; its reference attends to what such a cache holds."""

    def __init__(self, rows: list[tuple[int, int]], block_size: int, *, is_shifted: bool):
        super().__init__(rows, block_size)
        scales = make_scales()
        head_size = self.cache.keys.shape[-1]
        shift = torch.zeros(KV_HEADS, head_size)
        if is_shifted:
            shift = scales.key_shifts = torch.randn(KV_HEADS, head_size)
        shape = self.cache.keys.shape
        whole = torch.full((2, *shape), torch.nan).to(FLOAT8)
        cache = KVCache.of_layer(whole, scales)
        assert cache.scales is scales.table
        tables = self.inputs.block_tables
        for row, (past, _) in enumerate(rows):
            positions = torch.arange(past)
            slots = tables[row][positions // block_size] * block_size + positions % block_size
            cache.write(slots.long(), self.keys[row][:past], self.values[row][:past])
        self.cache = cache
        self.written = self.keys, self.values
        # what is read back of all that was and will be written
        of_values = self.values, scales.values, torch.zeros_like(shift)
        for parts, scale, less in ((self.keys, scales.keys, shift), of_values):
            for number, part in enumerate(parts):
                stored = ((part - less) / scale[:, None]).clamp(-448, 448).to(FLOAT8)
                parts[number] = stored.float() * scale[:, None] + less


@pytest.mark.parametrize(("window", "is_shifted"), [(None, False), (None, True), (5, True)])
@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES)
def test_attention_reads_what_the_cache_holds(
    rows: list[tuple[int, int]], window: int | None, is_shifted: bool
) -> None:
    """Rounding what is rounded changes nothing, so the step's own keys are those of the reference;
    and what keys are stored less need not be added when they are read."""
    batch = Float8Batch(rows, 4, is_shifted=is_shifted)
    expected = batch.reference(window)
    torch.testing.assert_close(batch.attend(window).double(), expected, rtol=1e-5, atol=1e-5)


def test_values_beyond_the_range_saturate_and_nan_stays_nan() -> None:
    scales = make_scales(2)
    cache = KVCache.of_layer(torch.zeros(2, 1, 4, 2, 3).to(FLOAT8), scales)
    new = torch.tensor([1e9, -torch.inf, torch.nan]).expand(1, 2, 3)
    cache.write(torch.tensor([2]), new, -new)
    keys, values = cache.read(cache.keys[0, 2], cache.values[0, 2], torch.float32)
    for head in range(2):
        top, low = 448 * float(scales.keys[head]), 448 * float(scales.values[head])
        assert keys[head, :2].tolist() == pytest.approx([top, -top])
        assert values[head, :2].tolist() == pytest.approx([-low, low])
    assert keys[:, 2].isnan().all()
    assert values[:, 2].isnan().all()
    assert not cache.keys.float()[0, [0, 1, 3]].any()


def test_numbers_are_rounded_to_the_nearest_once() -> None:
    """Every number is stored as the one of all 256 that lies nearest, times the scale."""
    scales = make_scales(1)
    scale = float(scales.keys)
    x = torch.randn(1, 1, 4000, dtype=torch.float32) * torch.logspace(-4, 2.2, 4000)
    cache = KVCache.of_layer(torch.zeros(2, 1, 1, 1, 4000).to(FLOAT8), scales)
    cache.write(torch.tensor([0]), x, x)
    grid = torch.arange(256, dtype=torch.uint8).view(FLOAT8).double()
    grid = grid[~grid.isnan()] * scale
    read, _ = cache.read(cache.keys, cache.values, torch.float64)
    error = (read.flatten() - x.flatten().double()).abs()
    nearest = (grid[:, None] - x.flatten().double()).abs().amin(0)
    assert (error <= nearest + 1e-6 * x.flatten().abs()).all()


def test_a_needle_among_32k_keys() -> None:
    """One key of 32 768 outweighs all others together, in float8 as in float64."""
    heads, size, length, block = 2, 64, 32_768, 64
    noise = torch.Generator().manual_seed(0)
    query, keys, values = (
        torch.randn(count, heads, size, generator=noise) for count in (1, length, length)
    )
    needle = 10_007
    # a score of ln(32 768) + 4, before which the sum of the others is about e ** 0.5 * 32 768
    goal = (math.log(length) + 4) * size**0.5
    keys[needle] = query[0] * goal / query[0].square().sum(-1, keepdim=True)
    scales = KVScales("", Shard.whole(heads), CPU)
    scales.set(torch.tensor([0.05, 1.0]), torch.tensor([1.0, 0.02]))
    cache = KVCache.of_layer(torch.zeros(2, length // block, block, heads, size).to(FLOAT8), scales)
    slots = torch.randperm(length // block, generator=noise)
    lines = (slots[:, None] * block + torch.arange(block)).flatten()
    cache.write(lines[:-1], keys[:-1], values[:-1])
    step = make_step([slots.tolist()], [length - 1], [1], block, torch.zeros(1, dtype=torch.int32))
    attention = TorchAttention(AttentionShape(heads, heads, size, size**-0.5), 0)
    found = attention(query, keys[-1:], values[-1:], cache, step)[0].double()
    scores = torch.einsum("hd,khd->hk", query[0].double(), keys.double()) * size**-0.5
    weights = scores.softmax(-1)
    assert (weights[:, needle] > 0.9).all()
    expected = torch.einsum("hk,khd->hd", weights, values.double())
    assert (found - expected).norm() < 0.05 * expected.norm()
    assert (found - values[needle].double()).norm() < 0.15 * found.norm()


# ------------------------------------------------------------------------ models


def check_model(model: Any, folder: Path, *, is_shifted: bool) -> None:
    """Logits of all positions, however texts are cut and batched, are those of a model that rounds
    keys and values alike, and not those of one that does not."""
    for number, scales in model.kv_scales.items():
        heads = scales.table.shape[1]
        scales.set(0.003 * (number + 1) * torch.arange(1.0, heads + 1), torch.full((heads,), 0.002))
    of_layers = {n: (s.keys.clone(), s.values.clone()) for n, s in model.kv_scales.items()}
    shifts = {}
    for number, scales in model.kv_scales.items():
        (spec,) = (spec for spec in model.kv_specs[number] if isinstance(spec, AttentionSpec))
        heads, size = scales.table.shape[1], spec.head_size
        scales.allow_key_shifts(size)
        shifts[number] = torch.zeros(heads, size)
        if scales.key_shifts is not None:
            shifts[number] = scales.key_shifts.normal_(0, 0.3).clone()
    assert any(bool(shift.any()) for shift in shifts.values()) == is_shifted
    for number, layer in enumerate(getattr(model, "layers", ())):
        for mixer in layer.mixers:
            if mixer.source_layer is not None:
                of_layers[number] = of_layers[mixer.source_layer]
                shifts[number] = shifts[mixer.source_layer]
    reference = rounding_model(folder, of_layers, shifts=shifts)
    logits = PagedModel(model, 4, FLOAT8).run_at_random(TEXTS, 9, seed=1)
    unrounded = PagedModel(model, 4).run_at_random(TEXTS, 9, seed=1)
    errors, distances = [], []
    for text, found, other in zip(TEXTS, logits, unrounded, strict=True):
        with torch.inference_mode():
            expected = reference(torch.tensor([list(text)]), use_cache=False).logits[0]
        errors.append(float((found - expected).norm() / expected.norm()))
        distances.append(float((other - expected).norm() / expected.norm()))
    # a sum computed in another order rounds, rarely, to the next number of float8
    assert sorted(errors)[len(errors) // 2] < 1e-5
    assert max(errors) < 0.25 * min(distances), (errors, distances)


@pytest.mark.parametrize(
    ("family", "is_shifted"),
    [
        ("llama", True),
        ("gemma2", False),
        ("qwen3_5_text", True),  # states in other layers
        ("nemotron_h", False),  # layers that keep nothing, too; no RoPE
        ("falcon_h1", True),  # states in the same layer
        ("gemma4_text", True),  # layers that read the keys of others
    ],
)
def test_a_family(family: str, is_shifted: bool, tmp_path: Path) -> None:
    """Keys of Gemma 2 are not shifted, as its scores have a soft cap. Falcon-H1's multipliers of
    keys are in the scores here, and not in the keys that are stored."""
    ones = {"key_multiplier": 1.0, "attention_in_multiplier": 1.0}
    tiny_model(family, tmp_path, **(ones if family == "falcon_h1" else {}))
    check_model(load_model(tmp_path, ParallelGroup.single()), tmp_path, is_shifted=is_shifted)


def test_a_model_of_transformers(tmp_path: Path) -> None:
    save_fallback("starcoder2", tmp_path)
    check_model(load_fallback(tmp_path), tmp_path, is_shifted=False)


# ------------------------------------------------------------------------ scales of checkpoints


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_model("llama", tmp_path)


def add_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    file = folder / "model.safetensors"
    save_file(load_file(file) | tensors, file)


def set_config(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def names(*suffixes: str) -> list[str]:
    return [f"model.layers.{layer}.self_attn.{suffix}" for layer in range(2) for suffix in suffixes]


@pytest.mark.parametrize(
    "suffixes",
    [
        ("k_scale", "v_scale"),
        ("attn.k_scale", "attn.v_scale"),
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("k_proj.output_scale", "v_proj.output_scale"),
        ("kv_scale",),
    ],
)
def test_scales_are_found_under_every_name(folder: Path, suffixes: tuple[str, ...]) -> None:
    stored = {name: torch.tensor(0.1 * n + 0.1) for n, name in enumerate(names(*suffixes))}
    stored |= {name: torch.ones(1) for name in names("q_scale", "prob_scale")}
    add_tensors(folder, stored)
    model = load_model(folder, ParallelGroup.single())
    assert load_kv_scales(folder, model.kv_scales.values())
    for layer, scales in model.kv_scales.items():
        prefix = f"model.layers.{layer}.self_attn."
        keys, values = stored[prefix + suffixes[0]], stored[prefix + suffixes[-1]]
        assert scales.table[:2].tolist() == [[float(keys)] * 2, [float(values)] * 2]
        torch.testing.assert_close(scales.table[2:], 1 / scales.table[:2])


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (1, 2), (3, 4)])
def test_scales_of_heads_belong_to_the_ranks_that_have_them(
    folder: Path, rank: int, size: int
) -> None:
    """Two KV heads: of four ranks two share each."""
    stored = {name: torch.tensor([[[1.0]], [[2.0]]]) for name in names("k_scale", "v_scale")}
    add_tensors(folder, stored)
    model = build_model(folder, Backend(CPU, torch.float32, ParallelGroup(rank, size)))
    assert load_kv_scales(folder, model.kv_scales.values())
    expected = [1.0, 2.0] if size == 1 else [2.0]
    assert all(scales.keys.tolist() == expected for scales in model.kv_scales.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k_scale": torch.ones(3)}, r"has the shape \[3\]; it should hold one scale, or one for "),
        ({"v_scale": torch.zeros(1)}, "should hold finite scales above 0"),
        ({"v_scale": torch.tensor(torch.nan)}, "should hold finite scales above 0"),
    ],
)
def test_wrong_scales_are_refused(
    folder: Path, change: dict[str, torch.Tensor], message: str
) -> None:
    stored = {name: torch.ones(1) for name in names("k_scale", "v_scale")}
    stored |= {f"model.layers.1.self_attn.{key}": value for key, value in change.items()}
    add_tensors(folder, stored)
    model = load_model(folder, ParallelGroup.single())
    with pytest.raises(ConfigError, match=message):
        load_kv_scales(folder, model.kv_scales.values())


def test_scales_of_some_layers_are_refused(folder: Path) -> None:
    add_tensors(folder, {name: torch.ones(1) for name in names("k_scale", "v_scale")[:2]})
    model = load_model(folder, ParallelGroup.single())
    with pytest.raises(ConfigError, match="for 1 of 2 layers: set cache"):
        load_kv_scales(folder, model.kv_scales.values())


def test_a_checkpoint_without_scales_sets_none(folder: Path) -> None:
    model = load_model(folder, ParallelGroup.single())
    assert not load_kv_scales(folder, model.kv_scales.values())
    assert all((scales.table == 1).all() for scales in model.kv_scales.values())


def test_which_schemes_are_read() -> None:
    assert not has_float8_cache({})
    assert not has_float8_cache({"quantization_config": {"quant_method": "fp8"}})
    for scheme in (SCHEME, SCHEME | {"strategy": "attn_head"}, "static"):
        assert has_float8_cache({"quantization_config": {"kv_cache_scheme": scheme}})
    for change in ({"type": "int"}, {"num_bits": 4}, {"strategy": "group"}, {"dynamic": True}):
        with pytest.raises(ConfigError, match=r"kv_cache_scheme = .* is not supported; these are"):
            has_float8_cache({"quantization_config": {"kv_cache_scheme": SCHEME | change}})


def test_a_checkpoint_of_which_the_cache_alone_is_quantized() -> None:
    found = {"quant_method": "compressed-tensors", "kv_cache_scheme": SCHEME, "config_groups": {}}
    quantization = read_quantization({"quantization_config": found})
    assert quantization is not None
    assert quantization.scheme_of("model.layers.0.mlp.down_proj") is None
    online = read_quantization({"quantization_config": found}, "fp8")
    assert online is not None
    assert online.scheme_of("model.layers.0.mlp.down_proj") is not None


# ------------------------------------------------------------------------ the worker


def test_twice_as_many_blocks_fit_and_more(folder: Path) -> None:
    """On a CPU the dtype of the arithmetic is float32: four times as many."""
    wide, narrow = (load_worker(make_worker(folder, dtype=dtype)) for dtype in ("model", "fp8"))
    assert wide.cache_dtype == "float32"
    assert narrow.block_bytes[0] * 4 == wide.block_bytes[0]
    assert narrow.num_blocks[0] // 4 == wide.num_blocks[0]
    half = load_worker(make_worker(folder, model={"dtype": "bfloat16"}))
    assert narrow.num_blocks[0] // 2 == half.num_blocks[0]
    with pytest.raises(ConfigError, match=r"cache\.num_blocks = .* take") as short:
        load_worker(make_worker(folder, dtype="fp8", num_blocks=2**34))
    assert f"{2**34 * narrow.block_bytes[0] / 2**20:.2f} MiB" in str(short.value)


@pytest.mark.parametrize(
    ("cache", "stored", "expected"),
    [
        ({}, True, "float8 (e4m3; scales: the checkpoint's)"),
        ({}, False, "float8 (e4m3; scales: calibrated)"),
        ({"dtype": "model"}, True, "float32"),
    ],
)
def test_the_checkpoint_decides_unless_the_configuration_does(
    folder: Path, cache: dict[str, Any], stored: bool, expected: str
) -> None:
    found = {"quant_method": "compressed-tensors", "kv_cache_scheme": SCHEME}
    set_config(folder, quantization_config=found)
    if stored:
        add_tensors(folder, {name: torch.tensor(0.5) for name in names("k_scale", "v_scale")})
    worker = make_worker(folder, **cache)
    assert load_worker(worker).cache_dtype == expected
    worker.allocate((4,), 60)
    worker.warm_up()
    table = torch.stack([scales.table for scales in worker.model.kv_scales.values()])
    if "the checkpoint's" in expected:
        assert (table[:, :2] == 0.5).all()
    else:
        assert (table == 1).all() != ("calibrated" in expected)
    for kv in worker.runner.device.kv.tensors:
        assert not kv.float().any(), "a trace of the warm-up is left"


def largest_of(folder: Path) -> torch.Tensor:
    """Returns [layers, 2, num_kv_heads], the largest key and value of each head that the model
    computes for the prompt of the calibration, in float32."""
    worker = make_worker(folder, dtype="model")
    load_worker(worker)
    worker.allocate((16,), 200)
    with mock.patch.object(worker.runner.device.kv, "zero"):
        worker._calibrate(worker._dummy_steps(worker.runner))
    return worker.runner.device.kv.tensors[0].abs().amax((2, 3, 5)).transpose(0, 1)


def test_calibrated_scales_leave_a_margin(folder: Path) -> None:
    """Powers of two with which the largest number of the prompt is at most 448 / MARGIN, and more
    than half of it; the same at each start."""
    tables = []
    for _ in range(2):
        worker = make_worker(folder, dtype="fp8")
        load_worker(worker)
        worker.allocate((16,), 200)
        worker.warm_up()
        tables.append(torch.stack([scales.table for scales in worker.model.kv_scales.values()]))
    assert torch.equal(*tables)
    assert (tables[0].log2() == tables[0].log2().round()).all()
    stored = largest_of(folder) / tables[0][:, :2]
    assert (stored <= 448 / MARGIN * 1.1).all()
    assert (stored > 448 / MARGIN / 2.2).all()


@pytest.mark.parametrize("size", [1e-5, 3e-3, 1.0, 500.0, 1e5])
def test_calibration_finds_scales_of_every_size(size: float) -> None:
    """The first pass rounds small numbers to zero, and cuts large ones off."""
    scales = KVScales("", Shard.whole(2), CPU)
    groups = group_layers([(AttentionShape(2, 2, 8, 1.0).kv_spec,)])
    kv = torch.zeros(2, 1, 4, 4, 2, 8).to(FLOAT8)
    cache = KVCache.of_layer(kv[:, 0], scales)
    new = torch.randn(6, 2, 8).clamp(-1, 1) * size
    new[0, :, 0] = size
    new[:, 1] *= 0  # a head of zeros

    def compute_prompt() -> None:
        cache.write(torch.arange(6), new, -new)

    calibrate({0: scales}, groups, [kv], 6, 6, compute_prompt, ParallelGroup.single())
    expected = 2.0 ** np.ceil(np.log2(size * MARGIN / 448))
    assert scales.keys.tolist() == scales.values.tolist() == pytest.approx([expected, 1.0])


@pytest.mark.parametrize("factor", [1.0, 1.3])
def test_calibration_finds_the_mean_key_over_all_positions(factor: float) -> None:
    """Of a key that is the same at each position before RoPE, and another at the first; with a
    variant that scales cosines and sines, too. Channels beyond the rotated ones keep their mean.
    The first key, which lies apart, is stored exactly."""
    heads, size, tokens, max_len = 2, 20, 30, 400
    rotary = RotaryTable(RopeConfig(theta=1e3, rotary_size=16), size, max_len + 9, CPU)
    rotary.cos_sin *= factor
    scales = KVScales("", Shard.whole(heads), CPU, rotary)
    scales.allow_key_shifts(size)
    key = torch.randn(heads, size)
    kv = torch.zeros(2, 1, 8, 4, heads, size).to(FLOAT8)
    cache = KVCache.of_layer(kv[:, 0], scales)
    stored = []
    first = key + torch.randn(heads, size)

    def compute_prompt() -> None:
        keys = key.repeat(tokens, 1, 1)
        keys[0] = first
        rotated = apply_rope(keys, *rotary.at(torch.arange(tokens)))
        stored[:] = cache.write(torch.arange(tokens), rotated, torch.ones_like(keys))

    calibrate(
        {0: scales}, group_layers([(AttentionShape(2, heads, size, 1.0).kv_spec,)]), [kv], tokens,
        max_len, compute_prompt, ParallelGroup.single(),
    )  # fmt: skip
    everywhere = apply_rope(key.repeat(max_len, 1, 1), *rotary.at(torch.arange(max_len)))
    expected = everywhere.mean(0)
    assert expected.norm() > 0.5 * key.norm()
    assert scales.key_shifts is not None
    # channels that are not rotated are rounded alike at all positions, by up to 1 / 16, and so are
    # the shifts, of their distance from the first key
    away = apply_rope(first[None], *rotary.at(torch.tensor([0])))[0]
    error, most = scales.key_shifts - expected, (away - expected).abs() / 16
    assert (error.abs() <= most + 0.05 * expected.norm()).all()
    read = stored[0][0].float() * scales.keys[:, None] + scales.key_shifts
    torch.testing.assert_close(read, away, rtol=2**-11, atol=2**-11)
    # the scales fit what is stored now
    largest = stored[0].float().abs().amax((0, 2)) * MARGIN
    assert ((largest <= 448) & (largest > 448 / 2.1)).all()


def test_nan_leaves_the_scales() -> None:
    scales = KVScales("", Shard.whole(1), CPU)
    groups = group_layers([(AttentionShape(1, 1, 8, 1.0).kv_spec,)])
    kv = torch.full((2, 1, 1, 4, 1, 8), torch.nan).to(FLOAT8)
    calibrate({0: scales}, groups, [kv], 4, 4, lambda: None, ParallelGroup.single())
    assert (scales.table == 1).all()


def save_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(WordLevel({"[UNK]": 0, "the": 7, "is": 9}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


def test_the_loss_is_the_divergence_of_distributions() -> None:
    plain = torch.tensor([[0.5, 0.5, 0.0], [0.25, 0.25, 0.5]]).log()
    rounded = torch.tensor([[0.25, 0.5, 0.25], [0.25, 0.25, 0.5]]).log()
    assert expected_loss(plain, plain) == 0.0
    assert expected_loss(plain, rounded) == pytest.approx(math.exp(0.25 * math.log(2)) - 1)
    assert expected_loss(plain, plain - 1e4) == math.inf


@pytest.mark.parametrize(("loss", "is_refused"), [(0.005, False), (0.03, True), (math.nan, True)])
def test_a_large_loss_is_refused(loss: float, is_refused: bool) -> None:
    if is_refused:
        with pytest.raises(ConfigError, match="set it to 'model', or to 'fp8_unchecked'"):
            check_loss(loss)
    else:
        check_loss(loss)


def test_the_text_is_read_with_the_tokenizer_of_the_folder(tmp_path: Path) -> None:
    assert text_tokens(tmp_path, 10, 50) is None
    save_tokenizer(tmp_path)
    tokens = text_tokens(tmp_path, 10, 50)
    assert tokens is not None
    assert len(tokens) == 50
    assert {0, 7, 9} >= set(tokens.tolist()) > {0}
    assert text_tokens(tmp_path, 7, 50) is None, "tokens that the model does not have"
    (tmp_path / "tokenizer.json").write_text("{}", "utf-8")
    assert text_tokens(tmp_path, 10, 50) is None


@pytest.mark.parametrize(
    ("dtype", "has_tokenizer", "is_refused"),
    [("fp8", True, True), ("fp8", False, False), ("fp8_unchecked", True, False)],
)
def test_a_worker_compares_the_cache_with_one_that_is_not_rounded(
    dtype: str, has_tokenizer: bool, is_refused: bool, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    losses: list[float] = []
    monkeypatch.setattr(cache_check, "MAX_LOSS", 0.0)
    monkeypatch.setattr(cache_check._log, "info", lambda _, loss: losses.append(loss))
    tiny_model("llama", tmp_path)
    if has_tokenizer:
        save_tokenizer(tmp_path)
    worker = make_worker(tmp_path, dtype=dtype)
    assert "calibrated" in load(worker).cache_dtype
    worker.allocate((16,), 200)
    if is_refused:
        with pytest.raises(ConfigError, match="harms this model"):
            worker.warm_up()
        assert 0.0 < losses[0] < 1.0  # of 100: a part of a per cent
    else:
        worker.warm_up()
        assert not losses
    for kv in worker.runner.device.kv.tensors:
        assert not kv.float().any(), "a trace of the check is left"
