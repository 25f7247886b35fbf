"""`prompt_progress` of streams, as llama.cpp's server has it: how much of the prompt is computed,
after each step that has computed some of it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aioinfer.engine.output import RequestOutput


class ProgressReader:
    """Reports the progress of an output's prompt, where it is new."""

    def __init__(self, output: RequestOutput):
        self._output = output
        self._num_reported = 0

    def news(self) -> dict[str, float] | None:
        """Returns how many tokens the prompt has, how many of them were in the prefix cache, how
        many are computed (the cached ones included), and the milliseconds since the prompt's first
        step; None if that is not wanted or nothing is new."""
        progress = self._output.prompt_progress
        if progress is None or progress.num_computed <= self._num_reported:
            return None
        self._num_reported = progress.num_computed
        times = self._output.sequences[0].times
        began = times.scheduled if times is not None else 0.0
        return {
            "total": progress.prompt_len,
            "cache": self._output.num_cached_tokens,
            "processed": progress.num_computed,
            "time_ms": (time.perf_counter() - began) * 1e3 if began else 0.0,
        }
