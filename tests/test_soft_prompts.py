"""Adapters of experts and soft prompts: texts are those of peft over transformers, in float32."""

from __future__ import annotations

import json
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import (
    PeftModel,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
)
from safetensors.torch import load_file, save_file

from aioinfer.config import LoraConfig
from aioinfer.errors import ConfigError, RequestError
from aioinfer.llm import LLM
from aioinfer.sampling_params import SamplingParams
from tests.adapters import adapted_text, make_adapter
from tests.test_adapters import SETTINGS
from tests.test_models import reference_model
from tests.tiny_models import tiny_model

OUTPUT = 8
PROMPTS = [[random.Random(seed).randrange(3, 500) for _ in range(35)] for seed in (3, 4)]


def make_prompt(model: Path, folder: Path, config: Any) -> Path:
    """Saves a random soft prompt."""
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = get_peft_model(reference_model(model), config)
    for name, parameter in made.named_parameters():
        if "prompt_encoder" in name:
            torch.nn.init.normal_(parameter, std=0.8)
    made.save_pretrained(folder)
    return folder


@torch.inference_mode()
def prompted_text(model_folder: Path, folder: Path, prompt: list[int]) -> list[int]:
    """Greedy tokens, each computed from the whole text, as peft computes them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PeftModel.from_pretrained(reference_model(model_folder), folder).eval()
    text = list(prompt)
    for _ in range(OUTPUT):
        logits = model(input_ids=torch.tensor([text])).logits[0, -1]
        text.append(int(logits.argmax()))
    return text[len(prompt) :]


STAGES = {"parallel.executor": "multiprocess", "parallel.pipeline_parallel_size": 2}


@pytest.mark.parametrize(
    ("family", "executor"),
    [
        ("llama", {}),
        pytest.param("llama", STAGES, marks=pytest.mark.extended),
        pytest.param("gpt2", {}, marks=pytest.mark.extended),
    ],
)
def test_virtual_tokens_are_a_prefix(family: str, executor: dict[str, Any], tmp_path: Path) -> None:
    """Beside LoRA and none, in chunks, again from the prefix cache, and evicted in between."""
    model = tiny_model(family, tmp_path / "model")
    kind = {"task_type": "CAUSAL_LM"}
    adapters = {
        "prompt": make_prompt(
            model, tmp_path / "prompt", PromptTuningConfig(num_virtual_tokens=40, **kind)
        ),
        "encoded": make_prompt(
            model, tmp_path / "encoded",
            PromptEncoderConfig(num_virtual_tokens=5, encoder_hidden_size=16, **kind),
        ),
        "lora": make_adapter(model, tmp_path / "lora", seed=0),
    }  # fmt: skip
    expected = {
        name: [
            adapted_text(model, path, prompt, OUTPUT)
            if name in (None, "lora")
            else prompted_text(model, path, prompt)
            for prompt in PROMPTS
        ]
        for name, path in {None: None, **adapters}.items()
    }
    assert len({tuple(text) for texts in expected.values() for text in texts}) == 8
    settings = {
        **SETTINGS, "lora.targets": ["prompts"], "lora.max_adapters": 2,
        "lora.adapters": {name: str(path) for name, path in adapters.items()}, **executor,
    }  # fmt: skip
    asked = [(name, number) for name in expected for number in (0, 1)] * 2
    with LLM(str(model), settings=settings, progress=False) as llm:
        for _ in range(2):
            outputs = llm.generate(
                [{"prompt_token_ids": PROMPTS[number]} for _, number in asked],
                [SamplingParams(temperature=0, max_tokens=OUTPUT, adapter=n) for n, _ in asked],
            )
            found = [output.completions[0].token_ids for output in outputs]
            assert found == [expected[name][number] for name, number in asked]
        (output,) = llm.generate(
            [{"prompt_token_ids": PROMPTS[0]}],
            SamplingParams(temperature=0, max_tokens=1, adapter="prompt"),
        )
        assert output.prompt_token_ids == PROMPTS[0]
        assert 16 <= output.num_cached_tokens <= len(PROMPTS[0])
        with pytest.raises(RequestError, match="neither logprobs of the prompt"):
            llm.generate(
                [{"prompt_token_ids": PROMPTS[0]}],
                SamplingParams(max_tokens=1, prompt_logprobs=1, adapter="prompt"),
            )


def test_what_does_not_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", tmp_path / "model")
    config = PromptTuningConfig(num_virtual_tokens=9, task_type="CAUSAL_LM")
    prompt = str(make_prompt(model, tmp_path / "prompt", config))
    config = PrefixTuningConfig(num_virtual_tokens=9, task_type="CAUSAL_LM")
    prefix = str(make_prompt(model, tmp_path / "prefix", config))
    settings = {**SETTINGS, "lora.max_adapters": 1}
    with (
        LLM(str(model), settings=settings, progress=False) as llm,
        pytest.raises(ConfigError, match=r"lora\.targets lacks 'prompts'"),
    ):
        llm.load_adapter("prompt", prompt)
    settings["lora.targets"] = ["prompts"]
    monkeypatch.setattr(LoraConfig, "longest_prompt", 8)
    with LLM(str(model), settings=settings, progress=False) as llm:
        with pytest.raises(ConfigError, match="has 9 virtual tokens"):
            llm.load_adapter("prompt", prompt)
        with pytest.raises(ConfigError, match="peft_type is 'PREFIX_TUNING'"):
            llm.load_adapter("prompt", prefix)


STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
LINEAR = ["q_proj", "v_proj", "o_proj"]
PROMPT = [random.Random(3).randrange(3, 500) for _ in range(45)]


def texts_of(model: Path, adapters: dict[str, Path], **settings: Any) -> list[list[int]]:
    """Texts without an adapter and with each, in the same steps."""
    paths = {name: str(path) for name, path in adapters.items()}
    given = {**SETTINGS, "lora.targets": ["experts"], "lora.adapters": paths, **settings}
    params = [
        SamplingParams(temperature=0, max_tokens=OUTPUT, adapter=name) for name in (None, *adapters)
    ]
    with LLM(str(model), settings=given, progress=False) as llm:
        outputs = llm.generate([{"prompt_token_ids": PROMPT}] * len(params), params)
    return [output.completions[0].token_ids for output in outputs]


def make_adapters(family: str, folder: Path, modules: list[str]) -> tuple[Path, dict[str, Path]]:
    """A model, and adapters of all experts, of one of their products, and of linear layers."""
    model = tiny_model(family, folder / "model")
    fields: dict[str, dict[str, Any]] = {
        "experts": {"rank": 4, "target_modules": modules, "target_parameters": STACKS},
        "downs": {"rank": 6, "target_modules": LINEAR, "target_parameters": STACKS[1:]},
        "linear": {"rank": 8, "target_modules": LINEAR},
        "large": {"rank": 64, "use_rslora": True, "target_modules": [], "target_parameters": STACKS,
                  "rank_pattern": {"gate_up_proj": 128}},
    }  # fmt: skip
    return model, {
        name: make_adapter(model, folder / name, seed=seed, **given)
        for seed, (name, given) in enumerate(fields.items())
    }


@pytest.mark.parametrize(
    ("family", "modules"),
    [
        pytest.param("qwen3_moe", LINEAR, marks=pytest.mark.extended),
        ("qwen2_moe", [*LINEAR, "gate_proj", "up_proj", "down_proj", "shared_expert_gate"]),
        pytest.param("qwen3_5_moe_text", ["q_proj", "gate_proj"], marks=pytest.mark.extended),
    ],
)
def test_experts_have_the_adapters_of_their_tokens(
    family: str, modules: list[str], tmp_path: Path
) -> None:
    """Of stacks of all experts, in the same steps as requests without."""
    model, adapters = make_adapters(family, tmp_path, modules)
    expected = [adapted_text(model, path, PROMPT, OUTPUT) for path in (None, *adapters.values())]
    assert len({*map(tuple, expected)}) == len(expected)
    assert texts_of(model, adapters) == expected


@pytest.mark.slow
@pytest.mark.parametrize("expert_parallel", [pytest.param(False, marks=pytest.mark.extended), True])
def test_ranks_have_their_parts_of_experts(tmp_path: Path, *, expert_parallel: bool) -> None:
    model, adapters = make_adapters("qwen2_moe", tmp_path, [*LINEAR, "gate_proj", "down_proj"])
    expected = [adapted_text(model, path, PROMPT, OUTPUT) for path in (None, *adapters.values())]
    settings = {
        "parallel.executor": "multiprocess", "parallel.tensor_parallel_size": 2,
        "parallel.expert_parallel": expert_parallel,
    }  # fmt: skip
    assert texts_of(model, adapters, **settings) == expected


def write_separate(model: Path, folder: Path) -> tuple[Path, Path]:
    """Saves an adapter of modules of each expert, and the model with it added to its weights."""
    weights, generator = load_file(model / "model.safetensors"), torch.Generator().manual_seed(1)
    tensors, rank = {}, 5
    for name, weight in list(weights.items()):
        if ".experts." in name and not ("up_proj" in name and "experts.3" in name):
            module = name.removesuffix(".weight")
            down, up = (
                torch.randn(shape, generator=generator) * 0.3
                for shape in ((rank, weight.shape[1]), (weight.shape[0], rank))
            )
            tensors[f"base_model.model.{module}.lora_A.weight"] = down
            tensors[f"base_model.model.{module}.lora_B.weight"] = up
            weights[name] = weight + 2 * up @ down
    (folder / "adapter").mkdir()
    (folder / "merged").mkdir()
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(config), "utf-8")
    save_file(tensors, folder / "adapter" / "adapter_model.safetensors")
    (folder / "merged" / "config.json").write_bytes((model / "config.json").read_bytes())
    save_file(weights, folder / "merged" / "model.safetensors", {"format": "pt"})
    return folder / "adapter", folder / "merged"


def test_modules_of_each_expert_have_matrices_of_their_own(tmp_path: Path) -> None:
    """As peft saved them when experts were modules; some have none."""
    model = tiny_model("qwen3_moe", tmp_path / "model")
    adapter, merged = write_separate(model, tmp_path)
    expected = [adapted_text(folder, None, PROMPT, OUTPUT) for folder in (model, merged)]
    assert expected[0] != expected[1]
    assert texts_of(model, {"separate": adapter}) == expected
    with pytest.raises(ConfigError, match=r"experts\.0\.\w+ of this model: lora\.targets lacks"):
        texts_of(model, {"separate": adapter}, **{"lora.targets": []})
    with pytest.raises(ConfigError, match="has rank 5, and the server's"):
        texts_of(model, {"separate": adapter}, **{"lora.max_rank": 4})
