"""The streamed products against float64 references, on a Hopper GPU."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("triton")

from aioinfer.kernels.activation import gated_activation_reference
from aioinfer.kernels.gated_product import interleave
from aioinfer.kernels.norm import rms_norm
from aioinfer.kernels.streamed_product import StreamWorkspace, streamed_product, supports
from aioinfer.kernels.streamed_tiles import TOKENS, StreamConfig, configs, padded_rows
from cases import error, normal, poisoned

DEVICE, BF16 = "cuda", torch.bfloat16
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
CONFIGS = [config for tokens in TOKENS for config in configs(tokens)]
LIMIT = 3e-3  # rounding the result to bf16 gives 1.7e-3
#: Outputs and inputs: a tile and less, K of few steps and of odd numbers of them, many tiles.
SHAPES = [(64, 64), (72, 896), (200, 2560), (1000, 3584), (4096, 4096), (640, 18944), (24576, 512)]


@pytest.fixture(scope="module")
def workspace() -> StreamWorkspace:
    """Its sums are poisoned: whatever is read must have been written."""
    made = StreamWorkspace.create(torch.device(DEVICE))
    made.partials.fill_(float("nan"))
    return made


@dataclass(frozen=True, slots=True)
class Product:
    """One product: what is added to it, and whether it is gated."""

    rows: int
    lines: int
    inputs: int
    dtype: torch.dtype = BF16
    biased: bool = False
    added: bool = False
    gated: bool = False

    def error(
        self, workspace: StreamWorkspace, config: StreamConfig | None = None, *, pdl: bool = False
    ) -> float:
        """Returns the normwise error; with a residual, the result is written over it."""
        x = normal(self.rows, self.inputs, dtype=self.dtype, device=DEVICE)
        weight = normal(self.lines, self.inputs, dtype=self.dtype, device=DEVICE)
        weight *= self.inputs**-0.5
        bias = normal(self.lines, dtype=self.dtype, device=DEVICE) if self.biased else None
        features = self.lines // 2 if self.gated else self.lines
        out = poisoned(self.rows, features, dtype=self.dtype, device=DEVICE)
        if self.added:
            out = normal(self.rows, features, dtype=self.dtype, device=DEVICE)
        expected = x.double() @ weight.double().T
        if bias is not None:
            expected += bias.double()
        if self.gated:
            expected = gated_activation_reference(expected)
        if self.added:
            expected += out.double()
        assert supports(x, weight, out)
        streamed_product(
            x, weight, workspace, bias=bias, residual=out if self.added else None,
            gated=self.gated, out=out, pdl=pdl, config=config
        )  # fmt: skip
        result = error((out, expected))
        assert not workspace.counters.any()
        return result


@pytest.mark.parametrize(("lines", "inputs"), SHAPES)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_configuration(
    config: StreamConfig, lines: int, inputs: int, workspace: StreamWorkspace
) -> None:
    """Rows that fill a tile and rows that do not; shapes that the tiles do not divide."""
    for rows in (config.tokens, config.tokens // 2 + 1):
        for kind in ({}, {"added": True}, {"gated": True}, {"biased": True}):
            given = {"biased": kind.get("gated", False)} | kind
            if given.get("gated") and lines % 16:
                continue
            assert Product(rows, lines, inputs, **given).error(workspace, config) < LIMIT, given


@pytest.mark.parametrize(
    "rows", [1, 2, 3, 5, 7, 8, 9, 15, 17, 31, 33, 47, 63, 64, 65, 100, 127, 128]
)
@pytest.mark.parametrize(("lines", "inputs"), [(6144, 4096), (4096, 12288), (3072, 1024)])
def test_the_selected_configuration(
    rows: int, lines: int, inputs: int, workspace: StreamWorkspace
) -> None:
    for kind in ({}, {"added": True}, {"gated": True}):
        assert Product(rows, lines, inputs, **kind).error(workspace, pdl=True) < LIMIT, kind


def test_float16(workspace: StreamWorkspace) -> None:
    for rows in (2, 30, 100):
        product = Product(rows, 4096, 2560, torch.float16, added=True)
        assert product.error(workspace) < LIMIT


def test_strided_rows(workspace: StreamWorkspace) -> None:
    wide = normal(20, 3 * 1024, dtype=BF16, device=DEVICE)
    weight = normal(512, 1024, dtype=BF16, device=DEVICE)
    x, target = wide[:, 1024:2048], poisoned(20, 1024, dtype=BF16, device=DEVICE)
    streamed_product(x, weight, workspace, out=target[:, 256:768])
    assert error((target[:, 256:768], x.double() @ weight.double().T)) < LIMIT
    assert target[:, :256].isnan().all()
    assert target[:, 768:].isnan().all()


def test_other_tensors_are_rejected(workspace: StreamWorkspace) -> None:
    x = normal(4, 1024, dtype=BF16, device=DEVICE)
    weight = normal(512, 1024, dtype=BF16, device=DEVICE)
    assert not supports(x.float(), weight.float())
    assert not supports(x[:, :1000], weight[:, :1000])
    assert not supports(x, weight, out=x.new_zeros(4, 516)[:, :512])
    assert not supports(x, weight, residual=x.new_zeros(1, 512).expand(4, -1))
    assert not supports(x.expand(200, 4, 1024).reshape(800, 1024), weight)
    with pytest.raises(ValueError, match="must be"):
        streamed_product(x, weight, workspace, out=x.new_zeros(4, 256))


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("rows", [2, 8, 16, 40, 64, 128])
def test_a_chain_in_a_graph(rows: int, pdl: bool, workspace: StreamWorkspace) -> None:
    """Products, gates, sums in place and norms, each of which reads what the one before wrote: many
    replays give the bits of kernels that run one after the other."""
    hidden, width = 1024, 3072
    layers = [
        [
            normal(*shape, dtype=BF16, device=DEVICE) * shape[1] ** -0.5
            for shape in ((2048, hidden), (hidden, 2048), (2 * width, hidden), (hidden, width))
        ]
        for _ in range(6)
    ]
    for weights in layers:
        weights[2] = interleave(weights[2])
    norm = torch.ones(hidden, dtype=BF16, device=DEVICE)
    first = normal(rows, hidden, dtype=BF16, device=DEVICE)
    state = first.clone()

    def run(launch_early: bool, config: StreamConfig | None) -> None:
        given = {"pdl": launch_early, "config": config}
        state.copy_(first)
        for qkv, o, gate_up, down in layers:
            normed = rms_norm(state, norm, 1e-6, pdl=launch_early)
            heads = streamed_product(normed, qkv, workspace, **given)
            streamed_product(heads, o, workspace, residual=state, out=state, **given)
            normed = rms_norm(state, norm, 1e-6, pdl=launch_early)
            gated = streamed_product(normed, gate_up, workspace, gated=True, **given)
            streamed_product(gated, down, workspace, residual=state, out=state, **given)

    for config in configs(padded_rows(rows)):
        run(False, config)
        torch.cuda.synchronize()
        expected = state.clone()
        assert expected.isfinite().all()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run(pdl, config)
        for _ in range(50):
            state.fill_(float("nan"))
            graph.replay()
            assert torch.equal(state, expected), config
    assert not workspace.counters.any()


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_hundreds_of_launches_give_the_same_bits(
    config: StreamConfig, workspace: StreamWorkspace
) -> None:
    """Dependent launches of one product over rotating weights, which also read a part each other's
    results: a race would show as other bits."""
    weights = normal(4, 2048, 2048, dtype=BF16, device=DEVICE) * 2048**-0.5
    x = normal(config.tokens, 2048, dtype=BF16, device=DEVICE)
    outs = [torch.empty_like(x) for _ in range(2)]

    def run(pdl: bool) -> torch.Tensor:
        value = x
        for index in range(100):
            residual = x if index % 3 else None
            value = streamed_product(
                value, weights[index % 4], workspace, residual=residual, out=outs[index % 2],
                pdl=pdl, config=config
            )  # fmt: skip
            value = rms_norm(value, x.new_ones(2048), 1e-6, pdl=pdl) if index % 5 == 4 else value
        return value.clone()

    expected = run(False)
    torch.cuda.synchronize()
    assert expected.isfinite().all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run(True)
    for _ in range(10):
        graph.replay()
        assert torch.equal(result, expected)
