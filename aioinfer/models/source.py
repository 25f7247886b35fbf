"""The source of a request to a model with an encoder before its decoder: what the encoder reads,
and how a family reads it. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from aioinfer.errors import ConfigError
from aioinfer.models.json_file import read_json

#: Samples a second of the sound that models hear.
SAMPLE_RATE = 16_000
_KEY_BYTES = 16


@dataclass(frozen=True, slots=True)
class SourceData:
    """A source as the encoder takes it.

    Attributes:
        values: int32 [n], token ids; or float32 [n], samples of sound.
        num_tokens: of the encoder's output, at most; what a step's budget counts.
        digest: of the values.
    """

    values: npt.NDArray[Any]
    num_tokens: int
    digest: bytes

    def key(self, salt: bytes) -> bytes:
        """Returns a key that is equal for equal sources under the same salt."""
        return blake2b(salt + self.digest, digest_size=_KEY_BYTES, person=b"source").digest()


@dataclass(frozen=True, slots=True)
class SourceFormat:
    """How a model reads sources.

    Attributes:
        kind: "text" for token ids, "sound" for samples.
        max_values: the maximum of a source's token ids or samples.
        max_tokens: the maximum of tokens of the encoder's output.
        start: the tokens with which the decoder begins, where a request names no others.
        rate: samples a second, of sound.
    """

    kind: Literal["text", "sound"]
    max_values: int
    max_tokens: int
    start: tuple[int, ...]
    rate: int = 0

    def source(self, values: npt.NDArray[Any]) -> SourceData:
        """Returns a source of values, which are no more than `max_values`. Two milliseconds for 30
        seconds of sound, most of them for the digest."""
        is_sound = self.kind == "sound"
        given = np.ascontiguousarray(values, np.float32 if is_sound else np.int32)
        digest = blake2b(given.data, digest_size=_KEY_BYTES, person=self.kind.encode()).digest()
        return SourceData(given, self.max_tokens if is_sound else len(given), digest)


def read_start(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the tokens with which a model's decoder begins: of `generation_config.json`, or of
    `config.json`, the decoder's start token and the one that must follow it.

    Raises `ConfigError` if they are missing or no token ids.
    """
    generation = read_json(folder / "generation_config.json", missing_ok=True)

    def read(name: str) -> Any:
        found = generation.get(name)
        return config.get(name) if found is None else found

    first, forced = read("decoder_start_token_id"), read("forced_bos_token_id")
    first = read("bos_token_id") if first is None else first
    start = [token for token in (first, forced) if token is not None]
    if not start or not all(isinstance(token, int) for token in start):
        raise ConfigError(
            f"decoder_start_token_id and forced_bos_token_id must be token ids, not {start!r}"
        )
    return tuple(start)
