"""Which replica of a cluster gets a request, by what replicas have reported."""

from __future__ import annotations

import random
import time
from collections import Counter
from typing import Any

import msgspec
import pytest

from aioinfer.api.event_stream import STREAM_HEADER, mark_frame
from aioinfer.cluster.reports import ReplicaLoad, Report
from aioinfer.cluster.router import PROMISE_S, REQUEST_COST, Choice, ClusterRouter, route_cost
from aioinfer.engine.output import KnownDelta
from aioinfer.gateway.prompt_reader import Prompt
from aioinfer.gateway.relay import Relay

BLOCK = 16


def hashes(name: str, count: int) -> list[bytes]:
    return [f"{name}{i}".encode() for i in range(count)]


class Cluster:
    """A router whose clock is turned by hand, and replicas of 64 slots and 100 000 tokens."""

    def __init__(self, replicas: int, **options: int):
        self.now = 0.0
        self.router = ClusterRouter(clock=lambda: self.now, **options)
        for number in range(replicas):
            self.router.join(str(number))
            self.report(number, is_first=True)

    def report(
        self,
        replica: int,
        added: list[bytes] | None = None,
        removed: list[bytes] | None = None,
        *,
        is_first: bool = False,
        is_leaving: bool = False,
        of_snapshots: bool = False,
        **load: int,
    ) -> None:
        usual = {"max_tokens": 100_000, "max_requests": 64}
        self.router.report(
            str(replica),
            Report(
                ReplicaLoad(**(usual | load)), added or [], removed or [], BLOCK, is_first,
                is_leaving, of_snapshots,
            ),
        )  # fmt: skip

    def route(self, length: int, known: list[bytes] | None = None, **more: object) -> Choice:
        choice = self.router.route(length, known or [], **more)  # type: ignore[arg-type]
        assert choice is not None
        return choice


def test_without_replicas_there_is_no_choice() -> None:
    assert ClusterRouter().route(10) is None


def test_idle_replicas_are_used_one_after_the_other() -> None:
    cluster = Cluster(3)
    used = []
    for _ in range(6):
        choice = cluster.route(10)
        used.append(choice.replica)
        cluster.router.end(choice)
    assert used == ["0", "1", "2", "0", "1", "2"]


def test_requests_spread_before_any_report() -> None:
    cluster = Cluster(3)
    assert Counter(cluster.route(100).replica for _ in range(9)) == {"0": 3, "1": 3, "2": 3}


def test_a_prefix_goes_to_who_holds_the_most_of_it() -> None:
    cluster, prompt = Cluster(3), hashes("a", 20)
    cluster.report(1, prompt[:10])
    cluster.report(2, prompt)
    choice = cluster.route(20 * BLOCK + 5, prompt)
    assert (choice.replica, choice.num_tokens) == ("2", 20 * BLOCK)
    assert choice.cost == 2 * 5


def test_a_hit_counts_up_to_the_first_block_that_is_missing() -> None:
    cluster, prompt = Cluster(2), hashes("a", 20)
    cluster.report(0, prompt[:4] + prompt[5:])
    cluster.report(1, prompt[:6])
    assert cluster.route(320, prompt).num_tokens == 6 * BLOCK


def test_a_hit_of_a_model_with_states_ends_at_a_snapshot() -> None:
    """Each counts by itself, whether or not there are any before it; blocks without one do not."""
    cluster, known = Cluster(3), hashes("a", 40)
    snapshots = {0: [known[9]], 1: [known[29]], 2: [known[19], b"other"]}
    for number, held in snapshots.items():
        cluster.report(number, held, of_snapshots=True)
    for length, replica, blocks in ((40, "1", 30), (29, "2", 20), (15, "0", 10)):
        choice = cluster.route(length * BLOCK + 1, known[:length])
        assert (choice.replica, choice.num_tokens) == (replica, blocks * BLOCK)
        cluster.router.end(choice)
        cluster.now += PROMISE_S + 1  # what was routed is not promised any more
        for number in snapshots:
            cluster.report(number, of_snapshots=True)
    cluster.report(1, removed=[known[29]], of_snapshots=True)
    assert cluster.route(641, known).num_tokens == 20 * BLOCK
    nothing = cluster.route(9 * BLOCK + 1, hashes("b", 9))
    assert nothing.num_tokens == 0


