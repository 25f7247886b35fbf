"""Check at the start whether a KV cache in float8 harms a model.

A rank computes a text with a cache in the dtype of the arithmetic before the real cache is made,
and once more with the calibrated cache. The mean Kullback-Leibler divergence of the distributions
of the next token is by how much the text's perplexity is expected to grow, on text that the model
writes itself. Unlike the perplexity of one text it is never below 0, and some hundred tokens
measure it well.

A model is refused above `MAX_LOSS`, unless `cache.dtype` is "fp8_unchecked". It is not checked
where the checkpoint says how its cache is to be stored, with random weights, without a
`tokenizer.json` in the model's folder, and where several ranks compute a layer.
"""

from __future__ import annotations

import logging
from pathlib import Path
from pydoc_data import topics

import numpy as np
import tokenizers
import torch

from aioinfer.errors import ConfigError
from aioinfer.ipc.plan import I32
from aioinfer.worker.dummy_steps import DummySteps

#: By which part the perplexity may be expected to grow. Models of 135 to 500 million parameters
#: lose 0.004 to 0.005; where keys are not shifted 0.007 to 0.019 (notes/fp8-kv.md).
MAX_LOSS = 0.01
#: Tokens of the text, at most.
CHECKED_TOKENS = 128

_log = logging.getLogger(__name__)


class CacheCheck:
    """The check of one rank's cache."""

    def __init__(self, tokens: I32, steps: DummySteps):
        """Computes the text `tokens` with the cache of `steps`, which does not round."""
        self._tokens, self._plain = tokens, steps.score_prompt(tokens)

    def end(self, steps: DummySteps) -> None:
        """Computes it with the cache of `steps`, which is the real one, and leaves no trace there.
        Raises `ConfigError` if the cache harms the model."""
        found = steps.score_prompt(self._tokens)
        steps.runner.device.kv.zero(-(-len(self._tokens) // steps.block_size))
        check_loss(expected_loss(self._plain, found))


def text_tokens(folder: Path, vocab_size: int, max_tokens: int) -> I32 | None:
    """Returns the first tokens of the text, English and Python, at most `max_tokens`; None where
    the model's folder has no `tokenizer.json` that can be used."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
        tokenizer.no_truncation()
        found = tokenizer.encode(topics.topics["types"]).ids
    except Exception as error:  # tokenizers raises bare exceptions
        _log.warning("the KV cache in float8 is not checked: %s cannot be read: %s", file, error)
        return None
    tokens = np.array(found[: min(max_tokens, CHECKED_TOKENS)], np.int32)
    return tokens if len(tokens) and tokens.max() < vocab_size else None


def expected_loss(plain: torch.Tensor, rounded: torch.Tensor) -> float:
    """Returns the part by which the perplexity is expected to grow, from log-probabilities float32
    [T, V] without rounding and with it."""
    terms = torch.where(plain.isfinite(), plain.exp() * (plain - rounded), 0.0)
    return float(terms.sum(-1, dtype=torch.float64).mean().expm1())


def check_loss(loss: float) -> None:
    """Raises `ConfigError` if a cache in float8 harms the model."""
    _log.info("KV cache in float8: the perplexity is expected to be %.2f %% worse", loss * 100)
    if not loss <= MAX_LOSS:  # it may be NaN
        raise ConfigError(
            "cache.dtype = 'fp8' harms this model: its perplexity is expected to be "
            f"{loss:.1%} worse, and {MAX_LOSS:.1%} are allowed; set it to 'model', or to "
            "'fp8_unchecked' to serve the model nevertheless"
        )
