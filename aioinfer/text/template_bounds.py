"""Bounds on what rendering a chat template may cost.

A template is a program that a model or an operator brings, and it runs over what clients send.
Jinja's sandbox keeps it from the process's objects, not from looping for minutes or from making a
text of gigabytes. Here a template is compiled again with checks: of the thread's CPU time in each
iteration of a loop and each call of a macro; of the length of each text or list that it joins, sets
or gets from a call; and of the whole output. Beyond a bound it ends with `TemplateCostError`, which
ends that request alone.

Not bounded is a single call into Python's own methods and Jinja's filters: `s.replace(a, b)` or
`center(10 ** 9)` is checked when it has returned. Nor are constants, such as `"x" * 10 ** 10`,
which Jinja computes when the template is compiled, at the start.

`ChatTemplate` uses this for templates that transformers has compiled, by a function that is not
part of its public interface. An environment of our own would need copies of the functions, filters
and blocks that transformers offers to templates, of the classes by which it closes holes of the
sandbox, and of what it does to messages before rendering: some 150 lines that change from release
to release, and a copy that has not followed a fix of a hole is worse than this dependence. Where
the function is missing, `ChatTemplate` says so at the start, and the tests fail.
"""

from __future__ import annotations

import operator
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jinja2
from jinja2 import nodes

#: CPU seconds of a rendering. A conversation of 16 MiB takes a tenth of it.
MAX_SECONDS = 5.0
#: Characters of a text, and items of a list, that a template makes.
MAX_LENGTH = 64 * 2**20
_MAX_BITS = 1024
_SIZED = (str, bytes, list, tuple)


class TemplateCostError(jinja2.TemplateError):
    """Rendering takes too long or makes too much text."""


class BoundedText(str):
    """The text of a template. It equals no plain text, so that a cache of compiled templates keeps
    the bounded one apart."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BoundedText) and str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(("bounded", str(self)))


class _Clock(threading.local):
    end = float("inf")


def bound(template: jinja2.Template, text: str) -> None:
    """Compiles a template again with checks. The template's environment must be its own.

    Args:
        template: what `text` was compiled to.
        text: its Jinja text.
    """
    environment: Any = template.environment
    clock = _Clock()

    def tick() -> None:
        if time.thread_time() > clock.end:
            raise TemplateCostError(f"it takes longer than {MAX_SECONDS:g} s")

    call, parse = environment.call, environment._parse
    changes: dict[str, Any] = {
        "bounded_tick": tick,
        "bounded_length": _check_length,
        "call": lambda *args, **kwargs: _check_length(call(*args, **kwargs)),
        "_parse": lambda *args: _add_checks(parse(*args), environment),
        "intercepted_binops": frozenset(("+", "*", "**")),
    }
    for name, value in changes.items():
        setattr(environment, name, value)
    environment.filters["bounded_length"] = _check_length
    environment.binop_table |= {
        "+": lambda left, right: _check_length(operator.add(left, right)),
        "*": _multiply,
        "**": _power,
    }
    bounded = environment.from_string(text)
    template.blocks = bounded.blocks
    template.root_render_func = _bound_output(bounded.root_render_func, clock)


def _bound_output(
    render: Callable[..., Iterator[str]], clock: _Clock
) -> Callable[[jinja2.runtime.Context], Iterator[str]]:
    def bounded(context: jinja2.runtime.Context) -> Iterator[str]:
        length, clock.end = 0, time.thread_time() + MAX_SECONDS
        try:
            for piece in render(context):
                length += len(piece)
                if length > MAX_LENGTH:
                    raise TemplateCostError(f"it writes more than {MAX_LENGTH} characters")
                yield piece
        finally:
            clock.end = float("inf")

    return bounded


def _add_checks(tree: nodes.Template, environment: jinja2.Environment) -> nodes.Template:
    """Returns a template's syntax tree with a tick in each loop and macro, and with checks of the
    texts that it joins and sets."""
    for node in list(tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock))):
        tick = nodes.Call(nodes.EnvironmentAttribute("bounded_tick"), [], [], None, None)
        statement = nodes.ExprStmt(tick)
        node.body.insert(0, statement.set_lineno(node.lineno))  # type: ignore[attr-defined]
    for block in list(tree.find_all(nodes.AssignBlock)):
        check = nodes.Filter(block.filter, "bounded_length", [], [], None, None)
        check.set_lineno(block.lineno)
        block.filter = check
    for joined in list(tree.find_all(nodes.Concat)):
        # the inner node is a copy, and the outer one becomes a list of one: the checked copy
        copy = nodes.Concat(joined.nodes)
        copy.set_lineno(joined.lineno)
        check = nodes.Filter(copy, "bounded_length", [], [], None, None)
        check.set_lineno(joined.lineno)
        joined.nodes = [check]
    tree.set_environment(environment)
    return tree


def _check_length(value: Any) -> Any:
    if isinstance(value, _SIZED) and len(value) > MAX_LENGTH:
        raise TemplateCostError(f"it makes a text or list longer than {MAX_LENGTH}")
    return value


def _multiply(left: Any, right: Any) -> Any:
    for sized, times in ((left, right), (right, left)):
        if isinstance(sized, _SIZED) and isinstance(times, int) and len(sized) * times > MAX_LENGTH:
            raise TemplateCostError(f"it makes a text or list longer than {MAX_LENGTH}")
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
    return left * right


def _power(base: Any, exponent: Any) -> Any:
    if isinstance(base, int) and isinstance(exponent, int):
        _check_bits(base.bit_length() * exponent)
    return base**exponent


def _check_bits(bits: int) -> None:
    if bits > _MAX_BITS:
        raise TemplateCostError("it computes with numbers that are too large")
