"""A request's whole way: HTTP body, protocol, frontend, plan, ring, worker, result, reply. Whatever
a body holds, it ends nothing but its own request.

All parts are the real ones but for the model: the rings (one process holds both ends), the slots,
the CPU sampler and the features. The logits are the same random numbers at every position.
"""

from __future__ import annotations

import asyncio
import io
import json
import sys
from collections.abc import Coroutine, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import pytest
import torch
import uvloop
from hypothesis import HealthCheck, Phase, event, example, given, settings
from hypothesis import strategies as st

from aioinfer.api.decoding import MAX_PROMPTS
from aioinfer.api.server import HttpServer
from aioinfer.checkpoint.source import resolve_model
from aioinfer.config import Config, load_config
from aioinfer.engine.frontend import Frontend
from aioinfer.errors import EngineDeadError
from aioinfer.features.logprobs import worker as logprobs
from aioinfer.features.masks import worker as masks
from aioinfer.features.prompt_logprobs import worker as prompt_logprobs
from aioinfer.ipc.plan import I32, StepPlan, StepResult
from aioinfer.ipc.ring import Ring
from aioinfer.layers.embedding import Vocabulary
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.layers.step import Step
from aioinfer.sampling_params import (
    MAX_LOGIT_BIAS,
    MAX_N,
    MAX_STOP_CHARS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
)
from aioinfer.worker.features import Rank
from aioinfer.worker.runner import ModelRunner
from aioinfer.worker.slots import Slots
from aioinfer.worker.step_works import StepWorks
from bench_loop import CONFIG, EchoExecutor
from tests.filled_slots import device_without_layers

pytestmark = [pytest.mark.longest, pytest.mark.slow]

MAX_MODEL_LEN = 48
VOCAB_SIZE = 49_152


def make_runner(slots: Slots) -> ModelRunner:
    """A model runner whose model gives every token the same logits."""
    logits = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(0)) * 3

    def finish(step: Step, stream: None) -> torch.Tensor:
        rows = step.inputs.input_ids if step.sampled is None else step.sampled.rows
        return torch.zeros(len(rows), 1)

    model: Any = SimpleNamespace(
        vocabulary=Vocabulary(VOCAB_SIZE, ParallelGroup.single()),
        finishes_with_hidden_states=True, scores_tokens=True, plan=lambda step: None,
        begin=lambda step, out, received: None, take_part=lambda: None, finish=finish,
        finish_all=finish, logits=lambda hidden, *_: logits.repeat(len(hidden), 1),
        logits_of=lambda hidden, *_: logits.repeat(len(hidden), 1),
    )  # fmt: skip
    rank = Rank(model, slots)
    works = StepWorks(half.Work(rank) for half in (logprobs, masks, prompt_logprobs))
    return ModelRunner(model, device_without_layers(slots), works)


class RingExecutor(EchoExecutor):
    """Sends plans through a ring to slots and a sampler, and results through another."""

    def __init__(self, config: Config):
        super().__init__(config, 0.0)
        self.plans, self.results = Ring(1), Ring(1)
        rows = config.scheduler.max_num_seqs
        self.slots = Slots(rows, MAX_MODEL_LEN, 16, VOCAB_SIZE, torch.device("cpu"))
        self.runner = make_runner(self.slots)
        self._filled: set[int] = set()  # steps whose masks were posted
        self._waiting: StepPlan | None = None  # for masks

    async def start(self, on_result: Any, on_failure: Any, on_progress: Any) -> Any:
        self._fail = on_failure
        return await super().start(on_result, on_failure, on_progress)

    def post(self, plan: StepPlan) -> None:
        try:
            self.plans.write(plan.encode())
        except Exception as error:
            self._fail(EngineDeadError(repr(error)))
        else:
            self._loop.call_soon(self._work)

    def post_masks(self, step_id: int) -> None:
        self._filled.add(step_id)
        if self._waiting is not None:
            plan, self._waiting = self._waiting, None
            self.results.write(self._execute(plan).encode())
            self._loop.call_soon(self._work)

    def _work(self) -> None:
        """What a worker's process and the engine's reader of results do."""
        try:
            for _ in range(self.plans.announced(0)):
                plan = StepPlan.decode(bytes(self.plans.read(0)))
                self.plans.release(0)
                waits = self.runner.works.of(plan).late is not None
                if waits and plan.step_id not in self._filled:
                    self._waiting = plan
                else:
                    self.results.write(self._execute(plan).encode())
            for _ in range(self.results.announced(0)):
                result = StepResult.decode(self.results.read(0))
                self.results.release(0)
                self._on_result(result)
        except Exception as error:
            self._fail(EngineDeadError(repr(error)))

    def _execute(self, plan: StepPlan) -> StepResult:
        return self.runner.step(plan, self._read_masks).wait()

    def _read_masks(self, plan: StepPlan, count: int) -> I32:
        return self.masks_of(plan.step_id)[:count]

    async def shutdown(self) -> None:
        self.plans.close()
        self.results.close()


