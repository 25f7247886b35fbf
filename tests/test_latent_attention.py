"""Latent attention: both forms of its projection, what a token costs, quantized checkpoints, and
configurations that are refused. Its equality with transformers is in `test_models`."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from aioinfer.errors import ConfigError
from aioinfer.ipc.kv_spec import LatentSpec, group_layers
from aioinfer.layers.backend import Backend
from aioinfer.layers.formats.dense import DenseWeight
from aioinfer.layers.kv_cache import LatentShape
from aioinfer.layers.linear import LatentExpansion
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.layers.shards import Shard, Source
from aioinfer.models.registry import build_model, load_model_config
from aioinfer.worker.kv_tensors import KVTensors
from tests.paged_model import CPU, PagedModel, load_model
from tests.scaled_models import layouts, write, write_dequantized
from tests.test_worker import load as load_worker
from tests.test_worker import make_worker
from tests.tiny_models import tiny_model

SINGLE = ParallelGroup.single()
SHAPE = LatentShape(5, 24, 8, 16, 12, 0.3)


def test_both_forms_of_the_projection_are_equal() -> None:
    """Scores and outputs over expanded keys and values are those over latents."""
    backend = Backend(CPU, torch.float64, SINGLE)
    rows = SHAPE.num_heads * (SHAPE.plain_size + SHAPE.value_size)
    source, columns = Source("b", Shard.whole(rows)), Shard.whole(SHAPE.latent_size)
    weight = torch.randn(rows, SHAPE.latent_size, dtype=torch.float64)
    weight = DenseWeight([source], columns, backend, weight)
    expansion = LatentExpansion(weight, SHAPE, source, backend)
    expansion.finalize()
    latents = torch.randn(9, SHAPE.latent_size, dtype=torch.float64)
    queries = torch.randn(4, SHAPE.num_heads, SHAPE.plain_size, dtype=torch.float64)
    keys, values = expansion.expand(latents)
    expanded = torch.einsum("qhd,khd->hqk", queries, keys)
    absorbed = torch.einsum("qhl,kl->hqk", expansion.absorb(queries), latents)
    torch.testing.assert_close(absorbed, expanded)
    weights = expanded.softmax(-1)
    sums = torch.einsum("hqk,kl->qhl", weights, latents)
    outputs = torch.einsum("hqk,khd->qhd", weights, values)
    torch.testing.assert_close(expansion.values_of(sums), outputs)


@pytest.mark.parametrize(("layers", "nbytes"), [(27, 31_104), (61, 70_272)])
def test_what_a_token_costs(layers: int, nbytes: int) -> None:
    """DeepSeek-V2-Lite's layers, and V3's, in 16 bits."""
    (group,) = group_layers([[LatentSpec(512 + 64)]] * layers)
    assert group.bytes_per_block(1, 2) == nbytes
    (tensor,) = KVTensors([group], [3], 16, torch.bfloat16, CPU).tensors
    assert tensor.nbytes == 3 * 16 * nbytes


@pytest.mark.parametrize("query_rank", [None, 40])
def test_float8_in_blocks(query_rank: int | None, tmp_path: Path) -> None:
    """As DeepSeek-V3's checkpoints are stored: the model is that of the dequantized weights, also
    where blocks end within the rows of a module that is merged with another."""
    folder, plain = tmp_path / "quantized", tmp_path / "plain"
    tiny_model("deepseek_v3", folder, q_lora_rank=query_rank)
    shutil.copytree(folder, plain)
    write_dequantized(plain, write(folder, layouts((16, 16))["fp8 block"]))
    texts = {0: list(range(3, 40)), 1: [7]}
    found, expected = (PagedModel(load_model(f, SINGLE), 16).step(texts) for f in (folder, plain))
    for name in texts:
        assert (found[name] - expected[name]).abs().max() < 1e-4 * expected[name].std()


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method = 'noaux_tc' is not supported"),
        ("deepseek_v2", {"attention_bias": True}, "attention_bias without q_lora_rank"),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func must be 'softmax'"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func must be 'sigmoid'"),
        ("deepseek_v3", {"n_group": 3, "topk_group": 2}, "the groups must be equal"),
        ("deepseek_v3", {"n_group": 8, "topk_group": 4}, "with at least 2 experts each"),
        ("deepseek_v3", {"topk_group": 1}, "3 in those that are taken"),
        ("deepseek_v3", {"kv_lora_rank": 0}, "kv_lora_rank must be at least 1"),
        ("deepseek_v3", {"qk_rope_head_dim": 7}, "7 channels are rotated"),
        *(
            ("deepseek_v2", {name: None}, f"lacks '{name}'")
            for name in ("kv_lora_rank", "v_head_dim", "moe_intermediate_size")
        ),
    ],
)
def test_configurations_that_are_refused(
    family: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = tiny_model(family, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    with pytest.raises(ConfigError, match=message):
        load_model_config(folder)


def test_ranks_have_to_divide_the_heads(tmp_path: Path) -> None:
    heads = {"num_attention_heads": 6, "num_key_value_heads": 6}
    folder = tiny_model("deepseek_v2", tmp_path, hidden_size=96, **heads)
    with pytest.raises(ConfigError, match=r"6 heads.*these do: 1, 2$"):
        build_model(folder, Backend(CPU, torch.float32, ParallelGroup(0, 4)))


def test_layers_without_experts(tmp_path: Path) -> None:
    folder = tiny_model("deepseek_v2", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": 6, "moe_layer_freq": 2}
    (folder / "config.json").write_text(json.dumps(config))
    mixture: Any = load_model_config(folder)
    assert mixture.mixture.dense_layers == {0, 1, 3, 5}


def test_a_cache_in_float8_is_refused(tmp_path: Path) -> None:
    worker = make_worker(tiny_model("deepseek_v2", tmp_path), dtype="fp8")
    with pytest.raises(
        ConfigError,
        match=r"not supported for latent vectors, and for models .* alone: set cache\.dtype",
    ):
        load_worker(worker)


def test_what_transformers_writes(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale_all_dim": 1.0}
    rope["original_max_position_embeddings"] = 128
    config: Any = load_model_config(tiny_model("deepseek_v3", tmp_path, rope_parameters=rope))
    shape = config.latent
    assert (shape.num_heads, shape.latent_size, shape.rotary_size) == (8, 24, 8)
    assert (shape.plain_size, shape.value_size, config.query_rank) == (16, 12, 40)
    assert shape.scale == pytest.approx(24**-0.5 * (0.1 * math.log(4) + 1) ** 2)
    assert config.rope.interleaved
    assert config.mixture.dense_layers == {0}
    assert config.mixture.shared_size == 2 * 32
