"""The tests of connections once more: here they run on the server's kind of event loop, and nothing
may block it."""

from __future__ import annotations

from tests.test_connections import *  # noqa: F403
