"""Products of few rows, whole or in parts, against float64, and in chains of dependent launches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from aioinfer.kernels.gated_product import GatedConfig, candidates, gated_product, interleave
from aioinfer.kernels.hopper_pipeline import supports_product
from aioinfer.kernels.norm import add_parts_rms_norm, rms_norm
from aioinfer.kernels.split_product import SplitConfig, split_config, split_product, whole_product
from cases import normal, poisoned

DEVICE = "cuda"
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")

ROWS = (1, 2, 8, 15, 16, 17, 33, 64, 100, 128)
#: Outputs and inputs: tiles clipped at their edges, one step of inputs, a step more than the ring.
SHAPES = ((8, 64), (200, 192), (1000, 4096), (3080, 1088))


def errors(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns the largest relative error of a row."""
    return float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("consumers", [1, 2])
@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_parts_sum_to_the_product(parts: int, consumers: int, dtype: torch.dtype) -> None:
    """x is a part of wider rows; a part takes other inputs than every other one."""
    for features, inputs in SHAPES:
        if parts > inputs // 64:
            continue
        x = poisoned(128, inputs + 8, dtype=dtype, device=DEVICE)[:, :inputs].normal_()
        weight = (torch.randn(features, inputs, device=DEVICE) * inputs**-0.5).to(dtype)
        bounds = [inputs // 64 * part // parts * 64 for part in range(parts + 1)]
        for rows in ROWS:
            found = split_product(x[:rows], weight, SplitConfig(consumers, parts))
            assert found.shape == (parts, rows, features)
            for part, begin, end in zip(found, bounds, bounds[1:], strict=False):
                exact = x[:rows, begin:end].double() @ weight[:, begin:end].double().T
                assert errors(part.double(), exact) < 1e-5, (rows, features, inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("biased", [False, True])
def test_whole_products(biased: bool, dtype: torch.dtype) -> None:
    """Nothing is written beyond the output, which is a part of wider rows."""
    for features, inputs in SHAPES:
        x = normal(128, inputs, dtype=dtype, device=DEVICE)
        weight = (torch.randn(features, inputs, device=DEVICE) * inputs**-0.5).to(dtype)
        bias = normal(features, dtype=dtype, device=DEVICE) if biased else None
        for rows in ROWS:
            buffer = poisoned(rows + 3, features + 8, dtype=dtype, device=DEVICE)
            out = buffer[:rows, :features]
            whole_product(x[:rows], weight, SplitConfig(1, 1), bias=bias, out=out)
            exact = x[:rows].double() @ weight.double().T
            if bias is not None:
                exact += bias.double()
            assert errors(out.double(), exact) < 1e-2, (rows, features, inputs)
            assert buffer[rows:].isnan().all()
            assert buffer[:, features:].isnan().all()


def make_chain(
    rows: int, config: GatedConfig
) -> tuple[torch.Tensor, Callable[[bool], torch.Tensor]]:
    """Returns the input of a chain of layers' products with their norms, and what computes it, with
    dependent launches or without; `config` is that of the gated products."""
    hidden_size, width = 2048, 3072

    def make(out: int, inputs: int) -> torch.Tensor:
        return (torch.randn(out, inputs, device=DEVICE) * inputs**-0.5).bfloat16()

    layers = [
        (
            make(hidden_size, hidden_size),
            make(hidden_size, hidden_size),
            interleave(make(2 * width, hidden_size)),
            make(hidden_size, width),
        )
        for _ in range(6)
    ]
    ones = torch.ones(hidden_size, dtype=torch.bfloat16, device=DEVICE)
    first = normal(rows, hidden_size, dtype=torch.bfloat16, device=DEVICE)
    programs = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    filling = [split_config(hidden_size, size, programs, 1) for size in (hidden_size, width)]

    def chain(pdl: bool) -> torch.Tensor:
        hidden = first.clone()
        normed = rms_norm(hidden, ones, 1e-6, pdl=pdl)
        for qkv, output, gate_up, down in layers:
            x = whole_product(normed, qkv, SplitConfig(1, 1), pdl=pdl)
            parts = split_product(x, output, filling[0], pdl=pdl)
            normed = add_parts_rms_norm(parts, hidden, ones, 1e-6, pdl=pdl)
            x = gated_product(normed, gate_up, pdl=pdl, config=config)
            parts = split_product(x, down, filling[1], pdl=pdl)
            normed = add_parts_rms_norm(parts, hidden, ones, 1e-6, pdl=pdl)
        return torch.cat([normed, hidden])

    return first, chain


@pytest.mark.parametrize("consumers", [1, 2, 3])
@pytest.mark.parametrize("rows", [2, 16, 31, 64, 128])
def test_in_a_chain_of_launches(rows: int, consumers: int) -> None:
    """Each kernel loads weights while the one before runs, in a graph, and the sums are the same,
    bit for bit, as those of launches one after the other."""
    (config,) = (each for each in candidates(rows) if each.consumers == consumers)
    first, chain = make_chain(rows, config)
    chain(True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(True)
    for _ in range(30):
        first.normal_()
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, chain(False))


def test_what_tma_cannot_load_is_rejected() -> None:
    x, weight = (torch.zeros(n, 128, dtype=torch.bfloat16, device=DEVICE) for n in (4, 32))
    assert supports_product(x, weight)
    assert not supports_product(x[:, :96], weight[:, :96].contiguous())
    assert not supports_product(x[:, 4:68], weight[:, :64].contiguous())
    assert not supports_product(x.float(), weight.float())
    with pytest.raises(ValueError, match="from 1 to 128"):
        split_product(x.expand(200, 4, 128)[:, 0].contiguous(), weight, SplitConfig(1, 1))
