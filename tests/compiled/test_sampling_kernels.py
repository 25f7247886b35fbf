"""The kernels of sampling as compiled for Hopper, without a GPU, for the vocabulary of Qwen3:
registers that are spilled, and how logits are loaded."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

import triton
from aioinfer.kernels.sampling import CHUNK, GATHERED, _chunk_kernel, _sample_kernel

from tests.compiled.hopper import check_fits, compile_call

VOCABULARY = 151936
LOGITS, FLOATS, INTS, LONGS = (
    torch.empty(8, dtype=d) for d in (torch.bfloat16, torch.float32, torch.int32, torch.int64)
)


def test_chunks() -> None:
    """Logits are loaded in vectors of 16 bytes."""
    kernel = compile_call(
        _chunk_kernel, SimpleNamespace(num_warps=4, num_stages=3), logits=LOGITS, slot_ids=INTS,
        positions=INTS, seeds=LONGS, temperatures=FLOATS, top_ps=FLOATS, best_scores=FLOATS,
        best_tokens=INTS, maxima=FLOATS, sums=FLOATS, vocab=VOCABULARY, stride=VOCABULARY, first=0,
        CHUNK=CHUNK, CHUNKS=triton.cdiv(VOCABULARY, CHUNK), PDL=True,
    )  # fmt: skip
    check_fits(kernel)
    assert "ld.global.v4.b32" in kernel.asm["ptx"]


@pytest.mark.parametrize(("size", "spilled"), [(1, 32), (8, 104)])
def test_sampling(size: int, spilled: int) -> None:
    """With the filters, over a whole vocabulary and over a shard of one: only then do ranks send
    numbers to one another."""
    vocab = VOCABULARY // size
    count = triton.cdiv(vocab, CHUNK)
    kernel = compile_call(
        _sample_kernel, SimpleNamespace(num_warps=16, num_stages=3), logits=LOGITS, slot_ids=INTS,
        positions=INTS, seeds=LONGS, temperatures=FLOATS, top_ks=INTS, top_ps=FLOATS, min_ps=FLOATS,
        best_scores=FLOATS, best_tokens=INTS, maxima=FLOATS, sums=FLOATS, chunks=INTS, out=INTS,
        vocab=vocab, stride=vocab, first=0, vocab_size=VOCABULARY, addresses=LONGS, epochs=INTS,
        rank=0, CHUNK=CHUNK, CHUNKS=count, CHUNKS_PAD=triton.next_power_of_2(count),
        GATHERED=GATHERED, SIZE=size, PDL=True,
    )  # fmt: skip
    check_fits(kernel, spilled=spilled)
    assert "ld.global.v4.b32" in kernel.asm["ptx"]
    assert ("atom.global.sys.relaxed.exch" in kernel.asm["ptx"]) == (size > 1)
