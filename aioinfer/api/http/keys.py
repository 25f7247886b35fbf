"""API keys: the keys that may send requests, their names, and their limits.

Keys come from `server.api_keys` and from `server.api_key_file`. The file holds plain keys, one a
line, and then a TOML table for each key that has a name:

    [alice]
    sha256 = "5e884898da28047151d0e56f8dc6292773603d0d6aabb9d2..."
    requests_per_minute = 600
    weight = 2

`python -m aioinfer.api.http.keys NAME` makes such a key. In memory there are digests only, so
nothing can print a key. The digest is a plain SHA-256: slow password hashes protect what people
invent against guessing, and would cost each request tens of milliseconds; a key of 256 random bits
cannot be guessed, however fast the hash. `limits` has what each key has used.
"""

from __future__ import annotations

import re
import secrets
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from aioinfer.config import LimitsConfig, ServerConfig
from aioinfer.errors import ConfigError

#: The name of all requests where the server has no keys.
ANONYMOUS = "anonymous"
_KEY = re.compile(r"[\x21-\x7e]+")
_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_Limit = Annotated[int, Meta(ge=0, le=10**12)]
_Digest = Annotated[str, Meta(pattern="^[0-9a-fA-F]{64}$")]


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key, or several under one name that share its limits.

    Attributes:
        name: stands for the key in logs and metrics.
        requests_per_minute, tokens_per_minute, max_concurrent_requests: limits; None is none.
        weight: its share of the server while several keys wait, relative to the others'.
        min_priority: the lowest `priority` that its requests may have; None is any.
        admin: whether it may use the endpoints that act on the whole server.
    """

    name: str
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent_requests: int | None = None
    weight: float = 1.0
    min_priority: int | None = None
    admin: bool = False


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    """A table of the key file. A limit of 0 lifts the one of the configuration."""

    key: str | None = None
    sha256: _Digest | list[_Digest] | None = None
    requests_per_minute: _Limit | None = None
    tokens_per_minute: _Limit | None = None
    max_concurrent_requests: _Limit | None = None
    weight: Annotated[float, Meta(ge=0.01, le=1000)] = 1.0
    min_priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    admin: bool = False

    def digests(self) -> list[bytes]:
        """Returns the digests of its keys. Raises ValueError unless there is exactly one of `key`
        and `sha256`."""
        if (self.key is None) == (self.sha256 is None):
            raise ValueError("needs either key or sha256")
        if self.key is not None:
            return [digest(_checked(self.key))]
        found = [self.sha256] if isinstance(self.sha256, str) else self.sha256 or []
        return [bytes.fromhex(value) for value in found]


class ApiKeys:
    """The API keys. Without any, every request is accepted, under the name `ANONYMOUS`.

    Attributes:
        all: the keys in order, `ANONYMOUS` alone if there are none.
    """

    def __init__(
        self,
        keys: Sequence[tuple[bytes, ApiKey]],
        defaults: LimitsConfig,
        admin_key: str | None = None,
    ):
        """`keys` are (SHA-256 digest, key) pairs; `admin_key` opens the admin endpoints beside
        them, and nothing else. Raises ConfigError for a digest or a name that stands for two
        keys."""
        self._by_digest = dict(keys)
        self._admins = {value for value, key in keys if key.admin}
        if admin_key is not None:
            self._admins.add(digest(admin_key))
        if len(self._by_digest) < len(keys):
            raise ConfigError("server.api_keys and server.api_key_file hold a key twice")
        by_name = {key.name: key for _, key in keys}
        if len(by_name) < len(set(map(id, self._by_digest.values()))):
            raise ConfigError("server.api_key_file: names like key-1 are those of keys without one")
        self.all = list(by_name.values()) or [_with_defaults(ANONYMOUS, _Entry(), defaults)]

    @classmethod
    def load(cls, config: ServerConfig, defaults: LimitsConfig | None = None) -> ApiKeys:
        """Returns the keys of `server.api_keys` and of `server.api_key_file`; `defaults` are the
        limits of keys that have none.

        Raises `ConfigError`, which shows none of them.
        """
        defaults = defaults or LimitsConfig()
        plain, named = list(config.api_keys), dict[str, _Entry]()
        if config.api_key_file is not None:
            try:
                lines, named = _read(Path(config.api_key_file))
            except OSError as error:
                raise _file_error(config, error.strerror or "it cannot be read") from None
            except ValueError as error:
                raise _file_error(config, str(error)) from None
            plain += lines
        try:
            found = list(_plain_keys(plain, defaults))
        except ValueError as error:
            message = f"server.api_keys and the lines of server.api_key_file: {error}"
            raise ConfigError(message) from None
        try:
            found += _named_keys(named, defaults)
        except ValueError as error:
            raise _file_error(config, str(error)) from None
        if config.admin_key is not None:
            try:
                _checked(config.admin_key)
            except ValueError as error:
                raise ConfigError(f"server.admin_key: {error}") from None
        return cls(found, defaults, config.admin_key)

    def find(self, authorization: str | None) -> ApiKey | None:
        """Returns the key that an `Authorization` header holds, None if it is none of these.

        The look-up is by the digest of the key that was sent. Python compares two digests byte by
        byte only where their keyed hashes agree, so its time says nothing about how near a guess
        is.
        """
        if not self._by_digest:
            return self.all[0]
        value = _bearer_digest(authorization)
        return None if value is None else self._by_digest.get(value)

    @property
    def has_admin(self) -> bool:
        """Whether any key opens the admin endpoints."""
        return bool(self._admins)

    def is_admin(self, authorization: str | None) -> bool:
        """Whether an `Authorization` header holds a key that opens the admin endpoints."""
        return _bearer_digest(authorization) in self._admins


def _bearer_digest(authorization: str | None) -> bytes | None:
    """Returns the digest of the key in an `Authorization` header, None for another scheme."""
    scheme, _, key = (authorization or "").partition(" ")
    return digest(key.strip()) if scheme.lower() == "bearer" else None


def digest(key: str) -> bytes:
    """Returns the SHA-256 of a key."""
    return sha256(key.encode("utf-8", "surrogateescape")).digest()


def _checked(key: str) -> str:
    """Returns a key. Raises ValueError, which does not show it, if no header can hold it."""
    if not _KEY.fullmatch(key):
        raise ValueError("keys must be printable ASCII without blanks")
    return key


def _read(file: Path) -> tuple[list[str], dict[str, _Entry]]:
    """Returns a file's plain keys, which stand before its first table, and its tables by name.

    Raises OSError and ValueError, which shows no key.
    """
    try:
        lines = file.read_text("utf-8").splitlines()
    except UnicodeDecodeError:
        raise ValueError("it is not text") from None
    first = next((i for i, line in enumerate(lines) if line.startswith("[")), len(lines))
    plain = [line.strip() for line in lines[:first] if line.strip() and line[0] != "#"]
    try:
        # blank lines in place of the plain keys: the numbers in messages are the file's
        tables = tomllib.loads("\n" * first + "\n".join([*lines[first:], ""]))
    except tomllib.TOMLDecodeError as error:
        place = re.search(r"at line \d+|at end of document", str(error))
        where = place.group() if place else "somewhere"
        raise ValueError(f"it is not TOML {where}") from None
    if not plain and not tables:
        raise ValueError("it holds no key")
    try:
        return plain, msgspec.convert(tables, dict[str, _Entry])
    except msgspec.ValidationError as error:
        # it names types and fields, and no value; at least one key of a table is its name
        raise ValueError(str(error).replace("$[...]", "one of the tables")) from None


def _plain_keys(keys: Sequence[str], defaults: LimitsConfig) -> Iterator[tuple[bytes, ApiKey]]:
    for number, key in enumerate(dict.fromkeys(keys), 1):
        yield digest(_checked(key)), _with_defaults(f"key-{number}", _Entry(), defaults)


def _named_keys(
    entries: dict[str, _Entry], defaults: LimitsConfig
) -> Iterator[tuple[bytes, ApiKey]]:
    for name, entry in entries.items():
        if not _NAME.fullmatch(name) or name == ANONYMOUS:
            raise ValueError(
                "names are 1 to 64 letters, digits and any of ._@-, and none is 'anonymous'"
            )
        try:
            digests = entry.digests()
        except ValueError as error:
            raise ValueError(f"[{name}] {error}") from None
        key = _with_defaults(name, entry, defaults)
        for value in digests:
            yield value, key


def _with_defaults(name: str, entry: _Entry, defaults: LimitsConfig) -> ApiKey:
    """Returns the key of an entry, with the configuration's limits where it has none."""

    def limit(own: int | None, default: int | None) -> int | None:
        return default if own is None else own or None

    return ApiKey(
        name,
        limit(entry.requests_per_minute, defaults.requests_per_minute),
        limit(entry.tokens_per_minute, defaults.tokens_per_minute),
        limit(entry.max_concurrent_requests, defaults.max_concurrent_requests),
        entry.weight,
        defaults.min_priority if entry.min_priority is None else entry.min_priority,
        entry.admin,
    )


def _file_error(config: ServerConfig, reason: str) -> ConfigError:
    return ConfigError(f"server.api_key_file = {config.api_key_file!r}: {reason}")


def main(arguments: Sequence[str]) -> int:
    """Makes a key: writes the entry for the key file to stdout, and the key itself, which nothing
    keeps, to stderr. Returns the exit status."""
    if len(arguments) != 1 or not _NAME.fullmatch(arguments[0]) or arguments[0] == ANONYMOUS:
        sys.stderr.write("usage: python -m aioinfer.api.http.keys NAME >> FILE\n")
        return 2
    key = f"sk-{secrets.token_urlsafe(32)}"
    sys.stderr.write(f"The key of {arguments[0]}, which is not kept anywhere:\n{key}\n")
    # quoted: a bare dot in TOML separates two names
    sys.stdout.write(f'["{arguments[0]}"]\nsha256 = "{digest(key).hex()}"\n')
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
