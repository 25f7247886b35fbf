"""Every family and variant against transformers: the logits of all positions, however the text is
cut and batched."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from aioinfer.errors import ConfigError
from aioinfer.layers.backend import Backend
from aioinfer.layers.layer import Layer
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.models.causal_lm import CausalLM
from aioinfer.models.decoder import DecoderModel
from aioinfer.models.json_file import read_json
from aioinfer.models.registry import build_model
from tests.paged_model import CPU, PagedModel, load_model
from tests.sharded_logits import logits_of_ranks
from tests.tiny_models import FAMILIES, tiny_model

VOCAB = 211
TEXTS = [
    [(7 * i * i + 13 * i + 5 * text) % VOCAB for i in range(length)]
    for text, length in enumerate((47, 30, 17, 1))
]
SINGLE = ParallelGroup.single()


def rope(kind: str, **numbers: Any) -> dict[str, Any]:
    return {
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": kind, "rope_theta": 500.0, "factor": 4.0, **numbers},
    }


def longrope(original: int) -> dict[str, Any]:
    """Returns the fields of a Phi-3 of 64 positions, with 6 pairs of rotated channels of 8."""
    factors = {"short_factor": [1 + i / 4 for i in range(6)], "long_factor": list(range(2, 8))}
    rotary = {"rope_theta": 100.0, "partial_rotary_factor": 0.75}
    return {
        "hidden_size": 128,
        "max_position_embeddings": 64,
        "original_max_position_embeddings": original,
        "rope_parameters": {"rope_type": "longrope", **rotary, **factors},
    }


NEMOTRON_EXPERTS = {
    "layers_block_type": ["full_attention", "moe", "linear_attention"], "n_routed_experts": 8,
    "num_experts_per_tok": 3, "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48, "routed_scaling_factor": 1.5,
}  # fmt: skip
#: The shape of Gemma 4 31B: layers without a window have other KV heads, and keys as values.
GEMMA4_31B: dict[str, Any] = {
    "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True,
    "num_key_value_heads": 4, "num_global_key_value_heads": 2,
}  # fmt: skip
GEMMA4_EXPERTS: dict[str, Any] = {
    "enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 24,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "ministral3": (
        "ministral3",
        rope("yarn", original_max_position_embeddings=8, llama_4_scaling_beta=0.7),
    ),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama without groups": ("llama", {"num_key_value_heads": 8}),
    "llama heads wider than hidden": ("llama", {"head_dim": 24, "num_key_value_heads": 1}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral window": ("mistral", {"sliding_window": 7}),
    "mistral window of one": ("mistral", {"sliding_window": 1}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 window in one layer": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen2 window unused": (
        "qwen2",
        {"use_sliding_window": False, "sliding_window": 5, "max_window_layers": 0},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3 window": (
        "qwen3",
        {
            "use_sliding_window": True, "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "qwen3 biases": ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    "gemma2": ("gemma2", {}),
    "gemma2 tied": ("gemma2", {"tie_word_embeddings": True, "num_hidden_layers": 3}),
    "gemma2 without soft caps": (
        "gemma2",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True},
    ),
    "gemma3": ("gemma3", {}),
    "gemma3 tied": ("gemma3", {"tie_word_embeddings": True}),
    "gemma3 linear": (
        "gemma3",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "gemma3n": ("gemma3n_text", {}),
    "gemma3n three streams": (
        "gemma3n_text",
        {
            "altup_num_inputs": 3, "altup_active_idx": 1, "altup_correct_scale": False,
            "intermediate_size": [96, 64, 96, 32, 96],
            "num_kv_shared_layers": 0, "vocab_size_per_layer_input": 100, "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "gemma4": ("gemma4_text", {}),
    "gemma4 31B": ("gemma4_text", GEMMA4_31B),
    "gemma4 26B": ("gemma4_text", GEMMA4_31B | GEMMA4_EXPERTS),
    "gemma4 tied, linear, biases": (
        "gemma4_text",
        {
            "tie_word_embeddings": True, "attention_bias": True, "use_double_wide_mlp": False,
            "final_logit_softcapping": None,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "proportional", "rope_theta": 500.0, "partial_rotary_factor": 0.5,
                    "factor": 2.0,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "phi3": ("phi3", {}),
    "phi3 window": ("phi3", {"sliding_window": 11, "tie_word_embeddings": True}),
    "phi3 partial rotary": (
        "phi3",
        {"rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": 0.75}},
    ),
    "phi3 longrope": ("phi3", longrope(original=16)),
    "olmo2": ("olmo2", {}),
    "olmo2 biases, no groups": ("olmo2", {"attention_bias": True, "num_key_value_heads": 8}),
    "olmo3": ("olmo3", {}),
    "olmo3 yarn in one layer": (
        "olmo3",
        {
            "max_position_embeddings": 64,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0,
                    "original_max_position_embeddings": 16,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    "seed_oss": ("seed_oss", {}),
    "seed_oss other biases": (
        "seed_oss",
        {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True},
    ),
    "ernie4_5": ("ernie4_5", {}),
    "ernie4_5 tied": ("ernie4_5", {"use_bias": False, "tie_word_embeddings": True}),
    "ernie4_5_moe": ("ernie4_5_moe", {}),
    "ernie4_5_moe experts in one layer": (
        "ernie4_5_moe",
        {"num_hidden_layers": 3, "moe_layer_end_index": 1},
    ),
    "ernie4_5_moe without shared experts": (
        "ernie4_5_moe",
        {"moe_layer_start_index": 0, "moe_layer_interval": 2, "moe_num_shared_experts": 0},
    ),
    "minimax_m2": ("minimax_m2", {}),
    "minimax_m2 rotary of a half": (
        "minimax_m2",
        {"rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": 0.5}},
    ),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {}),
    "hunyuan_v1_dense alpha, biases": (
        "hunyuan_v1_dense",
        {
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "dynamic", "rope_theta": 100.0, "alpha": 50.0, "factor": 1.0,
            },
        },
    ),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", {}),
    "hunyuan_v1_moe numbers by layer": ("hunyuan_v1_moe", {"moe_topk": [2, 2]}),
    "cohere2": ("cohere2", {}),
    "cohere2 tied, biases": (
        "cohere2",
        {"tie_word_embeddings": True, "attention_bias": True, "logit_scale": 0.5},
    ),
    "stablelm": ("stablelm", {}),
    "stablelm parallel": ("stablelm", {"use_parallel_residual": True, "use_qkv_bias": True}),
    "stablelm norms by head": (
        "stablelm",
        {"qk_layernorm": True, "rope_parameters": {"partial_rotary_factor": 0.5}},
    ),
    "phi": ("phi", {}),
    "phi norms by head": (
        "phi",
        {"qk_layernorm": True, "num_key_value_heads": 8, "hidden_act": "gelu"},
    ),
    "gpt2": ("gpt2", {}),
    "gpt2 tied, falling scales": (
        "gpt2",
        {"tie_word_embeddings": True, "scale_attn_by_inverse_layer_idx": True},
    ),
    "opt": ("opt", {}),
    "opt without biases": ("opt", {"enable_bias": False, "tie_word_embeddings": True}),
    "falcon": ("falcon", {}),
    "falcon one norm": ("falcon", {"num_ln_in_parallel_attn": 1, "bias": True}),
    "falcon 7B": ("falcon", {"new_decoder_architecture": False, "tie_word_embeddings": True}),
    "falcon RW": (
        "falcon",
        {
            "new_decoder_architecture": False, "multi_query": False, "parallel_attn": False,
            "alibi": True, "bias": True, "num_kv_heads": 8,
        },
    ),
    "gpt_oss": ("gpt_oss", {}),
    "gpt_oss yarn": (
        "gpt_oss",
        {
            "attention_bias": False,
            "layer_types": ["full_attention", "sliding_attention"],
            **rope("yarn", original_max_position_embeddings=16, truncate=False),
        },
    ),
    "granite": ("granite", {}),
    "granite tied": ("granite", {"tie_word_embeddings": True, "attention_bias": True}),
    "glm4": ("glm4", {}),
    "glm4 rotary of a quarter": (
        "glm4",
        {
            "rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": 0.25},
            "attention_bias": False,
        },
    ),
    "glm4_moe": ("glm4_moe", {}),
    "glm4_moe without groups": (
        "glm4_moe",
        {"n_group": 1, "topk_group": 1, "use_qk_norm": False, "attention_bias": True},
    ),
    "deepseek_v2": ("deepseek_v2", {}),
    "deepseek_v2 groups, biases, yarn": (
        "deepseek_v2",
        {
            "q_lora_rank": 40, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
            "routed_scaling_factor": 2.0, "attention_bias": True,
            **rope("yarn", original_max_position_embeddings=16, mscale=0.707, mscale_all_dim=0.9),
        },
    ),
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v3 yarn, pairs of halves": (
        "deepseek_v3",
        {
            **rope("yarn", original_max_position_embeddings=16, mscale=1.0, mscale_all_dim=1.0),
            "rope_interleave": False, "norm_topk_prob": False, "attention_bias": True, "n_group": 1,
            "topk_group": 1,
        },
    ),
    "mixtral": ("mixtral", {}),
    "mixtral window, all experts": ("mixtral", {"sliding_window": 7, "num_experts_per_tok": 4}),
    "olmoe": ("olmoe", {}),
    "olmoe normalized": ("olmoe", {"norm_topk_prob": True, "num_key_value_heads": 8}),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen2_moe dense layer": ("qwen2_moe", {"mlp_only_layers": [0], "norm_topk_prob": True}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe dense layer": (
        "qwen3_moe",
        {"decoder_sparse_step": 2, "norm_topk_prob": True, "num_experts_per_tok": 1},
    ),
    "qwen3_next": ("qwen3_next", {}),
    "qwen3_next MLP in a layer": (
        "qwen3_next",
        {"mlp_only_layers": [0], "attention_bias": True, "linear_num_value_heads": 8},
    ),
    "qwen3_5": ("qwen3_5_text", {}),
    "qwen3_5 tied, layers by an interval": (
        "qwen3_5_text",
        {
            "layer_types": None, "full_attention_interval": 2, "linear_conv_kernel_dim": 2,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_5_moe": ("qwen3_5_moe_text", {}),
    "bamba": ("bamba", {}),
    "bamba one group, biases": (
        "bamba",
        {
            "mamba_n_groups": 1, "mamba_proj_bias": True, "attention_bias": True,
            "time_step_limit": [0.1, 0.9],
        },
    ),
    "granitemoehybrid": ("granitemoehybrid", {}),
    "granitemoehybrid rope": (
        "granitemoehybrid",
        {"position_embedding_type": "rope", "mamba_conv_bias": False, "mamba_n_groups": 4},
    ),
    "granitemoehybrid experts": (
        "granitemoehybrid",
        {"num_local_experts": 8, "num_experts_per_tok": 3},
    ),
    "falcon_h1": ("falcon_h1", {}),
    "falcon_h1 norm before the gate, biases": (
        "falcon_h1",
        {
            "mamba_rms_norm": True, "projectors_bias": True, "mamba_proj_bias": True,
            "ssm_in_multiplier": 1.0, "attention_bias": True, "attention_in_multiplier": 1.0,
            "mlp_bias": True,
        },
    ),
    "falcon_h1 norm after the gate": (
        "falcon_h1",
        {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "tie_word_embeddings": True},
    ),
    "kimi_linear": ("kimi_linear", {}),
    "kimi_linear other queries, all experts": (
        "kimi_linear",
        {
            "q_lora_rank": 40,
            "mlp_layer_types": ["sparse", "sparse"],
            "linear_num_heads": 4, "norm_topk_prob": False, "n_group": 4, "topk_group": 2,
        },
    ),
    "nemotron_h": ("nemotron_h", {}),
    "nemotron_h experts": ("nemotron_h", NEMOTRON_EXPERTS),
    "nemotron_h experts of latents": (
        "nemotron_h",
        {**NEMOTRON_EXPERTS, "moe_latent_size": 24, "n_group": 4, "topk_group": 2},
    ),
    "nemotron_h with MLPs, biases": (
        "nemotron_h",
        {
            "layers_block_type": ["full_attention", "linear_attention", "mlp"],
            "mlp_bias": True, "use_bias": True,
        },
    ),
    "lfm2": ("lfm2", {}),
    "lfm2 biases": ("lfm2", {"conv_bias": True, "conv_L_cache": 5, "tie_word_embeddings": True}),
    "lfm2 size by a rule": (
        "lfm2",
        {"block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.3},
    ),
    "lfm2_moe": ("lfm2_moe", {}),
    "lfm2_moe without bias": ("lfm2_moe", {"use_expert_bias": False, "norm_topk_prob": False}),
    "linear": ("llama", rope("linear")),
    "llama3": (
        "llama",
        rope(
            "llama3", low_freq_factor=1.0, high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
    "yarn": ("qwen2", rope("yarn", original_max_position_embeddings=16)),
    "dynamic": ("llama", rope("dynamic")),
}  # fmt: skip


#: The first case of each family.
FIRST = [
    name for name, (family, _) in CASES.items()
    if name == next(first for first in CASES if CASES[first][0] == family)
]  # fmt: skip


class Case(NamedTuple):
    """`block_size`: another one for each of three cases in a row."""

    block_size: int
    folder: Path
    ours: CausalLM
    theirs: Any
    expected: list[torch.Tensor]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def make_case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """Makes each case once, whatever lists of them tests have."""
    return cache(lambda name: _make_case(name, tmp_path_factory.mktemp("model")))


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, make_case: Callable[[str], Case]) -> Case:
    return make_case(request.param)


def _make_case(name: str, folder: Path) -> Case:
    family, fields = CASES[name]
    tiny_model(family, folder, vocab_size=VOCAB, **fields)
    theirs = reference_model(folder)
    if name == "dynamic":  # the factor of the longest text, from the start
        rotary = theirs.model.rotary_emb
        rotary.inv_freq, _ = ROPE_INIT_FUNCTIONS["dynamic"](theirs.config, seq_len=4 * 64)
        rotary.rope_type = "default"
    block_size = (1, 16, 64)[list(CASES).index(name) % 3]
    return Case(block_size, folder, load_model(folder, SINGLE), theirs, reference_logits(theirs))


def reference_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Returns the model of transformers, with the implementation of attention that knows soft caps;
    Falcon's adds ALiBi twice."""
    kind = "sdpa" if read_json(folder / "config.json")["model_type"] == "falcon" else "eager"
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation=kind
    ).eval()


