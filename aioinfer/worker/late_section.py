"""A section of a result that is made when its step is over, and not when it is launched, which is a
step or two before: features that read in threads report by it what has been read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch

from aioinfer.ipc.sections import Section
from aioinfer.worker.features import PendingSection


@dataclass(frozen=True, slots=True)
class LateSection(PendingSection):
    """A section of int32 columns.

    Attributes:
        report: returns the rows; without any there is no section.
    """

    report: Callable[[], Sequence[Sequence[int]]]

    def fetch(self, stream: torch.cuda.Stream) -> PendingSection:
        """See `PendingSection.fetch`: nothing is on the device."""
        return self

    def to_sections(self) -> list[Section]:
        """See `PendingSection.to_sections`."""
        rows = np.array(self.report(), np.int32).reshape(-1, len(fields(self.kind)))
        return [self.kind(*rows.T.copy())] if len(rows) else []