class Server:
    """The server and a client of it, on an event loop that runs while a test waits for replies."""

    def __init__(self) -> None:
        # an operation on a row of logits takes microseconds; threads for it, on cores that other
        # tests use, make it milliseconds
        torch.set_num_threads(1)
        self.runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self.runner.run(self._start())

    async def _start(self) -> None:
        changed = {
            "scheduler.max_num_seqs": 32,
            "scheduler.max_num_batched_tokens": 512,
            "model.max_model_len": MAX_MODEL_LEN,
            "server.port": 0,
        }
        config = load_config(CONFIG, changed)
        self.frontend = Frontend(config, [RingExecutor(config)])
        await self.frontend.start(resolve_model(config.model))
        self._http = HttpServer(self.frontend.config, self.frontend)
        self._session = aiohttp.ClientSession(await self._http.start())

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Returns the status and the reply, of a stream its last event."""
        kind, data = {"Content-Type": "application/json"}, io.BytesIO(json.dumps(body).encode())
        async with self._session.post(path, data=data, headers=kind) as response:
            text = await response.text()
            if response.content_type != "text/event-stream":
                return response.status, json.loads(text)
            *_, last, done, rest = text.split("\n\n")
            assert (done, rest) == ("data: [DONE]", "")
            return response.status, json.loads(last.removeprefix("data: "))

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(work)

    def close(self) -> None:
        self.run(self._close())
        self.runner.close()

    async def _close(self) -> None:
        await self._session.close()
        await self._http.close()
        await self.frontend.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


PLAIN = {"prompt": "hello", "max_tokens": 2, "temperature": 0, "ignore_eos": True}


class Answer(NamedTuple):
    """What came of a body, and of a plain request that was sent right after it."""

    body: dict[str, Any]
    status: int
    reply: dict[str, Any]
    plain_status: int
    plain: dict[str, Any]


def send(server: Server, path: str, body: dict[str, Any]) -> Answer:
    """Sends a body, and then a plain request."""

    async def both() -> Answer:
        return Answer(
            body, *await server.post(path, body), *await server.post("/v1/completions", PLAIN)
        )

    answer: Answer = server.run(both())
    return answer


def assert_ended_itself_alone(server: Server, answer: Answer) -> None:
    """The body got a reply, an error with a reason, or the end of its own time or, in a stream, of
    what it allows; the plain request was served as ever, and all records agree."""
    error = answer.reply.get("error", {})
    if answer.status in (400, 404):
        assert error["message"], "an error has a reason"
    elif error:  # of a stream, for the greater part
        field = {"timeout": "timeout_s", "no_token_allowed": "stream"}[error["code"]]
        assert field in answer.body, answer.reply
    else:
        assert answer.status == 200, answer.reply
    assert answer.plain_status == 200, answer.plain
    assert answer.plain["usage"]["completion_tokens"] == 2
    assert server.frontend.dead_reason is None
    server.frontend.engines[0].scheduler.check_integrity()


FLOAT32_MAX = float(np.finfo(np.float32).max)
FLOATS = [
    0, -0.0, 5e-324, 1e-46, -1e-46, 1e-45, 1e-40, 2.0**-126, 1e-38, 1e-30, 1e-6, 1e-5, 1.1e-5, 0.01,
    0.5, 1 - 1e-9, 1, 1 + 1e-9, 2, -2, 2.0000001, 100, -100, 101, 1e38, FLOAT32_MAX, 1e39,
    sys.float_info.max, -sys.float_info.max,
]  # fmt: skip
INTEGERS = [
    0, -1, 1, 2, 20, 21, 40, 41, MAX_N, MAX_N + 1, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1,
    2**63 - 1, 2**63, -(2**63), 2**64 - 1, 2**64, 10**400, 1.5,
]  # fmt: skip
FLOAT_FIELDS = (
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "timeout_s",
)  # fmt: skip
INTEGER_FIELDS = ("n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "priority")
#: Lists of the sizes around their bounds.
LISTS: dict[str, list[Any]] = {
    "logit_bias": [
        {str(token): bias for token in range(size)}
        for size in (0, 1, MAX_LOGIT_BIAS, MAX_LOGIT_BIAS + 1, VOCAB_SIZE)
        for bias in (-100, 0, 1e-46, 100)
    ],
    "stop_token_ids": [
        list(range(size)) for size in (0, 1, MAX_STOP_TOKEN_IDS, MAX_STOP_TOKEN_IDS + 1, 40_000)
    ],
    "stop": [
        "", "x", "x" * MAX_STOP_CHARS, "x" * (MAX_STOP_CHARS + 1), [], ["x"] * MAX_STOPS,
        ["x"] * (MAX_STOPS + 1), ["y" * (MAX_STOP_CHARS // MAX_STOPS)] * MAX_STOPS, [""],
    ],
    "prompt": [
        "", "x", "x " * 10_000, [], [5], [5] * (MAX_MODEL_LEN - 1), [5] * MAX_MODEL_LEN,
        [5] * 40_000,
        [0, VOCAB_SIZE - 1], [VOCAB_SIZE], [2**31 - 1], ["a", "b"], [[5], [6, 7]], [[]],
        ["a"] * (MAX_PROMPTS + 1),
    ],
}  # fmt: skip


@pytest.mark.parametrize("field", [*FLOAT_FIELDS, *INTEGER_FIELDS, *LISTS])
def test_every_extreme_of_a_field_is_served_or_refused(server: Server, field: str) -> None:
    values = LISTS.get(field, FLOATS if field in FLOAT_FIELDS else INTEGERS)
    body = {"prompt": "hello", "max_tokens": 2}
    statuses = set()
    for value in values:
        answer = send(server, "/v1/completions", body | {field: value})
        assert_ended_itself_alone(server, answer)
        statuses.add(answer.status)
    assert statuses >= {200, 400}, "some are served, and some are beyond the bounds"


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"top_p": 1e-46}, 400),
        ({"repetition_penalty": 1e-46}, 400),
        ({"temperature": 1e-46}, 200),
        ({"min_p": 1e-46}, 200),
        ({"n": MAX_N, "logit_bias": {str(i): 1 for i in range(VOCAB_SIZE)}}, 400),
        ({"n": MAX_N, "logit_bias": {str(i): 1 for i in range(MAX_LOGIT_BIAS)}}, 200),
        ({"min_tokens": 2, "stop_token_ids": list(range(VOCAB_SIZE))}, 400),
        ({"n": MAX_N, "min_tokens": 2, "stop_token_ids": list(range(MAX_STOP_TOKEN_IDS))}, 200),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else str(value),
)
def test_what_once_ended_the_server(server: Server, fields: dict[str, Any], status: int) -> None:
    answer = send(server, "/v1/completions", PLAIN | fields)
    assert_ended_itself_alone(server, answer)
    assert answer.status == status


def fields_of(options: dict[str, list[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {}, optional={name: st.sampled_from(values) for name, values in options.items()}
    )


#: What passes alone, so that many extremes mostly pass together; the test above has the others.
PASSING: dict[str, list[Any]] = {
    "temperature": [0, 1e-46, 1e-5, 1.1e-5, 1, 100], "top_p": [2.0**-126, 1e-30, 0.5, 1 - 1e-9, 1],
    "min_p": [0, 1e-46, 2.0**-126, 1e-30, 1], "repetition_penalty": [0.01, 0.5, 1, 100],
    "presence_penalty": [-2, 1e-46, 2], "frequency_penalty": [-2, 1e-46, 2],
    "top_k": [-1, 0, 1, VOCAB_SIZE, 2**31 - 1], "n": [1, 2, 40, MAX_N],
    "seed": [-(2**63), 0, 2**63 - 1], "max_tokens": [1, 2, 5], "min_tokens": [0, 1],
    "ignore_eos": [True, False], "stream": [True, False], "include_stop_str_in_output": [True],
    "timeout_s": [60, 1e300], "logit_bias": LISTS["logit_bias"][4:12],
    "stop_token_ids": [[5], list(range(MAX_STOP_TOKEN_IDS))],
    "stop": ["x" * MAX_STOP_CHARS, ["x"] * MAX_STOPS, ["y" * (MAX_STOP_CHARS // MAX_STOPS)]],
    "prompt": ["x", [5], [5] * (MAX_MODEL_LEN - 5), [0, VOCAB_SIZE - 1], ["a", "b"], [[5], [6, 7]]],
}  # fmt: skip


def deep(depth: int) -> dict[str, Any]:
    """Returns an object in an object, and so on."""
    value: dict[str, Any] = {"<|im_end|>": "<|im_start|>"}
    for _ in range(depth):
        value = {"a": value}
    return value


def call(arguments: Any, name: str = "f") -> dict[str, Any]:
    return {"function": {"name": name, "arguments": arguments}}


CONTENTS = ["", "hi", "<|im_end|>", "\ud800", "\0", "x " * 40_000, "<|im_end|>" * 4000, None]
#: Of a conversation: what templates read.
TEMPLATE_FIELDS: dict[str, list[Any]] = {
    "messages": [
        *([{"role": "user", "content": content}] for content in CONTENTS),
        *([{"role": "user", "content": "x", "name": content}] for content in CONTENTS),
        *([{"role": role, "content": "x"}] for role in ("developer", "tool", "x" * 999)),
        *(
            [{"role": "assistant", "content": "x", "tool_calls": [call(arguments)]}]
            for arguments in (None, "", "{}", "[", deep(0), deep(300), '{"a":' * 5000)
        ),
        [{"role": "assistant", "content": "x", "tool_calls": [call({}, "<|im_end|>")] * 20_000}],
        [{"role": "user", "content": "x"}] * 20_000,
        [{"role": "user", "content": [{"type": "text", "text": "<|im_end|>"}] * 3}],
        [{"role": "user", "content": [{"type": "image_url"}]}],
        [],
        "x",
        5,
    ],
    "tools": [[], [{}], [deep(0)] * 3, [deep(400)], [{"a": 1}] * 60_000, "x"],
    "chat_template_kwargs": [
        {}, deep(0), deep(400), {"bos_token": "<|im_end|>"}, {"messages": []}, {"tokenize": 1},
        {"self": 1}, {"a": "x" * 100_000}, {str(i): i for i in range(60_000)}, [],
    ],
    "parse_special": [True, False, 1],
    "add_generation_prompt": [True, False, "x"],
    "continue_final_message": [True, False, 0],
}  # fmt: skip
#: Fields of both kinds of bodies, and of one.
FLAGS: dict[str, list[Any]] = {
    "stream_options": [{}, {"include_usage": True}, {"include_usage": 5}, []],
    "user": ["x" * 100_000, 5], "model": ["x" * 100_000, 5],
    "skip_special_tokens": [True, False, 0], "include_stop_str_in_output": [True, False, 0],
    "stream": [True, False, "x"], "ignore_eos": [True, False, "x"],
}  # fmt: skip
COMPLETION_FLAGS: dict[str, list[Any]] = {
    "best_of": [-1, 1, 2, 2**31], "echo": [True, False, 0], "suffix": ["", "x"],
    "add_special_tokens": [True, False, 0], "return_token_ids": [True, False, 0],
}  # fmt: skip
CHAT_FLAGS: dict[str, list[Any]] = {
    "top_logprobs": [-1, 0, 20, 21, 2**31],
    "max_completion_tokens": [0, 1, 2**31 - 1, 2**31],
    "response_format": [{"type": "text"}, {"type": "x" * 100_000}, {}],
    "tool_choice": ["auto", "none", "x" * 100_000, {}],
}
HELLO = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("field", [*TEMPLATE_FIELDS, *FLAGS, *CHAT_FLAGS])
def test_every_extreme_of_a_field_of_chat_ends_nothing_else(server: Server, field: str) -> None:
    for value in (TEMPLATE_FIELDS | FLAGS | CHAT_FLAGS)[field]:
        body = {"messages": HELLO, "max_tokens": 2, "logprobs": True, field: value}
        assert_ended_itself_alone(server, send(server, "/v1/chat/completions", body))
        if field in TEMPLATE_FIELDS:
            tokenized = send(server, "/tokenize", {"messages": HELLO, field: value})
            assert_ended_itself_alone(server, tokenized)


@pytest.mark.parametrize("field", [*FLAGS, *COMPLETION_FLAGS])
def test_every_extreme_of_a_flag_of_completions_ends_nothing_else(
    server: Server, field: str
) -> None:
    for value in (FLAGS | COMPLETION_FLAGS)[field]:
        body = {"prompt": "hello", "max_tokens": 2, field: value}
        assert_ended_itself_alone(server, send(server, "/v1/completions", body))


@pytest.mark.parametrize("tokens", [[], [0], [-1], [2**31 - 1], [2**31], [5] * 300_000, ["x"], 5])
def test_every_list_of_tokens_ends_nothing_else(server: Server, tokens: Any) -> None:
    assert_ended_itself_alone(server, send(server, "/detokenize", {"tokens": tokens}))


#: Each is compiled once, and kept.
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["b", 1]}}, "required": ["a"]}
STRUCTURED: dict[str, list[Any]] = {
    "response_format": [{"type": "json_object"}, {"type": "text"},
                        {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
                        {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}],
    "structured_outputs": [{"regex": "[ab]{1,3}"}, {"choice": ["yes", "no"]}, {"choice": []},
                           {"regex": "("}, {}],
    "grammar": ['start: "a" | "b" start'],
    "allowed_token_ids": [[5], [0, VOCAB_SIZE - 1], [VOCAB_SIZE], []],
    "bad_words": [["a", "b c"], ["x" * 4096]],
}  # fmt: skip
ONE_STRUCTURED = st.sampled_from(
    [{}, {}, *({name: value} for name, values in STRUCTURED.items() for value in values)]
)
BODIES = fields_of(PASSING | {"logprobs": [0, 1, 20], "echo": [True, False]})
CHATS = fields_of({name: PASSING[name] for name in PASSING if name != "prompt"}) | fields_of(
    {
        "logprobs": [True], "top_logprobs": [0, 20], "max_completion_tokens": [1, 2**31 - 1],
        "messages": TEMPLATE_FIELDS["messages"][:16], "tools": [[deep(0)]],
        "chat_template_kwargs": [deep(0)], "parse_special": [True, False],
        "add_generation_prompt": [True, False], "continue_final_message": [True, False],
    }
)  # fmt: skip


TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
TOOL_FIELDS = st.sampled_from([
    {}, {}, {"tools": [TOOL]}, {"tools": [TOOL], "tool_choice": "required"},
    {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
    {"tools": [TOOL], "tool_choice": "none"}, {"tools": [TOOL, TOOL]},
])  # fmt: skip

# without shrinking, which would take minutes
RUN = {
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "phases": [Phase.explicit, Phase.reuse, Phase.generate],
}


@settings(max_examples=60, **RUN)
@given(BODIES, ONE_STRUCTURED)
@example({"n": MAX_N, "logit_bias": LISTS["logit_bias"][8], "stream": True, "min_tokens": 1}, {})
@example({"n": 40, "logprobs": 20}, {"response_format": {"type": "json_object"}})
def test_no_completion_ends_anything_but_itself(
    server: Server, fields: dict[str, Any], structured: dict[str, Any]
) -> None:
    body = {"prompt": "hello", "max_tokens": 2} | fields | structured
    answer = send(server, "/v1/completions", body)
    assert_ended_itself_alone(server, answer)
    event(str(answer.status))


@settings(max_examples=60, **RUN)
@given(CHATS, ONE_STRUCTURED, TOOL_FIELDS)
def test_no_chat_ends_anything_but_itself(
    server: Server, fields: dict[str, Any], structured: dict[str, Any], tools: dict[str, Any]
) -> None:
    body = {"messages": HELLO, "max_tokens": 2} | fields | structured | tools
    answer = send(server, "/v1/chat/completions", body)
    assert_ended_itself_alone(server, answer)
    event(str(answer.status))
