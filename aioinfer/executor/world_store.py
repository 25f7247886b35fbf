"""The store through which the ranks of an engine on several hosts find each other."""

from __future__ import annotations

import socket
from typing import Any


def open_store(address: str) -> tuple[Any, int]:
    """Returns a `TCPStore`, through which the ranks of several hosts find each other, and its port.

    It listens at this address alone. Torch's stores know no authentication: whoever reaches the
    port while the engine starts can disturb that, as with everything that torch sends.
    """
    from torch.distributed import TCPStore

    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family)
    port = listener.getsockname()[1]
    store = TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, port
