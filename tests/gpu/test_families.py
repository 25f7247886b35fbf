"""Every family on a GPU, with and without CUDA graphs: greedy tokens in float32 equal to those of
transformers, rounding errors in bfloat16 no worse than its own.

The models are random, with heads of the size that the family's published models have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from engine_settings import NEEDS_TWO, TWO_RANKS, has_graphs, inline_llm, tokens_of
from random_models import greedy_outputs, random_model, random_prompts
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from aioinfer import SamplingParams

VOCAB = 4096
NEW_TOKENS = 32
TOP = 20
LENGTHS = (1, 2, 17, 60, 129, 200)
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
NO_END = replace(GREEDY, logit_bias={2: -100.0})
SIZES = {
    "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4,
    "max_position_embeddings": 1024, "initializer_range": 0.05, "eos_token_id": 2,
}  # fmt: skip
#: The windows are shorter than most prompts, and than a block of the KV cache or longer.
MODELS: dict[str, dict[str, Any]] = {
    "cohere2": {
        "head_dim": 64,
        "sliding_window": 50,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "falcon": {"head_dim": 64, "ffn_hidden_size": 1024},
    "falcon with ALiBi": {
        "head_dim": 64, "ffn_hidden_size": 1024, "alibi": True, "new_decoder_architecture": False,
        "multi_query": False, "num_kv_heads": 8, "parallel_attn": False,
    },
    "qwen3_5_text": {
        "head_dim": 256,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
    "lfm2": {"head_dim": 64, "layer_types": ["conv", "full_attention"] * 2},
    "granitemoehybrid": {
        "head_dim": 64,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "shared_intermediate_size": 1024,
        "mamba_n_heads": 16,
        "mamba_d_head": 64,
        "mamba_d_state": 64,
        "mamba_n_groups": 1,  # transformers 5.17 norms all groups together
    },
    "bamba": {
        "head_dim": 64, "num_hidden_layers": 4, "attn_layer_indices": [1, 3],
        "mamba_n_heads": 16, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1,
    },
    "falcon_h1": {
        "head_dim": 64, "mamba_d_ssm": 1024,
        "mamba_n_heads": 16, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1,
    },
    "nemotron_h": {
        "head_dim": 128, "layers_block_type": ["linear_attention", "full_attention"] * 2,
        "mamba_num_heads": 16, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8,
    },
    "qwen3_next": {
        "head_dim": 256, "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256,
    },
    "kimi_linear": {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_num_heads": 8, "linear_head_dim": 128, "kv_lora_rank": 64,
        "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64,
        "moe_intermediate_size": 256,
    },
    "gpt2": {"head_dim": 64, "n_inner": 1024, "initializer_range": 0.1},
    "hunyuan_v1_dense": {"head_dim": 64},
    "gemma2": {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 100},
    "gemma3": {
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 50,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 6,
    },
    # layers that read the cache of others, heads of two sizes, inputs of each layer
    "gemma3n_text": {
        "head_dim": 256,
        "num_hidden_layers": 5,
        "sliding_window": 50,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 64,
        "activation_sparsity_pattern": [0.9, 0.0, 0.0, 0.0, 0.0],
    },
    "gemma4_text": {
        "head_dim": 256,
        "global_head_dim": 512,
        "num_hidden_layers": 5,
        "sliding_window": 50,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 64,
    },
    "gemma4_text keys as values": {
        "head_dim": 256,
        "global_head_dim": 512,
        "num_hidden_layers": 5,
        "sliding_window": 50,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
    },
    "glm4": {"head_dim": 128},
    "granite": {"head_dim": 64, "embedding_multiplier": 12.0, "residual_multiplier": 0.5},
    "llama": {"head_dim": 128},
    "mistral": {"head_dim": 128, "sliding_window": 100},
    # embeddings as large as what the layers add, which is normed
    "olmo2": {"head_dim": 128, "initializer_range": 0.5},
    "olmo3": {
        "head_dim": 64,
        "sliding_window": 100,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "initializer_range": 0.5,
    },
    "opt": {"head_dim": 64, "ffn_dim": 1024, "init_std": 0.1},
    "phi": {"head_dim": 64},
    "phi3": {
        "head_dim": 128,
        "rope_parameters": {"rope_theta": 10_000.0, "partial_rotary_factor": 0.75},
    },
    "phi3 of 96 channels": {"head_dim": 96, "sliding_window": 100},
    "qwen2": {"head_dim": 64},
    "qwen3": {"head_dim": 128},
    "stablelm side by side": {"head_dim": 64, "use_parallel_residual": True, "qk_layernorm": True},
}  # fmt: skip


class Case(NamedTuple):
    """A model, prompts, and the greedy tokens of transformers in float32."""

    folder: Path
    prompts: list[list[int]]
    expected: list[list[int]]


#: An older version of transformers does not have all of them.
KNOWN = [name for name in MODELS if name.split()[0].removesuffix("_text") in CONFIG_MAPPING]


@pytest.fixture(scope="module", params=KNOWN)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    name = request.param
    return make_case(name, tmp_path_factory.mktemp("model"), "cuda")


def make_case(
    name: str, folder: Path, device: str, models: Mapping[str, dict[str, Any]] = MODELS
) -> Case:
    family, *_ = name.split()
    random_model(folder, family=family, vocab_size=VOCAB, **{**SIZES, **models[name]})
    prompts = random_prompts(LENGTHS, VOCAB)
    model = reference(folder, torch.float32, device)
    expected = greedy_outputs(model, prompts, NEW_TOKENS, min_new_tokens=NEW_TOKENS)
    return Case(folder, prompts, expected)


def reference(folder: Path, dtype: torch.dtype, device: str) -> Any:
    """Returns the model of transformers, with the implementation of attention that knows soft caps;
    of Falcon's, this one adds ALiBi twice."""
    is_falcon = "FalconForCausalLM" in (folder / "config.json").read_text("utf-8")
    attention = "sdpa" if is_falcon else "eager"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention)
    return model.eval().to(device)


