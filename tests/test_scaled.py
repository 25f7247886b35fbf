"""Weights of one byte: published checkpoint layouts load to the numbers of their plain
dequantization, on one rank or several; weights that are quantized while they are loaded."""

from __future__ import annotations

import gc
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aioinfer import LLM, SamplingParams
from aioinfer.errors import ConfigError
from aioinfer.layers.backend import Backend
from aioinfer.layers.formats import scaled
from aioinfer.layers.formats.dense import DenseWeight
from aioinfer.layers.formats.quantized import QuantizedWeight
from aioinfer.layers.formats.scaled import MAXIMA, ScaledWeight, quantize_rows
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.models.loader import load_weights
from aioinfer.models.registry import build_model
from tests.gpu.random_models import random_model
from tests.paged_model import PagedModel, load_model, model_options
from tests.scaled_models import Layout, layouts, set_config, write, write_dequantized
from tests.tiny_models import STATE_FAMILIES, tiny_model

#: Blocks that divide neither the weights nor what ranks have of them.
LAYOUTS = layouts((16, 24))
#: Three ranks divide it as well.
SIZES = {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 6}
Tensors = dict[str, torch.Tensor]


def load(
    folder: Path, *, rank: int = 0, size: int = 1, load_format: str = "auto",
    quantization: str = "auto", on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Any:  # fmt: skip
    """Returns the model, not yet finalized."""
    backend = Backend(torch.device("cpu"), torch.float32, ParallelGroup(rank, size))
    model = build_model(folder, backend, model_options(quantization=quantization))
    load_weights(list(model.weight_shards()), folder, load_format, 0, on_progress)
    return model


def weights(model: Any) -> Tensors:
    """Returns the weights of all linear layers, dequantized."""
    found = {}
    for number, layer in enumerate(model.layers):
        parts = {
            "qkv": layer.parts[0].qkv, "o": layer.parts[0].output,
            "gate_up": layer.parts[1].gate_up, "down": layer.parts[1].down,
        }  # fmt: skip
        for name, linear in parts.items():
            weight = linear.weight
            is_dense = isinstance(weight, DenseWeight)
            found[f"{number}.{name}"] = weight.weight if is_dense else weight.dequantized()
    return found


def assert_same(ours: Tensors, theirs: Tensors) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=0)


