"""Random models with a tokenizer of as many tokens, so that an engine serves them where no package
of data is installed."""

from __future__ import annotations

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
