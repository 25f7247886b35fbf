"""A tile of a product of experts: the sums over the inputs, in a loop of its own for each format of
weights, and the epilogue: scales, bias, activation, routing weight.

Called by the kernel of `expert_matrix`, which finds the rows of a tile; `expert_vector` has the
activation from here. FORMAT is one of `PLAIN`, `SCALED`, `INTEGERS` and `FLOATS`. Weights in four
bits are dequantized in registers, as the left operand of the tensor cores: two 16-bit words become
eight numbers, without a shuffle.

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
from aioinfer.kernels.grouped_product import _load_unit
from aioinfer.kernels.grouped_weight import split_zero

#: Formats of weights.
PLAIN, SCALED, INTEGERS, FLOATS = 0, 1, 2, 3


@triton.jit
def activate(gate, up, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """Returns silu(gate) * up; with an ALPHA gpt-oss's activation (`layers.experts`)."""
    if ALPHA == 0.0:
        result = gate / (1.0 + tl.exp(-gate)) * up
    else:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        result = gate / (1.0 + tl.exp(-ALPHA * gate)) * (up + 1.0)
    return result


@triton.jit
def _gate(
    totals, LINES: tl.constexpr, ROWS: tl.constexpr, RUN: tl.constexpr, ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
):  # fmt: skip
    """Returns the activations [LINES / 2, ROWS] of interleaved rows [LINES, ROWS]."""
    runs = tl.reshape(totals, [LINES // (2 * RUN), 2, RUN, ROWS])
    gate, up = tl.split(tl.permute(runs, [0, 2, 3, 1]))
    return tl.reshape(activate(gate, up, ALPHA, LIMIT), [LINES // 2, ROWS])


@triton.jit
def _plain_totals(
    x, weight, expert, line_tile, source, first, is_row,
    FEATURES: tl.constexpr, INPUTS: tl.constexpr, LINES: tl.constexpr, ROWS: tl.constexpr,
    STEP: tl.constexpr, TMA: tl.constexpr, TMA_ROWS: tl.constexpr,
):  # fmt: skip
    """Returns the sums [LINES, ROWS] with weights as they are."""
    line = line_tile * LINES + tl.arange(0, LINES)
    first_line = expert * FEATURES + line_tile * LINES
    k = tl.arange(0, STEP)
    row_place = source.to(tl.int64)[:, None] * INPUTS + k[None, :]
    line_place = (expert * FEATURES + line).to(tl.int64)[:, None] * INPUTS + k[None, :]
    totals = tl.zeros([LINES, ROWS], tl.float32)
    for step in range((INPUTS + STEP - 1) // STEP):
        inside = (step * STEP + k < INPUTS)[None, :]
        if TMA:
            w = weight.load([first_line, step * STEP])
        else:
            is_line = (line < FEATURES)[:, None]
            w = tl.load(weight + line_place + step * STEP, is_line & inside, 0.0)
        if TMA_ROWS:
            value = x.load([first, step * STEP])
        else:
            value = tl.load(x + row_place + step * STEP, is_row[:, None] & inside, 0.0)
        totals = tl.dot(w, tl.trans(value), totals, input_precision="ieee")
    return totals


@triton.jit
def _scaled_totals(
    x, weight, x_scales, w_scales, x_stride, expert, line_tile, source, first, is_row,
    FEATURES: tl.constexpr, INPUTS: tl.constexpr, LINES: tl.constexpr, ROWS: tl.constexpr,
    STEP: tl.constexpr, TMA: tl.constexpr, TMA_ROWS: tl.constexpr, X_SCALES: tl.constexpr,
    GROUPED: tl.constexpr, ROWS_PER_SCALE: tl.constexpr,
):  # fmt: skip
    """Returns the sums [LINES, ROWS] with float8 weights, scaled. X_SCALES is 0 for activations of
    16 or 32 bits, 1 for scales of rows, and 2 for scales of rows and groups, `x_stride` apart.
    With GROUPED a STEP is a group."""
    line = line_tile * LINES + tl.arange(0, LINES)
    first_line = expert * FEATURES + line_tile * LINES
    is_line = line < FEATURES
    k = tl.arange(0, STEP)
    row_place = source.to(tl.int64)[:, None] * INPUTS + k[None, :]
    line_place = (expert * FEATURES + line).to(tl.int64)[:, None] * INPUTS + k[None, :]
    GROUPS: tl.constexpr = (INPUTS + STEP - 1) // STEP if GROUPED else 1
    SCALE_ROWS: tl.constexpr = (FEATURES + ROWS_PER_SCALE - 1) // ROWS_PER_SCALE
    scale_place = w_scales + (expert * SCALE_ROWS + line // ROWS_PER_SCALE) * GROUPS
    totals = tl.zeros([LINES, ROWS], tl.float32)
    for step in range((INPUTS + STEP - 1) // STEP):
        inside = (step * STEP + k < INPUTS)[None, :]
        if TMA:
            w = weight.load([first_line, step * STEP])
        else:
            w = tl.load(weight + line_place + step * STEP, is_line[:, None] & inside, 0.0)
        if TMA_ROWS:
            value = x.load([first, step * STEP])
        else:
            value = tl.load(x + row_place + step * STEP, is_row[:, None] & inside, 0.0)
        if X_SCALES == 0:
            w = w.to(value.dtype)
        if GROUPED:
            part = tl.dot(w, tl.trans(value), input_precision="ieee", out_dtype=tl.float32)
            part *= tl.load(scale_place + step, is_line, 0.0)[:, None]
            if X_SCALES == 2:
                part *= tl.load(x_scales + step * x_stride + source, is_row, 0.0)[None, :]
            totals += part
        else:
            totals = tl.dot(w, tl.trans(value), totals, input_precision="ieee")
    if not GROUPED:
        totals *= tl.load(scale_place, is_line, 0.0)[:, None]
    if X_SCALES == 1:
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
    x, words, scales, expert, line_tile, source, is_row,
    FEATURES: tl.constexpr, INPUTS: tl.constexpr, LINES: tl.constexpr, ROWS: tl.constexpr,
    FORMAT: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Returns the sums [LINES, ROWS] with weights in four bits, runs of which have WORDS inputs;
    `source` are the rows of x."""
    dtype: tl.constexpr = x.dtype.element_ty
    OFFSET: tl.constexpr = 128 if dtype == tl.bfloat16 else 1024 if dtype == tl.float16 else 0
    UNITS: tl.constexpr = (INPUTS + 4 * WORDS - 1) // (4 * WORDS)
    WIDTH: tl.constexpr = (FEATURES + TILE - 1) // TILE * TILE
    line = line_tile * LINES + tl.arange(0, LINES)
    word = tl.arange(0, WORDS)
    is_line = line < WIDTH
    place = words + (expert * (WIDTH // TILE) + line // TILE).to(tl.int64)[:, None] * (
        UNITS * TILE * WORDS
    )
    place += (line % TILE)[:, None] * WORDS + word[None, :]
    SCALES: tl.constexpr = UNITS if FORMAT == 3 else (UNITS * 4 * WORDS + GROUP - 1) // GROUP
    scales += expert.to(tl.int64) * (SCALES * WIDTH)
    x_place = x + source[None, :].to(tl.int64) * INPUTS
    totals = tl.zeros([LINES, ROWS], tl.float32)
    for unit in range(UNITS):
        if FORMAT == 3:
            found = tl.load(place + unit * (TILE * WORDS), is_line[:, None], 0)
            runs = _expand_floats(found, tl.load(scales + unit * WIDTH + line, is_line, 0), dtype)
        else:
            runs, kept = _load_unit(
                place + unit * (TILE * WORDS), scales, unit, line, WIDTH, is_line, WORDS, GROUP, 4,
                OFFSET, HAS_ZEROS, dtype,
            )  # fmt: skip
            product = tl.zeros([LINES, ROWS], tl.float32)
        for part in tl.static_range(4):
            k = ((unit * 4 + part) * WORDS + word)[:, None]
            is_there = is_row[None, :]
            if UNITS * 4 * WORDS != INPUTS:
                is_there = is_there & (k < INPUTS)
            value = tl.load(x_place + k, is_there, 0.0)
            if FORMAT == 3:
                totals = tl.dot(runs[part], value, totals, input_precision="ieee")
            else:
                product = tl.dot(runs[part], value, product, input_precision="ieee")
                if part % 2 == 1 or GROUP == WORDS:  # runs of one group are scaled together
                    scale, _ = split_zero(kept[part], 4, HAS_ZEROS)
                    totals += product * scale[:, None]
                    product = tl.zeros([LINES, ROWS], tl.float32)
    return totals


@triton.jit
def finish(
    totals, bias, factors, out, expert, line_tile, target, pair, is_row, factor,
    FEATURES: tl.constexpr, LINES: tl.constexpr, ROWS: tl.constexpr, GATED: tl.constexpr,
    RUN: tl.constexpr, HAS_BIAS: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
):  # fmt: skip
    """Adds the bias to sums [LINES, ROWS], applies the activation or the routing weights, and
    writes rows `target`."""
    line = line_tile * LINES + tl.arange(0, LINES)
    if HAS_FACTOR:
        totals *= factor
    if HAS_BIAS:
        added = tl.load(bias + expert * FEATURES + line, line < FEATURES, 0.0)
        totals += added.to(tl.float32)[:, None]
    if GATED:
        totals = _gate(totals, LINES, ROWS, RUN, ALPHA, LIMIT)
        OUTPUTS: tl.constexpr = LINES // 2
        WIDTH: tl.constexpr = FEATURES // 2
    else:
        totals *= tl.load(factors + pair, is_row, 0.0)[None, :]
        OUTPUTS: tl.constexpr = LINES
        WIDTH: tl.constexpr = FEATURES
    column = line_tile * OUTPUTS + tl.arange(0, OUTPUTS)
    out_place = out + target.to(tl.int64)[None, :] * WIDTH + column[:, None]
    mask = (column < WIDTH)[:, None] & is_row[None, :]
    tl.store(out_place, totals.to(out.dtype.element_ty), mask)


@triton.jit
def multiply(
    x, weight, x_scales, w_scales, bias, factors, out, expert, line_tile, pair, packed, first,
    is_row, x_stride, factor,
    FEATURES: tl.constexpr, INPUTS: tl.constexpr, LINES: tl.constexpr, ROWS: tl.constexpr,
    STEP: tl.constexpr, TOP_K: tl.constexpr, GATED: tl.constexpr, RUN: tl.constexpr,
    TMA: tl.constexpr, TMA_ROWS: tl.constexpr, FORMAT: tl.constexpr, X_SCALES: tl.constexpr,
    GROUPED: tl.constexpr, ROWS_PER_SCALE: tl.constexpr, WORDS: tl.constexpr,
    GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, TILE: tl.constexpr, HAS_BIAS: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, HAS_FACTOR: tl.constexpr,
):  # fmt: skip
    """Computes a tile: LINES weight rows of an expert for the pairs [ROWS], which are, or become,
    rows `packed`, from `first` on, of the tensor between the products."""
    source = pair // TOP_K if GATED else packed
    if FORMAT == 0:
        totals = _plain_totals(
            x, weight, expert, line_tile, source, first, is_row, FEATURES, INPUTS, LINES, ROWS,
            STEP, TMA, TMA_ROWS,
        )  # fmt: skip
    elif FORMAT == 1:
        totals = _scaled_totals(
            x, weight, x_scales, w_scales, x_stride, expert, line_tile, source, first, is_row,
            FEATURES, INPUTS, LINES, ROWS, STEP, TMA, TMA_ROWS, X_SCALES, GROUPED, ROWS_PER_SCALE,
        )  # fmt: skip
    else:
        totals = _packed_totals(
            x, weight, w_scales, expert, line_tile, source, is_row, FEATURES, INPUTS, LINES, ROWS,
            FORMAT, WORDS, GROUP, HAS_ZEROS, TILE,
        )  # fmt: skip
    target = packed if GATED else pair
    finish(
        totals, bias, factors, out, expert, line_tile, target, pair, is_row, factor, FEATURES,
        LINES, ROWS, GATED, RUN, HAS_BIAS, ALPHA, LIMIT, HAS_FACTOR,
    )  # fmt: skip
