"""The texts of a plain run as drafts of another one, for `bench_gpu.py --acceptance`.

The feature `recorded_drafts` (scripts/feature_package) proposes them, spoiled by the position of a
draft, and the engine verifies them as any others. Rounding differs with the number of rows, and the
likeliest tokens of random weights are near ties: greedily, texts would part after some tokens. So
tokens are sampled at a high temperature, by seed: they follow the noise, which is the same in both
runs, and the logits hardly matter.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from aioinfer.llm import Output

_PACKAGE = Path(__file__).parent.parent / "feature_package"
_TEMPERATURE = 100.0
#: Drafts of a request in a step at most, where no acceptance is given for more.
_MIN_DRAFTS = 3


class Recording:
    """The texts of the rounds of all cases, in a plain run and again with drafts.

    Args:
        acceptance: the part of all first drafts that is kept, of all second drafts, and so on:
            none is above the one before it. Where there are fewer than `_MIN_DRAFTS`, further ones
            are kept like the last one.

    Attributes:
        acceptance: of a draft at each position if those before it are kept.
    """

    def __init__(self, acceptance: Sequence[float]):
        if not all(0.0 <= part <= 1.0 for part in acceptance):
            raise ValueError(f"acceptances {acceptance} are not all between 0 and 1")
        if any(later > part for part, later in pairwise(acceptance)):
            raise ValueError(f"acceptances {acceptance} rise: a draft needs those before it")
        before = (1.0, *acceptance)
        given = [
            part / all_ if all_ else 0.0 for part, all_ in zip(acceptance, before, strict=False)
        ]
        self.acceptance = [*given, *[given[-1]] * (_MIN_DRAFTS - len(given))]
        self._known: dict[tuple[int, ...], list[int]] = {}

    def params(self, seed: int) -> dict[str, Any]:
        """Returns how a request is sampled, as fields of `SamplingParams`."""
        return {"temperature": _TEMPERATURE, "seed": seed}

    def add(self, prompts: Sequence[list[int]], outputs: Sequence[Output]) -> float:
        """Adds texts, and returns the part of them that are as they were before, if they were."""
        same = 0
        for prompt, output in zip(prompts, outputs, strict=True):
            text = [*prompt, *output.token_ids]
            same += self._known.setdefault(tuple(prompt), text) == text
        return same / len(prompts)

    @contextmanager
    def replayed(self, method: str = "ngram") -> Iterator[list[str]]:
        """Context in which engines find the feature and the texts so far. Gives the configuration
        of a run with drafts as `section.key=value`, beside the plain run's; `method`: of
        `speculation`, whose drafts are replaced."""
        sys.path.append(str(_PACKAGE))
        from bench_features.recorded_drafts import FILE_VARIABLE

        texts = [*self._known.values()]
        padded = np.zeros((len(texts), max(map(len, texts))), np.int32)
        for row, text in zip(padded, texts, strict=True):
            row[: len(text)] = text
        with TemporaryDirectory() as folder:
            file = Path(folder) / "recording.npz"
            acceptance = np.array(self.acceptance, np.float32)
            np.savez(file, texts=padded, acceptance=acceptance)
            before = dict(os.environ)
            os.environ[FILE_VARIABLE] = str(file)
            # for servers; the processes of an engine here get `sys.path`
            paths = filter(None, (before.get("PYTHONPATH"), str(_PACKAGE)))
            os.environ["PYTHONPATH"] = os.pathsep.join(paths)
            try:
                yield [
                    f"speculation.method={method}",
                    f"speculation.max_draft_tokens={len(self.acceptance)}",
                    'model.features=["recorded_drafts"]',
                ]
            finally:
                os.environ.clear()
                os.environ.update(before)
                sys.path.remove(str(_PACKAGE))
