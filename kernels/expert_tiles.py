"""A tile of a product of experts: the sums over the inputs, in a loop of its own for each format of
weights, and the epilogue: scales, bias, activation, routing weight.

Called by the kernel of `expert_matrix`, which finds the rows of a tile; `expert_vector` has the
activation from here. What they are compiled for is an `expert_arguments.ExpertSpec`. Weights in
four bits are dequantized in registers, as the left operand of the tensor cores: two 16-bit words
become eight numbers, without a shuffle.

A number of MXFP4 (a bit of sign s, two of exponent, one of mantissa) becomes bfloat16 by writing
its sign and its magnitude where bfloat16 has the sign, the lowest two bits of the exponent and the
highest of the mantissa: that is the number times 2 ** -126, exactly, zero and the subnormal number
included, and its scale is multiplied by 2 ** 126 (as in OpenAI's triton_kernels). Sums of products
need no scaling afterwards.
"""
# ruff: noqa: N803, N806  (compile-time constants are written in capitals)

from __future__ import annotations

import triton
import triton.language as tl
from aioinfer.kernels.activation import activated
from aioinfer.kernels.grouped_product import _load_unit
from aioinfer.kernels.grouped_weight import split_zero


@triton.jit
def activate(gate, up, S: tl.constexpr):
    """Returns silu(gate) * up, or with S.is_gelu gelu(gate) * up; with S.alpha gpt-oss's activation
    (`layers.experts`)."""
    if S.is_gelu:
        result = activated(gate, "gelu_pytorch_tanh") * up
    elif S.alpha == 0.0:
        result = activated(gate, "silu") * up
    else:
        gate = tl.minimum(gate, S.limit)
        up = tl.minimum(tl.maximum(up, -S.limit), S.limit)
        result = gate / (1.0 + tl.exp(-S.alpha * gate)) * (up + 1.0)
    return result


@triton.jit
def squared_relu(x):
    """Returns relu(x) ** 2."""
    x = tl.maximum(x, 0.0)
    return x * x


