"""Stop strings: finds the first of several strings in a text that comes in pieces.

One `StopStrings` belongs to one sequence; the step loop feeds it the detokenizer's text. The search
is Aho and Corasick's automaton (1975): each character is looked at once, however many
strings there are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class _State:
    """The longest beginning of a stop string that the text ends in at present.

    Attributes:
        depth: its length.
        steps: the state after one more character, where that goes on with a stop string.
        shorter: the state of its longest proper suffix that also begins a stop string.
        stop: the longest stop string that ends here.
    """

    depth: int = 0
    steps: dict[str, _State] = field(default_factory=dict)
    shorter: _State | None = None
    stop: str | None = None


class StopStrings:
    """Ends a text where the first stop string in it is complete.

    The text ends with the first character that completes any stop string; if it completes several,
    the longest counts. This does not depend on how the text was cut into pieces, and nothing need
    be waited for once a string is complete.
    """

    __slots__ = ("_first_characters", "_held", "_include", "_root", "_state", "_stop")

    def __init__(self, stops: Sequence[str], include: bool = False):
        """Prepares the search.

        Args:
            stops: non-empty strings, `MAX_STOP_CHARS` characters in all at most.
            include: whether the text keeps the stop string that ends it.
        """
        self._include = include
        self._root = _automaton(stops)
        self._first_characters = frozenset(self._root.steps)
        self._state = self._root
        self._held = ""
        self._stop: str | None = None

    def for_other_text(self) -> StopStrings:
        """Returns a search for the same strings in another text. It costs next to nothing: the
        automaton, which takes milliseconds to build for the longest stop strings, is shared."""
        other = StopStrings.__new__(StopStrings)
        other._include, other._root = self._include, self._root
        other._first_characters = self._first_characters
        other._state, other._held, other._stop = self._root, "", None
        return other

    def feed(self, text: str) -> tuple[str, str | None]:
        """Takes the next piece of text.

        Returns:
            The text that may be shown now, and the stop string that ended it, if one did. What
            could be the beginning of a stop string is held back for the next call. After a stop, no
            more text comes.
        """
        if self._stop is not None:
            return "", self._stop
        root, state = self._root, self._state
        if state is root and self._first_characters.isdisjoint(text):
            return text, None
        for position, character in enumerate(text, 1):
            following = state.steps.get(character)
            while following is None and state is not root:
                assert state.shorter is not None
                state = state.shorter
                following = state.steps.get(character)
            state = following or root
            if state.stop is not None:
                return self._end(text[:position], state.stop)
        self._state = state
        seen = self._held + text
        shown = len(seen) - state.depth
        self._held = seen[shown:]
        return seen[:shown], None

    def flush(self) -> str:
        """Returns the text that was held back, once no more text comes."""
        held, self._held, self._state = self._held, "", self._root
        return held

    def _end(self, text: str, stop: str) -> tuple[str, str]:
        self._stop = stop
        seen, self._held = self._held + text, ""
        return (seen if self._include else seen[: len(seen) - len(stop)]), stop


def _automaton(stops: Sequence[str]) -> _State:
    """Builds the automaton of Aho and Corasick and returns its start."""
    root = _State()
    for stop in stops:
        state = root
        for character in stop:
            state = state.steps.setdefault(character, _State(state.depth + 1))
        state.stop = stop
    queue = deque(root.steps.values())
    for state in queue:
        state.shorter = root
    while queue:  # by depth, so that the shorter states are ready
        state = queue.popleft()
        for character, following in state.steps.items():
            shorter = state.shorter
            while shorter is not None and character not in shorter.steps:
                shorter = shorter.shorter
            following.shorter = root if shorter is None else shorter.steps[character]
            following.stop = following.stop or following.shorter.stop
            queue.append(following)
    return root
