"""Where the ranks of one host find each other: an anonymous file for torch's `FileStore`.

A `TCPStore` listens on a port that every user of the host can connect to, without authentication.
This file has no name, so nobody else can open it (`/proc/PID/fd` is closed to other users), and
nothing of it is left behind, whatever ends the processes. Ranks on several hosts need a
`TCPStore`: `RankSpec.master_address` names it.
"""

from __future__ import annotations

from aioinfer.ipc.anonymous_file import AnonymousFile


class MeetingFile(AnonymousFile):
    """The file of one world of ranks; for one start of them."""

    def __init__(self) -> None:
        super().__init__("aioinfer-meeting")

    @property
    def path(self) -> str:
        """A path by which this process can open the file, and no other."""
        return f"/proc/self/fd/{self._fd}"
