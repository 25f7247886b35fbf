"""Random inputs for the sampling kernels, and the CPU sampler's rules beside their results."""
# ruff: noqa: N803  (compile-time constants are written in capitals; l is the softmax's sum)

from __future__ import annotations

import math

import numpy as np
import torch
import triton
import triton.language as tl
from aioinfer.kernels.sampling import SamplingState, sample_tokens, uniform_noise

from aioinfer.worker.host_sampling import filter_tokens, gumbel_keys, gumbel_noise, uniforms


def make_state(slots: int, device: str) -> SamplingState:
    """Returns random sampling parameters for `slots` slots, with and without each filter."""
    rng = np.random.default_rng()

    def random_values(*values: float) -> torch.Tensor:
        return torch.from_numpy(rng.choice(np.array(values, np.float32), slots)).to(device)

    return SamplingState(
        seeds=torch.from_numpy(rng.integers(-(2**63), 2**63 - 1, slots, np.int64)).to(device),
        temperature=random_values(0.0, 0.6, 1.0, 1.4),
        top_k=random_values(0, 0, 1, 5, 20, 200, 10**6).int(),
        top_p=random_values(1.0, 1.0, 0.3, 0.9, 0.95),
        min_p=random_values(0.0, 0.0, 0.05, 0.3),
    )


def allowed_tokens(
    logits: np.ndarray, state: SamplingState, slot: int, position: int, slack: float = 1e-4
) -> tuple[set[int], int]:
    """Returns the tokens that are correct for a row up to rounding, and the one that the CPU
    sampler returns.

    The borders of the filters may move by `slack` in a logit, and scores within `slack` of the best
    are accepted, because sums and quotients are rounded differently on a GPU.
    """
    temperature = float(state.temperature[slot])
    scaled = logits / np.float32(temperature) if temperature >= 1e-5 else logits.copy()
    largest = float(scaled.max())
    if not math.isfinite(largest):
        return {-1}, -1
    if temperature < 1e-5:
        return {int(scaled.argmax())}, int(scaled.argmax())
    keys = gumbel_keys(state.seeds[slot : slot + 1].cpu().numpy(), np.array([position], np.int32))
    scores = scaled + gumbel_noise(keys[0], keys[1], np.arange(len(scaled), dtype=np.uint32))
    top_k, min_p = int(state.top_k[slot]), float(state.min_p[slot])
    exact_top_p = float(state.top_p[slot])
    allowed = set()
    for loosened in (0.0, slack, -slack):
        top_p = exact_top_p if exact_top_p == 1 else exact_top_p + loosened * 0.1
        kept = filter_tokens(scaled, largest, top_k, top_p, min_p)
        best = scores[kept].max()
        allowed |= set(kept[scores[kept] >= best - slack].tolist())
        if loosened == 0.0:
            exact = int(kept[scores[kept].argmax()])
    return allowed, exact


def sample_and_judge(
    rows: int, vocab: int, state: SamplingState, device: str, *, rounded: bool
) -> tuple[int, int]:
    """Samples from random logits; returns how many tokens are wrong, and how many differ from the
    CPU sampler's (see `allowed_tokens`)."""
    logits = torch.randn(rows, vocab, device=device) * 3
    if rounded:  # logits of a model in bf16 contain many equal values
        logits = logits.bfloat16().float()
    slots = torch.randint(0, len(state.seeds), (rows,), dtype=torch.int32, device=device)
    positions = torch.randint(0, 100_000, (rows,), dtype=torch.int32, device=device)
    tokens = torch.full((rows,), -7, dtype=torch.int32, device=device)
    sample_tokens(logits, slots, positions, state, out=tokens)
    wrong = different = 0
    for row, token in enumerate(tokens.tolist()):
        allowed, exact = allowed_tokens(
            logits[row].cpu().numpy(), state, int(slots[row]), int(positions[row])
        )
        wrong += token not in allowed
        different += token != exact
    return wrong, different


@triton.jit
def _uniforms_kernel(seeds, positions, out, COUNT: tl.constexpr):
    row = tl.program_id(0)
    tokens = tl.arange(0, COUNT)
    tl.store(
        out + row * COUNT + tokens,
        uniform_noise(tl.load(seeds + row), tl.load(positions + row), tokens),
    )


def uniforms_agree(device: str) -> bool:
    """Whether the kernels' uniforms are the CPU's, bit for bit."""
    seeds = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 123456789012345], device=device)
    positions = torch.tensor([0, 1, 17, 4096, 2**31 - 1, 77], dtype=torch.int32, device=device)
    out = torch.empty(6, 1024, device=device)
    _uniforms_kernel[(6,)](seeds, positions, out, COUNT=1024)
    key0, key1 = gumbel_keys(seeds.cpu().numpy(), positions.cpu().numpy())
    expected = uniforms(key0[:, None], key1[:, None], np.arange(1024, dtype=np.uint32)[None, :])
    return bool((out.cpu().numpy() == expected).all())
