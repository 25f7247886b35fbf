"""What is known of each GGUF architecture: random models that transformers makes come back from a
GGUF file as they were."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from aioinfer.checkpoint.gguf import convert_gguf
from aioinfer.checkpoint.gguf_architectures import ARCHITECTURES, TENSORS, read_config
from aioinfer.checkpoint.gguf_file import GgufFile
from aioinfer.errors import ConfigError
from aioinfer.models.registry import families, load_model_config
from tests.gguf_models import Change, config_of, random_model, write_gguf

#: What a GGUF file does not contain, and no forward pass needs.
UNSAID = ("dtype", "initializer_range", "_name_or_path", "transformers_version", "head_dim")
YARN = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip


def convert(file: Path) -> Path:
    folder = file.with_suffix("")
    folder.mkdir()
    convert_gguf(file, folder)
    return folder


def round_trip(
    root: Path, architecture: str, change: Change | None = None, **fields: Any
) -> tuple[Path, Path]:
    """Returns the folder of a random model, and of its conversion by way of a GGUF file."""
    source = random_model(architecture, root / "source", **fields)
    return source, convert(write_gguf(root / "model.gguf", source, architecture, change))


def said(config: Any) -> dict[str, Any]:
    return {name: value for name, value in config.to_dict().items() if name not in UNSAID}


def assert_same_model(source: Path, converted: Path) -> None:
    """Configuration (also as ours reads it, if the family is registered), weights, and
    transformers' logits over a text longer than the windows."""
    configs = [AutoConfig.from_pretrained(folder) for folder in (source, converted)]
    assert said(configs[1]) == said(configs[0])
    if configs[0].architectures[0] in families():
        ours, expected = load_model_config(converted), load_model_config(source)
        assert replace(ours, dtype=expected.dtype) == expected  # it is not in a GGUF file
    weights = [load_file(folder / "model.safetensors") for folder in (source, converted)]
    assert weights[1].keys() == weights[0].keys()
    for name, tensor in weights[0].items():
        if "norm" in name:  # one was added and subtracted
            torch.testing.assert_close(weights[1][name], tensor, rtol=0, atol=1e-6)
        else:
            assert torch.equal(weights[1][name], tensor), name
    text = torch.tensor([[5, 99, 17, 17, 3, 60, 8, 41, 40, 100, 9, 5, 5, 77]])
    with torch.inference_mode():
        expected, logits = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(text).logits
            for folder in (source, converted)
        )
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("architecture", "fields"),
    [(name, {}) for name in ARCHITECTURES]
    + [
        ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
        ("llama", {"rope_parameters": LINEAR}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen2", {"rope_parameters": YARN}),
        ("gemma3", {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": None}}),
        ("phi3", {"sliding_window": None, "tie_word_embeddings": True}),
        ("phi3", {"rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 500.0}}),
        ("granite", {"tie_word_embeddings": True}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value) or "plain",
)
def test_a_model_comes_back_as_it_was(tmp_path: Path, architecture: str, fields: dict[str, Any]):
    assert_same_model(*round_trip(tmp_path, architecture, **fields))


def test_llama3_scaling_is_recognised_by_its_table(tmp_path: Path):
    """The file holds what the frequencies are divided by, as llama.cpp computes it; the folder
    Llama 3's own parameters."""
    source = random_model(
        "llama", tmp_path / "source", rope_parameters=LLAMA3, max_position_embeddings=16384
    )
    config = AutoConfig.from_pretrained(source)
    stretched, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 500_000.0 ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)

    def add_table(metadata: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        metadata.pop("rope.scaling.original_context_length", None)
        tensors["rope_freqs.weight"] = (plain / stretched).numpy()
        assert len(set(tensors["rope_freqs.weight"].round(3))) > 2

    folder = convert(write_gguf(tmp_path / "model.gguf", source, "llama", add_table))
    assert_same_model(source, folder)


def test_longrope_factors_come_from_their_tensors(tmp_path: Path):
    longrope = {
        "rope_type": "longrope",
        "rope_theta": 500.0,
        "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0],
        "short_factor": [1.0, 1.0, 1.0, 1.25, 1.25, 1.25, 1.5, 1.5],
        "original_max_position_embeddings": 64,
    }
    source, folder = round_trip(
        tmp_path, "phi3", rope_parameters=longrope, original_max_position_embeddings=64
    )
    assert_same_model(source, folder)
    assert config_of(folder)["rope_parameters"]["long_factor"] == longrope["long_factor"]


def test_biases_of_queries_and_keys_are_reordered_as_their_weights(tmp_path: Path):
    def without_output_bias(metadata: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        for name in [name for name in tensors if name.endswith("output.bias")]:
            tensors[name] = np.zeros_like(tensors[name])

    source, folder = round_trip(tmp_path, "llama", without_output_bias, attention_bias=True)
    ours, theirs = (load_file(each / "model.safetensors") for each in (folder, source))
    for layer in range(config_of(folder)["num_hidden_layers"]):
        for kind in "qk":
            name = f"model.layers.{layer}.self_attn.{kind}_proj.bias"
            assert len(theirs[name].unique()) > 1, "equal biases would hide their order"
            assert torch.equal(ours[name], theirs[name])
    assert config_of(folder)["attention_bias"]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tensor_names_are_those_of_the_gguf_package(name: str):
    kind = {text: arch for arch, text in gguf.MODEL_ARCH_NAMES.items()}[name]
    theirs = gguf.get_tensor_name_map(kind, 2)
    for ours, hugging_face in TENSORS.items():
        assert theirs.get_name(hugging_face) in (ours, None)  # None: it is always tied
    known = [gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[kind]]
    for ours, hugging_face in ARCHITECTURES[name].layer_tensors.items():
        if f"blk.{{bid}}.{ours}" in known:  # others are not in files of this architecture
            assert theirs.get_name(f"model.layers.1.{hugging_face}") == f"blk.1.{ours}"


@pytest.mark.parametrize(
    ("architecture", "layers", "scale"),
    [("gemma2", 26, 32), ("gemma2", 46, 16), ("gemma3", 18, 32), ("gemma3", 62, 16)],
)
def test_the_largest_gemma_scales_queries_by_its_width(
    tmp_path: Path, architecture: str, layers: int, scale: int
):
    source = random_model(architecture, tmp_path / "source")
    file = write_gguf(
        tmp_path / "model.gguf",
        source,
        architecture,
        lambda metadata, tensors: metadata.update(block_count=layers),
    )
    assert read_config(GgufFile(file))["query_pre_attn_scalar"] == scale


@pytest.mark.parametrize(
    ("length", "window", "expected"), [(4096, None, 2047), (131072, None, None), (4096, 0, None)]
)
def test_the_window_of_phi3_files_that_do_not_name_it(
    tmp_path: Path, length: int, window: int | None, expected: int | None
):
    def change(metadata: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        del metadata["attention.sliding_window"]
        metadata |= {"context_length": length} | (
            {} if window is None else {"attention.sliding_window": window}
        )

    source = random_model("phi3", tmp_path / "source")
    file = write_gguf(tmp_path / "model.gguf", source, "phi3", change)
    assert read_config(GgufFile(file))["sliding_window"] == expected


@pytest.mark.parametrize(
    ("architecture", "change", "message"),
    [
        ("llama", lambda fields, tensors: fields.update(architecture="bert"),
         "architecture 'bert'.*llama, qwen2, qwen3"),
        ("llama", lambda fields, tensors: fields.pop("block_count"), r"lacks llama\.block_count"),
        ("llama", lambda fields, tensors: fields.update({"rope.scaling.type": "longrope"}),
         "'longrope'.*only 'linear' and 'yarn'"),
        ("llama", lambda fields, tensors: fields.update({"rope.scaling.type": "yarn"}),
         r"lacks llama\.rope\.scaling\.factor"),
        ("llama", lambda fields,
         tensors: tensors.update({"rope_freqs.weight": np.linspace(1, 2, 8, dtype=np.float32)}),
         "not Llama 3's"),
        ("llama", lambda fields,
         tensors: tensors.update({"blk.0.ffn_gate_exps.weight": np.ones(8, np.float32)}),
         r"blk\.0\.ffn_gate_exps\.weight"),
        ("llama", lambda fields, tensors: tensors.pop("token_embd.weight"),
         r"no token_embd\.weight"),
        ("llama", lambda fields, tensors: fields.update({"feed_forward_length": [96, 128]}),
         "intermediate_size by layer"),
        ("olmo2", lambda fields, tensors: fields.update({"attention.sliding_window": 4096}),
         "OLMo 3"),
    ],
    ids=[
        "architecture",
        "field",
        "rope",
        "factor",
        "rope table",
        "experts",
        "embedding",
        "by layer",
        "olmo 3",
    ],
)  # fmt: skip
def test_models_that_are_not_supported(
    tmp_path: Path, architecture: str, change: Change, message: str
):
    source = random_model(architecture, tmp_path / "source")
    file = write_gguf(tmp_path / "model.gguf", source, architecture, change)
    with pytest.raises(ConfigError, match=message):
        convert(file)
