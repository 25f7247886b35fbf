"""The noise of sampling: a pure function of seed, position and token id.

Gumbel-max (Gumbel 1954; Maddison et al. 2014) samples from a softmax: argmax over tokens of logit /
temperature + g. Here g depends on nothing but the request's seed, the position of the token to be
sampled (counted from the beginning of the prompt) and the token id. So the same seed gives the same
text, whatever else is in the batch and however the step is computed. It is made of 32-bit unsigned
integer operations that wrap, `^` is exclusive or, `>>` shifts in zeros, and `mix` is the finaliser
"lowbias32" of C. Wellons' hash prospector:

    mix(h):  h ^= h >> 16;  h *= 0x7feb352d;  h ^= h >> 15;  h *= 0x846ca68b;  h ^= h >> 16
    key0 = mix(seed_high ^ mix(seed_low ^ mix(position + 0x9e3779b9)))
    key1 = mix(seed_high ^ mix(seed_low ^ mix(position + 0x7f4a7c15)))
    h    = mix of (token ^ key0), with  h ^= key1  after its first multiplication
    u    = ((h >> 9) + 0.5) * 2**-23         (float32, exact; between 2**-24 and 1 - 2**-24)
    g    = -log(-log(u))                     (float32)

This is the arithmetic of the host, in numpy, since torch has no unsigned integers; the kernel that
does the same on a GPU (`kernels.sampling`) gives the same u bit for bit.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from aioinfer.ipc.plan import F32, I32

U32 = npt.NDArray[np.uint32]


def gumbel_keys(seeds: npt.NDArray[np.int64], positions: I32) -> tuple[U32, U32]:
    """Returns `key0` and `key1` (uint32 [n]) of the noise, from the seeds' 64 bits and the
    positions (both [n])."""
    halves = np.ascontiguousarray(seeds).view(np.uint64)
    low, high = halves.astype(np.uint32), (halves >> np.uint64(32)).astype(np.uint32)
    at = positions.astype(np.uint32)
    first = _mix(high ^ _mix(low ^ _mix(at + np.uint32(0x9E3779B9))))
    return first, _mix(high ^ _mix(low ^ _mix(at + np.uint32(0x7F4A7C15))))


def uniforms(key0: U32, key1: U32, tokens: U32) -> F32:
    """Returns the uniforms u (float32, the shape that the arguments broadcast to) of token ids
    under the keys."""
    hashed = tokens ^ key0
    hashed ^= hashed >> np.uint32(16)
    hashed *= np.uint32(0x7FEB352D)
    hashed ^= key1
    hashed ^= hashed >> np.uint32(15)
    hashed *= np.uint32(0x846CA68B)
    hashed ^= hashed >> np.uint32(16)
    hashed >>= np.uint32(9)
    u = hashed.view(np.int32).astype(np.float32)  # from signed integers there is an instruction
    u += np.float32(0.5)
    u *= np.float32(2**-23)
    return u


def _mix(hashed: U32) -> U32:
    hashed = hashed ^ (hashed >> np.uint32(16))
    hashed *= np.uint32(0x7FEB352D)
    hashed ^= hashed >> np.uint32(15)
    hashed *= np.uint32(0x846CA68B)
    return hashed ^ (hashed >> np.uint32(16))


def gumbel_noise(key0: U32, key1: U32, tokens: U32) -> F32:
    """Returns the noise g, like `uniforms`."""
    noise = uniforms(key0, key1, tokens)
    np.log(noise, out=noise)
    np.negative(noise, out=noise)
    np.log(noise, out=noise)
    return np.negative(noise, out=noise)
