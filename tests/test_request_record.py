"""Records of admitted requests: every field arrives as it was checked, and what sequences have in
common is sent once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aioinfer.ipc.request_record import (
    RECORD,
    RECORD_WORDS,
    WORD,
    Admission,
    AdmissionPacker,
    Admissions,
)
from aioinfer.ipc.sections import ArrayReader
from aioinfer.sampling_params import PARAMETERS, SamplingParams
from tests.plans import ids

#: A value for each parameter that crosses, unlike its default.
VALUES: dict[str, Any] = {
    "temperature": 0.3, "top_k": 7, "top_p": 0.9, "min_p": 2.0**-126, "repetition_penalty": 0.01,
    "presence_penalty": -2.0, "frequency_penalty": 1.7, "second_text": 5,
}  # fmt: skip


def through_the_wire(admissions: Admissions) -> Admissions:
    kind, *rest = b"".join(admissions.encode())[:4], b"".join(admissions.encode())[4:]
    assert int.from_bytes(kind, "little") == Admissions.kind
    return Admissions.decode(ArrayReader(rest[0], 0))


def test_the_layout_follows_from_the_declarations() -> None:
    crossing = [parameter for parameter in PARAMETERS if parameter.crosses]
    assert [p.name for p in crossing] == list(VALUES), "a new one needs a value here"
    assert list(RECORD.names or ())[-len(crossing) :] == [p.name for p in crossing]
    assert RECORD.itemsize == 4 * RECORD_WORDS == 4 * len(WORD)
    for parameter in crossing:
        expected = np.float32 if parameter.is_float else np.int32
        assert RECORD[parameter.name] == expected


def test_a_request_arrives_whole() -> None:
    params = SamplingParams(**VALUES, min_tokens=3, logit_bias={5: -0.1, 2: 100.0})
    sent = Admission(9, ids(4, 5, 6, 7), 2, params, 2**64 - 3, frozenset([11]))
    [got] = through_the_wire(Admissions.of([sent]))
    assert (got.slot, got.prompt_len, got.seed) == (9, 2, 2**64 - 3)
    assert got.tokens.tolist() == [4, 5, 6, 7]
    assert got.bias_ids.tolist() == [5, 2]
    assert got.bias_values.tolist() == [np.float32(-0.1), 100.0]
    assert got.banned_ids.tolist() == [11]
    assert got.record["banned_until"] == 5
    for name in VALUES:
        assert got.record[name] == getattr(params, name), "the same bits as were checked"


def test_what_is_left_out_crosses_as_its_default() -> None:
    [got] = through_the_wire(Admissions.of([Admission(0, ids(1), 1, SamplingParams(top_k=-1))]))
    assert got.record["top_k"] == 0
    assert got.record["top_p"] == 1
    assert got.record["banned_until"] == 0
    assert len(got.bias_ids) == len(got.banned_ids) == 0


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**64 - 1, -(2**63)])
def test_all_64_bits_of_a_seed_arrive(seed: int) -> None:
    [got] = Admissions.of([Admission(0, ids(1), 1, SamplingParams(), seed)])
    assert got.seed == seed % 2**64


def test_sequences_of_one_request_send_their_lists_once() -> None:
    params = SamplingParams(logit_bias=dict.fromkeys(range(1000), 1.0), min_tokens=2)
    tokens, banned = np.arange(500, dtype=np.int32), frozenset(range(50))
    packer = AdmissionPacker()
    assert packer.bytes_of_lists(params, banned) == 8 * 1000 + 4 * 50
    for slot in range(128):
        packer.add(Admission(slot, tokens, 500, params, slot, banned))
        assert packer.bytes_of_lists(params, banned) == 0
    assert packer.nbytes == 128 * RECORD.itemsize + 4 * 500 + 8 * 1000 + 4 * 50
    packed = through_the_wire(packer.pack())
    assert len(packed.tokens) == 500
    for slot, got in enumerate(packed):
        assert got.slot == slot == got.seed
        assert np.array_equal(got.tokens, tokens)
        assert len(got.bias_ids) == 1000
        assert sorted(got.banned_ids.tolist()) == list(range(50))


def test_the_bytes_are_those_of_the_section() -> None:
    packer = AdmissionPacker()
    for slot in range(3):
        bias = SamplingParams(logit_bias={slot: 1.0, 9: 2.0})
        packer.add(Admission(slot, ids(*range(slot + 1)), 1, bias, 0, (7,)))
    head = 4 * 6  # the kind and the lengths of five arrays
    assert sum(map(len, packer.pack().encode())) == head + packer.nbytes
