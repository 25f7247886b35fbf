"""Attention on CPUs by kernels that numba compiles (`kernels.cpu_attention`): rotary embeddings,
writing to the cache, and decodes. `Attention` uses it where it can.
"""

from __future__ import annotations

import ctypes
import struct
from itertools import takewhile

import torch

from aioinfer.layers.kv_cache import AttentionShape, KVCache
from aioinfer.layers.rotary import RotaryTable
from aioinfer.layers.step import Step
from aioinfer.layers.torch_attention import TorchAttention


def supports(shape: AttentionShape, rotary: RotaryTable | None, cache: KVCache) -> bool:
    """Whether `CompiledAttention` computes attention without sinks and ALiBi, where numba is
    installed."""
    if cache.keys.dtype != torch.float32 or (rotary is not None and rotary.sections is not None):
        return False
    from aioinfer.kernels.cpu_attention import HEAD_STEP

    rotated = 0 if rotary is None else rotary.cos_sin.shape[1]
    is_even = shape.head_size % HEAD_STEP == 0 and rotated % HEAD_STEP == 0
    return is_even and not shape.soft_cap and shape.num_heads % shape.num_kv_heads == 0


class CompiledAttention(TorchAttention):
    """`TorchAttention` with compiled decodes.

    Args:
        shape, group: as in `TorchAttention`. There are no sinks, and no ALiBi.
        cache: of the layer.
        rotary: of queries and keys; none where they are not rotated.
    """

    def __init__(
        self, shape: AttentionShape, group: int, cache: KVCache, rotary: RotaryTable | None
    ):
        from aioinfer.kernels.cpu_attention import AttentionTask, compile_kernel
        from aioinfer.kernels.cpu_team import process_team

        super().__init__(shape, group)
        kernels = compile_kernel()
        self._run = kernels.run
        self._cache = cache
        self._cos_sin = cache.keys.new_empty(0, 0) if rotary is None else rotary.cos_sin
        self._shared = shape.num_heads // shape.num_kv_heads
        self._threads = torch.get_num_threads()
        self._task = (ctypes.c_int64 * len(AttentionTask))()
        self._task[AttentionTask.KEYS : AttentionTask.NEXT] = [
            cache.keys.data_ptr(), cache.values.data_ptr(), shape.num_kv_heads, self._shared,
            shape.head_size, cache.keys.shape[1], shape.window or 0,
            struct.unpack("i", struct.pack("f", shape.scale))[0],
            self._cos_sin.data_ptr(), self._cos_sin.shape[1],
            process_team().grow(self._threads), kernels.work,
        ]  # fmt: skip
        self._address = ctypes.addressof(self._task)

    def rotate_and_attend(self, projected: torch.Tensor, step: Step) -> torch.Tensor:
        """Returns [T, num_heads, head_size].

        Args:
            projected: [T, heads of queries, keys and values, head_size], queries and keys not
                rotated yet.
            step: as in `TorchAttention`.
        """
        projected = projected.contiguous()
        shape, inputs = self._shape, step.inputs
        tokens, size, heads = len(projected), shape.head_size, shape.num_heads
        num_rotated = heads + shape.num_kv_heads
        rotated = projected.new_empty(tokens, num_rotated, size)
        self._task[:12] = [
            tokens, 0, projected.data_ptr(), 4 * size * projected.shape[1],
            rotated.data_ptr(), 4 * size * num_rotated,
            inputs.groups[self._group].slot_mapping.data_ptr(), 0,
            inputs.rotary_positions.data_ptr(),
            0, 0, 1,
        ]  # fmt: skip
        self._run(self._address)
        queries, keys, values = rotated[:, :heads], rotated[:, heads:], projected[:, num_rotated:]
        decodes = self._count_decodes(step)
        if decodes == tokens:
            return self._decode(queries, step, decodes)
        output = torch.empty(tokens, heads, size)
        if decodes:
            output[:decodes] = self._decode(queries[:decodes], step, decodes)
        for gather in self._gathers_of(step, self._cache, queries.dtype):
            if not gather.shape[0]:
                some = slice(gather.first, gather.first + gather.count)
                output[some] = self._attend_row(
                    queries[some], keys[some], values[some], self._cache, gather
                )
        return output

    @staticmethod
    def _count_decodes(step: Step) -> int:
        """Returns how many of the first rows have one token."""
        found: int | None = step.memo.get(CompiledAttention)
        if found is None:
            assert step.host is not None
            found = sum(1 for _ in takewhile(lambda count: count == 1, step.host.query_lens))
            step.memo[CompiledAttention] = found
        return found

    def _decode(self, queries: torch.Tensor, step: Step, rows: int) -> torch.Tensor:
        """Attends the only token of each of the first rows of a step."""
        from aioinfer.kernels.cpu_attention import TILE_BYTES

        assert step.host is not None
        shape, inputs = self._shape, step.inputs
        tables = inputs.groups[self._group].block_tables
        # a vector before the weights, in which their sum is, and one of padding behind them
        scores = self._shared * (4 * tables.shape[1] * self._cache.keys.shape[1] + 128)
        memory = torch.empty(self._threads * (TILE_BYTES + scores), dtype=torch.uint8)
        output = torch.empty(rows, shape.num_heads, shape.head_size)
        self._task[:12] = [
            0, rows, queries.data_ptr(), 4 * queries.stride(0), output.data_ptr(),
            4 * output.stride(0), tables.data_ptr(), 4 * tables.stride(0),
            inputs.seq_lens.data_ptr(), memory.data_ptr(), TILE_BYTES + scores, self._threads,
        ]  # fmt: skip
        self._run(self._address)
        return output
