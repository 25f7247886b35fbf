"""API keys: the keys that may send requests, their names, and their limits.

Keys come from `server.api_keys`: a list of some, which have no names of their own, or a TOML file
with a table for each name:

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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from aioinfer.config import ServerConfig
from aioinfer.config_sections import LIMITS
from aioinfer.errors import ConfigError

#: The name of all requests where the server has no keys.
ANONYMOUS = "anonymous"
_KEY = re.compile(r"[\x21-\x7e]+")
_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_WHAT_IS_A_NAME = "names are 1 to 64 letters, digits and any of ._@-, and none is 'anonymous'"
_Limit = Annotated[int, Meta(ge=0, le=10**12)]
_Digest = Annotated[str, Meta(pattern="^[0-9a-fA-F]{64}$")]


class ApiKey(Struct, frozen=True, forbid_unknown_fields=True):
    """A key, or several under one name that share its limits.

    Attributes:
        name: stands for the key in logs and metrics.
        requests_per_minute, tokens_per_minute, max_concurrent_requests: limits; None is none.
        weight: its share of the server while several keys wait, relative to the others'.
        min_priority: the lowest `priority` that its requests may have, and the one of requests that
            name none, if it is above 0.
        admin: whether it may use the endpoints that act on the whole server.
    """

    name: str
    requests_per_minute: _Limit | None = None
    tokens_per_minute: _Limit | None = None
    max_concurrent_requests: _Limit | None = None
    weight: Annotated[float, Meta(ge=0.01, le=1000)] = 1.0
    min_priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] = 0
    admin: bool = False

    def limited_by(self, defaults: Mapping[str, int]) -> ApiKey:
        """Returns the key with the configuration's limits where it has none. A limit of 0 lifts
        the configuration's."""
        fields = {name: getattr(self, name) for name in ApiKey.__struct_fields__}
        for name in LIMITS:
            own = fields[name]
            fields[name] = defaults.get(name) if own is None else own or None
        return ApiKey(**fields)


class _Entry(ApiKey, frozen=True, kw_only=True):
    """A table of the key file, with the key in clear or the digests of keys."""

    key: str | None = None
    sha256: _Digest | list[_Digest] | None = None

    def digests(self) -> list[bytes]:
        """Returns the digests of its keys. Raises ValueError unless there is exactly one of `key`
        and `sha256`."""
        if (self.key is None) == (self.sha256 is None):
            raise ValueError(f"[{self.name}] needs either key or sha256")
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
        defaults: Mapping[str, int],
        admin_key: str | None = None,
    ):
        """`keys` are (SHA-256 digest, key) pairs; `admin_key` opens the admin endpoints beside
        them, and nothing else. Raises ConfigError for a digest that stands for two keys."""
        self._by_digest = {value: key.limited_by(defaults) for value, key in keys}
        self._admins = {value for value, key in keys if key.admin}
        if admin_key is not None:
            self._admins.add(digest(admin_key))
        if len(self._by_digest) < len(keys):
            raise ConfigError("server.api_keys: the file holds a key twice")
        by_name = {key.name: key for key in self._by_digest.values()}
        self.all = list(by_name.values()) or [ApiKey(ANONYMOUS).limited_by(defaults)]

    @classmethod
    def load(cls, config: ServerConfig) -> ApiKeys:
        """Returns the keys of `server.api_keys`, with the limits of `server.limits` where they have
        none.

        Raises `ConfigError`, which shows none of them.
        """
        found: list[tuple[bytes, ApiKey]] = []
        given = config.api_keys
        with _errors_of("server.api_keys"):
            if isinstance(given, str):
                for entry in _read(Path(given)):
                    found += [(value, entry) for value in entry.digests()]
            else:
                for number, key in enumerate(dict.fromkeys(given), 1):
                    found.append((digest(_checked(key)), ApiKey(f"key-{number}")))
        with _errors_of("server.admin_key"):
            admin_key = None if config.admin_key is None else _checked(config.admin_key)
        return cls(found, config.limits, admin_key)

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


def _read(file: Path) -> Iterator[_Entry]:
    """Yields the tables of a key file. Raises OSError and ValueError, which shows no key."""
    try:
        tables = tomllib.loads(file.read_text("utf-8"))
    except UnicodeDecodeError:
        raise ValueError("it is not text") from None
    except tomllib.TOMLDecodeError as error:
        place = re.search(r"at line \d+|at end of document", str(error))
        raise ValueError(f"it is not TOML {place.group() if place else 'somewhere'}") from None
    if not tables:
        raise ValueError("it holds no key")
    for name, table in tables.items():
        if not _is_name(name):
            raise ValueError(_WHAT_IS_A_NAME)
        if not isinstance(table, dict) or "name" in table:
            raise ValueError("it must hold tables such as [alice], without a name in them")
        known = [field for field in _Entry.__struct_fields__ if field != "name"]
        if unknown := sorted(table.keys() - set(known)):
            raise ValueError(f"[{name}] has {unknown[0]!r}, and may have {', '.join(known)}")
        try:
            yield msgspec.convert(table | {"name": name}, _Entry)
        except msgspec.ValidationError as error:  # it names types and fields, and no value
            raise ValueError(f"[{name}] {error}") from None


def _is_name(name: str) -> bool:
    return bool(_NAME.fullmatch(name)) and name != ANONYMOUS


@contextmanager
def _errors_of(place: str) -> Iterator[None]:
    """Makes a `ConfigError`, which names the place, of OSError and ValueError."""
    try:
        yield
    except OSError as error:
        # its name may be a key that was given without brackets
        raise ConfigError(f"{place}: {error.strerror or 'the file cannot be read'}") from None
    except ValueError as error:
        raise ConfigError(f"{place}: {error}") from None


def main(arguments: Sequence[str]) -> int:
    """Makes a key: writes the entry for the key file to stdout, and the key itself, which nothing
    keeps, to stderr. Returns the exit status."""
    # a name like --help may be in a file, but here it is no name
    if len(arguments) != 1 or not _is_name(arguments[0]) or arguments[0].startswith("-"):
        sys.stderr.write(
            f"usage: python -m aioinfer.api.http.keys NAME >> FILE\n{_WHAT_IS_A_NAME}\n"
        )
        return 2
    key = f"sk-{secrets.token_urlsafe(32)}"
    sys.stderr.write(f"The key of {arguments[0]}, which is not kept anywhere:\n{key}\n")
    # quoted: a bare dot in TOML separates two names
    sys.stdout.write(f'["{arguments[0]}"]\nsha256 = "{digest(key).hex()}"\n')
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