@torch.inference_mode()
def reference_logits(model: Any, texts: Sequence[list[int]] = TEXTS) -> list[torch.Tensor]:
    return [model(torch.tensor([text])).logits[0].float() for text in texts]


def assert_close(
    logits: list[torch.Tensor],
    expected: list[torch.Tensor],
    tolerance: float = 2e-4,
    name: str = "",
) -> None:
    """The tolerance is relative to the spread of the logits."""
    for ours, theirs in zip(logits, expected, strict=True):
        assert ours.shape == theirs.shape
        assert ours.dtype == torch.float32
        assert (ours - theirs).abs().max() < tolerance * theirs.std(), (
            name, (ours - theirs).abs().amax(-1)
        )  # fmt: skip


def test_whole_prefill(case: Case):
    logits = PagedModel(case.ours, 16).step(dict(enumerate(TEXTS)))
    assert_close([logits[name] for name in range(len(TEXTS))], case.expected)


def test_chunks_and_decodes_in_mixed_batches(case: Case):
    assert_close(
        PagedModel(case.ours, case.block_size).run_at_random(TEXTS, longest=12, seed=1),
        case.expected,
    )


@pytest.mark.parametrize("case", FIRST, indirect=True)
def test_decodes_alone(case: Case):
    """Variants, and the longest text, have decodes in mixed batches."""
    logits = PagedModel(case.ours, 4).run_at_random(TEXTS[1:], longest=1, seed=3)
    assert_close(logits, case.expected[1:])


