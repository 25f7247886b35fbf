"""Models with experts over the kernels give what they give in plain torch, in float32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from aioinfer.kernels.expert_configs import SCANNED_TOKENS, expert_config
from aioinfer.kernels.expert_routing import RoutedTokens, routing_config

from aioinfer.ipc.expert_placement import ExpertPlacement, LayerPlacement
from aioinfer.layers import kernel_experts
from aioinfer.layers.kernel_experts import KernelMixtureMLP
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.layers.residual import ResidualStream
from tests.kernels.bound_model import Bound, assert_close, last_tokens, random_ids
from tests.paged_model import UnsummedGroup
from tests.test_models import NEMOTRON_EXPERTS
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.extended

#: Small heads of the size that the attention kernels take; one layer of experts.
SIZES = {
    "vocab_size": 100, "hidden_size": 64, "head_dim": 64, "num_attention_heads": 2,
    "num_key_value_heads": 1, "num_hidden_layers": 1,
}  # fmt: skip
EXPERTS = {**NEMOTRON_EXPERTS, "layers_block_type": ["full_attention", "moe"]}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {},
    "qwen2_moe": {},  # an expert that all tokens take, behind a gate
    "glm4_moe": {"first_k_dense_replace": 0},  # groups, a bias, sigmoids
    "mixtral": {},
    "nemotron_h": EXPERTS,  # without gates
    # GELU, a router with a norm of its own, and a scale of each expert
    "gemma4_text": {
        "enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 24,
        "layer_types": ["full_attention"], "global_head_dim": 128, "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
    },
}  # fmt: skip
#: The same between projections to latent vectors and back.
LATENTS = {"nemotron_h": {**EXPERTS, "moe_latent_size": 24}}
#: Experts that all tokens take, of the others' size: with a gate, and without.
SHARED: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"shared_expert_intermediate_size": 32},
    "glm4_moe": {"first_k_dense_replace": 0, "n_shared_experts": 1},
}


@pytest.mark.parametrize(
    ("family", "fields"),
    [*FAMILIES.items(), *SHARED.items(), *LATENTS.items()],
    ids=lambda each: str(each)[:40],
)
@torch.inference_mode()
def test_a_prefill_and_decodes(family: str, fields: dict[str, Any], tmp_path: Path) -> None:
    """With buckets, without, and for one token."""
    tiny_model(family, tmp_path, **{**SIZES, **fields})
    ours, plain = (Bound(tmp_path, kernels=use, fill=torch.nan) for use in (True, False))
    parts = (leaf for layer in ours.model.layers for part in layer.parts for leaf in part.leaves)
    mixture = next(part for part in parts if isinstance(part, KernelMixtureMLP))
    assert (len(mixture.stacked.gate_up) > mixture.router.routing.num_experts) == (
        fields == SHARED.get(family)
    )
    assert ours.model.supports_graphs
    for starts, lengths in (([0, 0, 0], [9, 5, 8]), ([9, 5, 8], [1, 1, 1])):
        ids = random_ids(lengths)
        expected = plain.run(plain.step(starts, lengths, ids))
        step = ours.step(starts, lengths, ids)
        assert_close(ours.run(step), expected)
    step = ours.step([10, 6, 9], [1, 1, 1], random_ids([1, 1, 1]))
    step.sampled = last_tokens(step, [1])
    expected = plain.run(plain.step([10, 6, 9], [1, 1, 1], random_ids([1, 1, 1])))
    assert_close(ours.run(step), expected[1:2])
    assert not mixture._counters.any()


@pytest.mark.parametrize(
    "family", ["qwen3_moe", "qwen2_moe", "nemotron_h", "gpt_oss", "deepseek_v2"]
)
@torch.inference_mode()
def test_tokens_with_adapters_of_experts(family: str, tmp_path: Path) -> None:
    """Of several adapters and of none, with buckets, without, and for one token; of the embedding,
    and of latent attention in both of its forms."""
    fields = {
        "nemotron_h": EXPERTS, "gpt_oss": {"layer_types": ["full_attention"]},
        "deepseek_v2": {"num_key_value_heads": 2, "first_k_dense_replace": 0, "head_dim": 8},
    }  # fmt: skip
    tiny_model(family, tmp_path, **{**SIZES, **fields.get(family, {})})
    both = [Bound(tmp_path, kernels=use, num_adapters=2, has_adapted_experts=True)
            for use in (True, False)]  # fmt: skip
    for each in both:
        each.fill_adapters()
    assert any(isinstance(part, KernelMixtureMLP) for part in both[0].model._parts)
    starts = [0, 0, 0]
    for lengths, sampled in (([20, 9, 35], None), ([1, 1, 1], None), ([1, 1, 1], [1])):
        adapters = torch.tensor([1, -1, 0], dtype=torch.int32)
        found, none = [], torch.full_like(adapters, -1)
        # the last leaves the keys of the adapters in the cache
        for bound, given in ((both[0], adapters), (both[1], none), (both[1], adapters)):
            step = bound.step(starts, lengths, random_ids(lengths))
            step.inputs = replace(step.inputs, slots=torch.arange(3))
            bound.backend.extension.of_slots[:3] = given + 1
            if sampled is not None:
                step.sampled = last_tokens(step, sampled)
            with bound.backend.extension:
                found.append(bound.run(step))
        assert_close(found[0], found[2])
        if sampled is None:
            of_tokens = adapters.repeat_interleave(torch.tensor(lengths))
            is_other = (found[2] - found[1]).abs().amax(1) > 1e-2
            assert is_other.tolist() == (of_tokens >= 0).tolist()
        starts = [start + length for start, length in zip(starts, lengths, strict=True)]


@pytest.mark.parametrize("experts", [8, 256])
@torch.inference_mode()
def test_every_configuration_is_launched_before_the_first_request(
    experts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever number of tokens comes, in 16 bits."""
    tiny_model("qwen3_moe", tmp_path, **SIZES)
    mixture = Bound(tmp_path, kernels=True).model.layers[0].parts[1]
    launched = set()
    mixture._backend.dtype = torch.float16
    mixture._rule = replace(mixture._rule, num_experts=experts)
    monkeypatch.setattr(
        kernel_experts, "route", lambda x, *given, buckets, config, **options: (
            launched.add((buckets, config or routing_config(len(x), experts))),
            RoutedTokens(torch.zeros(len(x), 3), torch.zeros(len(x), 3, dtype=torch.int32),
                         *[torch.zeros(8)] * 2 * buckets),
        )[1],
    )  # fmt: skip
    monkeypatch.setattr(
        kernel_experts, "expert_product", lambda x, weight, routed, *, config, gated, **options: (
            launched.add((routed.counts is None, config or expert_config(len(x), 3, 8))), x
        )[1],
    )  # fmt: skip
    for name in ("sum_pairs", "summed_product"):
        monkeypatch.setattr(kernel_experts, name, lambda *given, **options: None)
    mixture.warm_up(64)
    warmed, tokens = set(launched), (*range(2, 70), 200, 1000, 1025, 5000)
    launched.clear()
    for count in tokens:
        scanned = count <= SCANNED_TOKENS
        launched |= {
            (not scanned, routing_config(count, experts)), (scanned, expert_config(count, 3, 8))
        }  # fmt: skip
    assert launched <= warmed


