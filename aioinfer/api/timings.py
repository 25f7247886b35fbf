"""`timings` as llama.cpp's server has them: how many tokens were computed in how many
milliseconds."""

from __future__ import annotations

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
