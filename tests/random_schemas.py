"""Random JSON schemas, and random outputs that follow a constraint."""

from __future__ import annotations

import random
import re
from typing import Any

import numpy as np

from aioinfer.text.constraints import Constraint, mask_words
from aioinfer.text.tokenizer import Tokenizer

NAMES = ["a", "bb", "name with space", "ünï", 'q"uote', "x-y"]
PATTERNS = [
    "^[a-z]{1,5}$", "b+", "^(yes|no)$", r"^\d{3}-\d{2}$", r"^\w+\.\w+$", "^[^x]*$", "^ü{2}",
    r"^\S+ \S+$", "[A-F0-9]$",
]  # fmt: skip
FORMATS = ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid",
           "uri"]  # fmt: skip
SCALARS = [0, 1, -7, 2.5, "a", 'Ünï\n"\\', "", True, False, None, 10**12, 1e-3]


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """Returns a JSON schema that is nested `depth` deep at most; some cannot be satisfied."""
    kinds = [_string, _string, _number, _number, _fixed]
    if depth:
        kinds += [_array, _object, _object, _object, _combined]
    return rng.choice(kinds)(rng, depth)


def random_schemas(count: int, start: int = 0) -> list[dict[str, Any]]:
    """Returns schemas of arrays, objects and combinations, always the same ones."""
    rng = random.Random(start)
    kinds = [_array, _object, _object, _object, _combined]
    return [rng.choice(kinds)(rng, 2) for _ in range(count)]


def _some(rng: random.Random, **keywords: Any) -> dict[str, Any]:
    """Returns some of these keywords."""
    return {name: value for name, value in keywords.items() if rng.random() < 0.4}


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    kind: Any = rng.choice(["string", "string", ["string", "null"]])
    lengths = _some(rng, minLength=rng.randint(0, 3), maxLength=rng.randint(3, 20))
    others = [lengths, {"pattern": rng.choice(PATTERNS)}, {"format": rng.choice(FORMATS)}]
    return {"type": kind} | rng.choice(others) | (lengths if rng.random() < 0.2 else {})


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    kind = rng.choice(["integer", "number"])
    low, high = sorted([rng.randint(-50, 500) / rng.choice([1, 1, 4]) for _ in range(2)])
    if kind == "integer":
        low, high = int(low), int(high)
    bounds = rng.choice(
        [
            _some(rng, minimum=low, maximum=high),
            _some(rng, exclusiveMinimum=low, exclusiveMaximum=high),
        ]
    )
    multiple = rng.choice([1, 2, 5, 7] if kind == "integer" else [0.5, 0.25, 0.01, 3])
    return {"type": kind} | bounds | ({"multipleOf": multiple} if rng.random() < 0.2 else {})


def _fixed(rng: random.Random, depth: int) -> dict[str, Any]:
    return rng.choice(
        [
            {"type": "boolean"},
            {"type": "null"},
            {"type": ["integer", "boolean"]},
            {"enum": rng.sample(SCALARS, rng.randint(1, 4))},
            {"const": rng.choice([*SCALARS, {"a": [1, {}]}, []])},
            {},
        ]
    )


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    few = rng.randint(1, 3)
    return {"type": "array"} | _some(
        rng,
        items=random_schema(rng, depth - 1),
        prefixItems=[random_schema(rng, depth - 1) for _ in range(few)],
        minItems=rng.randint(0, 2),
        maxItems=rng.randint(2, 4),
    )


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(0, 4))
    patterns = {"^x": random_schema(rng, depth - 1), "^[0-9]$": random_schema(rng, depth - 1)}
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth - 1) for name in names},
        "required": rng.choice([names, names[1:], NAMES[:2], []]),
        "additionalProperties": rng.choice([False, False, True, random_schema(rng, depth - 1)]),
    } | rng.choice(
        [
            {},
            {},
            {"patternProperties": patterns},
            _some(rng, minProperties=rng.randint(0, 3), maxProperties=rng.randint(3, 5)),
        ]
    )


def _combined(rng: random.Random, depth: int) -> dict[str, Any]:
    keyword = rng.choice(["anyOf", "anyOf", "allOf", "oneOf"])
    inner = [random_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    if depth == 2 and rng.random() < 0.3:  # references are relative to the whole schema
        return {"$ref": "#/$defs/x", "$defs": {"x": {keyword: inner}}}
    return {keyword: inner}


class RandomWriter:
    """Writes random outputs under constraints, which tend to come to an end."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_token: int):
        self._tokenizer, self._end, self._vocab_size = tokenizer, end_token, vocab_size
        table = tokenizer.token_bytes(False)
        data = [table[token] for token in range(tokenizer.vocab_size)]
        self._closing = np.zeros(32 * mask_words(vocab_size), bool)
        self._closing[: len(data)] = [bool(re.search(rb'["\]}]', each)) for each in data]
        self._short = np.zeros(32 * mask_words(vocab_size), bool)
        self._short[: len(data)] = [len(each) <= 2 for each in data]

    def write(
        self, constraint: Constraint, rng: random.Random, max_tokens: int = 200
    ) -> str | None:
        """Returns an output, or None if it has not ended within `max_tokens`."""
        mask = np.zeros(mask_words(self._vocab_size), np.int32)
        output: list[int] = []
        for _ in range(max_tokens):
            constraint.fill(mask)
            allowed = np.unpackbits(mask.view(np.uint8), bitorder="little").view(bool)
            assert not allowed[self._vocab_size :].any()
            token = self._pick(allowed, rng)
            if token == self._end:
                return self._tokenizer.decode(output, False)
            constraint.accept([token])
            output.append(token)
            if constraint.is_finished:
                return self._tokenizer.decode(output, False)
        return None

    def _pick(self, allowed: np.ndarray, rng: random.Random) -> int:
        if allowed[self._end] and rng.random() < 0.5:
            return self._end
        for preferred, share in ((self._closing, 0.4), (self._short, 0.5)):
            some = np.flatnonzero(allowed & preferred)
            if len(some) and rng.random() < share:
                return int(rng.choice(some))
        return int(rng.choice(np.flatnonzero(allowed)))
