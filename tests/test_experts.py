"""Routing, and the weighted sum of experts, against a loop over tokens in float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from aioinfer.errors import ConfigError
from aioinfer.layers.backend import Backend
from aioinfer.layers.experts import MixtureMLP
from aioinfer.layers.maker import LayerMaker
from aioinfer.layers.mixture import ExpertRouter, MixtureShape, Routing
from aioinfer.layers.norm import RMSNorm
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.layers.shards import Shard
from aioinfer.models.registry import build_model, load_model_config
from tests.paged_model import CPU, PagedModel, load_model, model_options
from tests.tiny_models import tiny_model

HIDDEN, CHANNELS = 16, 24
SINGLE = ParallelGroup.single()


def random_mixture(shape: MixtureShape) -> MixtureMLP:
    """Returns a mixture of random weights, not yet finalized."""
    backend = Backend(CPU, torch.float32, SINGLE)
    make = LayerMaker(backend, HIDDEN, 64, 1e-6)
    mixture = make.mixture("m", shape, norm=RMSNorm("n", HIDDEN, 1e-6, backend))
    torch.manual_seed(0)
    for _, shard in mixture.weight_shards():
        shard.destination.normal_()
    return mixture


def by_token(mixture: MixtureMLP, x: torch.Tensor) -> torch.Tensor:
    """Returns the sum over each token's experts, one after the other, in float64."""
    weights = {name: shard.destination.double() for name, shard in mixture.weight_shards()}
    scores, chosen = mixture.router(x)
    total = torch.zeros(x.shape, dtype=torch.float64)
    for token, (row, experts) in enumerate(zip(scores.double(), chosen.tolist(), strict=True)):
        for weight, expert in zip(row, experts, strict=True):
            gate, up, down = (
                weights[f"m.experts.{expert}.{name}_proj.weight"] for name in ("gate", "up", "down")
            )
            inputs = x[token].double()
            total[token] += weight * (down @ (F.silu(gate @ inputs) * (up @ inputs)))
    return total


def test_a_skewed_router() -> None:
    """A tenth of the experts take half of the choices of normed tokens."""
    routing = Routing(128, 8)
    found = ExpertRouter("r", routing, 256, Backend(CPU, torch.float32, SINGLE))
    [(_, shard)] = found.weight_shards()
    assert shard.skew is not None
    rows, factor = shard.skew
    assert rows == 13
    torch.manual_seed(0)
    found.weight.normal_(0.0, 0.02)
    x = torch.randn(500, 256)
    even = (found(x)[1] < rows).float().mean()
    found.weight[:rows].mul_(factor)
    skewed = (found(x)[1] < rows).float().mean()
    assert abs(even - rows / 128) < 0.02
    assert abs(skewed - 0.5) < 0.02
    # an expert's logit is above 0 for half of the tokens only
    for others in (Routing(64, 8), Routing(256, 8, num_groups=8, top_groups=4)):
        made = ExpertRouter("r", others, 16, Backend(CPU, torch.float32, SINGLE))
        assert next(made.weight_shards())[1].skew is None


