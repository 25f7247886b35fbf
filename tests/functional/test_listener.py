"""The tests of the listener once more: here they run on the server's kind of event loop, and
nothing may block it."""

from __future__ import annotations

from tests.test_listener import *  # noqa: F403
