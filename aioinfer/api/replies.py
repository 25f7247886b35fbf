"""The shapes of replies, for `/openapi.json`. Handlers write JSON themselves; the tests compare
their JSON with these types."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType


class ErrorDetail(Struct, kw_only=True):
    """The details of an error; `param` names the field of the request."""

    message: str
    type: str
    param: str | None
    code: str | int | None


class ErrorReply(Struct, kw_only=True):
    """The body of an error, but for the paths of other APIs."""

    error: ErrorDetail


class AnthropicDetail(Struct, kw_only=True):
    """The details of an error, in the terms of Anthropic's API."""

    type: str
    message: str


class AnthropicError(Struct, kw_only=True):
    """The body of an error below `/v1/messages`."""

    type: str
    error: AnthropicDetail


class OllamaError(Struct, kw_only=True):
    """The body of an error below `/api`."""

    error: str


class Status(Struct, kw_only=True):
    """Confirmation that a check or an action has succeeded."""

    status: str


class Model(Struct, kw_only=True):
    """A name under which the model is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str | None
    parent: str | None
    max_model_len: int | None
    permission: list[dict[str, Any]]


class ModelList(Struct, kw_only=True):
    """All names under which the model is served."""

    object: Literal["list"]
    data: list[Model]


class Conversation(Struct, kw_only=True):
    """A conversation without its items."""

    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, str]


class InputTokens(Struct, kw_only=True):
    """The number of tokens that the prompt of a response would have."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class TokenPiece(Struct, kw_only=True):
    """A token with its text, or with its bytes if they are no text alone."""

    id: int
    piece: str | list[int]


class TokenizeReply(Struct, kw_only=True):
    """Token ids of a text."""

    count: int
    max_model_len: int
    tokens: list[int | TokenPiece]
    token_strs: list[str] | None


class DetokenizeReply(Struct, kw_only=True):
    """The text of token ids, under llama.cpp's name as well unless the request has a `model`."""

    prompt: str
    content: str | UnsetType = UNSET


class LlamaEmbeddingReply(Struct, kw_only=True):
    """The vectors of an input of `/embedding`."""

    index: int
    embedding: list[list[float]]


class EmbeddingUsage(Struct, kw_only=True):
    """Tokens of a request without an output."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int | UnsetType = UNSET


class EmbeddingItem(Struct, kw_only=True):
    """The vector of an input: numbers, or their base64; with pooling "all" one for each token."""

    object: Literal["embedding"]
    index: int
    embedding: list[float | list[float]] | str


class Embeddings(Struct, kw_only=True):
    """The reply of `/v1/embeddings`; in bytes for an `encoding_format` of bytes."""

    object: Literal["list"]
    model: str
    data: list[EmbeddingItem]
    usage: EmbeddingUsage


class PooledItem(Struct, kw_only=True):
    """The pooled state of an input, or the states of its tokens."""

    object: Literal["pooling"]
    index: int
    data: list[float | list[float]] | str


class PoolingReply(Struct, kw_only=True):
    """The reply of `/pooling`; in bytes for an `encoding_format` of bytes."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PooledItem]
    usage: EmbeddingUsage


class ClassifiedItem(Struct, kw_only=True):
    """The classes of an input: the likeliest, and the probability of each."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class Classes(Struct, kw_only=True):
    """The reply of `/classify`."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ClassifiedItem]
    usage: EmbeddingUsage


class ScoreItem(Struct, kw_only=True):
    """The score of a pair of texts."""

    index: int
    object: Literal["score"]
    score: float


class Scores(Struct, kw_only=True):
    """The reply of `/score`."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoreItem]
    usage: EmbeddingUsage


class RerankedDocument(Struct, kw_only=True):
    """A document of a request, by its place, with its relevance to the query."""

    index: int
    relevance_score: float
    document: dict[str, str] | UnsetType = UNSET


class Reranked(Struct, kw_only=True):
    """The reply of `/rerank` to `documents`, the most relevant first; `meta` is Cohere's, below
    `/v2`, which has neither `model` nor `usage`."""

    id: str
    results: list[RerankedDocument]
    model: str | UnsetType = UNSET
    usage: EmbeddingUsage | UnsetType = UNSET
    meta: dict[str, Any] | UnsetType = UNSET


class RerankedText(Struct, kw_only=True):
    """An item of the reply of `/rerank` to `texts`, as text-embeddings-inference has it."""

    index: int
    score: float
    text: str | UnsetType = UNSET


class OllamaEmbeddings(Struct, kw_only=True):
    """The reply of `/api/embed`: a vector for each input; durations are nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbedding(Struct, kw_only=True):
    """The reply of `/api/embeddings`."""

    embedding: list[float]


class TemplateReply(Struct, kw_only=True):
    """The prompt that the chat template makes of a conversation."""

    prompt: str


class LlamaSlot(Struct, kw_only=True):
    """A place for a request that runs."""

    id: int
    n_ctx: int
    is_processing: bool


class Version(Struct, kw_only=True):
    """The version of aioinfer."""

    version: str


class Load(Struct, kw_only=True):
    """The numbers of queued and running requests."""

    server_load: int
    running: int
    waiting: int
    kv_cache_usage: float
    paused: bool


class ExpertLayer(Struct, kw_only=True):
    """The tokens of a layer's experts, and of the ranks that have experts of their own."""

    layer: int
    imbalance: float
    tokens: list[int]
    rank_imbalance: float | UnsetType = UNSET
    rank_tokens: list[int] | UnsetType = UNSET


class ExpertEngine(Struct, kw_only=True):
    """The layers of an engine's model that have experts."""

    layers: list[ExpertLayer]


class ExpertLoads(Struct, kw_only=True):
    """The load of the experts of each engine."""

    engines: list[ExpertEngine]


class Placement(Struct, kw_only=True):
    """The content of a file for `parallel.expert_placement`: by layer, the experts of each rank."""

    version: int
    layers: dict[str, list[list[int]]]


class AbortReply(Struct, kw_only=True):
    """The number of aborted requests: one for each prompt of the body."""

    status: str
    count: int


class Deleted(Struct, kw_only=True):
    """Confirmation that a file is deleted."""

    id: str
    object: Literal["file"]
    deleted: bool


class Page(Struct, kw_only=True):
    """A part of a list."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
