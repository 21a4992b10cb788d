"""The model's own template renders as transformers renders it, in a sandbox, with bounded output."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from engine.errors import InvalidRequest, ModelLoadError
from engine.text import chat_template
from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer

CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi 😀 漢字"}],
    [
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "Two"},
        {"role": "user", "content": '<b>Three</b> & "four"\n\n'},
    ],
]
FEATURES = """{%- for message in messages %}
    {%- if loop.index0 == 1 %}{% continue %}{% endif %}
    {%- set ns = namespace(found=false) %}
{{ bos_token }}{{ message['role'] | upper }}: {% generation %}{{ message.content | trim }}{% endgeneration %}
{%- endfor %}
{{ {"a": "<é>", "b": [1, none, true]} | tojson }} {{ tools | tojson(indent=2) if tools else "no tools" }}
"""


@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_renders_as_transformers_does(
    real_folder: Path, real_tokenizer: Tokenizer, messages: list[dict[str, Any]], add_generation_prompt: bool
) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(real_folder)
    assert real_tokenizer.chat_template is not None
    text = real_tokenizer.chat_template.render(messages, add_generation_prompt=add_generation_prompt)
    assert text == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    ids = theirs.apply_chat_template(messages, add_generation_prompt=add_generation_prompt)["input_ids"]
    assert real_tokenizer.encode(text, add_special_tokens=False) == ids


@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "now"}}]])
def test_features_that_published_templates_use(tiny_folder: Path, tools: list[dict[str, Any]] | None) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(tiny_folder)
    messages = [{"role": role, "content": f" {role} text "} for role in ("system", "user", "assistant")]
    expected = theirs.apply_chat_template(messages, chat_template=FEATURES, tools=tools, tokenize=False)
    ours = ChatTemplate(FEATURES, {"bos_token": "<|im_start|>"})
    assert ours.render(messages, add_generation_prompt=False, tools=tools) == expected


def test_there_is_one_beginning_of_text(real_tokenizer: Tokenizer) -> None:
    """A template that writes BOS itself: the rendered text is encoded without adding another."""
    template = ChatTemplate("{{ bos_token }}{{ messages[0].content }}", {"bos_token": "<|im_start|>"})
    text = template.render([{"role": "user", "content": "hi"}])
    ids = real_tokenizer.encode(text, add_special_tokens=False)
    assert ids.count(1) == 1
    assert ids[0] == 1


def test_a_template_may_print_the_given_day_and_no_other() -> None:
    template = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}", {})
    moment = datetime(2031, 2, 3, tzinfo=UTC)
    assert template.render([], now=moment) == "2031-02-03"


def test_switches_reach_the_template_and_cannot_replace_the_messages() -> None:
    template = ChatTemplate("{{ enable_thinking }} {{ messages[0].content }}", {})
    variables = {"enable_thinking": False, "messages": [{"content": "forged"}]}
    assert template.render([{"role": "user", "content": "mine"}], variables=variables) == "False mine"


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0]['content'] + 1 }}", "str"),
        ("{{ messages[5].content.upper() }}", "no element 5"),
        ("{{ 1 / 0 }}", "division"),
        ("{% for i in range(10 ** 9) %}x{% endfor %}", "Range too big"),
    ],
)
def test_messages_that_a_template_refuses_are_the_callers_fault(source: str, what: str) -> None:
    with pytest.raises(InvalidRequest, match=what) as caught:
        ChatTemplate(source, {}).render([{"role": "user", "content": "hi"}])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(InvalidRequest):
        ChatTemplate(source, {}).render([{"role": "user", "content": "hi"}])


def test_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDERED_CHARACTERS", 1000)
    template = ChatTemplate("{% for i in range(1000) %}{% for j in range(1000) %}xx{% endfor %}{% endfor %}", {})
    with pytest.raises(InvalidRequest, match="1000 characters"):
        template.render([])


def test_a_broken_template_is_the_models_fault() -> None:
    with pytest.raises(ModelLoadError, match="line 2"):
        ChatTemplate("fine\n{% if %}", {})
