"""Chat templates (L06): parity with transformers, errors a client can read, and bounds on hostile templates."""

from __future__ import annotations

import time
import tracemalloc

import pytest

from sparseserve_jax.text.chat_template import ChatTemplate, ChatTemplateError, render_chat

SMOLLM = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""

BUSY = """{{- bos_token }}
{%- macro turn(m) -%}
    {{ m.role ~ ": " ~ m.content | trim }}
{%- endmacro -%}
{% set ns = namespace(count=0) %}
{% for m in messages %}
    {% if m.role == 'tool' %}{% continue %}{% endif %}
    {% set ns.count = ns.count + 1 %}
{{ turn(m) }}{{ eos_token }}{{ loop.index0 }} {{ loop.last }}
{% generation %}{{ m | tojson }}{% endgeneration %}
{% endfor %}
{% if tools is not none %}TOOLS{% endif %}
{{ ns.count }} {{ range(3) | list }} {{ "%s-%d" % ("a", 3) }} {{ "{:>5}".format("x") }} {{ [1] * 3 }} {{ 2 ** 5 }}
{% set block %}a{{ messages[0].content }}b{% endset %}{{ block | upper }}"""

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " Grüße <b> & 'x' 1234567 \n"},
    {"role": "tool", "content": "ignored"},
    {"role": "assistant", "content": "日本"},
]


@pytest.mark.parametrize("generation", [True, False])
@pytest.mark.parametrize("template", [SMOLLM, BUSY])
def test_renders_as_transformers(template: str, generation: bool) -> None:
    theirs = pytest.importorskip("transformers.utils.chat_template_utils")
    expected = theirs.render_jinja_template(
        [CHAT], chat_template=template, add_generation_prompt=generation, bos_token="<s>", eos_token="</s>"
    )[0][0]
    ours = render_chat(template, CHAT, add_generation_prompt=generation, bos_token="<s>", eos_token="</s>")
    assert ours == expected


def test_list_content_is_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts}]
    assert render_chat("{{ messages[0].content }}", messages) == "a\nb"
    assert messages[0]["content"] is parts  # the caller's messages stay as they were


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "empty"),
        ("hello", "list of messages"),
        (["hello"], r"messages\[0\]"),
        ([{"content": "x"}], r"messages\[0\]\.role"),
        ([{"role": "", "content": "x"}], "role"),
        ([{"role": "user"}], r"messages\[0\]\.content is missing"),
        ([{"role": "user", "content": None}], "missing"),
        ([{"role": "user", "content": 5}], "content must be text"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], r"content\[0\]"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\]"),
        ([{"role": "user", "content": "x", "extra": object()}], "object"),
    ],
)
def test_invalid_messages(messages, reason: str) -> None:
    with pytest.raises(ChatTemplateError, match=reason):
        render_chat(SMOLLM, messages)


def test_no_template() -> None:
    with pytest.raises(ChatTemplateError, match="no chat template"):
        render_chat(None, CHAT)


def test_template_reports_its_own_error() -> None:
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    with pytest.raises(ChatTemplateError, match="System role not supported"):
        render_chat(template, CHAT)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for m in %}", "line 1"),
        ("{{ messages[0].nothing.more }}", "nothing"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ ''.__class__.__mro__ }}", "sandbox|unsafe|undefined"),
        ("{{ ''['__class__']['__base__'] }}", "sandbox|unsafe|undefined"),
        ("{{ raise_exception.__globals__ }}x{{ raise_exception.__globals__['json'] }}", "sandbox|unsafe|undefined"),
        ("{{ messages.append(1) }}", "sandbox|unsafe"),
        ("{{ environment.budget }}", "undefined"),
        ("{% include 'x' %}", "chat template"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "deeply|steps|CPU"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "deeply"),
    ],
)
def test_errors_and_sandbox(template: str, reason: str) -> None:
    with pytest.raises(ChatTemplateError, match=reason):
        render_chat(template, CHAT)


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
        "{% for a in range(100000) %}{% for b in range(100000) if false %}{% endfor %}{% endfor %}",
        "{% for a in range(100000) %}{% set x = range(100000) | map('string') | list %}{% endfor %}",
        "{% macro f(n) %}{% for i in range(9) %}{{ f(n - 1) if n else '' }}{% endfor %}{% endmacro %}{{ f(30) }}",
        "{% for a in range(10 ** 9) %}{% endfor %}",
        "{{ 'x' * 10 ** 10 }}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ 'x' | center(10 ** 10) }}",
        "{{ 'x'.ljust(10000000000) }}",
        "{{ '%10000000000d' % 1 }}",
        "{{ '{:>10000000000}'.format(1) }}",
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}"
        "{% endfor %}",
        "{% for i in range(100000) %}0123456789012345678901234567890123456789{% endfor %}",
        "{{ lipsum(n=100000) }}",
    ],
)
def test_excess_is_stopped(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparseserve_jax.text.chat_template.MAX_CPU_S", 0.3)
    begin_s = time.thread_time()
    with pytest.raises(ChatTemplateError):
        render_chat(template, [{"role": "user", "content": "hi"}])
    assert time.thread_time() - begin_s < 2.0


def test_compiled_template_starts_each_rendering_with_a_fresh_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparseserve_jax.text.chat_template.MAX_STEPS", 1000)
    template = ChatTemplate("{% for a in range(600) %}{% endfor %}{{ messages[0].content }}")
    for _ in range(3):  # more than MAX_STEPS together
        assert template.render([{"role": "user", "content": "hi"}]) == "hi"


def test_long_conversations_fit() -> None:
    text = "word " * 500_000
    messages = [{"role": "user", "content": text}] + [{"role": "user", "content": "x"}] * 20_000
    assert text in render_chat(SMOLLM, messages)


@pytest.mark.parametrize("source", [
    "{{ '%1000000000d'|format(1) }}", "{{ '%.1000000000f'|format(1.0) }}", "{{ ['a'*10000]*100000 }}",
    "{{ (['a'*10000]*100000)|join }}", "{{ (['a'*10000]*100000)|string }}",
    "{% set a = ['x'*9000] %}{% set a = [a,a,a,a,a,a,a,a,a,a] %}{% set a = [a,a,a,a,a,a,a,a,a,a] %}"
    "{% set a = [a,a,a,a,a,a,a,a,a,a] %}{% set a = [a,a,a,a,a,a,a,a,a,a] %}{{ a }}",
])  # fmt: skip
def test_what_would_be_too_large_is_refused_before_it_is_built(source):
    tracemalloc.start()
    with pytest.raises(ChatTemplateError, match=r"chat template: "):
        ChatTemplate(source, bos_token="", eos_token="").render([{"role": "user", "content": "hi"}])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 << 20
