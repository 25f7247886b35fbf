"""The engine for programs that drive it themselves: they add requests, and call `step` for new
outputs.

The engine's own loop runs in a background thread, as with `LLM`, and goes on computing between two
calls of `step`; requests that were added before share its steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from aioinfer.arguments import Conversation, GivenParams, GivenPrompt, as_pairs, as_prompts
from aioinfer.async_llm import AsyncLLM, RequestStream, StreamedOutput
from aioinfer.background import BackgroundModel
from aioinfer.config import Config
from aioinfer.ipc.sections import F32
from aioinfer.tasks import end_tasks


class LLMEngine(BackgroundModel):
    """A model for synchronous programs; see `BackgroundModel` for its arguments. Its methods are
    called by one thread at a time."""

    def _launch(self, config: Config, progress: bool) -> None:
        super()._launch(config, progress)
        self._engine = AsyncLLM(self.frontend)
        self._is_open = True
        # these belong to the engine's event loop
        self._followers: dict[str, asyncio.Task[None]] = {}
        self._changed: dict[str, StreamedOutput] = {}
        self._news = asyncio.Event()

    def add_request(
        self,
        request_id: str,
        prompt: GivenPrompt,
        params: GivenParams | None = None,
        *,
        priority: int = 0,
    ) -> None:
        """Queues a request; see `AsyncLLM.add_request` for arguments and errors."""

        async def add() -> None:
            stream = await self._engine.add_request(
                prompt, params, request_id=request_id, priority=priority
            )
            self._followers[request_id] = asyncio.create_task(self._follow(stream))

        self.run(add())

    def add_chat(
        self,
        request_id: str,
        messages: Conversation,
        params: GivenParams | None = None,
        *,
        priority: int = 0,
        **options: Any,
    ) -> None:
        """Queues a conversation to be answered; see `AsyncLLM.add_chat`, also for `options`, such
        as `tools`."""

        async def add() -> None:
            stream = await self._engine.add_chat(
                messages, params, request_id=request_id, priority=priority, **options
            )
            self._followers[request_id] = asyncio.create_task(self._follow(stream))

        self.run(add())

    def embed(self, texts: GivenPrompt | Sequence[GivenPrompt], **options: Any) -> list[F32]:
        """Returns the embedding of each text; `options` are passed to `AsyncLLM.embed`. Requests
        under way go on meanwhile."""

        async def embed() -> list[F32]:
            return await asyncio.gather(
                *(self._engine.embed(text, **options) for text in as_prompts(texts))
            )

        return self.run(embed())

    def score(self, queries: str | Sequence[str], documents: str | Sequence[str]) -> list[float]:
        """Returns the similarity of each pair of texts, or of one query to each document; see
        `LLM.score`."""
        pairs = as_pairs(queries, documents)

        async def score() -> list[float]:
            return await asyncio.gather(*(self._engine.score(*pair) for pair in pairs))

        return self.run(score())

    async def _follow(self, stream: RequestStream) -> None:
        """Notes the outputs of a request, and at last that it has ended."""
        name = stream.request_id
        last = StreamedOutput([], [], 0, 0, request_id=name)
        try:
            async for last in stream:
                self._changed[name] = last
                self._news.set()
        except Exception as error:  # it ends this request alone
            last.error = error
        last.is_finished = True
        self._changed[name] = last
        del self._followers[name]
        self._news.set()

    def step(self) -> list[StreamedOutput]:
        """Returns the outputs, all so far, of the requests that have new tokens or have ended since
        the last call. Waits until there are any; returns none if no request is left."""
        return self.run(self._take())

    async def _take(self) -> list[StreamedOutput]:
        while not self._changed and self._followers:
            self._news.clear()
            await self._news.wait()
        taken = [output.snapshot() for output in self._changed.values()]
        self._changed.clear()
        return taken

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has something to return or to wait for."""

        async def check() -> bool:
            return bool(self._followers or self._changed)

        return self.run(check())

    def abort(self, request_ids: str | Sequence[str]) -> None:
        """Ends requests; `step` returns them once more, with the tokens generated so far and
        "abort" as the finish reason. Ids that are not known, or have ended, are ignored."""
        names = [request_ids] if isinstance(request_ids, str) else request_ids

        async def abort() -> None:
            for name in names:
                self._engine.abort(name)

        self.run(abort())

    def pause(self) -> None:
        """Lets all requests wait until `resume`."""

        async def pause() -> None:
            self._engine.pause()

        self.run(pause())

    def resume(self) -> None:
        """Goes on with all requests."""

        async def resume() -> None:
            self._engine.resume()

        self.run(resume())

    def close(self) -> None:
        """Ends the requests and the workers. Safe to call twice."""
        if self._is_open:
            self._is_open = False
            self.run(self._end_followers())
            super().close()

    async def _end_followers(self) -> None:
        await end_tasks(self._followers.values())
