"""KV blocks and the longest request: what fits, what is configured, and the error when the two
differ."""

from __future__ import annotations

import pytest

from aioinfer.config import Config, load_config
from aioinfer.errors import ConfigError
from aioinfer.executor.capacity import Capacity, settle_capacity
from aioinfer.ipc.kv_spec import AttentionSpec, KVGroup
from aioinfer.worker.worker import LoadReport


def config(**keys: int) -> Config:
    names = {
        "max_num_batched_tokens": "scheduler.max_num_batched_tokens",
        "max_model_len": "model.max_model_len",
    }
    return load_config(
        None, {"model.path": "m", **{names[key]: value for key, value in keys.items()}}
    )


FULL, WINDOW = KVGroup(AttentionSpec(1, 1), (0,)), KVGroup(AttentionSpec(1, 1, 32), (1,))


def report(*num_blocks: int, groups: tuple[KVGroup, ...] = (FULL,)) -> LoadReport:
    return LoadReport(
        device="cpu", dtype="float32", weights_bytes=1, block_size=16, groups=groups,
        block_bytes=(7, 3)[: len(groups)], num_blocks=num_blocks, model_max_len=1000, vocab_size=9,
    )  # fmt: skip


def test_the_rank_with_the_least_memory_decides() -> None:
    capacity = settle_capacity(config(), [report(500), report(90), report(300)])
    assert capacity == Capacity((90,), 90 * 7, 1000)


def test_each_group_has_the_blocks_of_the_rank_with_the_fewest() -> None:
    groups = (FULL, WINDOW)
    reports = [report(100, 900, groups=groups), report(200, 800, groups=groups)]
    assert settle_capacity(config(), reports) == Capacity((100, 800), 100 * 7 + 800 * 3, 1000)


def test_a_model_that_fits_keeps_its_length() -> None:
    assert settle_capacity(config(), [report(63)]) == Capacity((63,), 63 * 7, 1000)


def test_a_cache_that_is_too_small_limits_the_length_and_the_report_has_the_reason() -> None:
    capacity = settle_capacity(config(), [report(62)])
    assert (capacity.num_blocks, capacity.max_model_len) == ((62,), 992)
    assert "holds 992 tokens of one request, the model could do 1000" in capacity.reason


def test_blocks_of_a_window_limit_the_length_only_if_one_step_needs_more() -> None:
    groups = (FULL, WINDOW)
    chunk = {"max_num_batched_tokens": 64}
    assert settle_capacity(config(**chunk), [report(500, 7, groups=groups)]).max_model_len == 1000
    capacity = settle_capacity(config(**chunk), [report(500, 6, groups=groups)])
    assert capacity.max_model_len == 96


def test_configured_numbers_are_kept() -> None:
    capacity = settle_capacity(config(max_model_len=160), [report(10)])
    assert capacity == Capacity((10,), 70, 160, "as configured")
    assert settle_capacity(config(max_model_len=1000), [report(500)]).max_model_len == 1000


@pytest.mark.parametrize(
    ("wanted", "num_blocks", "message"),
    [
        (1001, 500, "is 1001, but the model was made for 1000: set it to 1000 or less"),
        (801, 50, "is 801, but the KV cache holds 800 tokens of one request: set it to 800"),
    ],
)
def test_a_length_that_cannot_be_kept_is_rejected(
    wanted: int, num_blocks: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=f"model.max_model_len {message}"):
        settle_capacity(config(max_model_len=wanted), [report(num_blocks)])