def test_bytes_of_the_weights(case: Case):
    kinds = ("correction_bias", "expert_bias", "layer_scalar")
    buffers = [buffer for name, buffer in case.theirs.named_buffers() if name.endswith(kinds)]
    names = dict(case.theirs.named_parameters())
    # what projects keys and values alike is there for each
    keys = [name for name in names if ".k_proj." in name]
    twice = [names[name] for name in keys if name.replace("k_proj", "v_proj") not in names]
    parameters = [*names.values(), *buffers, *twice]
    assert case.ours.weights_bytes == sum(parameter.nbytes for parameter in parameters)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "gemma3"])
@pytest.mark.parametrize("tied", [True, False])
def test_bfloat16(family: str, tied: bool, tmp_path: Path):
    """Rounds where transformers rounds, but for RoPE, which is in float32 here: nearer to float32
    than transformers, or about as near."""
    tiny_model(family, tmp_path, vocab_size=VOCAB, tie_word_embeddings=tied, dtype=torch.bfloat16)
    exact = reference_logits(reference_model(tmp_path))
    theirs = reference_logits(reference_model(tmp_path, torch.bfloat16))
    model = load_model(tmp_path, SINGLE, torch.bfloat16)
    ours = PagedModel(model, 16, torch.bfloat16).run_at_random(TEXTS, longest=12, seed=0)
    for mine, other, true in zip(ours, theirs, exact, strict=True):
        assert (
            (mine - true).square().mean().sqrt()
            < 1.3 * (other - true).square().mean().sqrt()
            < 0.1 * true.std()
        )


