"""Endpoints that score pairs of texts: `/score` and `/rerank`, with the names of Jina, Cohere, vLLM
and text-embeddings-inference."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from aiohttp import web
from msgspec import UNSET, Meta, Struct, UnsetType

from aioinfer.api import protocol
from aioinfer.api.decoding import MAX_PROMPTS
from aioinfer.api.openai.pooling import EmbeddingUsage, PooledReply, PoolingBody, PoolingDialect
from aioinfer.engine.pooled_prompts import join_texts, max_kept
from aioinfer.engine.served_model import cosine_similarity
from aioinfer.errors import FieldError
from aioinfer.ipc.sections import F32

Texts = str | Annotated[list[str], Meta(min_length=1, max_length=MAX_PROMPTS)]


class ScoringBody(PoolingBody, kw_only=True):
    """Base class of scoring and reranking bodies: how many tokens of each text count; 0 stands for
    all."""

    max_tokens_per_query: protocol.Length | None = None
    max_tokens_per_doc: protocol.Length | None = None

    @property
    def num_prompts(self) -> int:
        return sum(map(len, self.sides().values()))

    def sides(self) -> dict[str, list[str]]:
        """Returns the texts of the first and of the second side, by the names of their fields; the
        first may be one for all. Raises `RequestError` naming a side that is missing or given
        twice."""
        raise NotImplementedError


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

    def sides(self) -> dict[str, list[str]]:
        """See `ScoringBody.sides`."""
        found: dict[str, list[str]] = {}
        for name, other in _SIDES:
            self.check_one_of(name, other)
            for field, texts in self.given(name, other).items():
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
        self.check_one_of("documents", "texts")
        for name, goes_with in (("return_documents", "documents"), ("return_text", "texts")):
            if getattr(self, name) and getattr(self, goes_with) is None:
                raise FieldError(name, f"goes with {goes_with}")

    def sides(self) -> dict[str, list[str]]:
        """See `ScoringBody.sides`."""
        given = self.documents or self.texts or []
        contents = [each if isinstance(each, str) else each.text for each in given]
        return {"query": [self.query], "documents" if self.texts is None else "texts": contents}


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


SB = TypeVar("SB", bound=ScoringBody)


class _Scoring(PoolingDialect[SB]):
    """An endpoint that scores pairs of texts: by the classification head of a cross-encoder, else
    by the cosine of the angle between their embeddings. Of the texts only `max_tokens_per_query`
    and `max_tokens_per_doc` tokens count, if they are given and not 0."""

    id_prefix = "score-"

    def __init__(self, request: web.Request, body: SB):
        super().__init__(request, body)
        self._texts = body.sides()
        self._first_param, self.param = self._texts

    def kind(self) -> str:
        """See `PoolingDialect.kind`."""
        head = self.pooling.cross_encoder
        return super().kind() if head is None else head.pooling

    async def prompts(self) -> list[list[int]]:
        """See `PoolingDialect.prompts`."""
        pooling, body = self.pooling, self.body
        is_cross = pooling.cross_encoder is not None
        before = ("", "") if is_cross else (
            pooling.prompt_of("query"), pooling.prompt_of("document", "passage")
        )  # fmt: skip
        is_part = is_cross and self.frontend.is_encoder
        longest = body.max_tokens_per_query, body.max_tokens_per_doc
        sides = []
        for prompt, texts, most in zip(before, self._texts.values(), longest, strict=True):
            ids = await self.tokens([prompt + text for text in texts], is_part=is_part)
            sides.append([each[:most] for each in ids] if most else ids)
        first, second = sides
        self._num_first = len(first)
        if not is_cross:
            if not all(first):
                raise FieldError(self._first_param, "is empty")
            return first + second
        first *= len(second) if len(first) == 1 else 1
        frontend = self.frontend
        kept = max_kept(frontend, body.truncate_prompt_tokens, frontend.max_model_len)
        pairs = [join_texts(frontend, *both, kept) for both in zip(first, second, strict=True)]
        self.second_texts = [pair.second_text for pair in pairs]
        return [pair.ids for pair in pairs]

    def scores(self, states: list[F32]) -> list[float]:
        """Returns the score of each pair."""
        if (head := self.pooling.cross_encoder) is not None:
            scores: list[float] = head.probabilities(np.stack(states))[:, 0].tolist()
            return scores
        ones, others = states[: self._num_first], states[self._num_first :]
        ones *= len(others) if len(ones) == 1 else 1
        return [cosine_similarity(*pair) for pair in zip(ones, others, strict=True)]


class ScoreDialect(_Scoring[ScoreRequest]):
    """Returns how similar the texts of each pair are."""

    body_type = ScoreRequest
    reply_type = Scores

    def reply(self, states: list[F32]) -> Any:
        """See `PoolingDialect.reply`."""
        scores = enumerate(self.scores(states))
        data = [ScoreItem(index=index, score=value) for index, value in scores]
        reply = Scores(**self.fields(), data=data)
        reply.usage.completion_tokens = 0
        return reply


class RerankDialect(_Scoring[RerankRequest]):
    """Returns documents by falling relevance to a query, in Jina's shape, under `/v2` in Cohere's,
    and for `texts` in the shape of text-embeddings-inference."""

    body_type = RerankRequest
    reply_type = Reranked | list[RerankedText]
    id_prefix = "rerank-"

    def reply(self, states: list[F32]) -> Any:
        """See `PoolingDialect.reply`."""
        body, texts, scores = self.body, self._texts[self.param], self.scores(states)
        best = sorted(range(len(texts)), key=lambda index: -scores[index])[: body.top_n]
        if body.texts is not None:
            return [
                RerankedText(index=i, score=scores[i], text=texts[i] if body.return_text else UNSET)
                for i in best
            ]
        is_cohere = self.request.path.endswith("/v2/rerank")
        shows = not is_cohere if body.return_documents is None else body.return_documents
        documents = [{"text": texts[i]} if shows else UNSET for i in best]
        results = [
            RerankedDocument(index=i, relevance_score=scores[i], document=document)
            for i, document in zip(best, documents, strict=True)
        ]
        reply = Reranked(id=self.id, results=results)
        if is_cohere:
            tokens = {"input_tokens": self.usage.prompt_tokens, "output_tokens": 0}
            reply.meta = {"api_version": {"version": "2"}, "tokens": tokens}
        else:
            reply.model, reply.usage = self.model_name, self.usage
        return reply
