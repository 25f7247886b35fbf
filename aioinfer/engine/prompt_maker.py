"""Prompts of one model: texts, conversations, pictures and sound become checked token ids, and what
restricts the tokens of an output is compiled; without any engine.

`Frontend` is a `PromptMaker` with engines behind it; with none in the gateway, which finds the
block hashes of prompts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from aioinfer.config import Config
from aioinfer.engine.encoding import EncodingThreads, PreparedPrompt, PromptEncoder
from aioinfer.engine.pictures import PictureReader, first_source, has_pictures, not_read
from aioinfer.engine.restriction_compiler import RestrictionCompiler
from aioinfer.engine.served_model import Pooling, ServedModel
from aioinfer.engine.sources import SourcePrompt, text_prompt
from aioinfer.engine.transcription import SpeechTokens, Transcriber
from aioinfer.errors import FieldError, RequestError
from aioinfer.features.serving import ServingFeatures
from aioinfer.features.token_states.planning import check_states
from aioinfer.media.source import MediaSource
from aioinfer.models.source import SourceFormat
from aioinfer.sampling_params import SamplingParams
from aioinfer.text.constraints import CompiledConstraint
from aioinfer.text.generation_defaults import GenerationDefaults
from aioinfer.text.message_parser import MessageFormat
from aioinfer.text.tokenizer import Tokenizer


class PromptMaker:
    """Makes the prompts of one model. All methods are called on one event loop.

    Attributes:
        config: the whole configuration.
        variants: of the model, which requests may name; of its features.
        tokenizer: the model's; None where only token ids go in and out.
        message_format: how the model writes thoughts and tool calls.
        folder: the model's.
        defaults, vocab_size, hidden_size, pooling, is_encoder: see `ServedModel`.
        max_model_len: the longest sequence, prompt included, that every engine can hold.
        block_size: tokens of a block that the prefix cache shares; 0 without one.
    """

    tokenizer: Tokenizer | None
    message_format: MessageFormat
    folder: Path
    defaults: GenerationDefaults
    max_model_len: int
    vocab_size: int
    hidden_size: int
    pooling: Pooling
    is_encoder: bool

    def __init__(self, config: Config, variants: ServingFeatures):
        self.config, self.variants = config, variants
        self._threads = EncodingThreads()
        self._restrictions: RestrictionCompiler | None = None
        self._pictures: PictureReader | None = None
        self._transcriber: Transcriber | None = None

    async def start_text(self, folder: Path, max_model_len: int) -> None:
        """Loads the tokenizer and the model's defaults for a process without engines: prompts can
        be prepared from now on, and nothing can be submitted. Raises `ConfigError`."""
        await self._threads.run(lambda: self._load_text_side(folder))
        if self.tokenizer is not None:
            await self._threads.run(self.tokenizer.prepare)
        self.max_model_len = max_model_len
        self.make_encoder(None)

    def make_encoder(self, hash_block_size: int | None) -> None:
        """Makes the encoder of prompts; see `PromptEncoder`."""
        self.block_size = hash_block_size or 0
        self._encoder = PromptEncoder(
            self.tokenizer,
            self._threads,
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
            hash_block_size=hash_block_size,
        )

    def _load_text_side(self, folder: Path) -> RestrictionCompiler:
        """Loads the parts of the model that only this process needs. Returns the compiler of
        grammars."""
        self.folder = folder
        self._model = model = ServedModel.load(folder, self.config)
        self.tokenizer, self.message_format = model.tokenizer, model.message_format
        self.defaults, self.pooling = model.defaults, model.pooling
        self.vocab_size, self.hidden_size = model.vocab_size, model.hidden_size
        self.is_encoder = model.is_encoder
        if model.pictures is not None and model.tokenizer is not None:
            self._pictures = PictureReader(model.pictures, self.config, model.tokenizer)
        source = model.source
        if source is not None and source.kind == "sound" and model.tokenizer is not None:
            tokens = SpeechTokens.load(folder, model.tokenizer)
            self._transcriber = Transcriber(source, tokens, model.tokenizer, self.config)
        self._restrictions = RestrictionCompiler(
            model.tokenizer if model.generates else None,
            model.vocab_size,
            model.defaults.eos_token_ids,
        )
        return self._restrictions

    def _shutdown(self) -> None:
        """Ends the threads, and drops work that has not begun."""
        self._threads.shutdown()
        for part in (self._pictures, self._transcriber, self._restrictions):
            if part is not None:
                part.shutdown()

    def model_names(self) -> list[str]:
        """Returns the names that a request's `model` may have: the model's, and its variants'."""
        return [*self.config.served_model_names, *(each.name for each in self.variants)]

    @property
    def generates(self) -> bool:
        """Whether the model can generate, and not only pool."""
        return self._model.generates

    def check_generates(self) -> None:
        """Raises `RequestError` if the model cannot generate."""
        self._model.check_generates()

    def check_states(self, num_tokens: int) -> None:
        """Raises `RequestError` if a vector for each of so many tokens is too much to ask for."""
        check_states(num_tokens, self.hidden_size)

    def require_tokenizer(self, param: str | None = None) -> Tokenizer:
        """Returns the tokenizer.

        Raises `RequestError` naming `param`, the part of a request that is text, where the server
        has none.
        """
        if self.tokenizer is None:
            raise RequestError(
                "this server has no tokenizer (model.tokenizer): use completions with token "
                "ids as the prompt",
                param=param,
            )
        return self.tokenizer

    # ---------------------------------------------------------------- prompts

    async def encode(
        self, text: str, add_special_tokens: bool = True, *, max_tokens: int | None = None
    ) -> list[int]:
        """Returns the token ids of `text`; see `PromptEncoder.encode`. Raises `RequestError`."""
        self.require_tokenizer("prompt")
        return await self._encoder.encode(text, add_special_tokens, max_tokens=max_tokens)

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        max_tokens: int | None = None,
        **options: Any,
    ) -> list[int]:
        """Returns the token ids of a conversation, a `PicturePrompt` if it has pictures; see
        `PromptEncoder.encode_chat`.

        Raises `RequestError`.
        """
        self.require_tokenizer("messages")
        self._require_texts("messages")
        reader = self._pictures
        if not has_pictures(messages):
            if reader is not None:
                messages, _ = reader.for_template(messages)
            return await self._encoder.encode_chat(messages, max_tokens=max_tokens, **options)
        if reader is None:
            raise self._not_read(messages)
        pictures = await reader.read(reader.sources(messages))
        messages, marker = reader.for_template(messages)
        try:
            ids = await self._encoder.encode_chat(
                messages,
                max_tokens=max_tokens,
                expand=lambda text: reader.expand(text, pictures, marker),
                **options,
            )
            return reader.place(ids, pictures)
        finally:
            pictures.clear()  # a thread or an error may refer to the list for longer

    def check_media(self, sources: Sequence[MediaSource]) -> None:
        """Raises `RequestError` for files of a request's prompts that are too many, or that the
        model does not read."""
        if self._pictures is not None:
            self._pictures.check(sources)
        elif sources:
            self._require_texts(sources[0].place)
            name = self.config.name
            raise FieldError(
                sources[0].place, f"is a file, and the model {name!r} reads text alone"
            )

    async def encode_media(
        self,
        sources: Sequence[MediaSource],
        marker: str,
        text: str,
        add_special_tokens: bool = True,
        *,
        max_tokens: int | None = None,
    ) -> list[int]:
        """Returns the token ids of a text in which a marker stands for each of some pictures or
        sounds, which were checked: a `PicturePrompt`. Raises `RequestError`."""
        reader = self._pictures
        assert reader is not None
        pictures = await reader.read(sources)
        try:
            text = await asyncio.to_thread(reader.expand_text, text, pictures, marker)
            ids = await self.encode(text, add_special_tokens, max_tokens=max_tokens)
            return reader.place(ids, pictures)
        finally:
            pictures.clear()  # as above

    async def render_chat(
        self, messages: Sequence[Mapping[str, Any]], media_marker: str, **options: Any
    ) -> str:
        """Returns the prompt that the chat template makes of a conversation, as text: with a
        marker for each picture, which is not read.

        Raises `RequestError`.
        """
        tokenizer, reader = self.require_tokenizer("messages"), self._pictures
        if reader is not None:
            count = len(reader.sources(messages))
            messages, marker = reader.for_template(messages)
            options["expand"] = lambda text: reader.mark(text, count, marker, media_marker)
        elif has_pictures(messages):
            raise self._not_read(messages)
        return (await asyncio.to_thread(tokenizer.render_chat, messages, **options)).text

    def _not_read(self, messages: Sequence[Mapping[str, Any]]) -> RequestError:
        """Returns the error of a conversation with pictures, which the model does not read."""
        return not_read(first_source(messages), f"the model {self.config.name!r}")

    def require_transcriber(self) -> Transcriber:
        """Returns what makes prompts of sound. Raises `RequestError` for a model that does not
        transcribe."""
        if self._transcriber is None:
            name = self.config.name
            raise RequestError(f"the model {name!r} does not transcribe", param="model")
        return self._transcriber

    def _require_texts(self, param: str) -> None:
        """Raises `RequestError` for a model that transcribes: its prompts are sound."""
        if self._transcriber is not None:
            raise RequestError(
                "this model writes down what it hears: use /v1/audio/transcriptions", param=param
            )

    @property
    def input_modalities(self) -> list[str]:
        """What prompts may consist of: "text", and "image" if the model reads pictures or "audio"
        if it hears; "audio" alone if it transcribes."""
        if self._transcriber is not None:
            return ["audio"]
        pictures = self._model.pictures if self._pictures is not None else None
        return ["text"] if pictures is None else ["text", "audio" if pictures.hears else "image"]

    async def prepare(
        self,
        prompt: str | Sequence[int],
        add_special_tokens: bool = True,
        cache_salt: str = "",
        params: SamplingParams | None = None,
    ) -> PreparedPrompt:
        """The first half of `submit`, which may take long; see `PromptEncoder.prepare`. Prompts for
        several variants of the model share no KV blocks.

        Args:
            params: of the request; None for the model itself.

        Raises `RequestError`.
        """
        if isinstance(prompt, str):
            self.require_tokenizer("prompt")
        if self._model.source is not None and not isinstance(prompt, SourcePrompt):
            prompt = await self._text_source(prompt, self._model.source, add_special_tokens)
        variant = None if params is None else self.variants.of_request(params)
        if variant is None:
            return await self._encoder.prepare(prompt, add_special_tokens, cache_salt)
        salt, virtual = f"{cache_salt}\0{variant.key}", variant.virtual_tokens
        prepared = await self._encoder.prepare(prompt, add_special_tokens, salt, virtual=virtual)
        return replace(prepared, variant=variant)

    async def _text_source(
        self, prompt: str | Sequence[int], format: SourceFormat, add_special_tokens: bool
    ) -> SourcePrompt:
        """Returns the prompt whose source is a text, or token ids. Raises `RequestError`."""
        self._require_texts("prompt")
        if isinstance(prompt, str):
            prompt = await self.encode(prompt, add_special_tokens, max_tokens=format.max_values)
        return text_prompt(prompt, format, self.vocab_size)

    # ---------------------------------------------------------------- restrictions of the output

    async def compile(self, params: SamplingParams) -> CompiledConstraint | None:
        """Compiles the restrictions of a request's tokens (a grammar, say), for `admit`; None if
        there are none.

        Raises `RequestError` naming the field that is wrong or not supported.
        """
        if not params.is_restricted:
            return None
        assert self._restrictions is not None, "requests come after the start"
        return await self._restrictions.compile(params)
