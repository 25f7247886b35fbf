"""Encoders on a GPU: in float32 the pooled states of transformers, in bfloat16 rounding errors no
worse than its own; and attention within whole texts, compiled, against torch's own."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from aioinfer.kernels.bidirectional_attention import bidirectional_attention
from aioinfer.kernels.norm import add_layer_norm
from engine_settings import engine_settings

from aioinfer import LLM
from tests.encoder_models import random_texts, tiny_encoder
from tests.kernels.test_bidirectional_attention import attention_of_texts

LENGTHS = [1, 2, 17, 64, 65, 129, 300, 512, 7, 7, 250]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", {"num_attention_heads": 4}),
    "bert with heads of 32": ("bert", {"num_attention_heads": 8}),
    "xlm-roberta": ("xlm-roberta", {"num_attention_heads": 4}),
    "mpnet": ("mpnet", {"num_attention_heads": 4}),
    "modernbert": ("modernbert", {"num_attention_heads": 4, "local_attention": 64}),
}
SIZES = {"hidden_size": 256, "intermediate_size": 512, "initializer_range": 0.06}


class Case(NamedTuple):
    """An encoder and texts, with the mean of the hidden states of each in float32, and how far that
    is from transformers' mean in bfloat16, at the most."""

    folder: Path
    texts: list[list[int]]
    expected: np.ndarray
    bfloat16_error: float


@torch.inference_mode()
def means(model: Any, texts: list[list[int]], device: str) -> np.ndarray:
    base = getattr(model, model.base_model_prefix)
    ids = [torch.tensor([text], device=device) for text in texts]
    found = [base(each).last_hidden_state[0].float().mean(0) for each in ids]
    return torch.stack(found).cpu().numpy()


def make_case(name: str, folder: Path, device: str) -> Case:
    family, fields = MODELS[name]
    model = tiny_encoder(family, folder, **{**SIZES, **fields}).to(device)
    texts = random_texts(LENGTHS, model.config.vocab_size)
    expected = means(model, texts, device)
    error = np.abs(means(model.bfloat16(), texts, device) - expected).max()
    return Case(folder, texts, expected, float(error))


def check(case: Case, device: str, dtype: str, **settings: Any) -> None:
    """In steps of 600 tokens at most, and with all texts in one."""
    for budget in (600, 4096):
        merged = engine_settings(
            parallel__device=device, parallel__executor="inline", model__dtype=dtype,
            model__max_model_len=512, scheduler__max_num_batched_tokens=budget, **settings,
        )  # fmt: skip
        with LLM(str(case.folder), settings=merged, progress=False) as llm:
            found = np.stack(llm.embed(case.texts, pooling="mean", normalize=False))
            llm.frontend.engines[0].scheduler.check_integrity()
        error = np.abs(found - case.expected).max()
        assert error < (1e-4 if dtype == "float32" else 2 * case.bfloat16_error)


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(request.param, tmp_path_factory.mktemp("model"), "cuda")


@pytest.mark.timeout(300)  # kernels are compiled
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pooled_states_are_those_of_transformers(case: Case, dtype: str) -> None:
    check(case, "cuda", dtype)


@pytest.mark.timeout(300)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_two_gpus_share_an_encoder(case: Case) -> None:
    options = {"parallel__tensor_parallel_size": 2, "parallel__executor": "auto"}
    merged = engine_settings(model__max_model_len=512, **options)
    with LLM(str(case.folder), settings=merged, progress=False) as llm:
        found = np.stack(llm.embed(case.texts, pooling="mean", normalize=False))
    assert np.abs(found - case.expected).max() < 1e-4


# ------------------------------------------------------------------ kernels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("size", "reach"), [(32, 0), (64, 0), (64, 64), (80, 5), (128, 0)])
def test_attention(dtype: torch.dtype, size: int, reach: int) -> None:
    rng = random.Random(size + reach)
    torch.manual_seed(0)
    for heads, kv_heads in ((4, 4), (6, 2)):
        lengths = [1, 600, *(rng.randint(1, 300) for _ in range(6)), 128]
        width = (heads + 2 * kv_heads) * size
        qkv = torch.randn(sum(lengths), width + 16, device="cuda", dtype=dtype)
        qkv[:, width:] = torch.nan
        starts = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
        found = bidirectional_attention(
            qkv[:, :width], starts, num_heads=heads, num_kv_heads=kv_heads, head_size=size,
            scale=0.3, reach=reach,
        )  # fmt: skip
        expected = attention_of_texts(
            qkv[:, :width].double().cpu(), lengths, heads, kv_heads, size, reach
        )
        limit = 1e-4 if dtype == torch.float32 else 5e-2
        assert (found.cpu().double() - expected).abs().max() < limit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("hidden", [96, 384, 768, 1024, 5000])
def test_the_norm_of_a_sum(dtype: torch.dtype, hidden: int) -> None:
    torch.manual_seed(hidden)
    stream, addend = (torch.randn(77, hidden, device="cuda", dtype=dtype) for _ in range(2))
    weight, bias = (torch.randn(hidden, device="cuda", dtype=dtype) for _ in range(2))
    expected = torch.nn.functional.layer_norm(
        stream.double() + addend.double(), (hidden,), weight.double(), bias.double(), 1e-5
    )
    add_layer_norm(stream, addend, weight, bias, 1e-5)
    limit = 1e-4 if dtype == torch.float32 else 5e-2
    assert (stream.double() - expected).abs().max() < limit
