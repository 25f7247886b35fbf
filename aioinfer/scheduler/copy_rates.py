"""Measured rates of computing tokens, and of copying them from the host and the disk: whether a
prefix is copied or computed.

The unit is a token a second, of all requests together: of work that overlaps, the time is counted
once. Only amounts count that are large enough for a rate, so that the delay of a single copy or
step tells nothing. `KVStore` owns the rates.
"""

from __future__ import annotations

#: Tokens from which a step or a copy is measured.
MIN_TOKENS = 256
#: The weight of what was measured before, when something is added.
_MEMORY = 0.9
#: Of so many prefixes that are not copied, one is all the same, so that the rate stays known.
TRY_EVERY = 32


class Rate:
    """Tokens a second of one kind of work."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0
        self._last_end = 0.0
        self._num_skipped = 0

    def add(self, tokens: int, began: float, ended: float) -> None:
        """Adds work on `tokens` tokens between two moments, in seconds of one clock."""
        seconds = ended - max(began, self._last_end)
        self._last_end = max(ended, self._last_end)
        if tokens >= MIN_TOKENS and seconds > 0:
            self._tokens = _MEMORY * self._tokens + tokens
            self._seconds = _MEMORY * self._seconds + seconds

    @property
    def per_s(self) -> float | None:
        """Tokens a second; None if that is not known."""
        return self._tokens / self._seconds if self._seconds else None

    def pays(self, computing: Rate) -> bool:
        """Whether copying at this rate takes no longer than computing. Where that is not known, as
        in a server that has begun with the files of another one, a prefix is copied, the next one
        computed, and then they are compared."""
        here, there = self.per_s, computing.per_s
        if here is None or (there is not None and here >= there):
            return True
        self._num_skipped += 1
        return self._num_skipped > 1 if there is None else self._num_skipped % TRY_EVERY == 0


class CopyRates:
    """The rates of a store.

    Attributes:
        prefill: of computing prompts.
        loads: of copies from the host to the device.
    """

    def __init__(self) -> None:
        self.prefill, self.loads = Rate(), Rate()
