"""The step features: whatever a request may ask of a step beside its next token.

A feature is a folder. `sections.py` declares what plans and results carry for it, `planning.py` has
its planning half (`Planning`, a `scheduler.features.StepFeature`; imports neither torch nor
aiohttp), and `worker.py` its worker half (`Work`, a `worker.features.WorkerFeature`). `serving.py`
and `endpoints.py` have what it offers to clients (`features.serving`). A half that it does not need
is not there. No other module names a feature but to use its results.
docs/features.md describes how to add one, in this package or in another.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Sequence
from importlib.metadata import entry_points
from types import ModuleType

from aioinfer.errors import ConfigError

#: The features of this package. Their results are taken in this order: the end of a request by its
#: constraint comes last.
FEATURES = (
    "logprobs",
    "prompt_logprobs",
    "pooled_states",
    "token_states",
    "prompt_progress",
    "expert_load",
    "speculation",
    "adapters",
    "adapters.soft_prompts",
    "pictures",
    "sources",
    "speech",
    "alignment",
    "kv_store",
    "masks",
)
HALVES = ("planning", "worker", "serving")
#: The entry points by which other packages offer features: a name, and the package with its halves.
GROUP = "aioinfer.features"


@functools.cache
def load_halves(half: str, names: tuple[str, ...] = ()) -> Sequence[ModuleType]:
    """Returns the modules of one half of all features that have it. The first call of a process
    reads files.

    Args:
        half: one of `HALVES`, or "endpoints".
        names: the features of other packages, as the configuration names them.

    Raises:
        ConfigError: no installed package offers a feature of that name, or it cannot be imported.
    """
    packages = [*(f"{__name__}.{name}" for name in FEATURES), *map(_find_package, names)]
    found: list[ModuleType] = []
    for package in packages:
        try:
            if _has_half(package, half):
                found.append(importlib.import_module(f"{package}.{half}"))
            elif not any(_has_half(package, each) for each in HALVES):
                raise ConfigError(f"features: {package} has none of {', '.join(HALVES)}")
        except ImportError as error:
            raise ConfigError(f"features: {package} cannot be imported: {error}") from error
    return found


def _has_half(package: str, half: str) -> bool:
    return importlib.util.find_spec(f"{package}.{half}") is not None


def _find_package(name: str) -> str:
    """Returns the package of a feature that another distribution offers."""
    offered = {point.name: point.value for point in entry_points(group=GROUP)}
    if name not in offered:
        known = ", ".join(sorted(offered)) or "none"
        raise ConfigError(
            f"features: no installed package offers {name!r} (entry point {GROUP}); offered are "
            f"{known}"
        )
    return offered[name]
