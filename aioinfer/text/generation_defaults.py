"""What a model says about its own generation: end tokens, and defaults of the sampling parameters.

The engine reads it at the start. The sampling parameters are taken as the server's defaults for
what a request leaves out, as vLLM does; transformers' rule that they count only under `do_sample`
is for its own `generate`, while here a request is greedy when it says `temperature: 0`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aioinfer.errors import ConfigError, RequestError
from aioinfer.sampling_params import SamplingParams
from aioinfer.text.json_file import read_json

if TYPE_CHECKING:
    from aioinfer.text.tokenizer import Tokenizer

#: The keys of `generation_config.json` that are sampling parameters, and what these are called
#: here.
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
    """The defaults of one model.

    Attributes:
        eos_token_ids: the tokens that end a text; may be empty.
        sampling: values of `SamplingParams` fields.
    """

    eos_token_ids: tuple[int, ...] = ()
    sampling: Mapping[str, float | int] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: Path, tokenizer: Tokenizer | None = None) -> GenerationDefaults:
        """Reads a model's folder.

        The end tokens are those of `generation_config.json`, else of `config.json`, else of
        `tokenizer`: the first that names any, as with transformers' `generate`.

        Raises:
            ConfigError: a file cannot be read, or holds a value that no request could ask for.
        """
        generation = read_json(folder / "generation_config.json")
        config = read_json(folder / "config.json")
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
        return cls(eos, sampling)

    def sampling_params(self, **given: Any) -> SamplingParams:
        """Returns the parameters of a request that gives these fields.

        Raises `RequestError` for a wrong one.
        """
        return SamplingParams(**{**self.sampling, **given})


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
