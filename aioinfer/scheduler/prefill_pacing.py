"""How much prefill a step takes beside decodes: as many tokens as the step's predicted time allows.

With a target for inter-token latency that time is the target. Without one it follows from the cost
of a step beside its prefill (weights, keys of the decodes, launches): its overhead. A step yields a
token for each of D decode rows, and would yield one more for each of B prompts that are still to be
computed. So of the overhead the fraction B / (D + B) is lost, and taking more prefill into fewer
steps loses less; but every decode waits for the step. The step is made so long that the lost part
is `MAX_LOST` of it, `MIN_PREFILL_RATIO` times the overhead at least, and no longer than
`MAX_STEP_S`. So one stream beside long prompts waits for large chunks, many streams beside one
prompt for small ones, and prompts that pile up make the chunks grow.

`StepPlanner` asks for an allowance for each step, `Scheduler` reports the work of each posted step
and when its result came. Imports neither torch nor aiohttp.
"""

from __future__ import annotations

from collections import deque

from aioinfer.scheduler.limits import SchedulerLimits
from aioinfer.scheduler.step_time import StepTimes, StepWork

#: Without a target: the part of the throughput that the decodes' overhead may cost; the time for
#: prefill in units of the overhead; and seconds.
MAX_LOST = 0.025
MIN_PREFILL_RATIO = 3.0
MAX_STEP_S = 0.3
#: Prefill that a step takes whatever the target: so much of the step's overhead in time, so that
#: prompts never starve, and so many tokens.
MIN_SHARE = 0.25
MIN_TOKENS = 16
#: Chunks of `_ALIGNED_FROM` tokens or more fill the step up to a multiple of `_ALIGNMENT`, in which
#: GPUs compute, and for which there are CUDA graphs.
_ALIGNED_FROM, _ALIGNMENT = 512, 128
#: GPUs compute the products of a prefill in tiles of so many tokens (`gated_product`, cuBLAS), and
#: one that is not full takes as long. Chunks of fewer tiles than this are left as they are: they
#: would lose a larger part.
_TILE_TOKENS, _MIN_TILES = 256, 4


def fill_tiles(prefill: int, decodes: int) -> int:
    """Returns how many of `prefill` tokens a step takes beside so many decodes, where predicted
    times do not bound it: fewer, where with all of them less than half of the products' last tile
    would be used."""
    if prefill < _MIN_TILES * _TILE_TOKENS:
        return prefill
    in_last_tile = (prefill + decodes) % _TILE_TOKENS
    return prefill - in_last_tile if in_last_tile < _TILE_TOKENS // 2 else prefill


class PrefillAllowance:
    """The prefill budget of one step: tokens, and seconds by prediction."""

    __slots__ = ("_seconds_left", "_step_tokens", "_times", "tokens_left")

    def __init__(
        self,
        tokens: int,
        times: StepTimes | None = None,
        seconds: float = 0.0,
        step_tokens: int = 0,
    ):
        """Makes the allowance of a step.

        Args:
            tokens: at most.
            times: predicts their time; without it only `tokens` counts.
            seconds: that they may take.
            step_tokens: other tokens of the step.
        """
        self.tokens_left = tokens
        self._times = times
        self._seconds_left = seconds
        self._step_tokens = step_tokens

    def take(self, wanted: int, start: int) -> int:
        """Takes up to `wanted` tokens of a prompt from position `start` on, and returns how many:
        one at least while any are left.

        A prompt that gets fewer tokens than wanted, for want of time, is the last of the step: the
        tokens that alignment leaves are of no use to the next prompt, which might even begin like
        this one and compute tokens that it would find in the cache a step later.
        """
        granted = min(wanted, self.tokens_left)
        if self._times is not None and granted:
            granted = self._take_time(granted, start)
        self.tokens_left -= granted
        return granted

    def correct(self, more: int, extra: int, start: int) -> None:
        """Takes `more` tokens than before, or fewer, and off the time what `extra` tokens from
        position `start` on would take: for other work of the step that takes as long."""
        self.tokens_left = max(0, self.tokens_left - more - extra)
        if extra and self._times is not None:
            self._seconds_left -= self._times.prefill_seconds(extra, start)
            if self._times.prefill_tokens_within(self._seconds_left, start) < MIN_TOKENS:
                self.tokens_left = 0

    def _take_time(self, wanted: int, start: int) -> int:
        times = self._times
        assert times is not None
        fitting = times.prefill_tokens_within(self._seconds_left, start)
        if fitting < wanted > MIN_TOKENS:
            tokens = max(MIN_TOKENS, int(fitting))
            if tokens >= _ALIGNED_FROM:
                tokens -= (self._step_tokens + tokens) % _ALIGNMENT
            self.tokens_left = tokens
            return tokens
        self._step_tokens += wanted
        self._seconds_left -= times.prefill_seconds(wanted, start)
        if times.prefill_tokens_within(self._seconds_left, start) < MIN_TOKENS:
            self.tokens_left = wanted
        return wanted


