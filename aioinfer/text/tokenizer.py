"""The tokenizer of a model: text to token ids, conversations to token ids, token ids to text.

The engine loads one and encodes in threads. It is the model's `tokenizer.json` run by the
`tokenizers` library itself: that loads Qwen's in 0.4 s, where `transformers.AutoTokenizer` takes 2
s, wraps each call, and rebuilds the tokenizers of some model families by rules of its own. Chat
templates, which transformers alone defines, are left to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from aioinfer.errors import ConfigError, RequestError
from aioinfer.models.json_file import read_json
from aioinfer.text import sentencepiece_bpe, tekken_template, vocabulary_files
from aioinfer.text.chat_template import ChatTemplate
from aioinfer.text.detokenizer import DecodeRules, Detokenizer, TokenBytes
from aioinfer.text.fill_in_middle import FillInMiddle
from aioinfer.text.pieces import TextPieces
from aioinfer.text.plain_content import ChatText, PlainContent
from aioinfer.text.special_tokens import SpecialTokens
from aioinfer.text.tekken import Tekken
from aioinfer.text.token_bound import TokenBound

#: Tokens that are joined in one go.
_DECODED = 16_384


class Tokenizer:
    """Encodes and decodes; safe to use from several threads.

    Attributes:
        bos_token_id, eos_token_id: None where the tokenizer names none.
        special_ids: the tokens that `skip_special_tokens` leaves out.
        marker_ids: the ids by their texts of special tokens, and of other added tokens in angle
            brackets: grammars (llguidance) take these for special ones, which no text can spell.
        vocab_size: ids are below it. A model's embedding may have more rows.
        decode_rules: how tokens are converted to bytes.
        bound: a lower bound of the tokens of a text, or None if the vocabulary gives none.
        fill_in_middle: the tokens that mark the parts of a text with a gap, or None.
        special_tokens: what is put around one text, and around two.
        pieces: how long texts are cut for encoding, or None if they have to be encoded whole.
        escaped_pieces: the same for `ChatText.escaped`, in which the text of special tokens is
            plain text.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str],
        chat_template: ChatTemplate | None,
    ):
        """Wraps a loaded tokenizer; `special_tokens` are the tokens with a role, such as
        `{"eos_token": "</s>"}`."""
        self._backend = backend
        self._chat_template = chat_template
        self._special_tokens = dict(special_tokens)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self.marker_ids = {
            token.content: index
            for index, token in added.items()
            if token.special or (token.content.startswith("<") and token.content.endswith(">"))
        }
        self._shown_bytes: dict[frozenset[int], TokenBytes] = {}
        self.vocab_size = max(
            backend.get_vocab_size(with_added_tokens=False), *(index + 1 for index in added), 0
        )
        self.bos_token_id = _id_of(backend, special_tokens.get("bos_token"))
        self.eos_token_id = _id_of(backend, special_tokens.get("eos_token"))
        self.decode_rules = DecodeRules.of(backend)
        self._all_bytes = TokenBytes(backend, self.decode_rules)
        self._text_bytes = TokenBytes(backend, self.decode_rules, self.special_ids)
        self.special_tokens = SpecialTokens.of(backend)
        self.bound = TokenBound.of(backend)
        self.pieces = TextPieces.of(backend)
        self.fill_in_middle = FillInMiddle.of(backend, self.eos_token_id)
        self._plain_content = PlainContent(backend)
        self.escaped_pieces = self._plain_content.pieces

    @classmethod
    def load(cls, folder: Path, chat_template: str | Path | None = None) -> Tokenizer:
        """Loads the tokenizer of a folder in Hugging Face's layout.

        Args:
            folder: holds `tokenizer.json`, a sentencepiece `tokenizer.model`, Mistral's
                `tekken.json` or the files of `vocabulary_files`, and usually
                `tokenizer_config.json`.
            chat_template: a file with a Jinja template to use in place of the tokenizer's own.

        Raises:
            ConfigError: there is no tokenizer, or it cannot be read.
        """
        config = read_json(folder / "tokenizer_config.json", missing_ok=True)
        built_in: str | None = None
        special_tokens = _named_tokens(config) or _named_tokens(
            read_json(folder / "special_tokens_map.json", missing_ok=True)
        )
        if (folder / "tokenizer.json").is_file():
            backend = _load_backend(folder / "tokenizer.json", config)
        elif (folder / "tokenizer.model").is_file():
            pieces, model_tokens = sentencepiece_bpe.read_model(folder / "tokenizer.model")
            special_tokens = model_tokens | special_tokens
            backend = _build_sentencepiece(pieces, config, special_tokens)
        elif (folder / "tekken.json").is_file():
            tekken = Tekken.read(folder / "tekken.json")
            special_tokens = tekken.named_tokens | special_tokens
            backend = tekken.build(config)
            built_in = tekken_template.chat_template(
                tekken.version, thinks="[THINK]" in tekken.special_tokens
            )
        elif vocabulary_files.has_vocabulary(folder):
            backend, class_tokens = vocabulary_files.build(folder, config)
            special_tokens = class_tokens | special_tokens
        else:
            raise ConfigError(
                f"{folder} has no tokenizer.json, tokenizer.model or tekken.json, nor vocab.json "
                f"with merges.txt or vocab.txt: let model.tokenizer name a folder or id with one"
            )
        known = {
            name: token
            for name, token in special_tokens.items()
            if backend.token_to_id(token) is not None
        }
        # a token that is special already keeps its flags: a mask may include the space before it
        special = {
            each.content for each in backend.get_added_tokens_decoder().values() if each.special
        }
        backend.add_special_tokens(
            [
                tokenizers.AddedToken(token, normalized=False, special=True)
                for token in known.values()
                if token not in special
            ]
        )
        override = None if chat_template is None else Path(chat_template)
        template = ChatTemplate.load(folder, config, special_tokens, override)
        if template is None and built_in is not None:
            template = ChatTemplate(built_in, special_tokens)
        return cls(backend, known, template)

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be encoded."""
        return self._chat_template is not None

    def prepare(self) -> None:
        """Prepares the chat template, which the first conversation would have to wait for. Raises
        `ConfigError` if it cannot be used."""
        if self._chat_template is not None:
            self._chat_template.prepare()

    def describe(self) -> dict[str, Any]:
        """Returns a description for clients: the special tokens that have a role and their ids, and
        the chat template, or templates by name."""
        template = self._chat_template
        return {
            "tokenizer_class": type(self._backend.model).__name__,
            "tokenizer_vocab_size": self.vocab_size,
            "special_tokens": self._special_tokens,
            "special_token_ids": {
                name: _id_of(self._backend, token) for name, token in self._special_tokens.items()
            },
            "chat_template": None if template is None else template.source,
        }

    @property
    def chat_template_text(self) -> str:
        """The Jinja text of the chat template, or of all templates; "" without one."""
        return self._chat_template.text if self._chat_template is not None else ""

    def encode(
        self,
        text: str,
        add_special_tokens: bool = True,
        *,
        param: str = "prompt",
        is_escaped: bool = False,
    ) -> list[int]:
        """Returns the token ids of `text`.

        Args:
            text: any text; the text of a special token becomes that token.
            add_special_tokens: put BOS (or what else the tokenizer prescribes) around it.
            param: the parameter that the text came in, for the error.
            is_escaped: `text` is `ChatText.escaped`, or a piece of it; then no special tokens are
                put around it.

        Raises:
            RequestError: `text` holds half of a surrogate pair, which stands for no character.
        """
        try:
            if is_escaped:
                return self._plain_content.encode(text)
            # Of the library's ways to encode, the batch ones let other threads run; this one also
            # skips offsets.
            return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[
                0
            ].ids
        except TypeError as error:
            raise RequestError(
                "the text holds half of a surrogate pair, which cannot be encoded", param=param
            ) from error

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Returns the token ids of a conversation; `options` and errors are as in `render_chat`."""
        return self.encode_rendered(self.render_chat(messages, **options))

    def encode_rendered(self, chat: ChatText) -> list[int]:
        """Returns the token ids of a conversation that `render_chat` returned.

        Raises `RequestError` as `encode` does.
        """
        # the template writes BOS itself
        return self.encode(
            chat.text if chat.escaped is None else chat.escaped,
            False,
            param="messages",
            is_escaped=chat.escaped is not None,
        )

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        parse_special: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        expand: Callable[[str], str] | None = None,
        **options: Any,
    ) -> ChatText:
        """Returns the prompt that the chat template makes of a conversation.

        Args:
            messages: the messages, each a dict with at least a `role`.
            parse_special: whether the text of a special token in messages, tools or variables
                becomes that token; otherwise it becomes the tokens of plain text.
            tools, template_kwargs: as in `ChatTemplate.render`.
            expand: changes the rendered text, in which no special token is a client's unless
                `parse_special`.
            options: `add_generation_prompt` and `continue_final_message`, as in
                `ChatTemplate.render`.

        Raises:
            RequestError: the model has no chat template, or it refuses the messages.
        """
        if self._chat_template is None:
            raise RequestError(
                "this model has no chat template: use completions with a prompt, or set "
                "model.chat_template to a file with a template",
                param="messages",
            )
        given: Any = (messages, tools, template_kwargs)
        marks: dict[str, str] = {}
        if not parse_special:
            given, marks = self._plain_content.mark(given)
        messages, tools, template_kwargs = given
        rendered = self._chat_template.render(
            messages, tools=tools, template_kwargs=template_kwargs, **options
        )
        if expand is not None:
            rendered = expand(rendered)
        return self._plain_content.unmark(rendered, marks)

    def special_text(self, token: int) -> str:
        """Returns the text of an added token. Raises `ConfigError` if there is none with this
        id."""
        added = self._backend.get_added_tokens_decoder().get(token)
        if added is None:
            raise ConfigError(
                f"the tokenizer has no special token {token}, which config.json names"
            )
        return added.content

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of token ids.

        An id outside of the vocabulary adds nothing; bytes that make no character give U+FFFD. The
        config's `clean_up_tokenization_spaces` does not count, as it does not in transformers for
        BPE vocabularies.
        """
        table, listed = self.token_bytes(skip_special_tokens), list(ids)
        parts = [
            # in pieces: the interpreter changes threads between, not within
            b"".join([table[token] for token in listed[start : start + _DECODED]])
            for start in range(0, len(listed), _DECODED)
        ]
        return self.decode_rules.text(b"".join(parts))

    def to_json(self) -> str:
        """Returns the tokenizer in the format of `tokenizer.json`, with the tokens that were added
        to it when it was loaded."""
        return self._backend.to_str()

    def detokenizer(
        self,
        prompt_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        shown: frozenset[int] = frozenset(),
    ) -> Detokenizer:
        """Returns the detokenizer of the output that follows a prompt. Special tokens are skipped,
        except the tokens in `shown`, which have their texts."""
        table = self.token_bytes(skip_special_tokens)
        if shown and skip_special_tokens:
            table = self._shown_bytes.get(shown) or TokenBytes(
                self._backend, self.decode_rules, self.special_ids - shown
            )
            self._shown_bytes = {shown: table}  # of one message format
        return Detokenizer(self.decode_rules, table, prompt_ids)

    def token_text(self, token: int) -> tuple[str, bytes]:
        """Returns a single token's text and bytes, as log-probabilities are reported: a space
        before a word is part of it.

        The text of a token that is a part of a character holds U+FFFD; its bytes are exact.
        """
        data = self._all_bytes[token]
        return data.decode("utf-8", self.decode_rules.errors), data

    def token_bytes(self, skip_special_tokens: bool) -> TokenBytes:
        """Returns the table of each token's bytes; in the one that skips special tokens these have
        none."""
        return self._text_bytes if skip_special_tokens else self._all_bytes


def _load_backend(file: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Loads `tokenizer.json`, with the added tokens that only the config knows."""
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises bare exceptions
        raise ConfigError(f"{file} is not a tokenizer: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    known = backend.get_added_tokens_decoder()
    added = sorted(
        (int(index), token) for index, token in config.get("added_tokens_decoder", {}).items()
    )
    backend.add_tokens(
        [tokenizers.AddedToken(**token) for index, token in added if index not in known]
    )
    return backend


def _build_sentencepiece(
    pieces: sentencepiece_bpe.Pieces, config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> tokenizers.Tokenizer:
    """Makes the tokenizer of a sentencepiece model; the config has the keys of transformers'
    `LlamaTokenizer`."""
    prefix_space: sentencepiece_bpe.PrefixSpace = "always" if config.get("legacy") else "first"
    backend = sentencepiece_bpe.build(
        pieces, prefix_space if config.get("add_prefix_space") is not False else "never"
    )
    bos = special_tokens.get("bos_token") if config.get("add_bos_token", True) else None
    eos = special_tokens.get("eos_token") if config.get("add_eos_token", False) else None
    sentencepiece_bpe.add_bos_eos(backend, bos, eos)
    return backend


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the special tokens of a config by name; there each is a text or a dict with its
    `content`."""
    named = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in config.items()
        if name.endswith("_token")
    }
    return {name: token for name, token in named.items() if isinstance(token, str)}


def _id_of(backend: tokenizers.Tokenizer, token: str | None) -> int | None:
    return None if token is None else backend.token_to_id(token)
