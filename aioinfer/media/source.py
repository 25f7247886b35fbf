"""Where the bytes of a picture or a sound come from: a data URL, base64, a file below a folder that
the configuration allows, or a host that it allows.

A request could otherwise have the server read its own files or reach hosts of its network. So by
default there are neither files nor hosts; a host's addresses are looked up once, right where the
connection is made, and private ones are refused; redirects are not followed.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote_to_bytes, urlsplit

import aiohttp
import msgspec
from aiohttp.abc import AbstractResolver, ResolveResult

from aioinfer.config import MediaConfig
from aioinfer.errors import FieldError

#: Seconds that fetching a picture may take.
FETCH_TIMEOUT_S = 10.0
#: Read of a reply at a time.
_CHUNK = 64 * 1024
#: Media types whose pictures may be read; a type that is not given, or not an image's, is not
#: looked at: the bytes say what they are.
_REFUSED_TYPES = ("image/svg+xml",)
#: Characters of a data URL that are decoded at a time, a multiple of 4: decoding holds the
#: interpreter's lock, for which the event loop waits, and percents take 40 bytes each meanwhile.
_PIECE = 2**18


@dataclass(frozen=True, slots=True)
class MediaSource:
    """A picture or a clip of sound of a request, before it is read.

    Attributes:
        place: its place in the body, for errors.
        url: a URL of the kind data, file, http or https; or base64 alone where `is_base64`.
        is_base64: whether `url` is base64 without anything around it.
        is_sound: whether it is a clip of sound.
    """

    place: str
    url: str
    is_base64: bool = False
    is_sound: bool = False


class MediaReader:
    """Reads the bytes of pictures and sounds as a configuration allows. Its errors are
    `FieldError`s with the place.

    Args:
        config: the section `[media]`.
        is_allowed_address: whether a connection may be made to an address; by default to public
            ones.
    """

    def __init__(
        self,
        config: MediaConfig,
        is_allowed_address: Callable[[str], bool] = lambda address: is_public(address),
    ):
        self._config = config
        self._is_allowed_address = is_allowed_address
        allowed = config.allowed_sources
        self._folders = [Path(name) for name in allowed if name.startswith("/")]
        self._hosts = {name.lower().rstrip(".") for name in allowed if not name.startswith("/")}

    async def read(self, source: MediaSource) -> bytes:
        """Returns the bytes of a picture or a sound. Raises `FieldError`."""
        if source.is_base64:
            return await asyncio.to_thread(self._decode, source.url, source.place)
        scheme = source.url[:8].partition(":")[0].lower()
        if scheme == "data":
            return await asyncio.to_thread(self._read_data_url, source)
        if scheme == "file":
            return await asyncio.to_thread(self._read_file, source)
        if scheme in ("http", "https"):
            return await self._fetch(source)
        example = "a sound (data:audio/wav" if source.is_sound else "a picture (data:image/png"
        raise FieldError(source.place, f"must be a data URL with {example};base64,...)")

    def _too_large(self, place: str) -> FieldError:
        return FieldError(place, f"has more than {self._config.max_bytes} bytes (media.max_bytes)")

    def _decode(self, text: str, place: str) -> bytes:
        if len(text) // 4 * 3 > self._config.max_bytes + 3:
            raise self._too_large(place)
        try:
            data = _decode_base64(text)
        except (msgspec.ValidationError, ValueError) as error:
            raise FieldError(place, "is not valid base64") from error
        return self._checked(data, place)

    def _checked(self, data: bytes, place: str) -> bytes:
        if not data:
            raise FieldError(place, "is empty")
        if len(data) > self._config.max_bytes:
            raise self._too_large(place)
        return data

    def _read_data_url(self, source: MediaSource) -> bytes:
        """Reads a URL of RFC 2397."""
        head, comma, text = source.url[5:].partition(",")
        kind, *parameters = head.lower().split(";")
        kind = kind.strip()
        if not comma:
            raise FieldError(source.place, "is a data URL without a comma before its data")
        what, family = ("sound", "audio/") if source.is_sound else ("picture", "image/")
        if kind in _REFUSED_TYPES or (kind and not kind.startswith((family, "application/octet"))):
            raise FieldError(source.place, f"is of the type {kind[:40]!r}, and no {what}")
        if "base64" in (each.strip() for each in parameters):
            return self._decode(text, source.place)
        if len(text) > 3 * self._config.max_bytes:
            raise self._too_large(source.place)
        return self._checked(_unquote(text), source.place)

    def _read_file(self, source: MediaSource) -> bytes:
        """Reads a file below an allowed folder. One error stands for all files that are not read:
        it does not tell which exist."""
        place = source.place
        if not self._folders:
            raise FieldError(place, "may not be a file: media.allowed_sources has no folder")
        refused = FieldError(place, "is no file below a folder that media.allowed_sources names")
        parts = urlsplit(source.url)
        if parts.netloc not in ("", "localhost"):
            raise refused
        try:
            path = Path(os.fsdecode(unquote_to_bytes(parts.path))).resolve(strict=True)
            if not any(path.is_relative_to(folder.resolve()) for folder in self._folders):
                raise refused
            # a pipe must not be waited for
            with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise refused
                return self._checked(file.read(self._config.max_bytes + 1), place)
        except FieldError:  # a ValueError, too
            raise
        except (OSError, ValueError) as error:
            raise refused from error

    async def _fetch(self, source: MediaSource) -> bytes:
        """Fetches from an allowed host."""
        place = source.place
        try:
            parts = urlsplit(source.url)
            host = (parts.hostname or "").lower().rstrip(".")
            has_login = parts.username is not None or parts.password is not None
        except ValueError as error:
            raise FieldError(place, "is not a valid URL") from error
        if host not in self._hosts or has_login:
            raise FieldError(place, "names a host that media.allowed_sources does not")
        # aiohttp connects to an address without asking the resolver
        is_address = ":" in host or host.replace(".", "").isdigit()
        if is_address and not self._is_allowed_address(host):
            raise FieldError(place, "could not be fetched")
        try:
            async with asyncio.timeout(FETCH_TIMEOUT_S):
                return await self._fetch_from(source)
        except TimeoutError as error:
            text = f"could not be fetched within {FETCH_TIMEOUT_S:g} s"
            raise FieldError(place, text) from error
        except FieldError:
            raise
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise FieldError(place, "could not be fetched") from error

    async def _fetch_from(self, source: MediaSource) -> bytes:
        resolver = _CheckedResolver(self._is_allowed_address)
        connector = aiohttp.TCPConnector(resolver=resolver, limit=1, force_close=True)
        async with (
            aiohttp.ClientSession(connector=connector, trust_env=False) as session,
            session.get(source.url, allow_redirects=False) as reply,
        ):
            if reply.status != 200:
                raise FieldError(source.place, f"was answered with status {reply.status}")
            data = bytearray()
            async for chunk in reply.content.iter_chunked(_CHUNK):
                data += chunk
                if len(data) > self._config.max_bytes:
                    raise self._too_large(source.place)
        return self._checked(bytes(data), source.place)


def _decode_base64(text: str) -> bytes:
    """Decodes base64, also in lines, as `base64 FILE` writes it. Raises ValueError or
    msgspec.ValidationError if it is not valid."""
    found, rest, is_over = [], "", False
    for at in range(0, len(text), _PIECE):
        piece = text[at : at + _PIECE]
        if "\n" in piece or "\r" in piece:
            piece = piece.replace("\n", "").replace("\r", "")
        piece = rest + piece
        whole = len(piece) // 4 * 4
        piece, rest = piece[:whole], piece[whole:]
        if is_over and piece:
            raise ValueError("base64 that goes on after its end")
        is_over = is_over or piece.endswith("=")
        found.append(msgspec.convert(piece, bytes))  # five times as fast as base64.b64decode
    if rest:
        raise ValueError("base64 that is cut off")
    return b"".join(found)


def _unquote(text: str) -> bytes:
    """Decodes percents."""
    found, at = [], 0
    while at < len(text):
        end = at + _PIECE
        percent = text.rfind("%", end - 2, end)  # whose digits are in the next piece
        end = end if percent < 0 else percent
        found.append(unquote_to_bytes(text[at:end]))
        at = end
    return b"".join(found)


class _CheckedResolver(AbstractResolver):
    """Looks a host up, and fails for one with an address that may not be connected to. The
    connection is made to the addresses that it returns."""

    def __init__(self, is_allowed: Callable[[str], bool]):
        self._is_allowed = is_allowed

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Returns the addresses of a host. Raises OSError."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, family=family, type=socket.SOCK_STREAM)
        if not found or not all(self._is_allowed(str(address[0])) for *_, address in found):
            raise OSError("the host has an address that is not public")
        return [
            ResolveResult(
                hostname=host, host=str(address[0]), port=port, family=kind, proto=proto,
                flags=socket.AI_NUMERICHOST,
            )
            for kind, _, proto, _, address in found
        ]  # fmt: skip

    async def close(self) -> None:
        """Does nothing: there is nothing to close."""


def is_public(address: str) -> bool:
    """Whether an IP address is one of the public internet."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(parsed, "ipv4_mapped", None)
    return (mapped or parsed).is_global and not parsed.is_multicast
