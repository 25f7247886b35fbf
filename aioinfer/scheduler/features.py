"""Step features as the scheduler sees them: what a request asks of one, and the planning half.

A request lists its `Use`s. While a step is planned, the scheduler collects the rows of requests
that use a feature, asks the feature for its section of the plan, and hands it the result of the
step when that has come. A step calls only features that have rows in it; a request without uses
costs one comparison a row. The features themselves are in `aioinfer.features`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from aioinfer.errors import ConfigError
from aioinfer.ipc.plan import StepResult
from aioinfer.ipc.sections import Section
from aioinfer.sampling_params import SamplingParams
from aioinfer.scheduler.request import Request, Use
from aioinfer.scheduler.steps import Row, StepOutput

F = TypeVar("F", bound="StepFeature")

#: Bytes of a result that the running requests may hold together by `Use.result_bytes`. A message of
#: the usual ring has 16 MiB at most.
MAX_RESULT_BYTES = 6 * 2**20


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Variant:
    """The model as a feature offers it under a name of its own (`features.serving`).

    Attributes:
        name: by which requests name it.
        root: where it comes from, for lists of models.
        key: what its KV blocks depend on beside the tokens; they may outlive the process.
        virtual_tokens: tokens that the feature adds in front of a prompt.
    """

    name: str
    root: str
    key: str
    virtual_tokens: int

    def asked_by(self, params: SamplingParams) -> SamplingParams:
        """Returns the parameters of a request that asks for the variant."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class SubmittedRequest:
    """A request before it is routed, from which features derive its uses.

    Attributes:
        params: its sampling parameters.
        tokens: int32 array, the prompt.
        constraint: the compiled restriction of its tokens (`text.constraints`), or None.
        vocab_size, hidden_size: of the model.
        token_budget: the maximum of tokens that a step computes.
        report: wakes the reader of the request's output.
        variant: what it asks for in the place of the model; None for the model itself.
        is_whole: whether one step computes the whole prompt.
        pictures: what the feature of pictures knows of the prompt's pictures; None for none.
        source: what the feature of sources knows of what the encoder reads; None for none.
    """

    params: SamplingParams
    tokens: Any
    constraint: Any
    vocab_size: int
    hidden_size: int
    token_budget: int
    report: Any = None
    variant: Variant | None = None
    is_whole: bool = False
    pictures: Any = None
    source: Any = None


