"""MLPs of a layer, with and without a gate, against the same in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from aioinfer.layers.backend import Backend
from aioinfer.layers.formats.base import ACTIVATIONS
from aioinfer.layers.maker import LayerMaker
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.layers.residual import ResidualStream
from tests.pairs import pairwise

HIDDEN, CHANNELS = 24, 40


def make_layers() -> LayerMaker:
    backend = Backend(torch.device("cpu"), torch.float32, ParallelGroup.single())
    return LayerMaker(backend, HIDDEN, max_len=8, norm_eps=1e-6)


def load_random(make: LayerMaker) -> dict[str, torch.Tensor]:
    """Fills the made layers with random numbers and prepares them; returns copies of these by their
    names in the checkpoint."""
    torch.manual_seed(0)
    loaded = {}
    for name, shard in make.weight_shards():
        shard.destination.normal_()
        loaded[name] = shard.destination.clone()
    make.finalize()
    return loaded


@pairwise(bias=[True, False], activation=["relu", "gelu", "gelu_new"], tokens=[1, 5])
def test_an_mlp_without_a_gate(tokens: int, activation: str, bias: bool):
    make = make_layers()
    mlp = make.mlp(
        "fc1", "fc2", CHANNELS, norm=make.norm("norm"), activation=activation, bias=bias
    )  # fmt: skip
    loaded = load_random(make)
    assert ("fc1.bias" in loaded) == ("fc2.bias" in loaded) == bias
    x = torch.randn(tokens, HIDDEN)
    stream = ResidualStream(x.clone(), make.backend)
    mlp(stream, None)  # type: ignore[arg-type]  # an MLP reads nothing of a step
    normed = F.rms_norm(x, (HIDDEN,), loaded["norm.weight"], 1e-6)
    up = F.linear(normed, loaded["fc1.weight"], loaded.get("fc1.bias"))
    activated = {
        "relu": F.relu(up),
        "gelu": F.gelu(up),
        "gelu_new": F.gelu(up, approximate="tanh"),
    }[activation]
    expected = x + F.linear(activated, loaded["fc2.weight"], loaded.get("fc2.bias"))
    torch.testing.assert_close(stream.hidden, expected, rtol=1e-4, atol=1e-4)


@pairwise(bias=[True, False], activation=["silu", "gelu_pytorch_tanh"], tokens=[1, 5])
def test_an_mlp_with_a_gate(tokens: int, activation: str, bias: bool):
    make = make_layers()
    norm = make.norm("norm")
    mlp = make.gated_mlp("mlp", CHANNELS, norm=norm, activation=activation, bias=bias)
    loaded = load_random(make)
    x = torch.randn(tokens, HIDDEN)
    stream = ResidualStream(x.clone(), make.backend)
    mlp(stream, None)  # type: ignore[arg-type]
    normed = F.rms_norm(x, (HIDDEN,), loaded["norm.weight"], 1e-6)
    gate, up, down = (
        (loaded[f"mlp.{name}_proj.weight"], loaded.get(f"mlp.{name}_proj.bias"))
        for name in ("gate", "up", "down")
    )
    gated = ACTIVATIONS[activation](F.linear(normed, *gate)) * F.linear(normed, *up)
    torch.testing.assert_close(stream.hidden, x + F.linear(gated, *down), rtol=1e-4, atol=1e-4)
