"""Soft prompts: texts are those of peft over transformers, in float32."""

from __future__ import annotations

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
