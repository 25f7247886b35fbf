"""Number of KV blocks and maximum length of a request: settled once, from what every rank can
hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aioinfer.config import Config
from aioinfer.errors import ConfigError
from aioinfer.ipc.kv_spec import longest_request
from aioinfer.ipc.plan import max_sequence_tokens

if TYPE_CHECKING:
    from aioinfer.worker.worker import LoadReport


@dataclass(frozen=True, slots=True)
class Capacity:
    """The sizes that every rank allocates.

    Attributes:
        num_blocks: KV blocks of each group of layers.
        kv_cache_bytes: of these blocks, on the rank where they take the most.
        max_model_len: the maximum number of tokens of a request, prompt and output together.
        reason: why requests may not be as long as the model allows, or empty.
    """

    num_blocks: tuple[int, ...]
    kv_cache_bytes: int
    max_model_len: int
    reason: str = ""


def settle_capacity(config: Config, reports: Sequence[LoadReport]) -> Capacity:
    """Returns the capacity that all ranks can hold: of each group as many blocks as the rank with
    the fewest.

    Raises:
        ConfigError: `model.max_model_len` cannot be kept; the message states what to set it to.
    """
    first = reports[0]
    num_blocks = tuple(map(min, *(report.num_blocks for report in reports), first.num_blocks))
    kv_cache_bytes = max(
        sum(count * size for count, size in zip(num_blocks, report.block_bytes, strict=True))
        for report in reports
    )
    fitting = longest_request(
        first.groups, num_blocks, first.block_size, config.scheduler.max_num_batched_tokens
    )
    # longer ones could not be sent to the workers in one plan
    sendable = max_sequence_tokens(first.block_size, len(first.groups))
    fitting = sendable if fitting is None else min(fitting, sendable)
    model_max_len, wanted = first.model_max_len, config.model.max_model_len
    holder, remedy = "the KV cache holds", "give the cache more memory or blocks"
    if not first.groups:  # prompts are computed whole
        fitting = min(fitting, config.scheduler.max_num_batched_tokens)
        holder, remedy = "a step computes", "raise scheduler.max_num_batched_tokens"
    if wanted is not None and wanted > model_max_len:
        raise ConfigError(
            f"model.max_model_len is {wanted}, but the model was made for "
            f"{model_max_len}: set it to {model_max_len} or less"
        )
    max_len = wanted or model_max_len
    # the last token of a request is sampled but never computed, yet a round number serves better
    # than one more
    if fitting >= max_len:
        reason = "as configured" if max_len < model_max_len else ""
        return Capacity(num_blocks, kv_cache_bytes, max_len, reason)
    if wanted is None:
        reason = (
            f"{holder} {fitting} tokens of one request, the model could do {model_max_len}: "
            f"{remedy}"
        )
        return Capacity(num_blocks, kv_cache_bytes, fitting, reason)
    raise ConfigError(
        f"model.max_model_len is {wanted}, but {holder} {fitting} tokens of one request: "
        f"set it to {fitting} or less, or {remedy}"
    )
