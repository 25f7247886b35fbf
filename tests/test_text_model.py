"""The text models of checkpoints with other parts, against transformers, in older and newer
layouts; and values laid over `config.json`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from aioinfer.errors import ConfigError
from aioinfer.layers.backend import Backend
from aioinfer.layers.formats.schemes import ScaledScheme
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.models.causal_lm import CausalLM
from aioinfer.models.config import DecoderConfig
from aioinfer.models.quantization import read_quantization
from aioinfer.models.registry import build_model, load_model_config
from aioinfer.models.text_model import is_other_part, own_name, possible_names, read_text_config
from tests.paged_model import CPU, PagedModel, load_model, model_options
from tests.sharded_logits import logits_of_ranks
from tests.test_models import TEXTS, assert_close, reference_logits
from tests.tiny_models import tiny_model
from tests.wrapper_models import WRAPPERS, change_config, rename, save_wrapper

SINGLE = ParallelGroup.single()


class Wrapper(NamedTuple):
    folder: Path
    expected: list[torch.Tensor]


@pytest.fixture(scope="module")
def wrappers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Wrapper]:
    root, made = tmp_path_factory.mktemp("wrappers"), {}
    for name in WRAPPERS:
        model = save_wrapper(name, root / name)
        made[name] = Wrapper(root / name, reference_logits(model))
    return made


def logits_of(folder: Path) -> list[torch.Tensor]:
    logits = PagedModel(load_model(folder, SINGLE), 16).step(dict(enumerate(TEXTS)))
    return [logits[name] for name in range(len(TEXTS))]


@pytest.mark.parametrize("name", WRAPPERS)
def test_the_text_model_of_a_wrapper(name: str, wrappers: dict[str, Wrapper]) -> None:
    wrapper = wrappers[name]
    model = load_model(wrapper.folder, SINGLE)
    logits = PagedModel(model, 16).run_at_random(TEXTS, longest=12, seed=0)
    assert_close(logits, wrapper.expected)
    assert len(set(torch.cat(wrapper.expected).argmax(-1).tolist())) > 25
    assert "pictures are not read" in model.describe(16)


def test_two_ranks(wrappers: dict[str, Wrapper], tmp_path: Path) -> None:
    folders = [wrapper.folder for wrapper in wrappers.values()]
    found = logits_of_ranks(folders, TEXTS[0], 2, tmp_path)
    for name, logits in zip(wrappers, found, strict=True):
        assert_close([logits], wrappers[name].expected[:1])


def older(name: str) -> str:
    return name.replace("model.language_model.", "language_model.model.")


def newer(name: str) -> str:
    if name.startswith(("visual.", "vision_tower.", "multi_modal_projector.")):
        return f"model.{name}"
    if name.startswith("language_model.lm_head"):
        return name.removeprefix("language_model.")
    if name.startswith("language_model.model."):
        return name.replace("language_model.model.", "model.language_model.")
    return name.replace("model.", "model.language_model.", 1)


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_fields_that_are_left_out(kind: str, tmp_path: Path) -> None:
    """As in the published `config.json` of LLaVA 1.5 and OneVision, and of Pixtral, whose null is
    not the default."""
    text = {"model_type": kind, "rms_norm_eps": 1e-5, "sliding_window": None}
    config = {"architectures": ["LlavaForConditionalGeneration"], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    found = load_model_config(tmp_path)
    assert isinstance(found, DecoderConfig)
    default = transformers.AutoConfig.for_model(kind, sliding_window=None)
    size = default.hidden_size // default.num_attention_heads
    assert found.windows == (None,) * default.num_hidden_layers
    assert (found.vocab_size, found.hidden_size, found.intermediate_size, found.max_len) == (
        default.vocab_size, default.hidden_size, default.intermediate_size,
        default.max_position_embeddings,
    )  # fmt: skip
    assert (found.num_heads, found.num_kv_heads, found.head_size) == (
        default.num_attention_heads, default.num_key_value_heads,
        getattr(default, "head_dim", size),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "layout"),
    [("gemma3", newer), ("mistral3", newer), ("qwen2_vl", newer), ("qwen3_vl", older)],
)
def test_names_of_other_versions(
    name: str, layout: Any, wrappers: dict[str, Wrapper], tmp_path: Path
) -> None:
    folder = shutil.copytree(wrappers[name].folder, tmp_path / "model")
    before = set(load_file(folder / "model.safetensors"))
    rename(folder, layout)
    assert len(before - set(load_file(folder / "model.safetensors"))) > len(before) / 3
    for ours, expected in zip(logits_of(folder), logits_of(wrappers[name].folder), strict=True):
        assert torch.equal(ours, expected)


def test_stacks_of_experts_as_they_are_published(
    wrappers: dict[str, Wrapper], tmp_path: Path
) -> None:
    """[experts, in, out]: transformers reads it, and writes [experts, out, in]."""
    folder = shutil.copytree(wrappers["qwen3_vl_moe"].folder, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    stacks = {name: tensors[name].mT.contiguous() for name in tensors if ".mlp.experts." in name}
    assert len(stacks) == 4
    save_file(tensors | stacks, folder / "model.safetensors")
    expected = logits_of(wrappers["qwen3_vl_moe"].folder)
    for ours, other in zip(logits_of(folder), expected, strict=True):
        assert torch.equal(ours, other)


def test_stacks_and_tensors_of_each_expert(wrappers: dict[str, Wrapper], tmp_path: Path) -> None:
    """Qwen3.5-MoE is published with stacks [experts, out, in], and with layers that predict further
    tokens; transformers writes a tensor for each expert's projection."""
    folder = shutil.copytree(wrappers["qwen3_5_moe"].folder, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    layers = [f"model.language_model.layers.{number}.mlp.experts" for number in range(2)]

    def stack(layer: str, *modules: str) -> torch.Tensor:
        experts = [
            torch.cat([tensors.pop(f"{layer}.{expert}.{module}.weight") for module in modules])
            for expert in range(8)
        ]
        return torch.stack(experts)

    for layer in layers:
        tensors[f"{layer}.gate_up_proj"] = stack(layer, "gate_proj", "up_proj")
        tensors[f"{layer}.down_proj"] = stack(layer, "down_proj")
    assert not any(".mlp.experts.0." in name for name in tensors)
    tensors["mtp.fc.weight"] = torch.zeros(3)
    save_file(tensors, folder / "model.safetensors")
    expected = logits_of(wrappers["qwen3_5_moe"].folder)
    for ours, other in zip(logits_of(folder), expected, strict=True):
        assert torch.equal(ours, other)


def test_fields_of_the_text_model_among_the_wrapper_s(
    wrappers: dict[str, Wrapper], tmp_path: Path
) -> None:
    """As in Qwen2.5-VL's published `config.json`."""
    folder = shutil.copytree(wrappers["qwen2_5_vl"].folder, tmp_path / "model")

    def flatten(config: dict[str, Any]) -> None:
        text = config.pop("text_config")
        del text["model_type"]
        rope = text.pop("rope_parameters")
        text["rope_theta"] = rope["rope_theta"]
        text["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
        config.update({**text, **config})

    change_config(folder, flatten)
    for ours, expected in zip(
        logits_of(folder), logits_of(wrappers["qwen2_5_vl"].folder), strict=True
    ):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize(
    ("family", "extra"),
    [
        ("qwen2_vl", "adapter.weight"),
        ("qwen2_vl", "model.layers.2.mlp.up_proj.weight"),
        ("llama", "visual.proj.weight"),  # a model of text alone
    ],
)
def test_unknown_tensors(
    family: str, extra: str, wrappers: dict[str, Wrapper], tmp_path: Path
) -> None:
    if family == "llama":
        folder = tiny_model("llama", tmp_path)
    else:
        folder = shutil.copytree(wrappers[family].folder, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {extra: torch.zeros(3)}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=f"1 unknown .{extra}"):
        load_model(folder, SINGLE)


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [("Llama4ForConditionalGeneration", "llama4_text"), ("PegasusForConditionalGeneration", None)],
)
def test_wrappers_that_are_not_supported(
    architecture: str, kind: str | None, wrappers: dict[str, Wrapper], tmp_path: Path
) -> None:
    folder = shutil.copytree(wrappers["llava"].folder, tmp_path / "model")

    def change(config: dict[str, Any]) -> None:
        config["architectures"] = [architecture]
        if kind is None:
            del config["text_config"], config["vision_config"]
            config["model_type"] = "pegasus"
        else:
            config["text_config"]["model_type"] = kind
            config["model_type"] = "llama4"

    change_config(folder, change)
    with pytest.raises(ConfigError, match=rf"\['{architecture}'\] is none of "):
        load_model_config(folder)


def test_gemma_3_4b_as_it_is_published() -> None:
    text = {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
        "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }  # fmt: skip
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
    found = read_text_config({**outer, "text_config": text, "vision_config": {"hidden_size": 1152}})
    from aioinfer.models.gemma3 import Gemma3Config

    config = Gemma3Config.read(found)
    assert (config.num_heads, config.num_kv_heads, config.head_size) == (8, 4, 256)
    assert (config.vocab_size, config.tied_embeddings, config.max_len) == (262_208, True, 131_072)
    assert config.windows == tuple(None if (n + 1) % 6 == 0 else 1024 for n in range(34))


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}


@pytest.mark.parametrize(
    "ignored",
    [
        "language_model.model.layers.0.mlp",
        "model.language_model.layers.0.mlp",
        "model.layers.0.mlp",
        r"re:^language_model\.model\.layers\.0\.mlp.*",
        r"re:model\.language_model\.layers\.0\.mlp.*",
    ],
)
def test_patterns_of_a_quantized_wrapper(ignored: str) -> None:
    ignore = {"modules_to_not_convert": ["vision_tower", "visual", ignored]}
    found = read_quantization({"quantization_config": {**FP8, **ignore}})
    assert found is not None
    assert found.scheme_of("model.layers.0.mlp.up_proj") is None
    assert found.scheme_of("model.layers.0.self_attn.q_proj") == ScaledScheme("fp8")
    assert found.scheme_of("model.layers.10.mlp.up_proj") == ScaledScheme("fp8")


def test_names() -> None:
    for own in ("model.norm.weight", "lm_head.weight"):
        assert all(own_name(name) == own for name in possible_names(own))
    stored = "language_model.model.model.norm.weight"  # of Voxtral by transformers 5.17
    assert stored in possible_names("model.norm.weight")
    assert possible_names("lm_head") == ["lm_head", "language_model.lm_head"]
    assert is_other_part("model.visual.norm.weight")
    assert not is_other_part("model.norm.weight")


# -------------------------------------------------------------------- model.hf_overrides


def test_overrides_are_merged_into_config_json(tmp_path: Path) -> None:
    folder = tiny_model("llama", tmp_path, rope_parameters={"rope_theta": 500.0})
    given = {"rope_parameters": {"rope_type": "linear", "factor": 4.0}, "num_hidden_layers": 1}
    config: Any = load_model_config(folder, model_options(hf_overrides=given))
    found = (config.rope.theta, config.rope.kind, config.rope.scaling["factor"])
    assert found == (500.0, "linear", 4.0)
    assert (config.num_layers, config.max_len) == (1, 2048)
    assert load_model_config(folder).max_len == 512


def test_overrides_of_the_text_model(wrappers: dict[str, Wrapper]) -> None:
    options = model_options(hf_overrides={"text_config": {"max_position_embeddings": 99}})
    assert load_model_config(wrappers["llava"].folder, options).max_len == 99


def test_overrides_of_a_model_by_transformers(tmp_path: Path) -> None:
    fields = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    config = transformers.GPTNeoXConfig(**fields, num_attention_heads=4)
    transformers.GPTNeoXForCausalLM(config).save_pretrained(tmp_path)
    options = model_options(hf_overrides={"max_position_embeddings": 77})
    assert load_model_config(tmp_path, options).max_len == 77


def test_overrides_that_are_wrong_are_refused_by_name(tmp_path: Path) -> None:
    folder = tiny_model("llama", tmp_path)
    options = model_options(hf_overrides={"num_attention_heads": 0})
    with pytest.raises(ConfigError, match="num_attention_heads must be at least 1"):
        load_model_config(folder, options)
    options = model_options(hf_overrides={"num_hidden_layers": 1})
    model: CausalLM = build_model(folder, Backend(CPU, torch.float32, SINGLE), options)
    with pytest.raises(ConfigError, match=r"unknown .model\.layers\.1"):
        model.load(folder, "auto", 0, lambda done, total: None)
