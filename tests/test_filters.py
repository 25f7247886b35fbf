"""Min-p, top-k and top-p keep what transformers keeps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from aioinfer.sampling_params import SamplingParams
from aioinfer.worker.sampling.filters import filter_tokens


def warped(scaled: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """What transformers' warpers leave of scaled logits, in our order: min-p, top-k, top-p."""
    warpers = LogitsProcessorList()
    if params.min_p > 0:
        warpers.append(MinPLogitsWarper(params.min_p))
    if params.top_k > 0:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    return warpers(torch.zeros(1, 1, dtype=torch.long), scaled[None])[0]


@pytest.mark.parametrize("spread", [0.01, 1.0, 4.0, 30.0])
@pytest.mark.parametrize("top_k", [0, 1, 50, 2999, 3000])
@pytest.mark.parametrize("top_p", [1.0, 0.999, 0.5, 1e-6])
@pytest.mark.parametrize("min_p", [0.0, 0.3, 1e-6])
def test_filters_keep_what_transformers_keeps(
    spread: float, top_k: int, top_p: float, min_p: float
) -> None:
    """From nearly flat logits, where top-p reaches beyond every span, to a single likely token."""
    params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)
    torch.manual_seed(3)
    scaled = torch.randn(3000) * spread
    expected = warped(scaled, params).isfinite().nonzero()[:, 0].tolist()
    kept = filter_tokens(scaled.numpy(), float(scaled.max()), top_k, top_p, min_p).tolist()
    missing = set(kept) ^ set(expected)
    assert len(missing) <= (1 if top_p < 1 else 0), (
        "only rounding of a sum may move top-p's border, by a token"
    )
    assert kept == sorted(kept)
    assert kept


def test_equals_at_the_border_stay_together() -> None:
    scaled = np.log(np.array([0.1, 0.2, 0.2, 0.3, 0.2], np.float32))
    largest = float(scaled.max())
    assert filter_tokens(scaled, largest, 2, 1.0, 0.0).tolist() == [1, 2, 3, 4]
    assert filter_tokens(scaled, largest, 0, 0.45, 0.0).tolist() == [1, 2, 3, 4]
    assert filter_tokens(scaled, largest, 0, 0.25, 0.0).tolist() == [3]


@pytest.mark.parametrize("name", ["top_p", "min_p"])
def test_the_smallest_value_that_passes_keeps_what_it_must(name: str) -> None:
    smallest = getattr(SamplingParams(**{name: 2.0**-126}), name)
    assert smallest > 0
    scaled = np.array([0, -10, -80, -90], np.float32)
    top_p, min_p = (smallest, 0.0) if name == "top_p" else (1.0, smallest)
    kept = filter_tokens(scaled, 0.0, 0, top_p, min_p).tolist()
    assert kept == ([0] if name == "top_p" else [0, 1, 2])
