"""A batch as OpenAI describes it, and the request that makes one. `batches` does the work."""

from __future__ import annotations

import time
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from aioinfer.api.batch_lines import BATCH_PATHS
from aioinfer.api.errors import shorten
from aioinfer.api.protocol import Body
from aioinfer.errors import RequestError

#: The statuses in which a batch stays.
ENDED = frozenset(("completed", "failed", "expired", "cancelled"))
_MAX_METADATA = 16


class CreateBatch(Body, kw_only=True):
    """`POST /v1/batches`."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: (
        dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]] | None
    ) = None
    output_expires_after: dict[str, Any] | None = None

    def check(self) -> None:
        if self.endpoint not in BATCH_PATHS:
            raise RequestError(
                f"endpoint must be one of {', '.join(BATCH_PATHS)}, not {shorten(self.endpoint)!r}",
                param="endpoint",
            )
        if self.completion_window != "24h":
            raise RequestError("completion_window must be '24h'", param="completion_window")
        if self.metadata is not None and len(self.metadata) > _MAX_METADATA:
            raise RequestError(f"metadata may hold at most {_MAX_METADATA} pairs", param="metadata")
        if self.output_expires_after is not None:
            raise RequestError(
                "output_expires_after is not supported: results stay until they are deleted",
                param="output_expires_after",
            )


class RequestCounts(Struct, kw_only=True):
    """The number of requests of a batch, in total, completed and failed."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchFault(Struct, kw_only=True):
    """An error in a batch, with the line of its input."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchFaults(Struct, kw_only=True):
    """Everything that is wrong with a batch."""

    data: list[BatchFault]
    object: str = "list"


class BatchObject(Struct, kw_only=True):
    """A batch, as OpenAI describes it."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: str = "validating"
    object: str = "batch"
    errors: BatchFaults | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    metadata: dict[str, str] | None = None

    def enter(self, status: str) -> None:
        """Changes the status, now."""
        self.status = status
        setattr(self, f"{status}_at", int(time.time()))