@pytest.fixture(scope="module", params=LAYOUTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A quantized checkpoint and the same one dequantized."""
    quantized = tmp_path_factory.mktemp("model") / "quantized"
    return make_pair(quantized, LAYOUTS[request.param])


def make_pair(folder: Path, layout: Layout, family: str = "llama") -> tuple[Path, Path]:
    plain = folder.with_name("plain")
    extra = {"attention_bias": True, "mlp_bias": True} if family == "llama" else {}
    tiny_model(family, folder, **SIZES, **extra)
    shutil.copytree(folder, plain)
    write_dequantized(plain, write(folder, layout))
    return folder, plain


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_checkpoint_loads_to_its_dequantized_numbers(pair: tuple[Path, Path], size: int) -> None:
    """Each rank has its part of them."""
    quantized, plain = pair
    for rank in range(size):
        ours = load(quantized, rank=rank, size=size)
        kinds = {type(layer.parts[1].down.weight) for layer in ours.layers}
        assert kinds == {ScaledWeight}
        assert_same(weights(ours), weights(load(plain, rank=rank, size=size)))
        bias = ours.layers[0].parts[0].qkv.bias
        assert torch.equal(bias, load(plain, rank=rank, size=size).layers[0].parts[0].qkv.bias)


@pytest.mark.parametrize("family", ["phi3", "glm4", "gemma2"])
def test_other_families(family: str, tmp_path: Path) -> None:
    """With merged modules, reordered rows, other activations."""
    quantized, plain = make_pair(tmp_path / "quantized", LAYOUTS["fp8 block"], family)
    ours, theirs = load(quantized, size=2), load(plain, size=2)
    assert_same(weights(ours), weights(theirs))
    x = torch.randn(3, 96)
    for model in (ours, theirs):
        model.finalize()
    for layer, other in zip(ours.layers, theirs.layers, strict=True):
        expected = other.parts[0].qkv(x), other.parts[1].gate_up(x)
        torch.testing.assert_close((layer.parts[0].qkv(x), layer.parts[1].gate_up(x)), expected)


@pytest.mark.parametrize("name", ["fp8 block", "int channel"])
@pytest.mark.parametrize("family", STATE_FAMILIES)
def test_layers_with_states(family: str, name: str, tmp_path: Path) -> None:
    """Rates and decays of the delta rule are not quantized, and so are a product of their own;
    Falcon-H1's multipliers are multiplied with the scales."""
    layout = LAYOUTS[name]
    unquantized = [
        "in_proj_ba", "in_proj_a", "in_proj_b", "mlp.gate", "shared_expert_gate",
        "block_sparse_moe.gate", "b_proj", "f_a_proj", "g_a_proj", "f_b_proj", "g_b_proj",
    ]  # fmt: skip
    config = {**layout.config, "modules_to_not_convert": ["lm_head", *unquantized]}
    if "ignore" in config:  # of compressed-tensors
        config["ignore"] = ["lm_head", *(rf"re:.*\.{module}$" for module in unquantized)]
        del config["modules_to_not_convert"]
    quantized, plain = tmp_path / "quantized", tmp_path / "plain"
    tiny_model(family, quantized, vocab_size=64)
    shutil.copytree(quantized, plain)
    write_dequantized(plain, write(quantized, replace(layout, config=config)))
    ids = {0: [3, 14, 15, 9, 2, 6, 5, 35, 8, 9, 7, 9, 32, 38, 46, 26, 43, 38, 32]}
    ours, theirs = (load_model(folder, ParallelGroup.single()) for folder in (quantized, plain))
    if family.startswith(("qwen", "kimi")):
        assert [len(model.layers[0].parts[0].inputs) for model in (ours, theirs)] == [2, 1]
    logits, expected = (PagedModel(model, 16).step(ids)[0] for model in (ours, theirs))
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4 * expected.std().item())


def test_static_scales_of_activations(tmp_path: Path) -> None:
    """The largest of the modules that share the input."""
    quantized, _ = make_pair(tmp_path / "quantized", LAYOUTS["float static"])
    stored = load_file(quantized / "model.safetensors")
    scales = [stored[f"model.layers.1.mlp.{name}_proj.input_scale"] for name in ("gate", "up")]
    found = load(quantized).layers[1].parts[1].gate_up.weight.input_scale
    assert found == max(scales)
    assert scales[0] != scales[1]


def test_a_checkpoint_of_several_files(tmp_path: Path) -> None:
    """A weight and its scales may lie in different ones."""
    quantized, plain = make_pair(tmp_path / "quantized", LAYOUTS["fp8 block"])
    tensors = load_file(quantized / "model.safetensors")
    (quantized / "model.safetensors").unlink()
    place = {name: f"model-{number % 3}.safetensors" for number, name in enumerate(tensors)}
    for file in set(place.values()):
        part = {name: tensor for name, tensor in tensors.items() if place[name] == file}
        save_file(part, quantized / file)
    index = quantized / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": place}))
    assert_same(weights(load(quantized)), weights(load(plain)))


def test_scales_are_read_in_any_of_their_shapes(tmp_path: Path) -> None:
    """By row as [out] or [out, 1]; of a tensor as a scalar or [1]."""
    for name, shape in (("float channel", (-1,)), ("float tensor", (1,))):
        quantized, plain = make_pair(tmp_path / name / "quantized", LAYOUTS[name])
        change(quantized, lambda t, shape=shape: reshape_scales(t, shape))
        assert_same(weights(load(quantized)), weights(load(plain)))


def reshape_scales(tensors: Tensors, shape: tuple[int, ...]) -> None:
    for name, tensor in tensors.items():
        if name.endswith("weight_scale"):
            tensors[name] = tensor.reshape(shape)