def router(
    routing: Routing, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> ExpertRouter:
    found = ExpertRouter("r", routing, weight.shape[1], Backend(CPU, torch.float32, SINGLE))
    found.weight.copy_(weight)
    if bias is not None:
        assert found.bias is not None
        found.bias.copy_(bias)
    return found


@pytest.mark.parametrize("top_k", [1, 3, 6])
@pytest.mark.parametrize("tokens", [0, 1, 40])
def test_a_mixture_is_the_weighted_sum_of_its_experts(top_k: int, tokens: int) -> None:
    mixture = random_mixture(MixtureShape(Routing(6, top_k), CHANNELS))
    x = torch.randn(tokens, HIDDEN)
    expected = by_token(mixture, x)
    mixture.finalize()
    torch.testing.assert_close(mixture._mix(x).double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("favoured", [[2], [2, 5]])
def test_experts_that_get_every_token_and_those_that_get_none(favoured: list[int]) -> None:
    shape = MixtureShape(Routing(6, len(favoured), "sigmoid", has_bias=True), CHANNELS)
    mixture = random_mixture(shape)
    assert mixture.router.bias is not None
    mixture.router.bias.zero_()
    mixture.router.bias[favoured] = 10.0
    x = torch.randn(9, HIDDEN)
    _, chosen = mixture.router(x)
    assert set(chosen.flatten().tolist()) == set(favoured)
    expected = by_token(mixture, x)
    mixture.finalize()
    torch.testing.assert_close(mixture._mix(x).double(), expected, rtol=1e-4, atol=1e-4)


def test_ties_take_as_many_experts_as_ever() -> None:
    scores, chosen = router(Routing(8, 3), torch.zeros(8, 4))(torch.randn(5, 4))
    assert all(len(set(row)) == 3 for row in chosen.tolist())
    torch.testing.assert_close(scores, torch.full((5, 3), 1 / 3))


def test_a_bias_selects_and_does_not_weigh() -> None:
    weight = torch.eye(4)
    x = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    routing = Routing(4, 2, "sigmoid", is_normalized=False, scale=2.5, has_bias=True)
    scores, chosen = router(routing, weight, torch.tensor([0.0, 0.0, 0.0, 1.0]))(x)
    assert sorted(chosen[0].tolist()) == [0, 3]
    expected = 2.5 * x[0, chosen[0]].sigmoid()
    torch.testing.assert_close(scores[0], expected)


def test_experts_come_from_the_best_groups() -> None:
    """The second best expert is in a group whose two best are worse than another's."""
    preferred = torch.tensor([[0.9, 0.0, 0.5, 0.5, 0.6, 0.5, 0.0, 0.0]])
    weight = torch.eye(8)
    routing = Routing(8, 2, "sigmoid", has_bias=True, num_groups=4, top_groups=2)
    chosen = router(routing, weight, torch.zeros(8))(preferred.logit(eps=1e-6))[1]
    assert set(chosen[0].tolist()) <= {2, 3, 4, 5}
    assert 4 in chosen[0].tolist()


def test_a_groups_score_is_that_of_its_best_expert() -> None:
    """As in DeepSeek-V2: the groups of the best experts are taken, whatever is beside them."""
    logits = torch.tensor([[3.0, 0.0, 2.0, 2.0, 2.5, 0.0, 0.0, 0.0]])
    routing = Routing(
        8, 3, is_normalized=False, scale=2.0, num_groups=4, top_groups=2, group_best=1
    )
    scores, chosen = router(routing, torch.eye(8))(logits)
    assert {0, 4} < set(chosen[0].tolist()) <= {0, 1, 4, 5}
    torch.testing.assert_close(scores[0], 2.0 * logits.softmax(-1)[0, chosen[0]])


def test_quantized_experts(tmp_path: Path) -> None:
    """Experts in float8 are those of a model with their dequantized weights."""
    folder = tiny_model("qwen3_moe", tmp_path / "model")
    texts = {0: list(range(3, 40))}
    model = build_model(
        folder, Backend(CPU, torch.float32, SINGLE), model_options(quantization="fp8")
    )
    model.load(folder, "auto", 0, lambda done, total: None)
    quantized = PagedModel(model, 16).step(texts)[0]
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("proj.weight"):
            scale = tensor.abs().amax(1, keepdim=True) / 448
            tensors[name] = (tensor / scale).to(torch.float8_e4m3fn).float() * scale
    save_file(tensors, folder / "model.safetensors")
    expected = PagedModel(load_model(folder, SINGLE), 16).step(texts)[0]
    assert (quantized - expected).abs().max() < 1e-3 * expected.std()


def test_layers_behind_the_last_one_are_not_read(tmp_path: Path) -> None:
    """GLM's checkpoints have a layer that predicts further tokens."""
    folder = tiny_model("glm4_moe", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.2.enorm.weight"] = torch.ones(64)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    for count, message in ((1, None), (0, r"1 unknown \(model\.layers\.2\.enorm\.weight\)")):
        config["num_nextn_predict_layers"] = count
        (folder / "config.json").write_text(json.dumps(config))
        model = build_model(folder, Backend(CPU, torch.float32, SINGLE))
        if message is None:
            model.load(folder, "auto", 0, lambda done, total: None)
        else:
            with pytest.raises(ConfigError, match=message):
                model.load(folder, "auto", 0, lambda done, total: None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok = 9 exceeds the 8 experts"),
        ({"num_local_experts": None}, "lacks 'num_experts'"),
        ({"num_local_experts": 0}, "num_local_experts must be at least 1"),
        ({"mlp_only_layers": [-1]}, "mlp_only_layers must be at least 0"),
    ],
)
def test_configurations_that_are_refused(tmp_path: Path, fields: dict, message: str) -> None:
    folder = tiny_model("qwen3_moe", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    with pytest.raises(ConfigError, match=message):
        load_model_config(folder)


@pytest.mark.parametrize("quantization", ["auto", "fp8"])
def test_a_rank_reads_its_experts_alone(tmp_path: Path, quantization: str) -> None:
    """Those of others may be of any shape; one of its own may not be missing."""
    folder = tiny_model("qwen3_moe", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    prefix = "model.layers.1.mlp.experts"
    tensors[f"{prefix}.3.down_proj.weight"] = torch.zeros(1, 1)
    save_file(tensors, folder / "model.safetensors")
    backends = [
        Backend(CPU, torch.float32, ParallelGroup(rank, 2), expert_parallel=True)
        for rank in range(2)
    ]
    models = [
        build_model(folder, backend, model_options(quantization=quantization))
        for backend in backends
    ]
    numbers = [
        {int(name.split(".")[5]) for name, _ in model.weight_shards() if ".experts." in name}
        for model in models
    ]
    assert numbers == [{0, 1, 2, 3}, {4, 5, 6, 7}]
    with pytest.raises(ConfigError, match=r"experts\.3\.down_proj\.weight has the shape \[1, 1\]"):
        models[0].load(folder, "auto", 0, lambda done, total: None)
    models[1].load(folder, "auto", 0, lambda done, total: None)
    tensors[f"{prefix}.8.down_proj.weight"] = tensors.pop(f"{prefix}.4.down_proj.weight")
    save_file(tensors, folder / "model.safetensors")
    message = r"1 missing \(.*experts\.4\.down_proj\.weight\); 1 unknown \(.*experts\.8"
    with pytest.raises(ConfigError, match=message):
        build_model(folder, backends[1]).load(folder, "auto", 0, lambda done, total: None)


@pytest.mark.parametrize("quantization", ["auto", "fp8"])
@torch.inference_mode()
def test_what_ranks_with_whole_experts_add_is_the_mixture(
    tmp_path: Path, quantization: str
) -> None:
    folder = tiny_model("qwen3_moe", tmp_path)
    mixtures = []
    for group in (SINGLE, *(ParallelGroup(rank, 4) for rank in range(4))):
        backend = Backend(CPU, torch.float32, group, expert_parallel=group.size > 1)
        model: Any = build_model(folder, backend, model_options(quantization=quantization))
        model.load(folder, "auto", 0, lambda done, total: None)
        mixtures.append(model.layers[0].parts[1])
    x = torch.randn(9, 64)
    expected, *parts = (mixture._mix(x) for mixture in mixtures)
    assert all(float(part.abs().max()) > 0 for part in parts)
    torch.testing.assert_close(torch.stack(parts).sum(0), expected, rtol=1e-4, atol=1e-4)
    nothing = mixtures[1].router(x)[1].min(1).values >= 2  # tokens without experts of rank 0
    assert nothing.any()
    assert not parts[0][nothing].any()


def test_parts_of_experts_are_near_equal() -> None:
    for total, size in ((8, 2), (7, 2), (7, 4), (60, 8), (3, 3)):
        shards = [Shard.near_equal(total, rank, size) for rank in range(size)]
        assert [shard.start for shard in shards] == [
            sum(shard.size for shard in shards[:rank]) for rank in range(size)
        ]
        assert sum(shard.size for shard in shards) == total
        assert max(s.size for s in shards) - min(s.size for s in shards) == (total % size > 0)


def test_ranks_need_experts_of_their_own(tmp_path: Path) -> None:
    folder = tiny_model("mixtral", tmp_path / "mixtral", num_attention_heads=8, head_dim=8)
    with pytest.raises(ConfigError, match=r"4 experts\); these do: 1, 2, 4$"):
        load_model_config(folder).check_tensor_parallel(8, expert_parallel=True)
    dense = load_model_config(tiny_model("llama", tmp_path / "llama"))
    with pytest.raises(ConfigError, match=r"expert_parallel = true, but .* has no experts"):
        dense.check_tensor_parallel(2, expert_parallel=True)


def test_ranks_have_to_divide_the_experts(tmp_path: Path) -> None:
    folder = tiny_model("qwen3_moe", tmp_path, moe_intermediate_size=30)
    with pytest.raises(ConfigError, match=r"experts of 30 channels.*these do: 1, 2$"):
        build_model(folder, Backend(CPU, torch.float32, ParallelGroup(0, 4)))
