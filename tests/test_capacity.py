"""KV blocks and the longest request: what fits, what was asked for, and what is said when the two
differ."""

from __future__ import annotations

import pytest

from aioinfer.config import Config, load_config
from aioinfer.errors import ConfigError
from aioinfer.executor.capacity import Capacity, settle_capacity
from aioinfer.worker.worker import LoadReport


def config(**keys: int) -> Config:
    names = {"num_blocks": "cache.num_blocks", "max_model_len": "model.max_model_len"}
    return load_config(
        None, {"model.path": "m", **{names[key]: value for key, value in keys.items()}}
    )


def report(max_blocks: int) -> LoadReport:
    return LoadReport(
        device="cpu",
        dtype="float32",
        weights_bytes=1,
        block_size=16,
        bytes_per_block=1,
        max_blocks=max_blocks,
        model_max_len=1000,
        vocab_size=9,
    )


def test_the_rank_with_the_least_memory_decides() -> None:
    assert settle_capacity(config(), [report(500), report(90), report(300)]).num_blocks == 90


def test_a_model_that_fits_keeps_its_length() -> None:
    assert settle_capacity(config(), [report(63)]) == Capacity(63, 1000)


def test_a_cache_that_is_too_small_limits_the_length_and_says_so() -> None:
    capacity = settle_capacity(config(), [report(62)])
    assert (capacity.num_blocks, capacity.max_model_len) == (62, 992)
    assert "holds 992 tokens, the model could do 1000" in capacity.reason


def test_configured_numbers_are_kept() -> None:
    assert settle_capacity(config(num_blocks=10, max_model_len=160), [report(500)]) == Capacity(
        10, 160, "as configured"
    )
    assert settle_capacity(config(max_model_len=1000), [report(500)]) == Capacity(500, 1000)


@pytest.mark.parametrize(
    ("keys", "max_blocks", "message"),
    [
        (
            {"num_blocks": 501},
            500,
            "cache.num_blocks is 501, but memory holds 500: set it to 500 or less",
        ),
        (
            {"max_model_len": 1001},
            500,
            "model.max_model_len is 1001, but the model was made for 1000: set it to 1000 or less",
        ),
        (
            {"num_blocks": 10, "max_model_len": 161},
            500,
            "10 KV blocks hold 160 tokens: set it to 160 or less, or .* 11 or more",
        ),
        (
            {"max_model_len": 801},
            50,
            "50 KV blocks hold 800 tokens: set it to 800 or less, or give the cache more memory",
        ),
    ],
)
def test_what_cannot_be_kept_is_refused(
    keys: dict[str, int], max_blocks: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        settle_capacity(config(**keys), [report(max_blocks)])
