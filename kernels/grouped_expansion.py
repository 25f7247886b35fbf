"""4-bit integers expanded to 16 bits in registers, as `grouped_hopper` multiplies them."""
# ruff: noqa: N803  (compile-time constants are written in capitals)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def _instructions(run: int, offset: int) -> str:
    """Returns the assembly that makes two integers out of run `run` of two words ($1), less their
    zero points ($2) and times their scales ($3): see `grouped_product`."""
    shift = f"shr.u32 a, $1, {4 * run};" if run else "mov.b32 a, $1;"
    if offset == 128:
        return f"""{{
            .reg .b32 a, one;
            mov.b32 one, 0x3F803F80;
            {shift}
            lop3.b32 a, a, 0x000F000F, 0x43004300, 0xEA;
            fma.rn.bf16x2 a, a, one, $2;
            mul.rn.bf16x2 $0, a, $3;
            }}"""
    return f"""{{
        .reg .b32 a;
        {shift}
        lop3.b32 a, a, 0x000F000F, 0x64006400, 0xEA;
        add.rn.f16x2 a, a, $2;
        mul.rn.f16x2 $0, a, $3;
        }}"""


@gluon.jit
def scale_of(kept, HAS_ZEROS: gl.constexpr, dtype: gl.constexpr):
    """Returns, in `dtype`, the negative zero points that `_instructions` adds and the scales, both
    [N, 1], of elements [N] of `PackedGroups.scales`."""
    is_bf16: gl.constexpr = dtype == gl.bfloat16
    if HAS_ZEROS:
        sign_and_offset: gl.constexpr = 0xC300 if is_bf16 else 0xE400
        zero = ((kept & 255) | sign_and_offset).to(gl.int16).to(dtype, bitcast=True)
        scale = (kept & -256).to(gl.float32, bitcast=True).to(dtype)
    else:
        offset: gl.constexpr = 128 if is_bf16 else 1024
        zero = (kept * 0).to(dtype) - (offset + 8)
        scale = kept.to(gl.float32, bitcast=True).to(dtype)
    return zero[:, None], scale[:, None]


@gluon.jit
def expand(words, zero, scale, RUN: gl.constexpr):
    """Returns run `RUN` of words [N, 64], less its zero points and scaled, in `scale`'s dtype."""
    if scale.dtype == gl.bfloat16:
        values = gl.inline_asm_elementwise(
            _instructions(RUN, 128), "=r,r,r,r", [words, zero, scale], gl.bfloat16, True, 2
        )
    else:
        values = gl.inline_asm_elementwise(
            _instructions(RUN, 1024), "=r,r,r,r", [words, zero, scale], gl.float16, True, 2
        )
    return values
