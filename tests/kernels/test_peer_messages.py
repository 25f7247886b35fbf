"""Messages between two ranks, in processes: whole, in order, and none is overwritten before it was
read."""

from __future__ import annotations

import time

import pytest
import torch
from aioinfer.kernels.peer_messages import ChannelLayout, PeerChannel
from aioinfer.kernels.symmetric_memory import SymmetricBuffer
from peer_processes import run_ranks

MAX_BYTES = 64 * 1024
#: Shapes and dtypes in turn: whole chunks of 16 bytes and parts of one, one program and several.
MESSAGES = [
    ((3, 64), torch.bfloat16), ((1,), torch.int32), ((7,), torch.int32), ((0, 64), torch.bfloat16),
    ((128, 128), torch.float32), ((5, 3), torch.bfloat16), ((2, 8), torch.float16),
]  # fmt: skip
ROUNDS = 3


def message(number: int, rank: int = 0) -> torch.Tensor:
    shape, dtype = MESSAGES[number % len(MESSAGES)]
    generator = torch.Generator().manual_seed(number + 1000 * rank)
    return torch.randint(-100, 100, shape, generator=generator).to(dtype)


def send_or_receive(peers: SymmetricBuffer, slots: int, slow: int) -> list[torch.Tensor]:
    """Rank 0 sends, rank 1 receives; rank `slow` is slow."""
    channel = PeerChannel(peers, ChannelLayout.of(256, slots, MAX_BYTES), 1 - peers.rank)
    received = []
    for number in range(ROUNDS * len(MESSAGES)):
        if peers.rank == slow:
            time.sleep(0.05)
        expected = message(number)
        if peers.rank == 0:
            channel.send(expected)
        else:
            received.append(channel.receive(tuple(expected.shape), expected.dtype))
    return received


@pytest.mark.parametrize(("slots", "slow"), [(1, 0), (1, 1), (2, 1), (4, 0)])
def test_messages_come_whole_and_in_order(slots: int, slow: int) -> None:
    layout = ChannelLayout.of(256, slots, MAX_BYTES)
    _, received = run_ranks(2, layout.end, send_or_receive, slots, slow)
    for number, found in enumerate(received):
        expected = message(number)
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected), number


def exchange(peers: SymmetricBuffer) -> list[torch.Tensor]:
    """Both ranks send on the one channel and receive on it: each has the other's messages."""
    layout = ChannelLayout.of(0, 2, MAX_BYTES)
    out, back = (PeerChannel(peers, layout, 1 - peers.rank) for _ in range(2))
    received = []
    for number in range(4):
        out.send(message(number, peers.rank))
        expected = message(number)
        received.append(back.receive(tuple(expected.shape), expected.dtype))
    return received


def test_each_rank_may_send_and_receive_on_one_layout() -> None:
    found = run_ranks(2, ChannelLayout.of(0, 2, MAX_BYTES).end, exchange)
    for rank in range(2):
        for number, values in enumerate(found[rank]):
            assert torch.equal(values, message(number, 1 - rank))


def refuse(peers: SymmetricBuffer) -> str:
    channel = PeerChannel(peers, ChannelLayout.of(0, 1, 256), 0)
    with pytest.raises(ValueError, match="260 bytes do not fit into 256") as error:
        channel.send(torch.zeros(65))
    return str(error.value)


def test_too_large_a_message_is_refused() -> None:
    (message,) = run_ranks(1, ChannelLayout.of(0, 1, 256).end, refuse)
    assert "260 bytes" in message
