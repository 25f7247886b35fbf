"""The trainer's side of a group for new weights, as SGLang's users set it up."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed import distributed_c10d

NAME = "weight_update_group"


def broadcast_file(port: int, world_size: int, file: Path) -> None:
    """Forms the group, and broadcasts the tensors of a checkpoint."""
    limit = timedelta(seconds=20)
    store = dist.TCPStore("127.0.0.1", port, world_size, True, limit)
    helper: Any = distributed_c10d._new_process_group_helper
    group, _ = helper(
        world_size, 0, [], "gloo", dist.PrefixStore(NAME, store), group_name=NAME, timeout=limit
    )
    for tensor in load_file(file).values():
        group.broadcast(tensor, 0).wait()
    distributed_c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
    dist.destroy_process_group(group)  # which lets the name be used again
