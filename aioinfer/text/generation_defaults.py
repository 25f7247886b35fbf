"""Defaults of requests: end tokens and sampling parameters, from the model's files and the
configuration.

Where a request leaves a sampling parameter out, `model.sampling` of the configuration counts, then
the model's `generation_config.json`, then the built-in default of `SamplingParams`. Like vLLM, and
unlike transformers' `generate`, this reads `generation_config.json` whether or not it sets
`do_sample`: a request is greedy when its temperature is 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aioinfer.errors import ConfigError, RequestError
from aioinfer.models.json_file import read_json
from aioinfer.models.text_model import read_text_config
from aioinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from aioinfer.text.tokenizer import Tokenizer

#: Keys of `generation_config.json` that are sampling parameters, and their names in
#: `SamplingParams`.
_SAMPLING_KEYS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """The defaults of the requests to one model.

    Attributes:
        eos_token_ids: the tokens that end a text; may be empty.
        sampling: values of `SamplingParams` fields, `max_tokens` excepted.
        max_tokens: the output length of a request that brings none, in tokens; it is capped by
            the room in the context. None: no default.
    """

    eos_token_ids: tuple[int, ...] = ()
    sampling: Mapping[str, float | int] = field(default_factory=dict)
    max_tokens: int | None = None

    def end_tokens(self, params: SamplingParams) -> frozenset[int]:
        """Returns the tokens that end an output: the tokens that `params` names, and the
        model's."""
        own = () if params.ignore_eos else self.eos_token_ids
        return frozenset(params.stop_token_ids) | frozenset(own)

    @classmethod
    def load(
        cls,
        folder: Path,
        tokenizer: Tokenizer | None = None,
        configured: Mapping[str, float | int] | None = None,
        end_ids: Sequence[int] = (),
        overrides: Mapping[str, Any] | None = None,
    ) -> GenerationDefaults:
        """Reads a model's folder.

        The end tokens come from `generation_config.json`, else from `config.json`, else from
        `tokenizer`: the first that names any, as with transformers' `generate`; and `end_ids`.

        Args:
            folder: holds the model's `config.json`, and often `generation_config.json`.
            tokenizer: the model's tokenizer; None where it is not loaded.
            configured: sampling parameters of the configuration, which take precedence over the
                model's.
            end_ids: end tokens of the format in which the model writes messages.
            overrides: `model.hf_overrides`, laid over `config.json`.

        Raises:
            ConfigError: a file cannot be read, or holds a value that a request could not have.
        """
        generation = read_json(folder / "generation_config.json", missing_ok=True)
        config = read_text_config(read_json(folder / "config.json", missing_ok=True), overrides)
        eos = _first_given(
            generation.get("eos_token_id"),
            config.get("eos_token_id"),
            tokenizer.eos_token_id if tokenizer else None,
        )
        sampling = {
            ours: generation[theirs]
            for theirs, ours in _SAMPLING_KEYS.items()
            if generation.get(theirs) is not None
        }
        try:
            SamplingParams(**sampling)
        except (RequestError, TypeError) as error:
            raise ConfigError(f"{folder / 'generation_config.json'}: {error}") from error
        sampling |= configured or {}
        max_tokens = sampling.pop("max_tokens", None)
        return cls(tuple(dict.fromkeys((*eos, *end_ids))), sampling, max_tokens)

    def sampling_params(self, **given: Any) -> SamplingParams:
        """Returns the parameters of a request that brings these fields.

        Without `max_tokens` among them it stays None: the engine then takes the default, or what
        the context has room for. A beam search samples nothing and has no use for the defaults.
        Raises `RequestError` for a wrong field.
        """
        defaults = self.sampling if given.get("beam_search") is None else {}
        return SamplingParams(**{**defaults, **given})


def _first_given(*candidates: int | list[int] | None) -> tuple[int, ...]:
    """Returns the first candidate that names any ids.

    Raises `ConfigError` if it holds something else.
    """
    for ids in candidates:
        if ids is not None and ids != []:
            found = tuple(ids) if isinstance(ids, list) else (ids,)
            if not all(isinstance(token, int) for token in found):
                raise ConfigError(
                    f"the eos_token_id of generation_config.json or config.json "
                    f"must be an id or a list of ids, not {ids!r}"
                )
            return found
    return ()