def check_greedy(case: Case, device: str, graphs: bool) -> None:
    """In one batch, with prompts in chunks, and one after the other. `min_new_tokens` of
    transformers keeps it from the end token, as a bias does here."""
    settings = {"parallel__cuda_graphs": graphs, "scheduler__max_num_batched_tokens": 128}
    with inline_llm(case.folder, parallel__device=device, **settings) as llm:
        if device == "cuda":
            assert has_graphs(llm) == graphs
        together = tokens_of(llm.generate(case.prompts, NO_END))
        alone = [llm.generate([prompt], NO_END)[0].token_ids for prompt in case.prompts]
    assert together == case.expected
    assert alone == case.expected
    assert len({tuple(tokens) for tokens in case.expected}) == len(case.expected)


@pytest.mark.timeout(300)  # kernels are compiled
@pytest.mark.parametrize("graphs", [True, False])
def test_greedy_tokens_are_those_of_transformers(case: Case, graphs: bool) -> None:
    check_greedy(case, "cuda", graphs)


@pytest.mark.timeout(300)
@NEEDS_TWO
@pytest.mark.parametrize("name", ["gemma2", "olmo2", "phi3"])
def test_two_ranks_give_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    """With norms after the all-reduce, norms over whole projections, and merged projections."""
    check_two_ranks(make_case(name, tmp_path, "cuda"))


def check_two_ranks(case: Case, **settings: Any) -> None:
    with inline_llm(case.folder, **TWO_RANKS, **settings) as llm:
        assert llm.frontend.engines[0].report.graph_bytes != 0  # of a card that others use, too
        assert tokens_of(llm.generate(case.prompts, NO_END)) == case.expected


def logprobs_of(
    folder: Path, dtype: torch.dtype, device: str, sequences: Sequence[Sequence[int]]
) -> torch.Tensor:
    """Returns what transformers gives for the token after each of the last `NEW_TOKENS` positions:
    float32 [sequences, NEW_TOKENS, VOCAB]."""
    model = reference(folder, dtype, device)
    with torch.inference_mode():
        logits = [
            model(torch.tensor([sequence], device=device)).logits[0, -NEW_TOKENS:].float()
            for sequence in sequences
        ]
    return torch.stack(logits).log_softmax(-1)


def check_rounding(case: Case, device: str) -> None:
    """Of the log-probabilities of the tokens that the engine found likeliest: the first come from
    prefill, the others from decodes. And as many of these tokens as with transformers are those of
    float32, but for a few of 192, or three standard deviations of the difference if either alone
    is right by chance (McNemar's test)."""
    settings = {"parallel__device": device, "model__dtype": "bfloat16"}
    with inline_llm(case.folder, **settings) as llm:
        outputs = llm.generate(case.prompts, replace(GREEDY, logprobs=TOP))
    tops = [[entry.top for entry in output.completions[0].logprobs or []] for output in outputs]
    pairs = torch.tensor(tops, dtype=torch.float64, device=device)
    tokens, ours = pairs[..., 0].long(), pairs[..., 1]
    sequences = [
        prompt + output.token_ids[:-1] for prompt, output in zip(case.prompts, outputs, strict=True)
    ]
    every = [
        logprobs_of(case.folder, dtype, device, sequences)
        for dtype in (torch.float32, torch.bfloat16)
    ]
    exact, theirs = (each.gather(-1, tokens) for each in every)
    likeliest, of_theirs = (each.argmax(-1) for each in every)
    agrees = [each == likeliest for each in (tokens[..., 0], of_theirs)]
    only_ours, only_theirs = int((agrees[0] > agrees[1]).sum()), int((agrees[1] > agrees[0]).sum())
    allowed = max(0.03 * likeliest.numel(), 3 * (only_ours + only_theirs) ** 0.5)
    assert only_theirs - only_ours <= allowed, (only_ours, only_theirs)
    config = (case.folder / "config.json").read_text("utf-8")
    has_experts = any(name in config for name in ('"qwen3_next', '"kimi_linear'))
    for steps in (slice(0, 1), slice(1, None)):
        errors = ((x - exact)[:, steps].norm(dim=-1) for x in (ours, theirs))
        # a token that gets another expert by rounding would decide the sum
        error, limit = (each.median() if has_experts else each.norm() for each in errors)
        assert error <= 1.5 * limit
    # else the comparison says little: small random models of some families round very badly
    rounds_badly = has_experts or any(name in config for name in ('"gemma3n', '"gemma4'))
    spread = 1.0 if rounds_badly else 0.2
    assert (theirs - exact).norm() < spread * (exact - exact.mean()).norm()


@pytest.mark.timeout(300)
def test_rounding_errors_in_bfloat16(case: Case) -> None:
    check_rounding(case, "cuda")