def test_load_outweighs_a_prefix_by_its_tokens() -> None:
    cluster, prompt = Cluster(2), hashes("a", 40)  # worth 2 x 640 tokens
    cluster.report(0, prompt, running=4)
    assert cluster.route(41 * BLOCK, prompt).replica == "0"
    cluster = Cluster(2)
    cluster.report(0, prompt, running=6)
    assert cluster.route(41 * BLOCK, prompt).replica == "1"


def test_what_is_evicted_counts_no_longer() -> None:
    cluster, prompt = Cluster(2), hashes("a", 20)
    cluster.report(1, prompt)
    cluster.report(1, [], prompt[3:])
    assert cluster.route(320, prompt).num_tokens == 3 * BLOCK


def test_a_burst_follows_the_first_request_until_it_pays_no_more() -> None:
    cluster, prompt = Cluster(2), hashes("a", 128)
    used = [cluster.route(128 * BLOCK + 10, prompt).replica for _ in range(12)]
    assert used[:4] == ["0"] * 4
    assert "1" in used
    cluster.now += PROMISE_S + 1
    cluster.report(0)
    cluster.report(1)
    assert cluster.route(128 * BLOCK, prompt).num_tokens == 0, "a promise that was never kept"


def test_a_full_replica_comes_after_all_others() -> None:
    cluster, prompt = Cluster(2), hashes("a", 100)
    cluster.report(0, prompt, running=64)
    cluster.report(1, running=63)
    assert cluster.route(1600, prompt).replica == "1"
    cluster.report(1, running=64, waiting=1)
    cluster.report(0, running=10, used_tokens=100_001)
    assert cluster.route(1600, prompt).replica == "0"


def test_own_requests_count_until_a_report_does() -> None:
    cluster = Cluster(2)
    first = cluster.route(1000)
    assert first.replica == "0"
    cluster.report(0)  # made before the request came there
    assert cluster.route(1000).replica == "1"
    cluster.now += 0.2
    cluster.report(0, running=1)
    cluster.report(1, running=1)
    # both alike again: what was reported is not counted twice
    assert {cluster.route(10).cost, cluster.route(10).cost} == {REQUEST_COST + 20}


def test_ended_requests_count_no_more() -> None:
    cluster = Cluster(1)
    choices = [cluster.route(100) for _ in range(3)]
    cluster.now += 1
    cluster.report(0, running=3)
    for choice in choices:
        cluster.router.end(choice)
    assert cluster.route(0).cost == 0


def test_stale_reports_leave_the_least_loaded() -> None:
    cluster, prompt = Cluster(2, stale_s=3), hashes("a", 50)
    cluster.report(1, prompt)
    cluster.now += 2
    cluster.report(0)
    cluster.now += 2
    assert cluster.router.num_fresh == 1
    assert cluster.route(800, prompt).num_tokens == 0
    cluster.now += 2
    assert cluster.router.num_fresh == 0
    used = Counter(cluster.route(800, prompt).replica for _ in range(5))
    assert sorted(used.values()) == [2, 3]  # one has got the request before


def test_who_leaves_gets_nothing_and_comes_back_empty() -> None:
    cluster, prompt = Cluster(2), hashes("a", 50)
    cluster.report(1, prompt)
    running = cluster.route(800, prompt)
    assert running.replica == "1"
    cluster.report(1, is_leaving=True)
    assert list(cluster.router.names) == ["0"]
    cluster.router.end(running)
    assert cluster.route(800, prompt).num_tokens == 0
    cluster.router.join("1")
    cluster.report(1, is_first=True)
    cluster.now += PROMISE_S + 1
    cluster.report(0)
    cluster.report(1)
    assert {cluster.route(800, prompt).num_tokens for _ in range(2)} == {0, 799}, "one promise"
    cluster.report(1, prompt[:1], is_first=True)  # its workers were restarted
    assert len(cluster.router) == 2


