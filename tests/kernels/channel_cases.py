"""Float8 numbers in words of two channels, all that there are, in the interpreter and on a GPU."""
# ruff: noqa: N803  (compile-time constants are written in capitals)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from aioinfer.kernels.attention_tiles import joined_channels, paired_channels, split_channels

LINES = tl.constexpr(64)
CHANNELS = tl.constexpr(64)


@triton.jit
def _expand_kernel(words, out, again, BY_ASSEMBLY: tl.constexpr):
    line = tl.program_id(0) * LINES + tl.arange(0, LINES)[:, None]
    even, odd = paired_channels(
        tl.load(words + line * (CHANNELS // 2) + tl.arange(0, CHANNELS // 2)[None, :]), BY_ASSEMBLY
    )
    numbers = joined_channels(even, odd)
    place = line * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    tl.store(out + place, numbers)
    even, odd = split_channels(numbers)
    tl.store(again + place, joined_channels(even, odd))


def expand_all_words(device: str, *, by_assembly: bool) -> None:
    """Checks the numbers that `paired_channels` makes of all 65 536 words, with their signs."""
    words = torch.arange(2**16, device=device).to(torch.int16)
    numbers = words.view(torch.float8_e4m3fn).to(torch.float16)
    out, again = (torch.zeros_like(numbers) for _ in range(2))
    lines = len(numbers) // (LINES.value * CHANNELS.value)
    _expand_kernel[(lines,)](words, out, again, BY_ASSEMBLY=by_assembly)
    for result in (out, again):
        torch.testing.assert_close(result, numbers, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(result.signbit()[~numbers.isnan()], numbers.signbit()[~numbers.isnan()])