@pytest.mark.parametrize(
    ("family", "fields", "sizes"),
    [("qwen3_moe", {"num_experts": 7}, [3, 4]), ("glm4_moe", {}, [4, 4])],
)
@torch.inference_mode()
def test_ranks_with_whole_experts(
    family: str, fields: dict[str, Any], sizes: list[int], tmp_path: Path
) -> None:
    """They add up to all: with buckets, without, and for one token."""
    tiny_model(family, tmp_path, **{**SIZES, **FAMILIES[family], **fields})
    whole, *ranks = (
        Bound(tmp_path, kernels=True, group=group, expert_parallel=group.size > 1)
        for group in (ParallelGroup.single(), *(UnsummedGroup(rank, 2) for rank in range(2)))
    )
    stacks = [rank.model.layers[0].parts[1].stacked for rank in ranks]
    assert [len(stack.gate_up) for stack in stacks] == sizes
    of_all = whole.model.layers[0].parts[1].stacked
    assert torch.equal(torch.cat([stack.gate_up for stack in stacks]), of_all.gate_up)
    assert torch.equal(torch.cat([stack.down for stack in stacks]), of_all.down)
    for tokens in (1, 7, 24):
        x = torch.randn(tokens, 64)
        parts = [_mixed(one, x) for one in (whole, *ranks)]
        assert_close(torch.stack(parts[1:]).sum(0), parts[0])


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@torch.inference_mode()
def test_ranks_with_copies_of_experts(family: str, tmp_path: Path) -> None:
    """Tokens are divided among the copies, and all are counted once."""
    tiny_model(family, tmp_path, **SIZES)
    placement = ExpertPlacement({0: LayerPlacement(((6, 0, 1, 2), (3, 4, 5, 6, 7, 0)))})
    groups = (ParallelGroup.single(), *(UnsummedGroup(rank, 2) for rank in range(2)))
    whole, *ranks = (
        Bound(
            tmp_path, kernels=True, group=group, expert_parallel=group.size > 1,
            expert_placement=placement,
        )
        for group in groups
    )  # fmt: skip
    for tokens in (1, 7, 24):
        x = torch.randn(tokens, 64)
        counters = [one.model.layers[0].parts[1].counter for one in (whole, *ranks)]
        for counter in counters:
            counter.tokens.zero_()
        parts = [_mixed(one, x) for one in (whole, *ranks)]
        assert_close(torch.stack(parts[1:]).sum(0), parts[0])
        assert torch.equal(counters[1].tokens, counters[2].tokens)
        of_experts = torch.zeros(8, dtype=torch.int32)
        of_experts.index_add_(0, torch.tensor(counters[1].experts), counters[1].tokens)
        assert torch.equal(of_experts, counters[0].tokens)
        assert int(of_experts.sum()) == 3 * tokens


