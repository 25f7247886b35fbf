"""Chat templates, against transformers' `apply_chat_template`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from aioinfer.errors import ConfigError, RequestError
from aioinfer.text.tokenizer import Tokenizer
from tests.real_tokenizers import mistral_folder, smollm2_folder

pytestmark = pytest.mark.slow

FOLDERS = {"smollm2": smollm2_folder, "mistral": mistral_folder}
CONVERSATION = [
    {"role": "user", "content": "Hi <b>世界</b> & \"quotes\" 'n' <|im_end|>"},
    {"role": "assistant", "content": "Hello  "},
    {"role": "user", "content": "Who are you?", "name": None},
]
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Tells <the> weather & more",
                 "parameters": {"type": "object", "properties": {}}},
}  # fmt: skip
#: Uses whatever transformers adds to Jinja or sets in it.
EVERYTHING = (
    """\
{%- set ns = namespace(count=0) -%}
{% for message in messages %}
  {% if message.role == 'skipped' %}{% continue %}{% endif %}
  {% if loop.index > 3 %}{% break %}{% endif %}
{{ bos_token }}|{{ eos_token }}|{{ unk_token is defined }}|{{ message | tojson }}
  {% generation %}{{ message.content | trim }}{% endgeneration %}

  {% set ns.count = ns.count + 1 %}
{% endfor %}
{{ ns.count }} {{ strftime_now('%Y') }} """
    """{{ tools | tojson(indent=2) if tools else 'none' }} {{ enable_thinking | default('unset') }}
{% if documents %}{{ documents[0].text }}{% endif %}
{% if add_generation_prompt %}>>{% endif %}
"""
)


@pytest.fixture
def plain_folder(tokenizer_cache: Path, tmp_path: Path) -> Path:
    """A tokenizer without a template."""
    folder = shutil.copytree(smollm2_folder(tokenizer_cache), tmp_path / "model")
    (folder / "chat_template.jinja").unlink()
    return folder


Pair = tuple[Tokenizer, Any]


def load_both(folder: Path) -> Pair:
    """Loads a folder here and with transformers."""
    return Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="session", params=FOLDERS)
def real_pair(request: pytest.FixtureRequest, tokenizer_cache: Path) -> Pair:
    return load_both(FOLDERS[request.param](tokenizer_cache))


def render_both(
    pair: Pair,
    messages: list[dict[str, Any]],
    template_kwargs: dict[str, Any] | None = None,
    **options: Any,
) -> str:
    """Renders here and with transformers, asserts that both agree on the text and, where special
    tokens in messages are to be tokens, on the ids, and returns the text."""
    tokenizer, reference = pair
    everything = {"add_generation_prompt": True} | options | (template_kwargs or {})
    text = tokenizer.render_chat(messages, template_kwargs=template_kwargs, **options).text
    assert text == reference.apply_chat_template(messages, tokenize=False, **everything)
    assert tokenizer.encode_chat(
        messages, template_kwargs=template_kwargs, parse_special=True, **options
    ) == reference.apply_chat_template(messages, return_dict=False, **everything)
    return text


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
        {"tools": [TOOL]},
    ],
    ids=["plain", "no-prompt", "continued", "tools"],
)
def test_real_templates(real_pair: Pair, options: dict[str, Any]):
    assert "Who are you?" in render_both(real_pair, CONVERSATION, **options)


def test_what_transformers_offers_templates(plain_folder: Path):
    (plain_folder / "chat_template.jinja").write_text(EVERYTHING, "utf-8")
    messages = [
        {"role": "skipped", "content": "x"},
        *CONVERSATION,
        {"role": "user", "content": "beyond the break"},
    ]
    text = render_both(
        load_both(plain_folder),
        messages,
        {"enable_thinking": False, "documents": [{"title": "T", "text": "D"}]},
        tools=[TOOL],
    )
    assert "<the> weather & more" in text  # tojson does not escape for HTML
    assert "beyond" not in text
    assert text.startswith("<|im_start|>|<|im_end|>|True|")


def test_the_last_message_is_left_open(tokenizer_cache: Path):
    text = render_both(
        load_both(smollm2_folder(tokenizer_cache)),
        [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "One, two"}],
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert text.endswith("<|im_start|>assistant\nOne, two")


def test_the_template_with_tools_serves_requests_with_tools(plain_folder: Path):
    (plain_folder / "chat_template.jinja").write_text("default {{ messages[0].content }}", "utf-8")
    (plain_folder / "additional_chat_templates").mkdir()
    (plain_folder / "additional_chat_templates" / "tool_use.jinja").write_text(
        "tools {{ tools[0].function.name }}", "utf-8"
    )
    assert render_both(load_both(plain_folder), CONVERSATION).startswith("default Hi")
    assert render_both(load_both(plain_folder), CONVERSATION, tools=[TOOL]) == "tools weather"


def test_templates_in_the_config(plain_folder: Path):
    file = plain_folder / "tokenizer_config.json"
    config = json.loads(file.read_text("utf-8"))
    file.write_text(json.dumps(config | {"chat_template": "one {{ messages[0].role }}"}), "utf-8")
    assert render_both(load_both(plain_folder), CONVERSATION) == "one user"
    named = [{"name": "default", "template": "many"}, {"name": "tool_use", "template": "tools"}]
    file.write_text(json.dumps(config | {"chat_template": named}), "utf-8")
    assert render_both(load_both(plain_folder), CONVERSATION) == "many"
    assert render_both(load_both(plain_folder), CONVERSATION, tools=[TOOL]) == "tools"
    # as transformers' processors: that of pictures and sound goes before the tokenizer's
    template = {"chat_template": "processor {{ messages[0].role }}"}
    (plain_folder / "chat_template.json").write_text(json.dumps(template), "utf-8")
    assert Tokenizer.load(plain_folder).render_chat(CONVERSATION).text == "processor user"


def test_a_template_of_the_configuration_goes_first(tokenizer_cache: Path, tmp_path: Path):
    file = tmp_path / "mine.jinja"
    file.write_text("mine: {{ messages[-1].content }}{{ eos_token }}", "utf-8")
    tokenizer = Tokenizer.load(smollm2_folder(tokenizer_cache), str(file))
    assert tokenizer.render_chat(CONVERSATION).text == "mine: Who are you?<|im_end|>"


def test_a_template_that_is_missing_or_wrong_ends_the_start(tokenizer_cache: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"missing\.jinja cannot be read"):
        Tokenizer.load(smollm2_folder(tokenizer_cache), tmp_path / "missing.jinja")
    wrong = tmp_path / "wrong.jinja"
    wrong.write_text("{% for m in messages %}\n{{ m. }}\n{% endfor %}", "utf-8")
    tokenizer = Tokenizer.load(smollm2_folder(tokenizer_cache), wrong)
    with pytest.raises(ConfigError, match="not valid Jinja: line 2"):
        tokenizer.prepare()


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "judge", "content": "x"}], "only user and assistant roles"),
        ([{"role": "user", "content": {"a": {}}}, {"role": "user"}], "cannot render"),
        ([], "cannot render"),
        ([{"role": "user", "content": 5}], "cannot render"),
    ],
    ids=["refused", "undefined", "empty", "number"],
)
def test_messages_that_a_template_cannot_take(
    tokenizer_cache: Path, tmp_path: Path, messages: list[dict[str, Any]], message: str
):
    strict = tmp_path / "strict.jinja"
    strict.write_text(
        "{% for m in messages %}{% if m.role != 'user' %}{{ raise_exception('only user and "
        "assistant roles') }}{% endif %}"
        "{{ '[' + m.content + ']' }}{% endfor %}"
    )
    tokenizer = Tokenizer.load(smollm2_folder(tokenizer_cache), strict)
    with pytest.raises(RequestError, match=message) as caught:
        tokenizer.encode_chat(messages)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "name",
    [
        "chat_template", "tokenize", "conversation", "add_generation_prompt", "return_tensors",
        "messages", "conversations", "self",
    ],
)  # fmt: skip
def test_a_request_cannot_change_how_its_prompt_is_rendered(tokenizer_cache: Path, name: str):
    tokenizer = Tokenizer.load(smollm2_folder(tokenizer_cache))
    with pytest.raises(RequestError, match=name) as caught:
        tokenizer.encode_chat(CONVERSATION, template_kwargs={name: "{{ 1 }}"})
    assert caught.value.param == "chat_template_kwargs"


def test_a_prompt_cannot_both_go_on_and_begin_anew(tokenizer_cache: Path):
    with pytest.raises(RequestError) as caught:
        Tokenizer.load(smollm2_folder(tokenizer_cache)).encode_chat(
            CONVERSATION, continue_final_message=True
        )
    assert caught.value.param == "continue_final_message"
