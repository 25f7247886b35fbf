"""The bodies of requests that pool: embeddings, pooling, classification, scores, reranking. The
names are OpenAI's, Jina's and Cohere's, and vLLM's for what these do not have."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Struct

from aioinfer.api.protocol import MAX_PROMPTS, Body, Count, Int32, Seconds, TokenId
from aioinfer.errors import RequestError


class PoolingBody(Body, kw_only=True):
    """What all of these bodies have in common. `truncate_prompt_tokens` keeps the end of a text, as
    in vLLM, unless `keeps_beginning`."""

    keeps_beginning: ClassVar[bool] = False
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Int32 | None = None
    priority: Int32 | None = None
    timeout_s: Seconds | None = None
    user: str | None = None

    def check(self) -> None:
        limit = self.truncate_prompt_tokens
        if limit is not None and (limit == 0 or limit < -1):
            raise RequestError(
                "truncate_prompt_tokens must be a number of tokens, or -1 for as many as fit, not "
                f"{limit}",
                param="truncate_prompt_tokens",
            )


class InputBody(PoolingBody, kw_only=True):
    """A body with an `input`: one or many texts, or one or many lists of token ids."""

    input: str | list[str | TokenId | list[TokenId]]

    def check(self) -> None:
        super().check()
        if isinstance(self.input, list):
            _check_input(self.input)

    def inputs(self) -> list[Any]:
        """Returns the inputs one by one: texts, or lists of token ids."""
        if isinstance(self.input, str) or isinstance(self.input[0], int):
            return [self.input]
        return self.input


class EmbeddingRequest(InputBody, kw_only=True):
    """`POST /v1/embeddings`."""

    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = None
    normalize: bool | None = None
    prompt_name: str | None = None


class PoolingRequest(EmbeddingRequest, kw_only=True):
    """`POST /pooling`."""

    pooling_type: Literal["last", "mean", "cls"] | None = None


class OllamaEmbedRequest(EmbeddingRequest, kw_only=True):
    """`POST /api/embed`. A text that is too long is embedded up to where it fits, unless `truncate`
    is false."""

    keeps_beginning: ClassVar[bool] = True
    truncate: bool | None = None

    def __post_init__(self) -> None:
        if self.model is not None:
            self.model = self.model.removesuffix(":latest")
        if self.truncate is not False and self.truncate_prompt_tokens is None:
            self.truncate_prompt_tokens = -1


class OllamaEmbeddingsRequest(OllamaEmbedRequest, kw_only=True):
    """`POST /api/embeddings`, the older form: one text, named `prompt`."""

    input: str = msgspec.field(name="prompt")


class ClassifyRequest(InputBody, kw_only=True):
    """`POST /classify`."""


Texts = str | Annotated[list[str], Meta(min_length=1, max_length=MAX_PROMPTS)]


class ScoreRequest(PoolingBody, kw_only=True):
    """`POST /score`: the similarity of each pair of texts, or of one text to many."""

    text_1: Texts
    text_2: Texts

    def check(self) -> None:
        super().check()
        first, second = self.texts()
        if len(first) not in (1, len(second)):
            raise RequestError(
                f"text_1 has {len(first)} texts and text_2 {len(second)}: one goes with many, "
                "otherwise both need the same number",
                param="text_1",
            )

    def texts(self) -> tuple[list[str], list[str]]:
        """Returns the texts of both sides."""
        first, second = (
            [text] if isinstance(text, str) else text for text in (self.text_1, self.text_2)
        )
        return first, second


class Document(Struct, kw_only=True):
    """A document of `RerankRequest`, as Cohere and Jina have it beside plain texts."""

    text: str


class RerankRequest(PoolingBody, kw_only=True):
    """`POST /rerank`: documents in the order of their relevance to a query."""

    query: str
    documents: Annotated[list[str | Document], Meta(min_length=1, max_length=MAX_PROMPTS - 1)]
    top_n: Int32 | None = None
    return_documents: bool | None = None

    def check(self) -> None:
        super().check()
        if self.top_n is not None and self.top_n < 1:
            raise RequestError(f"top_n must be at least 1, not {self.top_n}", param="top_n")

    def texts(self) -> list[str]:
        """Returns the documents' texts."""
        return [each if isinstance(each, str) else each.text for each in self.documents]


def _check_input(values: list[Any]) -> None:
    kinds = set(map(type, values))
    if not kinds:
        raise RequestError("the input is empty", param="input")
    if len(kinds) > 1:
        raise RequestError(
            "input must be a text, a list of token ids, a list of texts or a list of lists of "
            "token ids",
            param="input",
        )
    if int not in kinds and len(values) > MAX_PROMPTS:
        raise RequestError(
            f"input may hold at most {MAX_PROMPTS} inputs, not {len(values)}", param="input"
        )
