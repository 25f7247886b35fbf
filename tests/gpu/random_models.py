"""Random models with a tokenizer of as many tokens, so that an engine serves them where no package
of data is installed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.tiny_models import tiny_model

#: The character of token 0; the others follow it.
FIRST_CHARACTER = 0x100


def random_model(folder: Path, *, vocab_size: int, family: str = "qwen3", **fields: Any) -> Path:
    """Saves a random model into `folder` and returns it. Its weights are bfloat16, so that rounding
    them to it loses nothing.

    Args:
        folder: an empty folder.
        family: of `tests.tiny_models.FAMILIES`.
        vocab_size: tokens of the model and of the tokenizer, a character each.
        fields: go over those of `tiny_model`'s configuration.
    """
    tiny_model(family, folder, vocab_size=vocab_size, dtype=torch.bfloat16, **fields)
    tokenizer = Tokenizer(
        models.BPE({chr(FIRST_CHARACTER + token): token for token in range(vocab_size)}, [])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def random_prompts(lengths: Sequence[int], vocab_size: int) -> list[list[int]]:
    """Returns prompts of these lengths, without the first three tokens of the vocabulary."""
    rng = random.Random(1)
    return [[rng.randrange(3, vocab_size) for _ in range(length)] for length in lengths]


def greedy_outputs(
    model: Any, prompts: Sequence[list[int]], num_tokens: int, **options: Any
) -> list[list[int]]:
    """Returns the tokens that transformers generates for each prompt alone; `options` go to
    `generate`."""
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=model.device)
        tokens = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_tokens,
            **options,
        )  # fmt: skip
        outputs.append(tokens[0, len(prompt) :].tolist())
    return outputs


def odd_vocabulary_model(folder: Path, vocab_size: int) -> Path:
    """Writes a model of four layers that never ends by itself; returns its folder."""
    return random_model(
        folder, vocab_size=vocab_size, head_dim=64, hidden_size=256, intermediate_size=512,
        num_hidden_layers=4, initializer_range=0.05, eos_token_id=None,
        max_position_embeddings=1024,
    )  # fmt: skip
