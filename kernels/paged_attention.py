"""Entry point of the attention kernels: attention over a paged KV cache for mixed batches of
prefill chunks and decodes.

Called by the attention layers on GPUs, once a layer. A step's rows of one token, which come first,
go to `decode_attention` (split along the keys); longer rows go to `prefill_hopper` where it
supports the GPU and the shapes, and to `prefill_attention` elsewhere. Nothing here reads from the
GPU, so a call can be captured in a CUDA graph.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from aioinfer.kernels.attention_tiles import LOG2_E, ScoreArguments
from aioinfer.kernels.decode_attention import launch_decode
from aioinfer.kernels.decode_plan import DecodeWorkspace
from aioinfer.kernels.prefill_attention import launch_prefill, prefill_config
from aioinfer.kernels.prefill_hopper import ROWS as HOPPER_ROWS
from aioinfer.kernels.prefill_hopper import launch_prefill_hopper, supports
from aioinfer.kernels.prefill_plan import PrefillPlan
from aioinfer.kernels.projection import Projection

HEAD_SIZES = (64, 96, 128, 256, 512)
BLOCK_SIZES = (16, 32, 64, 128)


def make_prefill_plan(
    rows: int,
    tokens: int,
    num_q_heads: int,
    dtype: torch.dtype,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    hopper: bool = True,
) -> PrefillPlan:
    """Returns an empty plan for the prefill kernel that will compute queries of `dtype` with
    `num_q_heads` heads over these caches.

    Args:
        rows, tokens: the maximum of rows of several tokens in a step, and of their tokens.
        hopper: whether `prefill_hopper` is used where it can be.
    """
    _, _, kv_heads, head_size = k_cache.shape
    hopper = hopper and supports(dtype, k_cache, v_cache)
    tile_rows = HOPPER_ROWS if hopper else prefill_config(head_size, dtype.itemsize).rows
    return PrefillPlan.empty(
        rows, tokens, num_q_heads // kv_heads, tile_rows, k_cache.device, hopper=hopper
    )


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    num_decodes: int | None,
    workspace: DecodeWorkspace,
    prefill_plan: PrefillPlan | None = None,
    scale: float | None = None,
    soft_cap: float = 0.0,
    scales: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    projection: Projection | None = None,
    older_keys_cached: bool = False,
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Returns causal attention of each token over the cached keys of its row, its own included.

    With `projection` the queries of the decodes are computed from it, and their keys and values are
    written to the cache, as `qk_norm_rope_cache` would; the first `num_decodes` tokens of q are not
    read then.

    Args:
        q: [T, Hq, D], bf16, fp16 or fp32, heads contiguous; D one of `HEAD_SIZES`.
        k_cache, v_cache: [num_blocks, block_size, Hkv, D] with this step's keys and values written;
            q's dtype or float8 (e4m3).
        block_tables: int32 [R, max_blocks]; entries past a row's length are not read.
        query_starts: int32 [R + 1], the first token of each row.
        seq_lens: int32 [R], the number of keys of each row; 0 is padding (a row without tokens or,
            among the decodes, with one).
        num_decodes: how many of the first rows have exactly one token. None: the plans on the GPU
            have it, and both kernels are launched; a CUDA graph can then be replayed for any
            number.
        workspace: from `DecodeWorkspace.create`, for the layer's sliding window. Unless there are
            no decodes, `plan_decode` has been called for this step's `seq_lens[:num_decodes]`.
        prefill_plan: from `make_prefill_plan`, filled by `plan_prefill` for this step's longer
            rows; not needed without such rows.
        scale: of the scores; by default 1 / sqrt(D).
        soft_cap: scores become soft_cap * tanh(score / soft_cap); 0 for none.
        scales: of caches in float8, see `qk_norm_rope_cache`; None: 1.
        sinks: float32 [Hq], a logit of each query head that takes part in the sum of its softmax
            and has no value, neither scaled nor capped; None for none.
        slopes: float32 [Hq], of each query head how much a key's score, scaled and capped, falls
            with every token between the key and the query (ALiBi); None for none. The workspace has
            no cascade then, and the plan is not for `prefill_hopper`.
        projection: the projected queries, keys and values of the decodes, one line a row.
        older_keys_cached: with a projection, whether earlier steps have cached all keys and values
            of the decodes but the newest ones: some are then read before the preceding kernel has
            ended.
        out: [T, Hq, D] to write to; by default a new tensor. Tokens of no row are not written.
        pdl: launch as programmatic dependents of the kernel before (Hopper and later); that kernel
            must not be `plan_decode`, whose plan is read before waiting for it.

    Raises:
        ValueError: sizes that the kernels do not support, or a missing plan.
    """
    head_size, group = q.shape[2], q.shape[1] // k_cache.shape[2]
    if (
        head_size not in HEAD_SIZES
        or k_cache.shape[1] not in BLOCK_SIZES
        or k_cache.shape[3] != head_size
    ):
        raise ValueError(
            f"head size must be in {HEAD_SIZES} and block size in {BLOCK_SIZES}: q "
            f"{tuple(q.shape)}, cache {tuple(k_cache.shape)}"
        )
    if group * k_cache.shape[2] != q.shape[1] or v_cache.shape != k_cache.shape:
        raise ValueError(
            f"{q.shape[1]} query heads are no multiple of {k_cache.shape[2]} KV heads, "
            f"or the caches differ in shape"
        )
    if q.stride()[1:] != (head_size, 1) or k_cache.stride(3) != 1 or v_cache.stride(3) != 1:
        raise ValueError("heads must be contiguous")
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    scale = 1.0 / math.sqrt(head_size) if scale is None else scale
    scores = ScoreArguments(scale * LOG2_E.value, soft_cap or None, sinks, slopes)
    if num_decodes != 0:
        launch_decode(
            q, k_cache, v_cache, block_tables, seq_lens, out, workspace,
            scores=scores, scales=scales, projection=projection,
            older_keys_cached=older_keys_cached, pdl=pdl,
        )  # fmt: skip
    if num_decodes is None or num_decodes < seq_lens.shape[0]:
        if prefill_plan is None:
            raise ValueError("rows of several tokens need a plan")
        arguments = (q, k_cache, v_cache, block_tables, query_starts, seq_lens, out, prefill_plan)
        options: dict[str, Any] = {
            "window": workspace.window, "scores": scores, "scales": scales
        }  # fmt: skip
        if prefill_plan.hopper:
            launch_prefill_hopper(*arguments, **options)
        else:
            launch_prefill(*arguments, **options, pdl=pdl)
    return out
