"""`timings` and `prompt_progress` as llama.cpp's server has them: how many tokens were computed in
how many milliseconds, and how much of a prompt is computed by now."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aioinfer.engine.output import RequestOutput


def timings(output: RequestOutput, sequence: int, num_tokens: int) -> dict[str, float]:
    """Returns the times of a sequence of an output that has `num_tokens` tokens by now. The prompt
    tokens that were in the prefix cache count apart."""
    times, cached = output.sequences[sequence].times, output.num_cached_tokens
    prompt_ms = predicted_ms = 0.0
    if times is not None and times.first_token:
        prompt_ms = (times.first_token - times.scheduled) * 1e3
        predicted_ms = max(0.0, times.last_token - times.first_token) * 1e3
    return {
        "cache_n": cached,
        **_rates("prompt", len(output.prompt_token_ids) - cached, prompt_ms),
        **_rates("predicted", num_tokens, predicted_ms),
    }


def _rates(name: str, tokens: int, milliseconds: float) -> dict[str, float]:
    return {
        f"{name}_n": tokens,
        f"{name}_ms": milliseconds,
        f"{name}_per_token_ms": milliseconds / tokens if tokens else 0.0,
        f"{name}_per_second": tokens / milliseconds * 1e3 if milliseconds else 0.0,
    }


class ProgressReader:
    """Reports the progress of an output's prompt after each step that has computed some of it."""

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