def test_a_replica_that_refused_is_avoided() -> None:
    cluster = Cluster(3)
    first = cluster.route(10)
    second = cluster.route(10, avoid={first.replica})
    third = cluster.route(10, avoid={first.replica, second.replica})
    assert len({first.replica, second.replica, third.replica}) == 3
    assert cluster.route(10, avoid={"0", "1", "2"}).replica in {"0", "1", "2"}


def test_memory_is_bounded_and_what_is_used_stays() -> None:
    cluster, kept = Cluster(2, max_hashes=100), hashes("kept", 10)
    cluster.report(1, kept)
    for number in range(30):
        cluster.report(0, hashes(f"other{number}-", 10))
        cluster.router.end(cluster.route(160, kept))
    assert cluster.router.num_hashes == 100
    assert cluster.route(161, kept).num_tokens == 160


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_is_the_cheapest(seed: int) -> None:
    """Against a look at every replica, within the steps in which loads are compared."""
    rng = random.Random(seed)
    cluster = Cluster(40)
    prompts = [hashes(name, 30) for name in "abc"]
    held = {}
    loads = {}
    for number in range(40):
        prompt, size = rng.choice(prompts), rng.randint(0, 30)
        running, prefill = rng.randint(0, 5), rng.randint(0, 3000)
        cluster.report(number, prompt[:size], running=running, prefill_tokens=prefill)
        held[number], loads[number] = (prompt, size), (prefill, running)
    wanted = rng.choice(prompts)
    length = 30 * BLOCK + 7

    def cost(number: int) -> int:
        prompt, size = held[number]
        cached = size * BLOCK if prompt is wanted else 0
        return route_cost(loads[number][0], length - cached, loads[number][1])

    choice = cluster.route(length, wanted)
    assert choice.cost == cost(int(choice.replica))
    assert choice.cost < min(map(cost, range(40))) + 128


@pytest.mark.parametrize("seed", range(3))
def test_bits_are_never_taken_for_another_replicas(seed: int) -> None:
    """Replicas come and go; a hit is expected only of one that has reported the blocks."""
    rng = random.Random(seed)
    cluster = Cluster(0, max_hashes=10_000)
    truth: dict[str, set[bytes]] = {}
    every = hashes("x", 3000)
    for step in range(200):
        cluster.now += 0.5
        action = rng.random()
        if action < 0.2 or not truth:
            name = str(step)
            cluster.router.join(name)
            truth[name] = set()
        elif action < 0.35:
            name = rng.choice(list(truth))
            cluster.router.leave(name)
            del truth[name]
        for name in truth:
            start = rng.randint(0, 2900)
            added = every[start : start + 50] if rng.random() < 0.3 else []
            truth[name].update(added)
            cluster.report(int(name), added)
        if truth:
            start = rng.randint(0, 2900)
            choice = cluster.route(801, every[start : start + 50])
            cluster.router.end(choice)
            cluster.now += PROMISE_S  # so that promises never count
            blocks = choice.num_tokens // BLOCK
            assert set(every[start : start + blocks]) <= truth[choice.replica]


def test_a_thousand_replicas_take_no_longer_than_they_may() -> None:
    """The bound is 100 us; this one guards against a scan of all replicas on any machine."""
    cluster = Cluster(1000)
    rng = random.Random(1)
    prefixes = [hashes(f"p{n}-", 16) for n in range(50)]
    for number in range(1000):
        own = [h for prefix in rng.sample(prefixes, 8) for h in prefix]
        cluster.report(number, own, running=rng.randint(0, 40), prefill_tokens=rng.randint(0, 4000))
    best = min(_seconds(cluster, prefixes, rng) for _ in range(5))
    assert best < 500e-6