def test_the_texts_make_a_difference(case: Case):
    """Guards the tests above: a model that gives the same everywhere would pass them with
    anything."""
    best = torch.cat(case.expected).argmax(-1)
    assert len(set(best.tolist())) > 25


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_a_configuration_from_before_transformers_5(family: str, tmp_path: Path):
    """With the windows by a pattern, and the ropes by keys of their own."""
    rope_of = {
        "gemma2": {"rope_theta": 100.0},
        "gemma3": {
            "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    }[family]
    folder = tiny_model(family, tmp_path, vocab_size=VOCAB, rope_parameters=rope_of)
    expected = PagedModel(load_model(folder, SINGLE), 16).step(dict(enumerate(TEXTS)))
    config = read_json(folder / "config.json")
    del config["layer_types"], config["rope_parameters"]
    if family == "gemma2":
        config |= {"rope_theta": 100.0}
    else:
        config |= {
            "sliding_window_pattern": 2,
            "rope_theta": 500.0,
            "rope_local_base_freq": 100.0,
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        }
    (folder / "config.json").write_text(json.dumps(config))
    logits = PagedModel(load_model(folder, SINGLE), 16).step(dict(enumerate(TEXTS)))
    for name in expected:
        assert torch.equal(logits[name], expected[name])


#: Cases of which ranks share something else than in a family's first one.
RANK_CASES = (
    *FAMILIES, "falcon 7B", "falcon RW", "stablelm norms by head", "phi norms by head",
    "gpt2 tied, falling scales", "hunyuan_v1_dense alpha, biases", "llama biases",
    "bamba one group, biases", "granitemoehybrid experts", "falcon_h1 norm before the gate, biases",
    "falcon_h1 norm after the gate", "nemotron_h experts of latents",
)  # fmt: skip


def test_two_ranks(tmp_path: Path):
    models = []
    for number, name in enumerate(RANK_CASES):
        family, fields = CASES.get(name, (name, {}))
        models.append(tiny_model(family, tmp_path / str(number), vocab_size=VOCAB, **fields))
    (tmp_path / "ranks").mkdir()
    found = logits_of_ranks(models, TEXTS[0], 2, tmp_path / "ranks")
    for name, folder, logits in zip(RANK_CASES, models, found, strict=True):
        expected = reference_logits(reference_model(folder), TEXTS[:1])
        assert_close([logits], expected, name=name)


def test_gpt2_saved_without_its_head(tmp_path: Path):
    """With names and masks as in the published checkpoint."""
    folder = tiny_model("gpt2", tmp_path, vocab_size=VOCAB, tie_word_embeddings=True)
    expected = reference_logits(reference_model(folder))
    tensors = load_file(folder / "model.safetensors")
    published = {name.removeprefix("transformer."): tensors[name] for name in tensors}
    assert not published.keys() & tensors.keys()
    masks = {f"h.{number}.attn.bias": torch.ones(1, 1, 9, 9).tril() for number in range(2)}
    save_file(published | masks, folder / "model.safetensors")
    logits = PagedModel(load_model(folder, SINGLE), 16).step(dict(enumerate(TEXTS)))
    assert_close([logits[name] for name in range(len(TEXTS))], expected)


@pytest.mark.parametrize(("served_len", "is_long"), [(None, True), (49, True), (48, False)])
def test_longrope_by_the_longest_sequence_that_is_served(
    served_len: int | None, is_long: bool, tmp_path: Path
):
    """transformers has the short factors for each of the texts, which are shorter than 48."""
    folder = tiny_model("phi3", tmp_path, vocab_size=VOCAB, **longrope(original=48))
    model = load_model(folder, SINGLE, served_len=served_len)
    logits = PagedModel(model, 16).step(dict(enumerate(TEXTS)))[0]
    expected = reference_logits(reference_model(folder))[0]
    assert ((logits - expected).abs().max() > 0.1 * expected.std()) == is_long
    if not is_long:
        assert_close([logits], [expected])


def test_ranks_that_do_not_divide_the_model(tmp_path: Path):
    folder = tiny_model("llama", tmp_path)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size = 3 .*these do: 1, 2, 4, 8"):
        build_model(folder, Backend(CPU, torch.float32, ParallelGroup(0, 3)))


LINEAR = ["linear_attention"] * 3 + ["full_attention"]
WINDOWS = ["sliding_attention"] * 2 + ["full_attention"]


@pytest.mark.parametrize(
    ("family", "fields", "computed"),
    [
        ("qwen3", {"num_hidden_layers": 9}, {0, 1}),
        ("deepseek_v3", {"num_hidden_layers": 9}, {0, 1, 2}),  # the first without experts
        ("qwen3_next", {"num_hidden_layers": 12, "layer_types": LINEAR * 3}, {0, 1, 2, 3, 4}),
        ("gemma3", {"num_hidden_layers": 9, "layer_types": WINDOWS * 3}, {0, 1, 2, 3}),
    ],
)
def test_equal_layers_are_omitted_where_kernels_are_compiled(
    family: str, fields: dict[str, Any], computed: set[int], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A layer is computed that has another form than those before it, or follows another one."""
    model = load_model(tiny_model(family, tmp_path, vocab_size=VOCAB, **fields), SINGLE)
    assert isinstance(model, DecoderModel)
    last, paged, called, call = len(model.layers) - 1, PagedModel(model, 4), set(), Layer.__call__

    def note(layer: Layer, *args: Any, **options: Any) -> None:
        called.add(model.layers.index(layer))
        call(layer, *args, **options)

    monkeypatch.setattr(Layer, "__call__", note)
    with model.backend.omitting_equal_layers():
        paged.step({0: TEXTS[2]})
    assert called == {*computed, last}
    paged.step({1: TEXTS[2]})
    assert called == {*range(last + 1)}