@triton.jit
def _gate(totals, ROWS: tl.constexpr, S: tl.constexpr):
    """Returns the activations [S.lines / 2, ROWS] of interleaved rows [S.lines, ROWS]."""
    runs = tl.reshape(totals, [S.lines // (2 * S.run), 2, S.run, ROWS])
    gate, up = tl.split(tl.permute(runs, [0, 2, 3, 1]))
    return tl.reshape(activate(gate, up, S), [S.lines // 2, ROWS])


@triton.jit
def _byte_totals(
    x, weight, x_scales, w_scales, x_stride, expert, line_tile, source, first, is_row,
    ROWS: tl.constexpr, TMA_ROWS: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Returns the sums [S.lines, ROWS] with weights as they are, or in one byte and scaled. Scales
    of rows and groups are `x_stride` apart; with S.grouped an S.step is a group."""
    LINES: tl.constexpr = S.lines
    line = line_tile * LINES + tl.arange(0, LINES)
    first_line = expert * S.features + line_tile * LINES
    is_line = line < S.features
    k = tl.arange(0, S.step)
    row_place = source.to(tl.int64)[:, None] * S.inputs + k[None, :]
    line_place = (expert * S.features + line).to(tl.int64)[:, None] * S.inputs + k[None, :]
    STEPS: tl.constexpr = (S.inputs + S.step - 1) // S.step
    if S.format == 1:
        SCALE_ROWS: tl.constexpr = (S.features + S.rows_per_scale - 1) // S.rows_per_scale
        scale_row = expert * SCALE_ROWS + line // S.rows_per_scale
        scale_place = w_scales + scale_row * (STEPS if S.grouped else 1)
    totals = tl.zeros([LINES, ROWS], tl.float32)
    for step in range(STEPS):
        inside = (step * S.step + k < S.inputs)[None, :]
        if S.tma:
            w = weight.load([first_line, step * S.step])
        else:
            w = tl.load(weight + line_place + step * S.step, is_line[:, None] & inside, 0.0)
        if TMA_ROWS:
            value = x.load([first, step * S.step])
        else:
            value = tl.load(x + row_place + step * S.step, is_row[:, None] & inside, 0.0)
        if S.x_scales == 0:
            w = w.to(value.dtype)
        if S.grouped:
            part = tl.dot(w, tl.trans(value), input_precision="ieee", out_dtype=tl.float32)
            part *= tl.load(scale_place + step, is_line, 0.0)[:, None]
            if S.x_scales == 2:
                part *= tl.load(x_scales + step * x_stride + source, is_row, 0.0)[None, :]
            totals += part
        else:
            totals = tl.dot(w, tl.trans(value), totals, input_precision="ieee")
    if S.format == 1 and not S.grouped:
        totals *= tl.load(scale_place, is_line, 0.0)[:, None]
    if S.x_scales == 1:
        totals *= tl.load(x_scales + source, is_row, 0.0)[None, :]
    return totals


@triton.jit
def _scale_of(kept, PART: tl.constexpr, dtype: tl.constexpr):
    """Returns [N, 1] the scales of run PART times 2 ** 126, of `PackedExperts.scales`."""
    code = (kept >> (8 * PART)) & 255
    if dtype == tl.bfloat16:
        scale = (code << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        scale = (code << 23).to(tl.float32, bitcast=True)
    return scale[:, None]


@triton.jit
def _number(magnitude, negative, scale, dtype: tl.constexpr):
    """Returns the numbers of MXFP4 with three bits of magnitude, times scale / 2 ** 126."""
    bits = ((negative & 1) << 31) | (magnitude << 22)
    return (bits.to(tl.float32, bitcast=True) * scale).to(dtype)


@triton.jit
def _expand_floats(words, kept, dtype: tl.constexpr):
    """Returns the numbers of words [N, R] of MXFP4, scaled: of each run a tensor [N, R]."""
    scale_0, scale_1 = _scale_of(kept, 0, dtype), _scale_of(kept, 1, dtype)
    scale_2, scale_3 = _scale_of(kept, 2, dtype), _scale_of(kept, 3, dtype)
    if dtype == tl.bfloat16:
        run_0, run_1, run_2, run_3 = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d, e, f;
            shl.b32 b, $4, 3;
            shl.b32 c, $4, 6;
            shl.b32 d, $4, 1;
            shr.u32 e, $4, 5;
            shr.u32 f, $4, 4;
            and.b32 a, $4, 0x81C081C0;
            and.b32 b, b, 0x81C081C0;
            and.b32 c, c, 0x81C081C0;
            and.b32 d, d, 0x80008000;
            lop3.b32 d, e, 0x01000100, d, 0xEA;
            lop3.b32 d, f, 0x00C000C0, d, 0xEA;
            mul.rn.bf16x2 $0, a, $5;
            mul.rn.bf16x2 $1, b, $6;
            mul.rn.bf16x2 $2, c, $7;
            mul.rn.bf16x2 $3, d, $8;
            }""",
            "=&r,=&r,=&r,=&r,r,r,r,r,r",
            [words, scale_0, scale_1, scale_2, scale_3],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        wide = words.to(tl.int32)
        run_0 = _number((wide >> 6) & 7, wide >> 15, scale_0, dtype)
        run_1 = _number((wide >> 3) & 7, wide >> 12, scale_1, dtype)
        run_2 = _number(wide & 7, wide >> 9, scale_2, dtype)
        last = ((wide >> 11) & 4) | ((wide >> 10) & 3)
        run_3 = _number(last, wide >> 14, scale_3, dtype)
    return run_0, run_1, run_2, run_3


@triton.jit
def _packed_totals(
    x, words, scales, expert, line_tile, source, is_row, ROWS: tl.constexpr, S: tl.constexpr
):  # fmt: skip
    """Returns the sums [S.lines, ROWS] with weights in four bits, in runs of S.words inputs;
    `source` are the rows of x."""
    dtype: tl.constexpr = x.dtype.element_ty
    LINES: tl.constexpr = S.lines
    WORDS: tl.constexpr = S.words
    GROUP: tl.constexpr = S.group
    HAS_ZEROS: tl.constexpr = S.has_zeros
    OFFSET: tl.constexpr = 128 if dtype == tl.bfloat16 else 1024 if dtype == tl.float16 else 0
    UNITS: tl.constexpr = (S.inputs + 4 * WORDS - 1) // (4 * WORDS)
    WIDTH: tl.constexpr = (S.features + S.tile - 1) // S.tile * S.tile
    line = line_tile * LINES + tl.arange(0, LINES)
    word = tl.arange(0, WORDS)
    is_line = line < WIDTH
    place = words + (expert * (WIDTH // S.tile) + line // S.tile).to(tl.int64)[:, None] * (
        UNITS * S.tile * WORDS
    )
    place += (line % S.tile)[:, None] * WORDS + word[None, :]
    GROUPS: tl.constexpr = (UNITS * 4 * WORDS + GROUP - 1) // GROUP
    SCALES: tl.constexpr = UNITS if S.format == 3 else GROUPS
    scales += expert.to(tl.int64) * (SCALES * WIDTH)
    x_place = x + source[None, :].to(tl.int64) * S.inputs
    totals = tl.zeros([LINES, ROWS], tl.float32)
    for unit in range(UNITS):
        if S.format == 3:
            found = tl.load(place + unit * (S.tile * WORDS), is_line[:, None], 0)
            runs = _expand_floats(found, tl.load(scales + unit * WIDTH + line, is_line, 0), dtype)
        else:
            runs, kept = _load_unit(
                place + unit * (S.tile * WORDS), scales, unit, line, WIDTH, is_line, WORDS,
                GROUP, 4, OFFSET, HAS_ZEROS, dtype,
            )  # fmt: skip
            product = tl.zeros([LINES, ROWS], tl.float32)
        for part in tl.static_range(4):
            k = ((unit * 4 + part) * WORDS + word)[:, None]
            is_there = is_row[None, :]
            if S.inputs != UNITS * 4 * WORDS:
                is_there = is_there & (k < S.inputs)
            value = tl.load(x_place + k, is_there, 0.0)
            if S.format == 3:
                totals = tl.dot(runs[part], value, totals, input_precision="ieee")
            else:
                product = tl.dot(runs[part], value, product, input_precision="ieee")
                if part % 2 == 1 or GROUP == WORDS:  # runs of one group are scaled together
                    scale, _ = split_zero(kept[part], 4, HAS_ZEROS)
                    totals += product * scale[:, None]
                    product = tl.zeros([LINES, ROWS], tl.float32)
    return totals


@triton.jit
def multiply(
    x, weight, x_scales, w_scales, bias, factors, out, expert, line_tile, pair, packed, first,
    is_row, x_stride, factor, ROWS: tl.constexpr, TMA_ROWS: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Computes a tile: S.lines weight rows of an expert for the pairs [ROWS], which are, or become,
    rows `packed`, from `first` on, of the tensor between the products; adds the bias, applies the
    activation or the routing weights. S is an `expert_arguments.ExpertSpec`."""
    source = pair // S.top_k if S.gated else packed
    if S.format < 2:
        totals = _byte_totals(
            x, weight, x_scales, w_scales, x_stride, expert, line_tile, source, first, is_row, ROWS,
            TMA_ROWS, S,
        )  # fmt: skip
    else:
        totals = _packed_totals(x, weight, w_scales, expert, line_tile, source, is_row, ROWS, S)
    line = line_tile * S.lines + tl.arange(0, S.lines)
    if S.has_factor:
        totals *= factor
    if S.has_bias:
        added = tl.load(bias + expert * S.features + line, line < S.features, 0.0)
        totals += added.to(tl.float32)[:, None]
    HAS_GATE: tl.constexpr = S.gated and S.has_gate
    if HAS_GATE:
        totals = _gate(totals, ROWS, S)
    elif S.gated and S.is_linear:
        pass
    elif S.gated:
        totals = squared_relu(totals)
    else:
        totals *= tl.load(factors + pair, is_row, 0.0)[None, :]
    HALVES: tl.constexpr = 2 if HAS_GATE else 1
    OUTPUTS: tl.constexpr = S.lines // HALVES
    WIDTH: tl.constexpr = S.features // HALVES
    target = packed if S.gated else pair
    column = line_tile * OUTPUTS + tl.arange(0, OUTPUTS)
    out_place = out + target.to(tl.int64)[None, :] * WIDTH + column[:, None]
    mask = (column < WIDTH)[:, None] & is_row[None, :]
    tl.store(out_place, totals.to(out.dtype.element_ty), mask)
