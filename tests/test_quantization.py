"""How `quantization_config` is read: every form that is supported, and the message for each that is
not."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from aioinfer.errors import ConfigError
from aioinfer.layers.backend import Backend
from aioinfer.layers.formats import make_weight
from aioinfer.layers.formats.schemes import GroupScheme, Quantization, ScaledScheme, Scheme
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.layers.shards import Shard, Source
from aioinfer.models.quantization import read_quantization
from aioinfer.models.registry import load_model_config
from tests.paged_model import CPU, model_options
from tests.scaled_models import compressed, set_config, token
from tests.tiny_models import tiny_model


def read(found: dict[str, Any] | None, wanted: str = "auto") -> Quantization | None:
    return read_quantization({"quantization_config": found}, wanted)


def group(weights: dict[str, Any], activations: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns a `quantization_config` of compressed-tensors with one group."""
    groups = {"group_0": {"weights": weights, "input_activations": activations}}
    return {"quant_method": "compressed-tensors", "config_groups": groups}


def integers(bits: int, strategy: str = "group", **others: Any) -> dict[str, Any]:
    return {"type": "int", "num_bits": bits, "strategy": strategy, "symmetric": True, **others}


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
SCHEMES: list[tuple[dict[str, Any], Scheme]] = [
    (FP8, ScaledScheme("fp8")),
    ({**FP8, "activation_scheme": "static"}, ScaledScheme("fp8", inputs="static")),
    ({**FP8, "weight_block_size": [128, 64]},
     ScaledScheme("fp8", (128, 64), scales="weight_scale_inv")),
    (compressed("float", "channel", token("float")), ScaledScheme("fp8")),
    (compressed("float", "tensor", token("float")), ScaledScheme("fp8")),
    (compressed("float", "tensor", token("float", dynamic=False)),
     ScaledScheme("fp8", inputs="static")),
    (compressed("float", "channel", None), ScaledScheme("fp8", inputs="none")),
    (compressed("float", "block", token("float"), block_structure=[128, 128]),
     ScaledScheme("fp8", (128, 128))),
    (compressed("int", "channel", token("int")), ScaledScheme("int8")),
    (compressed("int", "tensor", token("int", dynamic=False)),
     ScaledScheme("int8", inputs="static")),
    (group(integers(4, group_size=32)), GroupScheme("packed", 4, 32, False)),
    (group(integers(8, "channel")), GroupScheme("packed", 8, None, False)),
    (group(integers(4, group_size=128, symmetric=False, actorder="group")),
     GroupScheme("packed", 4, 128, True, has_order=True)),
    (group(integers(4, group_size=128, actorder="weight")), GroupScheme("packed", 4, 128, False)),
    (GPTQ, GroupScheme("gptq", 4, 128, False)),
    ({**GPTQ, "bits": 8, "group_size": -1, "desc_act": True, "sym": False},
     GroupScheme("gptq", 8, None, True, has_order=True)),
    ({**GPTQ, "checkpoint_format": "gptq_v2"}, GroupScheme("gptq_v2", 4, 128, False)),
    (AWQ, GroupScheme("awq", 4, 64, True)),
    ({"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "zero_point": False},
     GroupScheme("awq", 4, 32, False)),
]  # fmt: skip


@pytest.mark.parametrize(("found", "scheme"), SCHEMES)
def test_supported(found: dict[str, Any], scheme: Scheme) -> None:
    quantization = read(found)
    assert quantization is not None
    assert quantization.name == found["quant_method"]
    assert quantization.scheme_of("model.layers.3.mlp.down_proj") == scheme


UNSUPPORTED: list[tuple[Any, str]] = [
    ("fp8", "quantization_config must be an object"),
    ({}, None),  # as if it were not there
    ({"bits": 4}, "quant_method = None is not supported; these are: compressed-tensors, fp8, gptq"),
    ({"quant_method": "bitsandbytes"}, "quant_method = 'bitsandbytes' is not supported"),
    ({**FP8, "activation_scheme": "none"}, "activation_scheme = 'none' is not supported; these ar"),
    ({**FP8, "weight_block_size": [128]}, "a block must be two numbers, not [128]"),
    ({**FP8, "weight_block_size": [0, 128]}, "a block must be two numbers"),
    ({**FP8, "weight_block_size": [128, True]}, "a block must be two numbers"),
    (
        {**FP8, "weight_block_size": [128, 128], "activation_scheme": "static"},
        "static activation scales go with no blocks",
    ),
    ({**FP8, "modules_to_not_convert": "lm_head"}, "module names must be a list, not 'lm_head'"),
    ({**FP8, "ignored_layers": [3]}, "module names must be a list"),
    ({**FP8, "ignored_layers": ["re:("]}, "'re:(' is no pattern"),
    ({**GPTQ, "bits": 3}, "bits = 3 is not supported; these are: 4, 8"),
    ({**GPTQ, "group_size": 0}, "group_size must be -1 or above 0, not 0"),
    ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format = 'marlin' is not supported"),
    ({**GPTQ, "lm_head": True}, "quantization_config.lm_head is not supported for GPTQ"),
    ({**GPTQ, "dynamic": ["-:.*"]}, "quantization_config.dynamic must be an object"),
    ({**GPTQ, "dynamic": {"-:.*": 4}}, "quantization_config.dynamic: '-:.*' must have an object"),
    ({**GPTQ, "dynamic": {"-:[": {}}}, "'re:[' is no pattern"),
    ({**GPTQ, "dynamic": {"mlp": {"bits": 3}}}, "bits"),
    ({**AWQ, "version": "gemv"}, "version = 'gemv' is not supported; these are: gemm"),
    ({**AWQ, "bits": 8}, "bits = 8 is not supported; these are: 4"),
    ({"quant_method": "compressed-tensors"}, "config_groups must be an object that is not empty"),
    (
        {**group(integers(4, group_size=32)), "sparsity_config": {"format": "sparse-24-bitmask"}},
        "sparsity_config is not supported",
    ),
    ({"quant_method": "compressed-tensors", "config_groups": {"a": 3}}, "config_groups.a must be"),
    (group({"type": "float", "num_bits": 4, "strategy": "group"}), "type 'float' in 4 bits with"),
    (compressed("float", "channel", None, symmetric=False), "strategy 'channel' and activations"),
    (compressed("float", "block", token("float")), "a block must be two numbers, not ()"),
    (compressed("int", "channel", None, num_bits=6), "type 'int' in 6 bits"),
    (
        compressed("float", "block", token("float", dynamic=False), block_structure=[128, 128]),
        "static activation scales go with no blocks",
    ),
    (
        compressed("int", "channel", {**token("int"), "symmetric": False}),
        "config_groups.group_0.input_activations must be symmetric and of 8 bits",
    ),
    (
        compressed("float", "channel", token("int")),
        "config_groups.group_0.input_activations must be of type 'float'",
    ),
    (group(integers(4, group_size=32), token("int")), "4-bit and 8-bit integers by channel or gro"),
]


@pytest.mark.parametrize(("found", "message"), UNSUPPORTED)
def test_what_is_not_supported_is_named(found: Any, message: str | None) -> None:
    if message is None:
        assert read(found) is None
        return
    with pytest.raises(ConfigError, match=re.escape(message)):
        read(found)


# ---------------------------------------------------------------- which modules

LAYER = "model.layers.3"


@pytest.mark.parametrize(
    ("ignored", "module", "is_ignored"),
    [
        (["lm_head"], "lm_head", True),
        (["lm_head"], f"{LAYER}.mlp.up_proj", False),
        ([f"{LAYER}.mlp.up_proj"], f"{LAYER}.mlp.up_proj", True),
        ([f"{LAYER}.mlp"], f"{LAYER}.mlp.up_proj", True),
        (["model.layers.3"], "model.layers.31.mlp.up_proj", False),
        (["mlp.gate"], f"{LAYER}.mlp.gate_proj", False),
        (["up_proj"], f"{LAYER}.mlp.up_proj", True),
        (["re:.*up_proj"], f"{LAYER}.mlp.up_proj", True),
        (["re:up_proj"], f"{LAYER}.mlp.up_proj", False),  # from the beginning of the name
        ([r"re:.*layers\.3\..*"], f"{LAYER}.mlp.up_proj", True),
    ],
)
def test_modules_that_are_ignored(ignored: list[str], module: str, is_ignored: bool) -> None:
    for found in (
        {**compressed("float", "channel", token("float")), "ignore": ignored},
        {**FP8, "modules_to_not_convert": ignored},
        {**FP8, "ignored_layers": ignored},
    ):
        quantization = read(found)
        assert quantization is not None
        assert (quantization.scheme_of(module) is None) == is_ignored


def test_groups_by_pattern() -> None:
    """The first that matches holds; modules that are computed as one need one scheme."""
    by_float = compressed("float", "channel", token("float"))
    found = {
        **by_float,
        "config_groups": {
            "a": {**by_float["config_groups"]["group_0"], "targets": ["re:.*(q|gate|up)_proj$"]},
            "b": {"weights": integers(4, group_size=32), "targets": ["Linear"]},
        },
    }
    quantization = read(found)
    assert quantization is not None
    names = [
        f"{LAYER}.{name}_proj" for name in ("self_attn.q", "self_attn.k", "mlp.gate", "mlp.up")
    ]
    assert quantization.scheme_of(names[0]) == ScaledScheme("fp8")
    assert quantization.scheme_of(names[1]) == GroupScheme("packed", 4, 32, False)
    assert quantization.scheme_of_all(names[2:]) == ScaledScheme("fp8")
    with pytest.raises(ConfigError, match=r"q_proj, .*k_proj are computed as one product"):
        quantization.scheme_of_all(names[:2])


def test_modules_that_are_computed_as_one_are_ignored_together() -> None:
    quantization = read({**FP8, "modules_to_not_convert": ["gate_proj"]})
    assert quantization is not None
    names = [f"{LAYER}.mlp.gate_proj", f"{LAYER}.mlp.up_proj"]
    with pytest.raises(ConfigError, match="different schemes"):
        quantization.scheme_of_all(names)


# ---------------------------------------------------------------- model.quantization


def test_weights_that_are_not_quantized() -> None:
    assert read(None) is None
    for kind in ("fp8", "int8"):
        quantization = read(None, kind)
        assert quantization is not None
        scheme = quantization.scheme_of(f"{LAYER}.mlp.up_proj")
        assert scheme == ScaledScheme(kind, is_online=True)  # type: ignore[arg-type]


def test_a_checkpoint_that_is_quantized_already() -> None:
    assert read(FP8, "fp8") == read(FP8)
    for found, wanted in ((FP8, "int8"), (GPTQ, "fp8"), (AWQ, "int8")):
        with pytest.raises(ConfigError, match=f"'{wanted}', but the checkpoint is quantized alrea"):
            read(found, wanted)


def test_config_json(tmp_path: Path) -> None:
    """What cannot be read is an error before weights are; families alone can be quantized."""
    tiny_model("llama", tmp_path)
    load_model_config(tmp_path, model_options(quantization="int8"))
    set_config(tmp_path, quantization_config={"quant_method": "hqq"})
    with pytest.raises(ConfigError, match="'hqq' is not supported"):
        load_model_config(tmp_path)
    set_config(tmp_path, quantization_config=FP8, architectures=["PersimmonForCausalLM"])
    with pytest.raises(ConfigError, match="quantized weights are supported for"):
        load_model_config(tmp_path)


def test_multipliers_that_a_format_has_no_scales_for() -> None:
    found = read({"quant_method": "mxfp4", "modules_to_not_convert": []})
    backend = Backend(CPU, torch.float32, ParallelGroup.single())
    sources = [Source("model.layers.0.mlp.experts.up_proj", Shard.whole(32), scale=2.0)]
    with pytest.raises(ConfigError, match=r"up_proj is multiplied with a constant .* for mxfp4"):
        make_weight(sources, Shard.whole(32), backend, found)


def test_rules_of_gptq_modules() -> None:
    """The first rule of `dynamic` that matches holds; regular expressions begin at the name's
    beginning."""
    rules = {
        "lm_head": {}, "-:.*attn.*": {}, "+:.*experts": {"bits": 8, "group_size": -1},
        "-:.*experts.*": {}, ".*down_proj": {"sym": False},
    }  # fmt: skip
    quantization = read_quantization({"quantization_config": {**GPTQ, "dynamic": rules}})
    assert quantization is not None
    plain = GroupScheme("gptq", 4, 128, has_zeros=False)
    expected = {
        "model.layers.0.self_attn.q_proj": None,
        "model.layers.0.linear_attn.in_proj_qkvz": None,
        "model.layers.0.mlp.experts.3.up_proj": GroupScheme("gptq", 8, None, has_zeros=False),
        "model.layers.0.mlp.down_proj": replace(plain, has_zeros=True),
        "model.layers.0.mlp.up_proj": plain,
        "lm_head": None,
    }
    assert {module: quantization.scheme_of(module) for module in expected} == expected
