"""The buckets of distances against transformers, and the table that attention reads."""

from __future__ import annotations

import torch
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder
from transformers.models.t5.modeling_t5 import T5Attention

from aioinfer.layers.backend import Backend
from aioinfer.layers.distance_bias import DistanceBias, buckets_of
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.layers.shards import Shard

BACKEND = Backend(torch.device("cpu"), torch.float32, ParallelGroup.single())


def test_buckets() -> None:
    distances = torch.arange(-600, 601)
    for count in (32, 16):
        expected = MPNetEncoder.relative_position_bucket(distances, num_buckets=count)
        assert torch.equal(buckets_of(distances, count), expected)
        expected = T5Attention._relative_position_bucket(distances, False, count, 100)
        assert torch.equal(buckets_of(distances, count, 100, both_ways=False), expected)


def test_a_rank_has_the_biases_of_its_heads() -> None:
    bias = DistanceBias("bias", 32, Shard(2, 2, 8), 20, BACKEND)
    ((name, shard),) = bias.weight_shards()
    assert (name, shard.start, shard.total) == ("bias.weight", 2, 8)
    shard.destination.normal_()
    weight = shard.destination.clone()
    bias.finalize()
    assert bias.table.shape == (2, 39)
    found = bias.of_length(7)
    for query in range(7):
        for key in range(7):
            bucket = buckets_of(torch.tensor(key - query), 32)
            assert torch.equal(found[:, query, key], weight[bucket])
