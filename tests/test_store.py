"""Objects in memory: bounds, and that each API key finds its own alone."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec import Struct

from aioinfer.api.batch import store as stores
from aioinfer.api.batch.store import Metadata, ObjectStore
from aioinfer.errors import RequestError


class Body(Struct):
    """What the store reads of an object."""

    id: str
    object: str
    metadata: dict[str, str]


def response(id: str) -> Body:
    return Body(id, "response", {})


def conversation(id: str) -> Body:
    return Body(id, "conversation", {})


def text(length: int) -> list[dict[str, Any]]:
    return [{"id": "msg_1", "text": "x" * length}]


def test_each_key_finds_its_own() -> None:
    store = ObjectStore()
    store.add("a", response("r"), [])
    store.add("b", conversation("c"), [])
    assert store.find("a", "response", "r").body.id == "r"
    for owner, kind, id in (("b", "response", "r"), ("c", "response", "r"),
                            ("a", "conversation", "c"), ("b", "response", "c")):  # fmt: skip
        with pytest.raises(RequestError) as caught:
            store.find(owner, kind, id)  # type: ignore[arg-type]
        assert caught.value.status == 404
    with pytest.raises(RequestError):
        store.remove("b", "response", "r")
    assert [each.body.id for each in store.all_of("b", "conversation")] == ["c"]
    assert list(store.all_of("b", "response")) == []


def test_the_oldest_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "MAX_STORED", 2)
    store = ObjectStore()
    for id in ("1", "2", "3"):
        store.add("a", response(id), [])
    assert [each.body.id for each in store.all_of("a", "response")] == ["3", "2"]
    monkeypatch.setattr(stores, "MAX_STORED_BYTES", 1000)
    store = ObjectStore()
    for id in ("1", "2", "3"):
        store.add("a", response(id), text(600))
    assert [each.body.id for each in store.all_of("a", "response")] == ["3"]
    store.remove("a", "response", "3")
    assert len(store) == 0


def test_a_conversation_is_as_new_as_its_last_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "MAX_STORED", 2)
    store = ObjectStore()
    store.add("a", conversation("1"), [])
    store.add("a", conversation("2"), [])
    store.add("a", conversation("1"), text(10))
    store.add("a", conversation("3"), [])
    assert [each.body.id for each in store.all_of("a", "conversation")] == ["3", "1"]
    assert store.find("a", "conversation", "1").items == text(10)


def test_what_is_too_large_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "MAX_STORED_BYTES", 1000)
    store = ObjectStore()
    store.add("a", response("1"), [])
    store.add("a", response("2"), text(2000))
    store.add("a", conversation("3"), [])
    store.add("a", conversation("3"), text(2000))
    assert [id for _, id in store._stored] == ["1"]
    store.check_room(1000, "a conversation")
    with pytest.raises(RequestError, match="larger than the server's 1000 bytes"):
        store.check_room(1001, "a conversation")


def test_bytes_follow_all_changes() -> None:
    store = ObjectStore()
    store.add("a", conversation("1"), text(5))
    store.add("a", conversation("1"), text(7))  # in the place of the other
    store.add("a", conversation("1"), text(50))
    store.change_metadata(store.find("a", "conversation", "1"), {"a": "b" * 30})
    stored = store.find("a", "conversation", "1")
    assert stored.body.metadata == {"a": "b" * 30}
    known = ObjectStore()
    known.add("a", stored.body, stored.items)
    assert known.find("a", "conversation", "1").num_bytes == stored.num_bytes
    deep: Any = []
    for _ in range(1000):
        deep = [deep]
    store.add("a", conversation("2"), [{"id": "x", "deep": deep}])
    assert len(store) == 1


@pytest.mark.parametrize(
    "wrong", [{"a": 1}, {"a" * 65: "b"}, {"a": "b" * 513}, {str(n): "" for n in range(17)}, []]
)
def test_bounds_of_metadata(wrong: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(wrong, Metadata)
    longest = {"a" * 64: "b" * 512}
    assert msgspec.convert(longest, Metadata) == longest
