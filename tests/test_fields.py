"""`config.json` with any values: it is read, and then the model can be built, or `ConfigError`
names the file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, note, settings
from hypothesis import strategies as st

from aioinfer.errors import ConfigError
from aioinfer.layers.backend import Backend
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.models.config import DecoderConfig
from aioinfer.models.fields import check_fields
from aioinfer.models.registry import build_model, families, load_model_config

#: A model of every family, with all the fields that any of them reads.
WHOLE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "hidden_activation": "silu", "dtype": "float32", "tie_word_embeddings": True,
    "attention_bias": False, "mlp_bias": False, "use_sliding_window": True, "sliding_window": 16,
    "max_window_layers": 1, "sliding_window_pattern": 2, "rope_theta": 10_000.0,
    "rope_local_base_freq": 10_000.0, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5,
    "attention_multiplier": 0.1, "logits_scaling": 4.0, "partial_rotary_factor": 0.5,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
ROPE: dict[str, list[Any]] = {
    "rope_type": ["default", "linear", "llama3", "yarn", "dynamic", "longrope", "su", "mrope"],
    "rope_theta": [10_000.0, 2], "factor": [1.0, 8.0], "low_freq_factor": [1.0, 4.0],
    "high_freq_factor": [4.0],
    "original_max_position_embeddings": [1, 64, 1024],
    "short_factor": [[1.0] * 4, [1.0] * 2, [2.0]],
    "long_factor": [[2.0] * 4, [2.0] * 2, []],
    "attention_factor": [1.0], "beta_fast": [32], "mscale": [0, 1.0], "mscale_all_dim": [0.7],
}  # fmt: skip
WRONG = st.one_of(
    st.sampled_from(
        [
            None, True, False, -1, 0, 1, 2, 3, 5, 7, 2**31 - 1, 2**31, 2**63, 10**30, 10**400,
            0.5, -0.5, 1e-320, 1e300, float("nan"), float("inf"), float("-inf"), "", "8", "silu",
            [], [1], {}, {"a": 1}, [[]], "\ud800",
        ]
    ),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=4,
    ),
)  # fmt: skip
#: Small enough to be built at once; what is larger is only read.
_SMALL = {"vocab_size": 300, "hidden_size": 300, "intermediate_size": 300, "num_layers": 4,
          "num_heads": 16, "num_kv_heads": 16, "head_size": 64, "max_len": 4096}  # fmt: skip


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """Returns a config of which some fields are missing, and some are wrong."""
    architecture = draw(st.sampled_from(list(families())))
    config = {"architectures": [architecture]} | WHOLE
    rope = draw(
        st.fixed_dictionaries(
            {}, optional={name: st.sampled_from(values) for name, values in ROPE.items()}
        )
    )
    if rope:
        if draw(st.booleans()) and draw(st.booleans()):
            rope[draw(st.sampled_from(list(ROPE)))] = draw(WRONG)
        if draw(st.booleans()) and draw(st.booleans()):
            rope = {"full_attention": rope, "sliding_attention": {}}
        config[draw(st.sampled_from(["rope_parameters", "rope_scaling"]))] = rope
    for name in draw(st.lists(st.sampled_from(list(config)), max_size=4)):
        config.pop(name, None)
    for name in draw(st.lists(st.sampled_from([*WHOLE, "rope_scaling"]), max_size=3)):
        config[name] = draw(WRONG)
    return config


def is_small(config: DecoderConfig) -> bool:
    return all(getattr(config, name) <= most for name, most in _SMALL.items())


@settings(
    max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(config=configs())
@example(config={"architectures": ["LlamaForCausalLM"]} | WHOLE | {"num_attention_heads": 0})
@example(config={"architectures": ["Phi3ForCausalLM"]} | WHOLE)
@example(
    config={"architectures": ["Gemma2ForCausalLM"]}
    | WHOLE
    | {"rope_parameters": {"rope_type": {"": None}}}
)
def test_any_config_is_served_or_refused_by_name(tmp_path: Path, config: dict[str, Any]) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config), "utf-8")
    error = None
    try:
        read = load_model_config(tmp_path)
    except ConfigError as raised:
        error = str(raised)
    if error is not None:
        note(error)
        assert str(tmp_path) in error or "is none of" in error
        # an architecture that is missing lists those that are supported, which may be many
        shown = re.sub(r"is none of [^;]*;", "", error)
        assert len(shown) < 800, "an error shows no more of a value than its beginning"
        return
    assert isinstance(read, DecoderConfig)
    read.check_tensor_parallel(1)
    if is_small(read):
        backend = Backend.of(torch.device("cpu"), torch.float32, ParallelGroup.single())
        assert len(build_model(tmp_path, backend).kv_specs) == read.num_layers


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads must be at least 1 and at most 65536"),
        ({"num_attention_heads": 3, "num_key_value_heads": 2}, "must be a multiple of"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at least 1 and at most 4096"),
        ({"hidden_size": "576"}, "hidden_size must be a whole number, not '576'"),
        ({"hidden_size": True}, "hidden_size must be a whole number, not True"),
        ({"hidden_size": None}, "hidden_size must not be null"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be finite, not nan"),
        ({"vocab_size": 10**400}, "vocab_size must be at least 1 and at most 2147483647"),
        ({"head_dim": 7}, "must be even"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for num_hidden_layers"),
        ({"layer_types": ["linear_attention"] * 2}, "layer_types holds 'linear_attention'"),
        ({"rope_scaling": "yarn"}, "rope_scaling must be an object, not 'yarn'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -2}}, "rope_scaling.factor must be"),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1] * 3,
                              "long_factor": [1] * 3}},
            "rope_parameters",
        ),
        ({"max_position_embeddings": 2**30}, "at most 134217728 are supported"),
    ],
    ids=str,
)  # fmt: skip
def test_the_error_names_file_and_field(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    file = tmp_path / "config.json"
    config = {"architectures": ["MistralForCausalLM"]} | WHOLE | {"layer_types": None} | fields
    if "layer_types" in fields:
        config["architectures"] = ["Qwen2ForCausalLM"]
    file.write_text(json.dumps(config), "utf-8")
    with pytest.raises(ConfigError) as raised:
        load_model_config(tmp_path)
    assert str(raised.value).startswith(f"{file}: ")
    assert message in str(raised.value)


def test_a_whole_config_is_right() -> None:
    check_fields(WHOLE)
    check_fields({"unknown_field": object()})


@pytest.mark.parametrize("kinds", [True, [1], ["M", True]])
def test_kinds_of_layers_that_are_no_texts_are_refused(tmp_path: Path, kinds: Any) -> None:
    config = {"architectures": ["NemotronHForCausalLM"], "hybrid_override_pattern": kinds}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="the kinds of layers must be a list of names"):
        load_model_config(tmp_path)
