"""A replica in a process of its own, for `functional/test_lost_replicas.py`.

    python -m tests.replica_process NAME TOKEN SECTION.KEY=VALUE ...

It writes its `Address` as JSON, and serves until its standard input ends.
"""

from __future__ import annotations

import asyncio
import json
import sys

from aioinfer.config import load_config
from aioinfer.gateway.replica import ReplicaServer


async def main(name: str, token: str, settings: list[str]) -> None:
    config = load_config("configs/smollm2.toml", settings)
    replica = await ReplicaServer.start(config, "127.0.0.1", name, token)
    sys.stdout.write(json.dumps(replica.address) + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await replica.stop()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
