"""The serving half of a feature: what it offers to clients of a model, in front of the engines.

A feature may offer the model under further names (`scheduler.features.Variant`): `serving.py` of
its folder has `Serving`, a `ServingFeature`. Endpoints of its own, all of which need an admin key,
are in `ENDPOINTS` of `endpoints.py`, which other processes read, too, and which imports little.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import msgspec

from aioinfer.config import Config
from aioinfer.features import load_halves
from aioinfer.sampling_params import SamplingParams
from aioinfer.scheduler.features import StepFeatures, Variant

F = TypeVar("F", bound="ServingFeature")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A POST request that a feature answers, about a variant of a model.

    Attributes:
        path: of the request.
        feature: the name of the feature.
        body: of the request.
        variant: the field of the body that names the variant.
        answer: is given the serving half and the body, and returns the status of the reply; its
            docstring describes the endpoint. Raises `RequestError`.
        makes: whether the variant is made, and so may not be another model's.
        example: of a body.
    """

    path: str
    feature: str
    body: type[msgspec.Struct]
    variant: str
    answer: Callable[[Any, Any], Awaitable[str]]
    makes: bool = False
    example: Mapping[str, Any] = field(default_factory=dict)


class ServingFeature:
    """The serving half of a feature: one object a model being served. Methods are called on the
    event loop.

    Args:
        config: of the model.
        engines: returns the planning halves of each engine.

    Attributes:
        name: by which endpoints name their feature.
    """

    name: ClassVar[str]

    def __init__(self, config: Config, engines: Callable[[], Iterable[StepFeatures]]):
        self.config, self.engines = config, engines

    async def start(self, folder: Path) -> None:
        """Prepares for requests, while the workers load the model of a folder. Raises
        `ConfigError`."""

    def variants(self) -> Mapping[str, Variant]:
        """Returns what requests may name in the place of the model, by name."""
        return {}

    def variant_of(self, params: SamplingParams) -> Variant | None:
        """Returns the variant that a request asks for; None for none of this feature. Raises
        `RequestError` for one that is not there."""
        return None


class ServingFeatures:
    """The serving halves of the features of a model; iteration gives its variants."""

    def __init__(self, config: Config, engines: Callable[[], Iterable[StepFeatures]]):
        halves = load_halves("serving", tuple(config.model.features))
        self._features: list[ServingFeature] = [half.Serving(config, engines) for half in halves]

    def __iter__(self) -> Iterator[Variant]:
        return (each for feature in self._features for each in feature.variants().values())

    def of(self, kind: type[F]) -> F:
        """Returns the feature of a class. Raises LookupError if there is none."""
        for feature in self._features:
            if isinstance(feature, kind):
                return feature
        raise LookupError(f"no feature {kind.__name__}")

    def named(self, name: str) -> ServingFeature:
        """Returns the feature of a name."""
        return next(feature for feature in self._features if feature.name == name)

    async def start(self, folder: Path) -> None:
        """See `ServingFeature.start`."""
        for feature in self._features:
            await feature.start(folder)

    def find(self, name: str | None) -> Variant | None:
        """Returns the variant of a name; None if there is none."""
        found = (feature.variants().get(name or "") for feature in self._features)
        return next(filter(None, found), None)

    def of_request(self, params: SamplingParams) -> Variant | None:
        """Returns the variant that a request asks for, or None. Raises `RequestError` for one that
        is not there."""
        found = (feature.variant_of(params) for feature in self._features)
        return next(filter(None, found), None)
