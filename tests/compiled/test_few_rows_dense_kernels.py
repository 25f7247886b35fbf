"""The configurations of few-row products that are timed at a start, as compiled for Hopper without
a GPU: they fit into shared memory, and none spills."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from aioinfer.kernels.few_rows_dense import (
    FewRowsConfig,
    FewRowsSpec,
    _tensor_kernel,
    _vector_kernel,
    adapter_columns,
    few_rows_dense_config,
    other_configs,
)

from tests.compiled.hopper import check_fits, compile_kernel, names_to_types

pytestmark = pytest.mark.extended

#: Rows, output features, inputs, whether normed and gated: products of Qwen3-8B.
PRODUCTS = [
    (1, 6144, 4096, True, False),
    (1, 12288, 4096, True, True),
    (1, 4096, 12288, False, False),
    (8, 6144, 4096, False, False),
    (8, 4096, 12288, False, False),
    (16, 6144, 4096, False, False),
    (1, 25600, 5120, True, True),  # steps of 1024 inputs
    (1, 5120, 25600, False, False),
    (1, 4608, 3584, True, False),  # of 512
]
TYPES = names_to_types(
    {
        "*bf16": ("x", "weight", "scales", "norm", "residual", "out", "shrunk", "up", "A", "B"),
        "*i32": ("blocks", "slots", "ranks"),
        "*i16": ("words", "others"),
        "fp32": ("eps",),
    }
)


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize(("rows", "features", "inputs", "normed", "gated"), PRODUCTS)
def test_they_fit(
    rows: int, features: int, inputs: int, normed: bool, gated: bool, adapted: bool
) -> None:
    shape = {"normed": normed, "gated": gated}
    configs = other_configs(rows, features, inputs, **shape)
    assert configs or rows > 8
    for config in (few_rows_dense_config(rows, features, inputs, **shape), *configs):
        assert isinstance(config, FewRowsConfig)
        spec = FewRowsSpec(inputs, config.features, config.step, gated, not normed)
        fixed = {"PDL": True, "ADAPTED": adapted, "S": spec}
        if rows == 1:
            columns = adapter_columns(48, config.num_warps)
            fixed |= {
                "HAS_NORM": normed, "EARLY_TRIGGER": False, "WIDTH": columns, "MISSING": -1,
            }  # fmt: skip
        else:
            fixed |= {"ROWS_PAD": 8 if rows <= 8 else 16, "BLOCK": 64}
        kernel = _vector_kernel if rows == 1 else _tensor_kernel
        compiled = compile_kernel(kernel, TYPES, fixed, config)
        check_fits(compiled)
        if rows == 1 and adapted:  # no two threads read the same word: before the loop, and in it
            loads = compiled.asm["ptx"].count("ld.volatile.global.b16 {")
            assert loads * 32 * config.num_warps == 2 * columns