def change(folder: Path, how: Callable[[Tensors], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    how(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_layers_that_are_left_out_stay_as_they_are(tmp_path: Path) -> None:
    folder, plain = tmp_path / "quantized", tmp_path / "plain"
    tiny_model("llama", folder)
    shutil.copytree(folder, plain)
    layout = LAYOUTS["fp8 block"]
    write_dequantized(plain, write(folder, layout, ["layers.0.mlp.down_proj", "v_proj", "q_proj",
                                                    "k_proj"]))  # fmt: skip
    skipped = ["model.layers.0.mlp.down_proj", "q_proj", "k_proj", "v_proj"]
    set_config(folder, quantization_config={**layout.config, "modules_to_not_convert": skipped})
    ours = load(folder)
    assert_same(weights(ours), weights(load(plain)))
    quantized = [isinstance(layer.parts[1].down.weight, QuantizedWeight) for layer in ours.layers]
    assert quantized == [False, True]
    assert isinstance(ours.layers[1].parts[0].qkv.weight, DenseWeight)


# ---------------------------------------------------------------- tokens


@pytest.mark.parametrize("name", ["fp8 block", "int channel"])
def test_greedy_tokens_are_those_of_the_dequantized_model(name: str, tmp_path: Path) -> None:
    quantized, plain = tmp_path / "quantized", tmp_path / "plain"
    random_model(quantized, vocab_size=512, **SIZES)
    shutil.copytree(quantized, plain)
    write_dequantized(plain, write(quantized, LAYOUTS[name]))
    prompts = [[3, 4, 5], [7] * 30, [9, 11]]
    assert generate(quantized, prompts) == generate(plain, prompts)


def generate(folder: Path, prompts: list[list[int]], **settings: Any) -> list[list[int]]:
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    settings = {
        "parallel.executor": "inline", "parallel.device": "cpu", "cache.num_blocks": 20,
        "model.dtype": "float32", "scheduler.max_num_seqs": 4, **settings,
    }  # fmt: skip
    with LLM(str(folder), settings=settings, progress=False) as llm:
        return [list(output.token_ids) for output in llm.generate(prompts, greedy)]


# ---------------------------------------------------------------- quantized while loading


@pytest.mark.parametrize(("kind", "limit"), [("fp8", 0.03), ("int8", 0.01)])
@pytest.mark.parametrize("size", [1, 2])
def test_any_checkpoint_is_quantized_while_it_is_loaded(
    kind: str, limit: float, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row by row of what a rank has, some rows at a time."""
    monkeypatch.setattr(scaled, "_SLICE_VALUES", 300)
    tiny_model("qwen3", tmp_path, dtype=torch.bfloat16)
    for rank in range(size):
        ours = weights(load(tmp_path, rank=rank, size=size, quantization=kind))
        for name, exact in weights(load(tmp_path, rank=rank, size=size)).items():
            values, scales = quantize_rows(exact, kind)
            expected = values.float() * scales[:, None]
            torch.testing.assert_close(ours[name], expected, rtol=0, atol=0)
            error = (ours[name] - exact).norm() / exact.norm()
            assert 0 < error < limit


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_multipliers_of_weights_that_are_quantized_while_they_are_loaded(
    kind: str, tmp_path: Path
) -> None:
    """The multiplier of the gate is in the scales, and the values are as without it."""
    scales = []
    for number, multiplier in enumerate((1.0, 1.5)):
        folder = tmp_path / str(number)
        tiny_model("falcon_h1", folder, mlp_multipliers=[multiplier, 0.6])
        weight = load(folder, quantization=kind).layers[0].parts[2].gate_up.weight
        scales.append((weight.values.float(), weight.scales))
    (values, plain), (others, multiplied) = scales
    half = len(plain) // 2
    assert torch.equal(values, others)
    torch.testing.assert_close(multiplied, torch.cat((plain[:half] * 1.5, plain[half:])))


def test_rows_use_the_whole_range() -> None:
    weight = torch.randn(5, 40) * torch.tensor([1e-6, 1.0, 1e3, 0.0, 1e-20])[:, None]
    for kind, maximum in MAXIMA.items():
        values, scales = quantize_rows(weight, kind)
        assert values[:3].float().abs().amax(1).tolist() == [maximum] * 3
        assert scales.min() > 0
        assert not values[3].float().any()


def test_a_model_is_quantized_without_a_second_copy_of_it(tmp_path: Path) -> None:
    """While it is loaded, there are the one-byte weights and what it takes to quantize a tensor."""
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8}
    tiny_model("llama", tmp_path, dtype=torch.bfloat16, **shape)
    largest = 512 * 256
    num_weights = 8 * (3 * 256 * 512 + 2 * 256 * 128 + 2 * 256 * 32)
    peak = 0

    def watch(done: int, total: int) -> None:
        nonlocal peak
        peak = max(peak, tensor_bytes())

    gc.freeze()  # what is there by now is not counted
    try:
        model = load(tmp_path, quantization="fp8", on_progress=watch)
    finally:
        gc.unfreeze()
    others = 2 * 4 * 512 * 256  # embedding and head, float32
    scales = 4 * 8 * (4 * 512 + 4 * 256)
    assert num_weights + others < peak <= num_weights + others + scales + 4 * 4 * largest
    assert peak < 0.75 * (2 * num_weights + others)  # the bf16 model alone has more
    assert {shard.destination.dtype for _, shard in model.weight_shards()} == {
        torch.float8_e4m3fn, torch.float32,
    }  # fmt: skip


def tensor_bytes() -> int:
    """Returns the bytes of the tensors that Python knows, but for those that are frozen."""
    everything = gc.get_objects()
    tensors = [each for each in everything if type(each) is torch.Tensor and not each.is_mkldnn]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def test_tokens_of_a_model_that_is_quantized_while_it_is_loaded(tmp_path: Path) -> None:
    random_model(tmp_path, vocab_size=512)
    tokens = generate(tmp_path, [[3, 4, 5]], **{"model.quantization": "int8"})
    assert [len(each) for each in tokens] == [12]


# ---------------------------------------------------------------- at random


@pytest.mark.parametrize("name", LAYOUTS)
def test_random_weights_are_as_large_as_those_of_dense_models(name: str, tmp_path: Path) -> None:
    tiny_model("qwen3", tmp_path)
    set_config(tmp_path, quantization_config=LAYOUTS[name].config)
    (tmp_path / "model.safetensors").unlink()
    for weight in weights(load(tmp_path, load_format="dummy")).values():
        assert 0.017 < weight.std() < 0.023
        assert weight.unique().numel() > 100


def test_random_weights_that_are_quantized_while_they_are_loaded(tmp_path: Path) -> None:
    tiny_model("qwen3", tmp_path)
    for weight in weights(load(tmp_path, load_format="dummy", quantization="fp8")).values():
        assert 0.017 < weight.std() < 0.023


# ---------------------------------------------------------------- errors

DOWN = "model.layers.1.mlp.down_proj"


def convert(name: str, dtype: torch.dtype) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({name: tensors[name].to(dtype)})


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (convert(f"{DOWN}.weight", torch.bfloat16), f"tensor {DOWN}.weight .* BF16; .* F8_E4M3"),
        (convert(f"{DOWN}.weight_scale", torch.int32), f"tensor {DOWN}.weight_scale .* I32; "),
        (lambda tensors: tensors.pop(f"{DOWN}.weight_scale"), f"1 missing .{DOWN}.weight_scale"),
        (lambda tensors: tensors.update({f"{DOWN}.weight_scale": torch.ones(3)}),
         rf"tensor {DOWN}.weight_scale has the shape \[3\]; .* \[64\]"),
        (lambda tensors: tensors.update({f"{DOWN}.zero_point": torch.ones(3)}),
         f"1 unknown .{DOWN}.zero_point"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(
    how: Callable[[Tensors], Any], message: str, tmp_path: Path
) -> None:
    write(tiny_model("llama", tmp_path), LAYOUTS["float channel"])
    change(tmp_path, how)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path)


def test_a_module_without_quantized_weights_is_named(tmp_path: Path) -> None:
    tiny_model("llama", tmp_path)
    set_config(tmp_path, quantization_config=LAYOUTS["float channel"].config)
    with pytest.raises(ConfigError, match=re.escape("14 missing (model.layers.0")):
        load(tmp_path)