#: Of a step without prompts; it has nothing to be taken, and never changes.
NO_PREFILL = PrefillAllowance(0)


class PrefillPacing:
    """Learns how long the steps of one scheduler take, and bounds their prefill by it.

    Attributes:
        is_active: whether it bounds prefill; a step costs nothing more otherwise.
        times: the learned costs, which predict the times of steps.
        step_s, error_s: seconds of all steps with a predicted and a measured time, and of the
            differences between the two.
    """

    def __init__(self, limits: SchedulerLimits):
        self._target_s = limits.target_itl_s
        self.is_active = limits.paces_prefill
        self._cap = limits.prefill_cap
        self._first_cap = min(limits.prefill_cap, max(1, limits.token_budget // 4))
        self.times = StepTimes()
        self.step_s = self.error_s = 0.0
        self._posted: deque[tuple[StepWork, float]] = deque()
        self._last_result_s = 0.0

    def allow(self, tokens: int, decodes: StepWork, num_prompts: int) -> PrefillAllowance:
        """Returns the prefill allowance of a step that decodes, if pacing `is_active`.

        Args:
            tokens: that the step's budget leaves.
            decodes: the decode rows.
            num_prompts: requests that decode once their prompts are computed, as far as they have
                slots.
        """
        if not self.times.is_known:
            return PrefillAllowance(min(tokens, self._first_cap))
        overhead = self.times.predict(decodes, is_mixed=True)
        if self._target_s is None:
            lost = num_prompts / max(1, decodes.decodes + num_prompts)
            seconds = overhead * max(MIN_PREFILL_RATIO, lost / MAX_LOST - 1.0)
            seconds = min(seconds, max(MAX_STEP_S - overhead, MIN_PREFILL_RATIO * overhead))
        else:
            seconds = self._target_s / (1.0 + self.times.mean_error) - overhead
        seconds = max(seconds, MIN_SHARE * overhead)
        return PrefillAllowance(min(tokens, self._cap), self.times, seconds, decodes.decodes)

    # ---------------------------------------------------------------- measuring

    def post(self, work: StepWork, now: float) -> None:
        """Notes that a step is posted at `now`, in seconds. Called for each step if pacing
        `is_active`."""
        self._posted.append((work, now))

    def finish(self, now: float) -> None:
        """Learns from the oldest posted step, whose result came at `now`. Called for each step if
        pacing `is_active`."""
        work, posted_s = self._posted.popleft()
        seconds = now - max(posted_s, self._last_result_s)
        self._last_result_s = now
        if not work.decodes and not work.prefill_tokens:
            return  # it computed nothing of its own, and waited for the steps of other engines
        error = self.times.learn(work, seconds)
        if error is not None:
            self.step_s += seconds
            self.error_s += abs(error) * seconds

    def clear(self) -> None:
        """Forgets the posted steps: their results will not come."""
        self._posted.clear()
