"""What the outputs are compared with: `generate` of transformers, greedy, in float32."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import torch

_SHORT = 64


class Reference:
    """A model folder loaded by transformers."""

    def __init__(self, folder: Path, *, with_tokenizer: bool = True):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        if with_tokenizer:
            self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text).input_ids

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        rendered = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        return self.tokenizer(rendered, add_special_tokens=False).input_ids

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        """Returns each prompt's new tokens, an end token included. Prompts of about equal length go
        together, padded on the left.

        A step reads the weights once for all prompts of a batch, so short and long ones are the
        only batches.
        """
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        outputs: dict[int, list[int]] = {}
        for _, group in groupby(order, key=lambda i: len(prompts[i]) > _SHORT):
            batch = list(group)
            outputs.update(
                zip(batch, self._generate([prompts[i] for i in batch], max_new_tokens), strict=True)
            )
        return [outputs[i] for i in range(len(prompts))]

    def _generate(self, prompts: list[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        longest = max(map(len, prompts))
        padding = [longest - len(prompt) for prompt in prompts]
        ids = torch.tensor(
            [[0] * pad + list(prompt) for pad, prompt in zip(padding, prompts, strict=True)]
        )
        mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding])
        with torch.inference_mode():
            output = self.model.generate(
                ids, attention_mask=mask, do_sample=False, max_new_tokens=max_new_tokens,
                pad_token_id=0,
            )  # fmt: skip
        ends = self.model.generation_config.eos_token_id
        return [
            _until_end(row, ends if isinstance(ends, list) else [ends])
            for row in output[:, longest:].tolist()
        ]


def _until_end(tokens: list[int], ends: list[int]) -> list[int]:
    found = [index for index, token in enumerate(tokens) if token in ends]
    return tokens[: found[0] + 1] if found else tokens
