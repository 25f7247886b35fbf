"""The chat template: formats a conversation as the text of a prompt.

`Tokenizer` owns one, if its folder has one. Templates are Jinja programs that models ship, and what
they may use is whatever transformers offers them (its own filters, functions and blocks, a sandbox,
plain data, special tokens as variables), which changes from release to release; so transformers
renders them. It needs a tokenizer object for that, and gets one with an empty vocabulary, which
takes no time to make.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import tokenizers

from aioinfer.errors import ConfigError, RequestError
from aioinfer.models.json_file import read_json
from aioinfer.text.template_bounds import BoundedText, bound

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_log = logging.getLogger(__name__)


class ChatTemplate:
    """One template, or several by name: then "tool_use" serves requests with tools, and "default"
    all others. They are compiled by `prepare`, or when the first one is rendered.

    Attributes:
        source: the Jinja text, or the texts by name.
        text: the Jinja text of all of them.
    """

    def __init__(self, templates: str | dict[str, str], special_tokens: Mapping[str, str]):
        """Takes the templates.

        Args:
            templates: the Jinja text, or the texts by name.
            special_tokens: variables that templates may use, such as `{"bos_token": "<s>"}`.
        """
        self.source = templates
        self.text = templates if isinstance(templates, str) else "\n".join(templates.values())
        self._special_tokens = special_tokens

    def prepare(self) -> None:
        """Imports what renders the templates, half a second, and compiles them. Raises
        `ConfigError` if one cannot be used, such as one that is not valid Jinja."""
        try:
            _ = self._renderer
        except ConfigError:
            raise
        except Exception as error:  # what transformers raises depends on its release
            raise ConfigError(f"the chat template cannot be used: {error!r}") from error

    @cached_property
    def _renderer(self) -> PreTrainedTokenizerFast:
        from transformers import PreTrainedTokenizerFast

        templates, texts = self.source, [self.text]
        bounded: Any = BoundedText(self.text)
        if not isinstance(templates, str):
            bounded = {name: BoundedText(text) for name, text in templates.items()}
            texts = list(templates.values())
        empty = tokenizers.Tokenizer(tokenizers.models.BPE())
        renderer = PreTrainedTokenizerFast(
            tokenizer_object=empty, chat_template=bounded, **self._special_tokens
        )
        for text in texts:
            _compile(renderer, BoundedText(text))
        return renderer

    @cached_property
    def _reserved(self) -> frozenset[str]:
        """The parameters of rendering itself, also where transformers hands them on under another
        name: a request may set variables of the template, but none of these."""
        parameters = inspect.signature(self._renderer.apply_chat_template).parameters
        return frozenset(parameters) - {"documents"} | {"conversations", "messages", "self"}

    @classmethod
    def load(
        cls,
        folder: Path,
        config: Mapping[str, Any],
        special_tokens: Mapping[str, str],
        override: Path | None,
    ) -> ChatTemplate | None:
        """Finds the templates as transformers does, or returns None where there are none.

        Args:
            folder: may hold `chat_template.jinja` and `additional_chat_templates/NAME.jinja`, or
                `chat_template.json`, of older processors of pictures and sound; they go before the
                config's.
            config: `tokenizer_config.json`, whose `chat_template` is a text or a list of names and
                texts.
            special_tokens: as in the constructor.
            override: a file with a template to use in place of all of these.

        Raises:
            ConfigError: a file cannot be read.
        """
        if override is not None:
            return cls(_read(override), special_tokens)
        named = {
            file.stem: _read(file)
            for file in sorted(folder.glob("additional_chat_templates/*.jinja"))
        }
        main = folder / "chat_template.jinja"
        if main.is_file():
            named["default"] = _read(main)
        if not named:
            of_processor = read_json(folder / "chat_template.json", missing_ok=True).get(
                "chat_template"
            )
            given = of_processor or config.get("chat_template") or {}
            named = (
                {"default": given}
                if isinstance(given, str)
                else {item["name"]: item["template"] for item in given}
            )
        if not named:
            return None
        return cls(named["default"] if named.keys() == {"default"} else named, special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Returns the text of the prompt, as transformers' `apply_chat_template(...,
        tokenize=False)`.

        Args:
            messages: dicts with at least a `role`.
            tools: JSON schemas of the functions that the model may call.
            add_generation_prompt: end with the text that opens the assistant's turn.
            continue_final_message: leave the last message open, for the model to go on with it.
            template_kwargs: further variables of the template, such as `{"enable_thinking":
                False}`.

        Raises:
            RequestError: the template refuses the conversation or fails on it.
        """
        variables = dict(template_kwargs or {})
        if wrong := sorted(self._reserved & variables.keys()):
            raise RequestError(
                f"chat_template_kwargs may not hold {wrong[0]!r}", param="chat_template_kwargs"
            )
        if add_generation_prompt and continue_final_message:
            raise RequestError(
                "continue_final_message needs add_generation_prompt to be false: a prompt goes on "
                "with the last message or opens one",
                param="continue_final_message",
            )
        try:
            return self._renderer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] if tools is not None else None,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=False,
                **variables,
            )
        except Exception as error:  # a template is a program, and may raise anything
            raise RequestError(
                f"the chat template cannot render these messages: {error}",
                param="messages",
                logged="the chat template cannot render these messages",
            ) from error


def _compile(renderer: PreTrainedTokenizerFast, text: BoundedText) -> None:
    """Has transformers compile (and keep) a template, so that a bad one ends the start and no
    request waits for it."""
    try:
        renderer.apply_chat_template(
            [{"role": "user", "content": ""}], chat_template=text, tokenize=False
        )
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"the chat template is not valid Jinja: line {error.lineno}: {error.message}"
        ) from error
    except Exception:  # the template compiles, but needs other messages than this one
        pass
    from transformers.utils import chat_template_utils

    # transformers caches compiled templates, and renders the cached one
    compiled = getattr(chat_template_utils, "_compile_jinja_template", None)
    if compiled is None:
        _log.warning("this release of transformers renders chat templates without bounds")
    else:
        bound(compiled(text), text)


def _read(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the chat template {file} cannot be read: {error}") from error
