"""The gated delta rule for rows of one token at tiny sizes, against the float64 recurrence."""

from __future__ import annotations

import pytest
import torch
from aioinfer.kernels.delta_arguments import DeltaInputs, DeltaWeights
from aioinfer.kernels.delta_decode import delta_decode, make_tickets
from aioinfer.kernels.states import StateTables
from cases import error
from delta_cases import DeltaCase, DeltaProblem, Row, decode
from references import delta_reference

#: Starts from zero, in a block, at its last token, and at the first token of the next one.
LENGTHS = [1, 2, 7, 16, 17, 18, 33, 300]
ROWS = [Row(1, length) for length in LENGTHS]


def small(**fields: object) -> DeltaCase:
    torch.manual_seed(0)
    return DeltaCase(**{"dtype": torch.float32, "device": "cpu", **fields})


@pytest.mark.parametrize("group", [1, 2, 4])
def test_rows_of_any_length(group: int) -> None:
    assert max(decode(small(group=group), ROWS)) < 1e-6


@pytest.mark.parametrize(("key", "value"), [(8, 24), (24, 8), (64, 32)])
def test_heads_of_other_sizes(key: int, value: int) -> None:
    """Padded and not, keys and values of different sizes."""
    assert max(decode(small(key=key, value=value), ROWS[:4])) < 1e-6


@pytest.mark.parametrize("block_size", [32, 64, 128])
def test_block_sizes(block_size: int) -> None:
    rows = [Row(1, length) for length in (block_size - 1, block_size, block_size + 1, 1)]
    assert max(decode(small(block_size=block_size), rows)) < 1e-6


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize(("a_log", "shift"), [((-9.0, -8.0), -4.0), ((2.0, 2.8), 30.0)])
def test_decays_near_one_and_zero(
    a_log: tuple[float, float], shift: float, by_channel: bool
) -> None:
    """A state that is kept, and one that is forgotten."""
    case = small(a_log=a_log, shift=shift, by_channel=by_channel, group=1)
    assert max(decode(case, ROWS[:5])) < 1e-6


@pytest.mark.parametrize(("key", "value"), [(16, 16), (8, 24), (24, 8)])
def test_decays_by_channel(key: int, value: int) -> None:
    """Kimi delta attention, whose gates are sigmoids."""
    case = small(key=key, value=value, group=1, by_channel=True)
    assert max(decode(case, [*ROWS, Row(3, 20), Row(1, 0)])) < 1e-6


def test_padding_rows_touch_nothing() -> None:
    """Padding rows have a token without a length; their tables have no blocks."""
    rows = [Row(1, 5), Row(1, 0), Row(1, 17), Row(1, 0)]
    assert max(decode(small(), rows, has_starts=False)) < 1e-6


def test_rows_of_several_tokens_are_left_alone() -> None:
    """Their outputs and states stay as they were, and the tokens after them are found."""
    rows = [Row(1, 5), Row(3, 20), Row(1, 17), Row(2, 2), Row(1, 1)]
    assert max(decode(small(), rows)) < 1e-6


def test_states_in_bfloat16() -> None:
    """The state is rounded where it is kept; the output is computed before that."""
    output, windows, matrices = decode(small(state_dtype=torch.bfloat16), ROWS)
    assert output < 1e-6
    assert windows < 1e-6
    assert 1e-6 < matrices < 8e-3  # the interpreter cuts bits off instead of rounding


def test_inputs_in_bfloat16() -> None:
    output, windows, matrices = decode(small(dtype=torch.bfloat16), ROWS)
    assert output < 4e-3
    assert max(windows, matrices) < 1e-6


def test_wrong_shapes_are_rejected() -> None:
    """Of value heads, and of a convolution's windows."""
    problem = DeltaProblem(small(), ROWS[:1])
    weights, windows = problem.weights, problem.windows.states

    def run(weights: DeltaWeights, windows: StateTables) -> None:
        delta_decode(
            problem.inputs, weights, windows, problem.matrices.states, problem.seq_lens,
            make_tickets(1, 2, torch.device("cpu")), problem.out, block_size=16,
        )  # fmt: skip

    with pytest.raises(ValueError, match="do not fit together"):
        run(weights._replace(a_log=torch.zeros(3)), windows)
    with pytest.raises(ValueError, match="tickets do not fit"):
        run(weights, windows._replace(states=windows.states[..., :2]))


@torch.no_grad()
def test_the_reference_is_the_layer_of_transformers() -> None:
    """Qwen3.5's layer between its projections, in one pass from zero."""
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

    config = Qwen3_5TextConfig(
        hidden_size=32, linear_key_head_dim=8, linear_value_head_dim=16, linear_num_key_heads=2,
        linear_num_value_heads=4,
    )  # fmt: skip
    layer = Qwen3_5GatedDeltaNet(config, 0)
    hidden = torch.randn(1, 70, 32)
    inputs = DeltaInputs(
        layer.in_proj_qkv(hidden)[0], layer.in_proj_z(hidden)[0].unflatten(1, (4, 16)),
        layer.in_proj_b(hidden)[0], layer.in_proj_a(hidden)[0],
    )  # fmt: skip
    weights = DeltaWeights(
        layer.conv1d.weight[:, 0], layer.A_log, layer.dt_bias, layer.norm.weight,
        config.rms_norm_eps,
    )  # fmt: skip
    output, _, _ = delta_reference(inputs, weights, torch.zeros(96, 3), torch.zeros(4, 8, 16))
    expected = layer(hidden)[0]
    assert error((layer.out_proj(output.float()), expected)) < 1e-5
