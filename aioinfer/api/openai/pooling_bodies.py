"""Bodies and replies of pooling endpoints: embeddings, pooling, classification, scores, reranking.
The names are OpenAI's, Jina's and Cohere's, and vLLM's for what these do not have."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from aioinfer.api import protocol
from aioinfer.api.decoding import MAX_PROMPTS
from aioinfer.api.messages import Message
from aioinfer.errors import FieldError, RequestError


class PoolingBody(protocol.PromptsBody, kw_only=True):
    """Base class of the bodies of pooling requests. `truncate_prompt_tokens` keeps the end of a
    text, as in vLLM, unless `truncation_side` is "right"."""

    add_special_tokens: bool | None = None
    truncate_prompt_tokens: protocol.Int32 | None = None
    truncation_side: Literal["left", "right"] | None = None
    user: protocol.Ignored = None

    def check(self) -> None:
        super().check()
        protocol.check_truncation(self.truncate_prompt_tokens)


class InputBody(PoolingBody, kw_only=True):
    """A body with an `input`: one or many texts, or one or many lists of token ids, or what
    `prompts` has beside these. Or with `messages`, a conversation, whose text under the chat
    template is the input (vLLM's form)."""

    input: protocol.Prompts | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self) -> None:
        super().check()
        if self.messages is not None and self.input is not None:
            raise RequestError("input and messages cannot be combined", param="messages")
        if self.messages is not None:
            if self.add_special_tokens:
                raise FieldError(
                    "add_special_tokens", "goes with input: the chat template has its own"
                )
            protocol.check_messages(self.messages)
        elif self.input is None:
            raise FieldError("input", "is missing", "missing_required_parameter")

    @property
    def prompt_field(self) -> str:
        return "" if self.input is None else "input"

    def template_options(self) -> dict[str, Any]:
        """Returns the arguments of `Frontend.encode_chat` besides the messages."""
        return {
            "add_generation_prompt": bool(self.add_generation_prompt),
            "continue_final_message": bool(self.continue_final_message),
            "template_kwargs": self.chat_template_kwargs,
        }


class EmbeddingBody(InputBody, kw_only=True):
    """A body whose inputs are embedded."""

    dimensions: protocol.Count | None = None
    prompt_name: str | None = None

    def check(self) -> None:
        super().check()
        if self.messages is not None and self.prompt_name is not None:
            raise FieldError(
                "prompt_name",
                "goes with input: messages are embedded as the chat template writes them",
            )


class EmbeddingRequest(EmbeddingBody, kw_only=True):
    """`POST /v1/embeddings`."""

    token_field: ClassVar[str] = "input"

    encoding_format: Literal["float", "base64"] | None = None
    normalize: bool | None = None
    use_activation: bool | None = None

    @property
    def normalizes(self) -> bool | None:
        """Whether vectors are to have length 1; None leaves it to the endpoint. `use_activation` is
        vLLM's name."""
        return self.use_activation if self.normalize is None else self.normalize


class PoolingRequest(EmbeddingRequest, kw_only=True):
    """`POST /pooling`."""

    pooling_type: Literal["last", "mean", "cls", "all"] | None = None
    task: Literal["embed", "token_embed"] | None = None

    def check(self) -> None:
        super().check()
        if self.task == "token_embed" and self.pooling_type not in (None, "all"):
            raise RequestError(
                f"token_embed has a vector for each token, and pooling_type is "
                f"{self.pooling_type!r}",
                param="pooling_type",
            )

    @property
    def kind(self) -> str | None:
        """How to pool; None leaves it to the model."""
        return "all" if self.task == "token_embed" else self.pooling_type

    @property
    def normalizes(self) -> bool | None:
        """See `EmbeddingRequest.normalizes`; an embedding is normalised."""
        found = super().normalizes
        return True if found is None and self.task is not None else found


class OllamaEmbedRequest(EmbeddingBody, kw_only=True):
    """`POST /api/embed`. A text that is too long is embedded up to where it fits, unless `truncate`
    is false. `options` hold Ollama's settings of sampling and loading, which have no effect."""

    ignored: ClassVar[Collection[str] | None] = ()

    options: protocol.Ignored = None
    truncate: bool | None = None

    def __post_init__(self) -> None:
        if self.model is not None:
            self.model = self.model.removesuffix(":latest")
        if self.truncation_side is None:
            self.truncation_side = "right"
        if self.truncate is not False and self.truncate_prompt_tokens is None:
            self.truncate_prompt_tokens = -1


class OllamaEmbeddingsRequest(OllamaEmbedRequest, kw_only=True):
    """`POST /api/embeddings`, the older form: one text, named `prompt`."""

    input: str = msgspec.field(name="prompt")


