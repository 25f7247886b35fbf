"""What the outputs are compared with: `generate` of transformers, greedy, in float32, one prompt at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch


class Reference:
    """A model folder loaded by transformers."""

    def __init__(self, folder: Path):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text).input_ids

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        rendered = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return self.tokenizer(rendered, add_special_tokens=False).input_ids

    def generate(self, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
        """Returns the new tokens, an end token included."""
        ids = torch.tensor([list(prompt)])
        with torch.inference_mode():
            output = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new_tokens, pad_token_id=0
            )
        return output[0, ids.shape[1] :].tolist()
