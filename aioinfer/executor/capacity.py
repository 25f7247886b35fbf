"""How many KV blocks and how long a request: settled once, from what every rank can hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aioinfer.config import Config
from aioinfer.errors import ConfigError
from aioinfer.ipc.plan import max_sequence_tokens

if TYPE_CHECKING:
    from aioinfer.worker.worker import LoadReport


@dataclass(frozen=True, slots=True)
class Capacity:
    """What every rank allocates.

    `reason` says why requests may not be as long as the model allows, or is empty.
    """

    num_blocks: int
    max_model_len: int
    reason: str = ""


def settle_capacity(config: Config, reports: Sequence[LoadReport]) -> Capacity:
    """Returns what all ranks can hold.

    Raises:
        ConfigError: a configured number cannot be kept; the message says which key to change, and
            to what.
    """
    block_size, model_max_len = reports[0].block_size, reports[0].model_max_len
    fitting = min(report.max_blocks for report in reports)
    num_blocks = config.cache.num_blocks or fitting
    if num_blocks > fitting:
        raise ConfigError(
            f"cache.num_blocks is {num_blocks}, but memory holds {fitting}: set it "
            f"to {fitting} or less"
        )
    # longer ones could not be sent to the workers in one plan
    tokens = min(num_blocks * block_size, max_sequence_tokens(block_size))
    wanted = config.model.max_model_len
    if wanted is None:
        # the last token of a request is chosen but never computed, yet a round number serves better
        # than one more
        if tokens >= model_max_len:
            return Capacity(num_blocks, model_max_len)
        reason = f"the KV cache holds {tokens} tokens, the model could do {model_max_len}: give the cache more memory or blocks"
        return Capacity(num_blocks, tokens, reason)
    if wanted > model_max_len:
        raise ConfigError(
            f"model.max_model_len is {wanted}, but the model was made for "
            f"{model_max_len}: set it to {model_max_len} or less"
        )
    if wanted > tokens:
        blocks = -(-wanted // block_size)
        remedy = (
            f"let cache.num_blocks be {blocks} or more"
            if blocks <= fitting
            else "give the cache more memory"
        )
        raise ConfigError(
            f"model.max_model_len is {wanted}, but {num_blocks} KV blocks hold {tokens} tokens: "
            f"set it to {tokens} or less, or {remedy}"
        )
    return Capacity(num_blocks, wanted, "as configured" if wanted < model_max_len else "")
