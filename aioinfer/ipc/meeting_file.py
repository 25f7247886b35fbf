"""Where the ranks of one host find each other: an anonymous file for torch's `FileStore`.

A `TCPStore` listens on a port that every user of the host can connect to, without authentication.
This file has no name, so nobody else can open it (`/proc/PID/fd` is closed to other users), and
nothing of it is left behind, whatever ends the processes. Ranks on several hosts need a
`TCPStore`: `RankSpec.master_address` names it.
"""

from __future__ import annotations

from collections import Counter

from aioinfer.ipc.anonymous_file import AnonymousFile


class MeetingFile(AnonymousFile):
    """The file of one world of ranks; for one start of them."""

    def __init__(self) -> None:
        super().__init__("aioinfer-meeting")

    @property
    def path(self) -> str:
        """A path by which this process can open the file, and no other."""
        return f"/proc/self/fd/{self._fd}"


class Meetings:
    """The files of worlds whose ranks are those of several engines. At its n-th start, an engine's
    ranks meet those of the n-th start of all others."""

    def __init__(self, num_engines: int):
        self._num_engines = num_engines
        self._starts: Counter[int] = Counter()
        self._files: dict[int, MeetingFile] = {}

    def next(self, engine: int) -> MeetingFile:
        """Returns the file for the next start of an engine, which closes it."""
        start = self._starts[engine]
        self._starts[engine] += 1
        if start not in self._files:
            self._files[start] = MeetingFile()
        file = self._files[start].duplicate()
        if all(self._starts[each] > start for each in range(self._num_engines)):
            self._files.pop(start).close()
        return file
