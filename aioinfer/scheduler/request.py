"""A request as the scheduler sees it: one sequence to complete, how much of it is computed, and the
blocks that hold it."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, TypeVar

from aioinfer.errors import RequestError
from aioinfer.sampling_params import MAX_END_TOKENS, SamplingParams
from aioinfer.scheduler.block_pool import KeyedSpan, root_hash
from aioinfer.scheduler.handover import Handover

U = TypeVar("U", bound="Use")


class RequestStatus(enum.Enum):
    """The state of a request.

    WAITING: for a slot and blocks; a preempted request is WAITING again. LOADING: it has the blocks
    of a prefix, which the store of KV fills; it is WAITING again after that. RUNNING: it has a
    slot. FINISHED: it has ended.
    """

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    FINISHED = "finished"


class Finish(NamedTuple):
    """Why a request ended.

    Attributes:
        reason: "stop", "length", "abort" or "error".
        stop_reason: the token or string that ended it, if one did.
    """

    reason: str
    stop_reason: int | str | None = None


class Flow(NamedTuple):
    """Requests that share a part of the server. `weight` is that part, relative to other flows."""

    name: str = ""
    weight: float = 1.0


#: The flow of all requests where nothing tells them apart.
ONE_FLOW = Flow()


class Use:
    """What one sequence asks of a feature. Features derive from it."""

    __slots__ = ()

    #: The name of the feature: `StepFeature.name`.
    feature: ClassVar[str]
    #: Whether a step may have lookahead rows of the request.
    allows_lookahead: ClassVar[bool] = True
    #: Whether it may only if the engine knows the drafts by the time that a row is sampled (see
    #: `StepFeature.drafts`).
    needs_drafts: ClassVar[bool] = False

    @property
    def result_bytes(self) -> int:
        """Bytes that any result may carry for the request while it runs."""
        return 0

    @property
    def output(self) -> Any:
        """What has come for the reader of the request (`Completion.features`), or None."""
        return None

    @property
    def is_done(self) -> bool:
        """Whether all that the other sequences of its prompt wait for has come."""
        return True

    @property
    def max_cached(self) -> int | None:
        """How many tokens may be taken from the prefix cache, since the feature does not need
        their rows; None without a limit."""
        return None

    def covers(self, start: int, end: int, samples: bool) -> bool:
        """Whether a row that computes the tokens `start` to `end` concerns the feature; `samples`:
        whether the next token is sampled from it. By default all rows that do."""
        return samples


@dataclass(slots=True, eq=False)
class Source:
    """What the tokens of a request attend to beside each other: the output of an encoder. Each
    request has its own object.

    Attributes:
        key: equal for sources that may share keys and values.
        data: what the workers encode.
        is_held: whether the request owns the block of its keys and values.
        is_unwritten: whether it was the first to take the block, which no posted step has written.
    """

    key: bytes
    data: Any
    is_held: bool = False
    is_unwritten: bool = False


@dataclass(slots=True, eq=False)
class ForkGroup:
    """The n sequences of one prompt.

    Attributes:
        leader: the sequence that computes the prompt; the others share its blocks.
        awaited: the uses of the first sequence that the others wait for (see `Use.is_done`).
        has_begun: whether any of them has had a slot.
    """

    leader: Request | None = None
    awaited: Sequence[Use] = ()
    has_begun: bool = False


@dataclass(slots=True, weakref_slot=True, eq=False)
class Request:
    """One sequence to complete.

    Given by the engine:
        request_id: for messages.
        tokens: int32 array, the prompt; generated tokens are appended as they become known.
        prompt_len: how many of `tokens` are the prompt.
        params: the sampling parameters.
        max_len: the length, prompt included, at which the request ends.
        seed: 64 bits that key the sampler's noise.
        end_tokens: the token ids that end it, `MAX_END_TOKENS` of them at most.
        priority: lower goes first.
        block_hashes: the hashes of the full blocks of `tokens`, which the encoding thread computes
            for the prompt.
        group: the fork group, if there are siblings.
        num_expected: prompt tokens that are likely to be in the cache when the request is admitted.
        flow: the requests with which it shares a part of the server (see `fair_queuing`).
        uses: what it asks of step features.
        spans: the tokens of the prompt that are not known by their ids alone, ascending.
        handover: the blocks of its prompt that another server has computed for it.
        retain_s: for how long its blocks are evicted last after it has ended, in seconds.
        rotary_offset: added to the positions of tokens behind the pictures of the prompt where RoPE
            is applied, in models that have three positions a token.
        source: what its tokens attend to beside each other, in models with an encoder before the
            decoder; None in others.
        plan_limit: the `total` up to which its tokens are planned: `max_len`, or less where
            `Scheduler.fork` decides on each token.

    Kept by the scheduler:
        key: its place in the order of all requests: priority, start tag, arrival.
        finish_tag: the tag at which it ends (see `fair_queuing`).
        total: tokens known plus tokens sampled in posted steps whose results have not come yet
            (placeholders).
        sampled_step: the last posted step that samples a token of it; kept for pipelines alone.
        num_computed: tokens whose keys and values are in the cache once all posted steps have run,
            if these keep all of their lookahead (see `ipc.lookahead`).
        num_lookahead: lookahead rows, beside the first, of posted steps whose results have not
            come; `total` and `num_computed` count each as kept.
        num_settled: tokens after which the states in its blocks are once all posted steps have
            run, at least: the inputs of lookahead rows that are kept enter the states one step
            later (see `ipc.lookahead`).
        lookahead_state: kept by the feature that looks ahead for the request; None before that.
        blocks: the block tables, one for each group of layers (see `KVCacheManager`).
        states: which entries of the block tables of states are blocks, ascending.
        snapshots: with how many cached blocks it began, where it has states, and after how many of
            its blocks a state is to be kept, ascending.
        left: hash and blocks, one for each group of states, of the snapshot that it left last, if
            that is not one of `snapshots`.
        asked_connectors: a bit for each connector that was asked for its prefix since it waits.
        num_awaited: with how many blocks the state begins that it has waited for in the queue.
        num_blocks: how many blocks its tokens have begun: the length of each block table.
        num_committed: how many of these blocks the prefix index knows.
        cache_era: how often the prefix cache had been emptied when the first of the request's
            blocks was computed: other weights may have computed it than compute the next.
        slot: the worker slot while it runs.
        prefill_step: the step that computed the last token of the prompt, or -1.
        num_cached, num_preemptions, num_prefill_steps: prompt tokens found in the prefix cache when
            it first ran; how often it was preempted; steps that computed more than a decode token
            for it.
        finish_reason: "stop", "length", "abort" or "error"; stop_reason: the token or string that
            ended it.

    Kept by the engine:
        num_interruptions: how often its workers were lost while it ran.
    """

    request_id: str
    tokens: array[int]
    prompt_len: int
    params: SamplingParams
    max_len: int
    seed: int = 0
    end_tokens: frozenset[int] = frozenset()
    priority: int = 0
    block_hashes: list[bytes] = field(default_factory=list)
    hash_root: bytes = field(default_factory=root_hash)
    group: ForkGroup | None = None
    num_expected: int = 0
    uses: tuple[Use, ...] = ()
    flow: Flow = ONE_FLOW
    spans: Sequence[KeyedSpan] = ()
    rotary_offset: int = 0
    source: Source | None = None
    handover: Handover | None = None
    retain_s: float = 0.0

    status: RequestStatus = RequestStatus.WAITING
    key: tuple[int, float, int] = (0, 0.0, 0)
    finish_tag: float = 0.0
    total: int = 0
    plan_limit: int = 0
    sampled_step: int = -1
    num_computed: int = 0
    num_lookahead: int = 0
    num_settled: int = 0
    lookahead_state: Any = None
    blocks: list[list[int]] = field(default_factory=list)
    states: list[int] = field(default_factory=list)
    snapshots: list[int] = field(default_factory=list)
    left: tuple[bytes, list[int]] | None = None
    asked_connectors: int = 0
    num_awaited: int = 0
    num_blocks: int = 0
    num_committed: int = 0
    cache_era: int = 0
    slot: int = -1
    prefill_step: int = -1
    num_cached: int = -1
    num_preemptions: int = 0
    num_prefill_steps: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_interruptions: int = 0

    def __post_init__(self) -> None:
        if len(self.end_tokens) > MAX_END_TOKENS:
            raise RequestError(
                f"stop_token_ids and the model's own end tokens are {len(self.end_tokens)} in all; "
                f"at most {MAX_END_TOKENS} tokens may end a request",
                param="stop_token_ids",
            )
        self.total = len(self.tokens)
        self.plan_limit = self.max_len

    @property
    def num_output(self) -> int:
        """Generated tokens that are known."""
        return len(self.tokens) - self.prompt_len

    @property
    def num_uncomputed(self) -> int:
        """Prompt tokens whose keys and values no posted step computes."""
        return max(0, self.prompt_len - self.num_computed)

    @property
    def min_computed(self) -> int:
        """Tokens whose keys and values are in the cache once all posted steps have run, however
        much of their lookahead is kept."""
        return self.num_computed - self.num_lookahead

    @property
    def num_pending(self) -> int:
        """Tokens sampled in posted steps whose results have not come yet, at most."""
        return self.total - len(self.tokens)

    def settle(self, lookahead: int, skipped: int) -> None:
        """Takes the outcome of a step that had `lookahead` rows beside its first row, of which
        `skipped` were not kept."""
        self.num_lookahead -= lookahead
        self.total -= skipped
        if self.slot >= 0:
            self.num_computed -= skipped

    def use(self, kind: type[U]) -> U | None:
        """Returns its use of a class, or None."""
        for use in self.uses:
            if isinstance(use, kind):
                return use
        return None

    @property
    def result_bytes(self) -> int:
        """Bytes that it may add to each result beside its tokens, while it runs."""
        return sum(use.result_bytes for use in self.uses)

    @property
    def is_idle(self) -> bool:
        """Whether none of its tokens may be planned before `Scheduler.fork` says so."""
        return self.total >= self.plan_limit

    @property
    def has_begun(self) -> bool:
        """Whether it has had a slot, or a sibling has, which may have to wait for it."""
        return self.num_cached >= 0 or (self.group is not None and self.group.has_begun)

    def begin(self) -> None:
        """Records that it has got its first slot, and the tokens that were cached."""
        self.num_cached = self.num_computed
        if self.group is not None:
            self.group.has_begun = True

    def restore(self, tokens: Sequence[int], num_cached: int, finish: Finish | None) -> None:
        """Makes a request that no scheduler has go on behind output that another server generated.

        Args:
            tokens: the output.
            num_cached: prompt tokens that the other server found in its prefix cache.
            finish: why the request ended there, if it did.
        """
        self.tokens.extend(tokens)
        self.num_cached = max(self.num_cached, num_cached)
        if finish is not None:
            self.end(finish)
        self.detach()

    def end(self, finish: Finish) -> None:
        """Marks the request as ended."""
        self.status = RequestStatus.FINISHED
        self.finish_reason, self.stop_reason = finish

    def detach(self) -> None:
        """Takes the slot and the blocks away from the request, since they no longer exist, and
        forgets the tokens whose results have not come: all of it is recomputed."""
        self.total = len(self.tokens)
        self.num_computed = self.num_lookahead = self.num_settled = 0
        self.blocks = []
        self.num_blocks = self.num_committed = 0
        self.slot = self.prefill_step = -1
        self.asked_connectors = 0
        if self.source is not None:
            self.source.is_held = self.source.is_unwritten = False

    def __lt__(self, other: Request) -> bool:
        return self.key < other.key
