"""Templates that loop for ever or blow up end their own rendering, and others render as before."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import _compile_jinja_template

from aioinfer.errors import RequestError
from aioinfer.text import template_bounds
from aioinfer.text.chat_template import ChatTemplate
from aioinfer.text.template_bounds import BoundedText

LONG = "{{ messages[0].content }}"
FOREVER = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "filtered loops": "{% for a in range(99999) %}{% for b in range(999) if false %}{% endfor %}"
    "{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "recursive loops": "{% for a in [[1, 2]] recursive %}{% for b in range(2) %}"
    "{{ loop([a]) if false else '' }}{% endfor %}{% for c in range(99999) %}{% for d in "
    "range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
}
LOOP = "{% set ns = namespace(x='abcdefgh', l=[1]) %}{% for i in range(99) %}"
TOO_LONG = {
    "output": "{% for a in range(99999) %}" + LONG * 3 + "{% endfor %}",
    "joined": LOOP + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "added": LOOP + "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "lists": LOOP + "{% set ns.l = ns.l + ns.l %}{% endfor %}",
    "blocks": LOOP + "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
    "macros": "{% macro twice(x) %}{{ x }}{{ x }}{% endmacro %}"
    + LOOP
    + "{% set ns.x = twice(ns.x) %}{% endfor %}",
    "methods": LOOP + "{% set ns.x = ns.x.replace('a', 'abcdefgh' * 9) %}{% endfor %}",
    "multiplied": "{% set n = 10 ** 10 * messages | length %}{{ 'x' * n }}",
    "multiplied list": "{% set n = 10 ** 10 * messages | length %}{{ (n * [1]) | length }}",
    "numbers": "{% set n = 10 ** 9 * messages | length %}{{ 10 ** n }}",
    "products": "{% set ns = namespace(x=3) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}"
    "{% endfor %}",
}
MESSAGES = [{"role": "user", "content": "hello" * 100}]


@pytest.mark.parametrize("name", FOREVER)
def test_time_is_bounded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate("{% if messages[0].content %}" + FOREVER[name] + "{% endif %}", {})
    monkeypatch.setattr(template_bounds, "MAX_SECONDS", 0.1)
    for _ in range(2):
        with pytest.raises(RequestError, match=r"takes longer than 0\.1 s"):
            template.render(MESSAGES)
    assert template.render([{"role": "user", "content": ""}]) == ""


@pytest.mark.parametrize("name", TOO_LONG)
def test_lengths_are_bounded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate("{% if messages[0].content %}" + TOO_LONG[name] + "{% endif %}", {})
    monkeypatch.setattr(template_bounds, "MAX_LENGTH", 10**6)
    with pytest.raises(RequestError, match=r"more than|longer than|too large"):
        template.render(MESSAGES)
    assert template.render([{"role": "user", "content": ""}]) == ""


TEMPLATE = (
    "{% macro twice(x) -%} {{ x }}-{{ x ~ loop_name ~ 1 }} {%- endmacro %}"
    "{% set loop_name = 'n' %}{% set ns = namespace(n=0, x='') %}"
    "{% for m in messages if m.content != 'skip' recursive %}{{ loop.index }}/{{ loop.length }} "
    "{{ twice(m.content) }}{% set ns.n = ns.n + 2 * 3 ** 2 %}"
    "{% set y %}<{{ m.content }}>{% endset %}"
    "{% set ns.x = ns.x + y ~ m.role %}{% if loop.last %}{{ ns.x | upper }}{% endif %}"
    "{{ twice(m.role) | trim }}{% else %}none{% endfor %}{{ ns.n }}"
    "{% set z | trim %} padded {% endset %}[{{ z }}]{{ 'a' * 3 }}{{ [1] + [2] }}{{ 1.5 * 2 + 1 }}"
)


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return ChatTemplate(TEMPLATE, {})


@settings(deadline=None)
@given(contents=st.lists(st.text(max_size=9) | st.just("skip"), min_size=1, max_size=5))
def test_other_templates_render_as_before(template: ChatTemplate, contents: list[str]) -> None:
    messages = [{"role": "user", "content": content} for content in contents]
    values = {"messages": messages, "tools": None, "documents": None}
    expected = _compile_jinja_template(TEMPLATE).render(add_generation_prompt=True, **values)
    assert template.render(messages) == expected


def test_the_bounded_template_has_a_place_of_its_own_in_a_cache() -> None:
    text = BoundedText("x")
    assert text == BoundedText("x")
    assert hash(text) == hash(BoundedText("x"))
    assert text != "x"
    assert len({text, "x"}) == 2