class ClassifyRequest(InputBody, kw_only=True):
    """`POST /classify`."""

    token_field: ClassVar[str] = "input"


Texts = str | Annotated[list[str], Meta(min_length=1, max_length=MAX_PROMPTS)]


class ScoringBody(PoolingBody, kw_only=True):
    """Base class of scoring and reranking bodies: how many tokens of each text count; 0 stands for
    all."""

    max_tokens_per_query: protocol.Length | None = None
    max_tokens_per_doc: protocol.Length | None = None


#: Names of the two sides of `ScoreRequest`.
_SIDES = (("text_1", "queries"), ("text_2", "documents"))


class ScoreRequest(ScoringBody, kw_only=True):
    """`POST /score`: the similarity of each pair of texts, or of one text to many. The sides have
    two names each in vLLM: `text_1` and `text_2`, or `queries` and `documents`."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None

    def check(self) -> None:
        super().check()
        first, second = self.sides().values()
        if len(first) not in (1, len(second)):
            raise FieldError(
                "text_1",
                f"has {len(first)} texts and text_2 {len(second)}: one goes with many, "
                "otherwise both need the same number",
            )

    @property
    def num_prompts(self) -> int:
        return sum(map(len, self.sides().values()))

    def sides(self) -> dict[str, list[str]]:
        """Returns the texts of the first and of the second side, by the names under which they were
        given. Raises `RequestError` naming a side that is missing or given twice."""
        found: dict[str, list[str]] = {}
        for name, other in _SIDES:
            given = self.given(name, other)
            if not given:
                raise FieldError(name, "is missing", "missing_required_parameter")
            if len(given) > 1:
                raise RequestError(f"{name} and {other} are the same side", param=other)
            for field, texts in given.items():
                found[field] = [texts] if isinstance(texts, str) else texts
        return found


class Document(Struct, kw_only=True):
    """A document of `RerankRequest`, as Cohere and Jina have it beside plain texts."""

    text: str


_Documents = Annotated[list[str | Document], Meta(min_length=1, max_length=MAX_PROMPTS)]


class RerankRequest(ScoringBody, kw_only=True):
    """`POST /rerank`: documents in the order of their relevance to a query. With `texts` in the
    place of `documents`, the reply has the form of Hugging Face's text-embeddings-inference."""

    query: str
    documents: _Documents | None = None
    texts: _Documents | None = None
    top_n: protocol.Count | None = None
    return_documents: bool | None = None
    return_text: bool | None = None

    def check(self) -> None:
        super().check()
        if (self.documents is None) == (self.texts is None):
            raise RequestError("either documents or texts must be given", param="documents")
        for name, goes_with in (("return_documents", "documents"), ("return_text", "texts")):
            if getattr(self, name) and getattr(self, goes_with) is None:
                raise FieldError(name, f"goes with {goes_with}")

    @property
    def num_prompts(self) -> int:
        return 1 + len(self.contents())

    def contents(self) -> list[str]:
        """Returns the documents' texts."""
        given = self.documents or self.texts or []
        return [each if isinstance(each, str) else each.text for each in given]


class EmbeddingUsage(Struct, kw_only=True):
    """Tokens of a request without an output."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int | UnsetType = UNSET


class EmbeddingItem(Struct, kw_only=True):
    """The vector of an input: numbers, or their base64; with pooling "all" one for each token."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float | list[float]] | str


class Embeddings(Struct, kw_only=True):
    """The reply of `/v1/embeddings`."""

    object: Literal["list"] = "list"
    model: str
    usage: EmbeddingUsage
    data: list[EmbeddingItem] = []


class PooledReply(Struct, kw_only=True):
    """The fields that vLLM's replies to pooling requests have in common."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    usage: EmbeddingUsage


class PooledItem(Struct, kw_only=True):
    """The pooled state of an input, or the states of its tokens."""

    object: Literal["pooling"] = "pooling"
    index: int
    data: list[float | list[float]] | str


class PoolingReply(PooledReply, kw_only=True):
    """The reply of `/pooling`."""

    data: list[PooledItem] = []


class ClassifiedItem(Struct, kw_only=True):
    """The classes of an input: the likeliest, and the probability of each."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class Classes(PooledReply, kw_only=True):
    """The reply of `/classify`."""

    data: list[ClassifiedItem]


class ScoreItem(Struct, kw_only=True):
    """The score of a pair of texts."""

    index: int
    object: Literal["score"] = "score"
    score: float


class Scores(PooledReply, kw_only=True):
    """The reply of `/score`."""

    data: list[ScoreItem]


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
