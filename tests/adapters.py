"""Random adapters, made and computed by peft."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model

from tests.test_models import reference_model


def make_adapter(
    model_folder: Path, folder: Path, *, seed: int, rank: int = 4, **fields: Any
) -> Path:
    """Saves an adapter of a model into `folder`, with random matrices. `fields` as of peft's
    `LoraConfig`."""
    torch.manual_seed(seed)
    fields = {"target_modules": "all-linear", "lora_alpha": 2 * rank, **fields}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(reference_model(model_folder), LoraConfig(r=rank, **fields))
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.3)
        model.save_pretrained(folder)
    return folder


def adapted_model(model_folder: Path, adapter: Path | None) -> Any:
    """Returns the model with an adapter, as peft computes it, or without one."""
    model = reference_model(model_folder)
    if adapter is None:
        return model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(model, adapter).eval()


@torch.inference_mode()
def adapted_text(
    model_folder: Path, adapter: Path | None, prompt: Sequence[int], count: int
) -> list[int]:
    """Returns `count` greedy tokens, each computed from the whole text, as peft computes them."""
    model, text = adapted_model(model_folder, adapter), list(prompt)
    for _ in range(count):
        logits = model(input_ids=torch.tensor([text])).logits[0, -1]
        text.append(int(logits.argmax()))
    return text[len(prompt) :]


@torch.inference_mode()
def prompt_scores(model_folder: Path, adapter: Path | None, prompt: Sequence[int]) -> list[float]:
    """Returns the log-probability of each token of a prompt but the first."""
    logits = adapted_model(model_folder, adapter)(input_ids=torch.tensor([prompt])).logits[0]
    scores = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(prompt[1:])[:, None])
    return [float(score) for score in scores]