class StepFeature:
    """The planning half of a feature: one object an engine. Methods are called on the event loop.

    A feature overrides what it needs. `__init__` takes the `features.host.Host` of the engine.

    Attributes:
        name: by which uses name their feature.
        extra_args: the names that it takes of `SamplingParams.extra_args`.
        reports: the section that workers send on their own, if there is one.
        looks_ahead: whether it may ask for lookahead rows; of one feature at most.
        reserve: tokens behind the last row of a request for which a step that looks ahead should
            have KV blocks.
        is_waiting: whether no step may be planned until the feature says so by `Host.go_on`.
        holds_back: whether `holds` may let a request wait; it is also told of each one that comes
            (`expect`).
        announces: whether `announce` may have a section.
    """

    name: ClassVar[str]
    extra_args: ClassVar[tuple[str, ...]] = ()
    reports: ClassVar[type[Section] | None] = None
    looks_ahead: bool = False
    reserve: int = 0
    is_waiting: bool = False
    holds_back: bool = False
    announces: bool = False

    def __init__(self, host: Any):
        self.host = host

    @classmethod
    def use_of(cls, submitted: SubmittedRequest, index: int) -> Use | None:
        """Returns what sequence `index` of a request asks of the feature; None if nothing.

        Raises `RequestError` if the request asks for something that is wrong or too much.
        """
        return None

    def holds(self, request: Request, use: Any) -> bool:
        """Whether a waiting request with this use may not be admitted yet; others go before it.
        Called if the feature `holds_back`, when the request is next in the queue."""
        return False

    def expect(self, request: Request, use: Any) -> None:
        """Notes that a request with this use begins to wait. Called if the feature `holds_back`."""

    def admit(self, request: Request, use: Any) -> None:
        """Notes that a request with this use takes its slot in the step that is being planned.
        Called if the feature `holds_back`."""

    def needs_step(self, *, is_idle: bool) -> bool:
        """Whether a plan is to be posted though it has no rows, for what the feature announces, or
        to hear of the workers where nothing else is posted (`is_idle`). Called if the feature
        `announces`."""
        return False

    def limit(self, use: Any, wanted: int, rows: Sequence[Row], start: int) -> int:
        """Returns how many of `wanted` tokens of a request with this use, from position `start` on,
        the step may compute, which has `rows` of the feature so far; 0 keeps it out of the
        step."""
        return wanted

    def fit(
        self, use: Any, tokens: int, start: int, more: int, rows: Sequence[Row]
    ) -> tuple[int, int]:
        """Returns how many tokens of a request with this use the step computes from position
        `start` on, where `tokens` were granted and up to `more` others may be: for tokens that have
        to be computed together; and how many prompt tokens would take as long as what workers
        compute for the feature beside them. The step has `rows` of the feature so far."""
        return tokens, 0

    def lookahead(self, decodes: Sequence[Request]) -> Mapping[Request, int] | None:
        """Returns how many lookahead rows each of some requests should have in the step that is
        being planned, at most; None for a plain step. With a mapping, even an empty one, workers
        draft tokens for the next step. `decodes` generate and will have a row. Called once a step,
        if the feature `looks_ahead`."""
        return None

    def drafts(self, request: Request, count: int) -> Sequence[int]:
        """Returns the tokens that the `count` lookahead rows of a request in a posted step compute,
        once all tokens before them are known. Called of requests with a use that `needs_drafts`,
        if the feature has given them such rows."""
        return [0] * count

    def take_lookahead(self, request: Request, rows: int, kept: int) -> None:
        """Notes that of `rows` lookahead rows of a request in a step `kept` were kept."""

    def note_end(self, request: Request) -> None:
        """Notes that a request has ended. Called if the feature `looks_ahead`."""

    def note_step(self, num_rows: int, seconds: float, has_lookahead: bool) -> None:
        """Notes how long a step of decodes took that had `num_rows` rows, and whether its plan had
        `LookaheadRows`. Called if the feature `looks_ahead`."""

    def plan(self, rows: Sequence[Row]) -> Section | None:
        """Returns the plan's section for the rows of a step, which will be posted."""
        return None

    def announce(self) -> Section | None:
        """Returns a section of a plan that will be posted, whatever its rows are. Called for every
        plan, if the feature `announces`."""
        return None

    def confirm_post(self, step_id: int, rows: Sequence[Row]) -> None:
        """Notes that the plan with `rows` was posted."""

    def take(self, rows: Sequence[Row], result: StepResult, output: StepOutput) -> StepOutput:
        """Takes the result of a posted step with `rows`. Returns the step's output: `output`, or
        one with further tokens or ends of requests. Requests may have ended meanwhile."""
        return output

    def take_report(self, section: Section) -> None:
        """Takes a section of `reports`, which belongs to no step in particular."""

    def drop(self, request: Request) -> None:
        """Notes that a request with a use of the feature has ended."""

    def lose(self) -> None:
        """Notes that the workers were lost: results of posted steps will not come."""

    def restart(self) -> None:
        """Prepares for new workers, which serve from now on."""

    def forget_results(self) -> None:
        """Notes that the weights are others: what workers keep of earlier steps is not to be
        used."""

    def close(self) -> None:
        """Ends the feature's threads."""


