"""Renderings of prompts: what a template or a tokenizer does to them must not lose the user's words."""

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from data_gen.pipeline.command import make
from data_gen.prompts.prompt import Prompt, say_once
from data_gen.prompts.templates import encode, line_of_prompt, render

PARTS = """{% for message in messages %}<{{ message['role'] }}>{% for part in message['content'] %}
{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}<a>"""
DATED = "{% if strftime_now is defined %}Today: {{ strftime_now('%d %b %Y') }}. {% endif %}{{ messages[0]['content'] }}"
CONVERSATION = Prompt("a", ("How many are 1  and 2?", "And 3?"), system="Be brief.")


@pytest.fixture
def own(toy_pair):
    """A tokenizer that a test may change."""
    say_once.cache_clear()
    return AutoTokenizer.from_pretrained(toy_pair / "target")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (PARTS, "<system>Be brief.<user>How many are 1  and 2?<assistant>3.<user>And 3?<a>"),
        (
            "{% for m in messages %}{{ m['content'] | trim }};{% endfor %}",
            "Be brief.;How many are 1  and 2?;3.;And 3?;",
        ),
    ],
)
def test_a_template_gets_content_as_text_or_as_the_list_of_parts_that_it_expects(own, template, expected):
    own.chat_template = template
    assert render(CONVERSATION, own, "chat", ["3."]) == expected


@pytest.mark.parametrize(
    "template", ["<u>{{ messages[-1]['role'] }}<a>", "{{ messages[-1]['content'][:3] }}", "<u><a>"]
)
def test_a_rendering_without_the_users_words_is_refused(own, template):
    own.chat_template = template
    for prompt in (CONVERSATION, Prompt("a", ("Hello there?",))):
        with pytest.raises(
            ValueError, match=r"prompt a: the chat template of .* leaves out the user's words, also as a list"
        ):
            render(prompt, own, "chat", ["3."][: len(prompt.turns) - 1])


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for m in messages %}{{ m['content'] + 1 }}{% endfor %}", "TypeError"),
        ("{{ 1 / (messages | length - 4) }}", "ZeroDivisionError"),
        ("{{ messages[0]['content'].index('zzz') }}", "ValueError"),
        ("{{ range(10 ** 9) | list }}", "OverflowError"),
        ("{{ messages", "TemplateSyntaxError"),
    ],
)
def test_a_template_that_fails_is_refused_by_name_with_its_reason(own, template, reason):
    own.chat_template = template
    with pytest.raises(ValueError, match=rf"prompt a: the chat template of .* {reason}: "):
        render(CONVERSATION, own, "chat", ["3."])


def test_a_template_with_todays_date_gives_the_same_prompt_on_every_day(own, capsys):
    own.chat_template = DATED
    for _ in range(2):
        assert render(Prompt("a", ("Hi?",)), own, "chat") == "Today: 26 Jul 2024. Hi?"
    assert capsys.readouterr().err.count("prompts have 26 Jul 2024 instead") == 1
    own.chat_template = "{{ strftime_now(format) }} {{ messages[0]['content'] }}"
    with pytest.raises(ValueError, match="writes today's date in a computed form"):
        render(Prompt("a", ("Hi?",)), own, "chat")


@pytest.mark.parametrize("template", ["plain", "llama2", "gsm8k", "humaneval"])
def test_no_prompt_ends_with_a_special_token_that_the_tokenizer_appends(own, capsys, template):
    before = encode(CONVERSATION, own, template, ["3."])
    special = [("<u>", 2), ("<end>", 1)]
    own.backend_tokenizer.post_processor = TemplateProcessing(single="<u> $A <end>", special_tokens=special)
    assert own("x").input_ids[-1] == 1
    expected = before if own.decode(before[:1]) == "<u>" else [2, *before]
    assert encode(CONVERSATION, own, template, ["3."]) == expected
    assert "ends each text with '<end>' (EOS" in capsys.readouterr().err


def test_data_shows_one_prompt_with_its_special_tokens(own, toy_config, capsys):
    assert (
        line_of_prompt(Prompt("a", ("Hi?",)), own, "chat")
        == "one prompt as the models read it, 6 tokens: '<u>Hi?\\n<a>'"
    )
    assert len(line_of_prompt(Prompt("a", ("long " * 1000,)), own, "chat")) < 700
    make(toy_config)
    assert "one prompt as the models read it" in capsys.readouterr().out