@torch.inference_mode()
def test_padding_is_not_counted(tmp_path: Path) -> None:
    tiny_model("qwen3_moe", tmp_path, **SIZES)
    bound = Bound(tmp_path, kernels=True)
    step = bound.step([0, 0, 0], [3, 5, 1], random_ids([3, 5, 1]))
    step.inputs.groups[0].slot_mapping[5:] = -1
    bound.run(step)
    assert int(bound.model.layers[0].parts[1].counter.tokens.sum()) == 3 * 5


def _mixed(bound: Bound, x: torch.Tensor) -> torch.Tensor:
    """Returns what the experts of the first layer add for x, without the one of all tokens."""
    mixture = bound.model.layers[0].parts[1]
    mixture._shared = None
    stream = ResidualStream(torch.zeros_like(x), bound.backend)
    mixture._add(stream, x, mixture._route(x, buckets=len(x) > SCANNED_TOKENS))
    assert not mixture._counters.any()
    return stream.hidden


@pytest.mark.parametrize(("family", "count"), [("qwen3_moe", 8), ("qwen2_moe", 9)])
def test_ranks_have_their_channels_of_every_expert(family: str, count: int, tmp_path: Path) -> None:
    """Of gate and up interleaved, and of the second product's inputs; of the expert that all tokens
    take, too."""
    tiny_model(family, tmp_path, **{**SIZES, **SHARED.get(family, {})})
    whole, *ranks = (
        Bound(tmp_path, kernels=True, group=group).model.layers[0].parts[1].stacked
        for group in (ParallelGroup.single(), ParallelGroup(0, 2), ParallelGroup(1, 2))
    )
    assert torch.equal(torch.cat([rank.gate_up for rank in ranks], 1), whole.gate_up)
    assert torch.equal(torch.cat([rank.down for rank in ranks], 2), whole.down)
    assert len(whole.gate_up) == len(whole.down) == count