class StepFeatures:
    """The planning halves of an engine's features.

    Attributes:
        ahead: the feature that looks ahead, if there is one.
    """

    def __init__(self, features: Sequence[StepFeature] = ()):
        """Raises ConfigError if two have one name, or take one argument."""
        names = [feature.name for feature in features]
        arguments = [name for feature in features for name in feature.extra_args]
        for what, given in (("are named", names), ("take the argument", arguments)):
            if twice := [name for name in given if given.count(name) > 1]:
                raise ConfigError(f"features: several {what} {twice[0]!r}")
        self._by_name = {feature.name: feature for feature in features}
        self._holding = {each.name: each for each in features if each.holds_back}
        self._announcing = [each for each in features if each.announces]
        self._reporting = [(each, each.reports) for each in features if each.reports is not None]
        self.ahead = next((each for each in features if each.looks_ahead), None)

    def __iter__(self) -> Iterator[StepFeature]:
        return iter(self._by_name.values())

    def of(self, kind: type[F]) -> F:
        """Returns the feature of a class. Raises LookupError if there is none."""
        for feature in self:
            if isinstance(feature, kind):
                return feature
        raise LookupError(f"no feature {kind.__name__}")

    @property
    def are_waiting(self) -> bool:
        """Whether a feature lets no step be planned; see `StepFeature.is_waiting`."""
        return any(feature.is_waiting for feature in self)

    def hold(self, request: Request) -> bool:
        """Whether a waiting request may not be admitted yet; see `StepFeature.holds`."""
        return bool(self._holding) and any(
            use.feature in self._holding and self._holding[use.feature].holds(request, use)
            for use in request.uses
        )

    def expect(self, request: Request) -> None:
        """Notes that a request begins to wait; see `StepFeature.expect`."""
        for use in request.uses if self._holding else ():
            if use.feature in self._holding:
                self._holding[use.feature].expect(request, use)

    def admit(self, request: Request) -> None:
        """Notes that a request takes its slot; see `StepFeature.admit`."""
        for use in request.uses if self._holding else ():
            if use.feature in self._holding:
                self._holding[use.feature].admit(request, use)

    def need_step(self, *, is_idle: bool) -> bool:
        """See `StepFeature.needs_step`."""
        return any(feature.needs_step(is_idle=is_idle) for feature in self._announcing)

    def limit(
        self, request: Request, wanted: int, rows: Mapping[str, Sequence[Row]], start: int
    ) -> int:
        """Returns how many of `wanted` tokens of a request from position `start` on the step may
        compute, which has `rows` so far; see `StepFeature.limit`."""
        for use in request.uses:
            feature = self._by_name[use.feature]
            wanted = feature.limit(use, wanted, rows.get(use.feature, ()), start)
        return wanted

    def fit(
        self, request: Request, tokens: int, start: int, more: int,
        rows: Mapping[str, Sequence[Row]],
    ) -> tuple[int, int]:  # fmt: skip
        """Returns how many tokens of a request the step computes, and in tokens what features
        compute beside them; see `StepFeature.fit`."""
        extra = 0
        for use in request.uses:
            feature, of_feature = self._by_name[use.feature], rows.get(use.feature, ())
            tokens, beside = feature.fit(use, tokens, start, more, of_feature)
            extra += beside
        return tokens, extra if tokens else 0

    def plan(self, rows: Mapping[str, Sequence[Row]]) -> list[Section]:
        """Returns the sections of the plan with `rows`, which will be posted; see
        `StepFeature.plan` and `announce`."""
        found = [self._by_name[name].plan(of_feature) for name, of_feature in rows.items()]
        found += [feature.announce() for feature in self._announcing]
        return [section for section in found if section is not None]

    def confirm_post(self, step_id: int, rows: Mapping[str, Sequence[Row]]) -> None:
        """See `StepFeature.confirm_post`."""
        for name, of_feature in rows.items():
            self._by_name[name].confirm_post(step_id, of_feature)

    def take(
        self, rows: Mapping[str, Sequence[Row]], result: StepResult, output: StepOutput
    ) -> StepOutput:
        """Hands the result of a step with `rows` to the features, in their order. Returns the
        step's output; see `StepFeature.take`."""
        if rows:
            for name, feature in self._by_name.items():
                if name in rows:
                    output = feature.take(rows[name], result, output)
        for feature, kind in self._reporting if result.sections else ():
            if (section := result.section(kind)) is not None:
                feature.take_report(section)
        return output

    def drop(self, request: Request) -> None:
        """Notes that a request has ended."""
        for use in request.uses:
            self._by_name[use.feature].drop(request)
        if self.ahead is not None:
            self.ahead.note_end(request)