def _seconds(cluster: Cluster, prefixes: list[list[bytes]], rng: random.Random) -> float:
    prompts = [rng.choice(prefixes) + hashes(f"q{n}-", 4) for n in range(100)]
    began = time.thread_time()
    for prompt in prompts:
        cluster.route(20 * BLOCK + 3, prompt)
    return (time.thread_time() - began) / len(prompts)


def test_cost_is_in_tokens_of_prefill() -> None:
    assert route_cost(100, 10, 2) == 100 + 20 + 2 * REQUEST_COST


EVENTS = [
    b'data: {"text":":[0,[1]]"}\n\n',
    b"",  # a token whose text is held back
    b'event: message_start\ndata: {"a":":"}\n\nevent: ping\ndata: {}\n\n',
    b'{"response":"\\n:[1,[2]]\\n"}\n',
]
MARKS = [
    b"[0,[5]]", b"[0,[6],3,null,null]", b"[1,[7,8],3,null,null]", b'[0,[2],null,"stop",":\\n"]',
]  # fmt: skip


class Request:
    """What a relay reads of its request."""

    method, headers, remote = "POST", {"X-Request-Id": "7", STREAM_HEADER: "forged"}, "192.0.2.1"


def relay() -> Relay:
    request: Any = Request()
    return Relay(request, "/v1/completions", b"{}", Prompt(1, []), "secret")


@pytest.mark.parametrize("seed", range(20))
def test_events_are_passed_on_with_their_marks_alone(seed: int) -> None:
    rng, found = random.Random(seed), relay()
    data = b"".join(b"%b:%b\n" % pair for pair in zip(EVENTS, MARKS, strict=True))
    data += b"data: [DO"  # and the replica is lost
    passed, known = b"", 0
    while data:
        size = rng.randint(1, 30)
        passed += found._read_marks(data[:size])
        data = data[size:]
        known = len(found._marks)
        assert passed == b"".join(EVENTS[:known]), "nothing without its mark, nothing late"
    assert (known, found._marks) == (4, MARKS)


def test_the_next_replica_gets_the_marks_behind_the_body() -> None:
    found = relay()
    headers, body = found.message()
    assert dict(headers)[STREAM_HEADER] == "secret", "whatever the client has sent"
    found._began, found._marks = "1700000000 key", MARKS
    headers, body = found.message()
    token, created, key, size = dict(headers)[STREAM_HEADER].split()
    assert (token, created, key) == ("secret", "1700000000", "key")
    assert body is not None
    assert body[: -int(size)] == b"{}"
    known = msgspec.json.decode(body[-int(size) :], type=list[KnownDelta])
    assert [delta.token_ids for delta in known] == [[5], [6], [7, 8], [2]]
    assert (known[-1].finish_reason, known[-1].stop_reason) == ("stop", ":\n")


def test_a_request_takes_two_replicas_down_at_most_without_a_token_between() -> None:
    found = relay()
    assert found.can_go_on()
    assert not found.can_go_on()
    found = relay()
    found._began = "1700000000 key"
    for _ in range(5):
        found._read_marks(b":[0,[5]]\n")
        assert found.can_go_on()
    assert not found.can_go_on()


@pytest.mark.parametrize(
    ("reason", "stop_reason"), [(None, None), ("length", None), ("stop", "\n")]
)
def test_a_mark_in_a_frame_is_a_line(reason: str | None, stop_reason: str | None) -> None:
    size, line, end = mark_frame(1, 9, reason, stop_reason).split(b"\r\n")
    assert (int(size, 16), end) == (len(line), b"")
    assert line.endswith(b"\n")
    delta = msgspec.json.decode(line[1:], type=KnownDelta)
    assert delta == KnownDelta(1, [9], None, reason, stop_reason)
