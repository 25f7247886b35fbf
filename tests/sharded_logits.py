"""The logits of models whose ranks are processes, for the tests of tensor parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from aioinfer.layers.parallel import ParallelGroup
from tests.paged_model import PagedModel, load_model
from tests.rank_processes import run_ranks


def logits_of_ranks(
    models: Sequence[Path], text: Sequence[int], size: int, scratch: Path
) -> list[torch.Tensor]:
    """Returns the logits [tokens, vocab_size] of a text by each of `models`, which `size` ranks
    share.

    Args:
        models: folders.
        text: token ids.
        size: how many ranks.
        scratch: an empty folder.
    """
    torch.save((list(models), list(text)), scratch / "job")
    found = run_ranks(_compute, size, scratch)
    return [torch.cat(parts, dim=-1) for parts in zip(*found, strict=True)]


def _compute(rank: int, size: int, scratch: Path) -> None:
    torch.set_num_threads(1)
    models, text = torch.load(scratch / "job", weights_only=False)
    store = dist.FileStore(str(scratch / "store"), size)
    group = ParallelGroup.connect(rank, size, store, torch.device("cpu"))
    found = []
    for folder in models:
        model = load_model(folder, group)
        logits = PagedModel(model, 16).step({0: text})[0]
        found.append(logits[:, : model.vocabulary.local_size])
    torch.save(found, scratch / f"rank-{rank}-of-{size}")
