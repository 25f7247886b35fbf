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


@torch.inference_mode()
def adapted_text(
    model_folder: Path, adapter: Path | None, prompt: Sequence[int], count: int
) -> list[int]:
    """Returns `count` greedy tokens, each computed from the whole text, as peft computes them."""
    model = reference_model(model_folder)
    if adapter is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = PeftModel.from_pretrained(model, adapter).eval()
    text = list(prompt)
    for _ in range(count):
        logits = model(input_ids=torch.tensor([text])).logits[0, -1]
        text.append(int(logits.argmax()))
    return text[len(prompt) :]
