"""The tests of request bodies once more: here they run on the server's kind of event loop, and
nothing may block it."""

from __future__ import annotations

from tests.test_request_body import *  # noqa: F403
