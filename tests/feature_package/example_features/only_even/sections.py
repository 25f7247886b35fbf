from dataclasses import dataclass

import numpy as np

from aioinfer.ipc.sections import I32, Section, array


@dataclass(frozen=True, slots=True)
class EvenRows(Section):
    """The places, among the sampled rows of a step, of rows that sample even token ids only."""

    rows: I32 = array(np.int32)
