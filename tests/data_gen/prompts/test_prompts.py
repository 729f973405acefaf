"""Prompts: records, splits, templates; and the story problems."""

import hashlib
import json
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from configs.schema import DataConfig, PromptSource
from data_gen.pipeline.stages import settled
from data_gen.prompts import sets as hub
from data_gen.prompts.prompt import Prompt, prompt_of, prompts_of
from data_gen.prompts.sets import SPLITS, WEIGHTS, load, load_prompts, set_of, split_by_id
from data_gen.prompts.stories import KINDS, split_of, stories
from data_gen.prompts.templates import encode, render


def said(role: str, content: object) -> dict[str, object]:
    return {"role": role, "content": content}


def wrote(author: str, value: str) -> dict[str, str]:
    return {"from": author, "value": value}


TURNS = [said("developer", "s"), said("user", [{"type": "text", "text": "u"}])]
TURNS += [said("assistant", None) | {"tool_calls": [{}]}, said("system", "t")]


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"idx": 3, "instruction": "Add", "input": "1 2", "output": "3"}, Prompt("3", ("Add",), context="1 2")),
        ({"question": "How many?", "answer": "4"}, Prompt("7", ("How many?",))),
        ({"task_id": "HumanEval/0", "prompt": "def f():"}, Prompt("HumanEval/0", ("def f():",))),
        ({"question_id": 81, "turns": ["a", "b"], "category": "writing"}, Prompt("81", ("a", "b"), category="writing")),
        (
            {"id": "c", "messages": [said("system", "s"), said("user", "u"), said("assistant", "gone")]},
            Prompt("c", ("u",), system="s"),
        ),
        (
            {"id": "d", "conversations": [wrote("human", "u"), wrote("gpt", "gone"), wrote("human", "v")]},
            Prompt("d", ("u", "v")),
        ),
        (
            {"instruction": "Which?", "context": "It is red.", "response": "x", "category": "qa"},
            Prompt("7", ("Which?",), context="It is red.", category="qa"),
        ),
        ({"messages": [said("user", "u")], "context": "c"}, Prompt("7", ("u",), context="c")),
        ({"system_prompt": "s", "question": "u", "response": "x"}, Prompt("7", ("u",), system="s")),
        (
            {"instruction": "v", "input": "i", "system": "s", "history": [["u", "gone"]]},
            Prompt("7", ("u", "v\ni"), system="s"),
        ),
        (
            {"conversations": [wrote("human", "u"), wrote("function_call", "{}"), wrote("observation", "5")]}
            | {"system": "s", "tools": '[{"name": "w"}]'},
            Prompt("7", ("u", "5"), system="s", tools='[{"name": "w"}]', roles=("user", "tool")),
        ),
        ({"conversation": TURNS}, Prompt("7", ("u",), system="s\n\nt")),
        ({"prompt": [said("user", "u")], "chosen": [], "tools": [{"a": 1}]}, Prompt("7", ("u",), tools='[{"a": 1}]')),
    ],
)
def test_every_known_form_of_record_is_read(record, expected):
    assert prompt_of(record, default_id="7") == expected


def lines(path: Path, numbers: Iterable[int], field: str = "prompt") -> str:
    """The path of a file with one prompt for each number."""
    path.write_text("".join(f'{{"{field}": "p{number}"}}\n' for number in numbers))
    return str(path)


def test_every_prompt_is_in_exactly_one_split_whatever_the_order_and_listed_ids_decide_it(tmp_path):
    prompts = [Prompt(str(number), (f"x{number}",)) for number in range(520)]
    splits = split_by_id(prompts, weights=(40, 10, 2), seed=0)
    assert {split: len(splits[split]) for split in SPLITS} == {"train": 400, "dev": 100, "test": 20}
    assert sorted(prompt.id for split in SPLITS for prompt in splits[split]) == sorted(prompt.id for prompt in prompts)
    assert split_by_id(reversed(prompts), weights=(40, 10, 2), seed=0) == splits
    assert split_by_id(prompts, weights=(40, 10, 2), seed=1) != splits
    lists = tmp_path / "ids.json"
    lists.write_text(json.dumps({"test": [2], "dev": [0, 3]}))
    splits = split_by_id(prompts[:5], weights=(1, 1, 1), seed=0, split_ids=str(lists))
    assert [sorted(prompt.id for prompt in splits[split]) for split in SPLITS] == [["1", "4"], ["0", "3"], ["2"]]


@pytest.mark.parametrize(
    ("lists", "complaint"),
    [
        ('{"dev": [0, 1], "test": [2, 70, 71]}', r"lists 2 of 5 ids that no prompt has, the first '70'\. An id is"),
        ('{"test": ["0007"]}', r"lists 1 of 1 ids that no prompt has, the first '0007'; did you mean '7'\?"),
        ('{"dev": [0, 1], "test": [1, 2]}', r"lists the id '1' for dev and for test; remove it from one"),
        ('{"dev": [0], "test": [1], "dev": [2]}', r"it has 'dev' twice; join the two lists"),
        ('{"dev": [0], "tset": [1]}', r"has the split 'tset'; use train, dev, test"),
        ('{"dev": [0, 0, "1"], "test": [2]}', None),
    ],
)
def test_listed_ids_are_those_of_prompts_each_in_one_split(tmp_path, capsys, lists, complaint):
    (tmp_path / "ids.json").write_text(lists)
    path = lines(tmp_path / "prompts.jsonl", range(20))
    config = DataConfig(prompts=path, split_ids=str(tmp_path / "ids.json"), num_train=17)
    with pytest.raises(ValueError, match=complaint) if complaint else nullcontext():
        assert len(load_prompts(config, "train")) == 17
        assert (
            "data.split_ids: 3 of 20 prompts are listed (2 dev, 1 test); all others are train"
            in capsys.readouterr().err
        )


def test_listed_test_ids_are_refused_where_a_set_has_its_own_test_part(tmp_path):
    (tmp_path / "ids.json").write_text('{"test": [0]}')
    config = DataConfig(prompts="gsm8k", split_ids=str(tmp_path / "ids.json"))
    with pytest.raises(ValueError, match="lists test ids, but gsm8k has a separate part for test"):
        load_prompts(config, "train")


def test_a_prompt_with_the_id_of_another_ones_later_turn_is_left_out():
    records = [("f:1", "0", {"id": "a#2", "prompt": "x"}), ("f:2", "1", {"id": "a", "turns": ["y", "z"]})]
    records += [("f:3", "2", {"id": "a#3", "prompt": "w"})]
    prompts, problems = prompts_of(records, {})
    assert [prompt.id for prompt in prompts] == ["a", "a#3"]
    assert problems == {
        "f:1": "id 'a#2' is that of a later turn of the record 'a'; give each record a unique id without #"
    }


def test_no_text_is_in_two_splits(tmp_path, capsys):
    path, ids = tmp_path / "prompts.jsonl", tmp_path / "ids.json"
    path.write_text("".join(f'{{"prompt": "p{number % 20}", "note": "n"}}\n' for number in range(60)))
    ids.write_text(json.dumps({"dev": [0, 1, 2], "test": [21, 40]}))
    for change in ({}, {"split_ids": str(ids)}):
        config = DataConfig(prompts=str(path), num_train=None, num_dev=1, num_test=1, split_weights=(2, 1, 1), **change)
        texts = [[p.turns for p in load_prompts(config, split, may_be_fewer=True)] for split in SPLITS]
        assert len(texts[0]) == len(set(texts[0])), change
        assert not set(texts[0]) & {*texts[1], *texts[2]}, change
    shown = capsys.readouterr().err
    assert "40 of 60 prompts are duplicates and are left out" in shown
    assert shown.count("ignoring the column note; to use one") == 1


@pytest.mark.parametrize(
    ("record", "lines"),
    [
        (
            {"messages": [said("user", "u")], "prompt": "u", "history": [["a", "b"]]},
            ["the prompt is read from the column messages, not from prompt; to", "ignoring the column history; to use"],
        ),
        (
            {"instruction": "u", "text": "### u", "passage": "p", "empty": "", "output": "x"},
            [
                "from the column instruction, not from text; to choose another",
                "ignoring the column passage; to use one",
            ],
        ),
        ({"turns": ["u"], "prompt": "u", "question": "v", "reference": ["r"]}, ["turns, not from prompt, question"]),
        ({"messages": None, "question": "u", "notes": "n"}, ["ignoring the column notes; to use one, map it"]),
        # neither is a column of replies offered, nor one that includes the reply, as Alpaca's text
        ({"instruction": "u", "text": "### u\n### x", "output": "x", "modelAnswer": "x"}, []),
    ],
)
def test_filled_columns_that_no_prompt_uses_are_named_once(record, lines, tmp_path, capsys):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps(record) + "\n" + json.dumps(record | {"id": "b"}) + "\n")
    load(set_of(PromptSource(path=str(path))), "train")
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == len(lines)
    for printed, line in zip(shown, lines, strict=True):
        assert line in printed


@pytest.mark.parametrize(
    ("record", "suggested"),
    [
        ({"answer": "a long reply", "problem": "u"}, "problem"),
        ({"Answer": "a long reply", "Question": "u"}, "Question"),
        ({"a_note": "n", "body": "the longest text here"}, "body"),
        ({"gpt4_response": "a long reply", "userQuery": "u", "context": "a long text"}, "userQuery"),
        ({"output": "a long reply", "chosen": "a", "expected_output": "b"}, "COLUMN"),
        ({"both": "u a long reply", "completion": "a long reply", "kind": "u"}, "kind"),
        ({"query": "", "body": "u"}, "body"),
        ({"number": 3, "list": ["a"]}, "COLUMN"),
        ({"my: text ": "u"}, '"my: text "'),
        ({}, "COLUMN"),
    ],
)
def test_a_column_is_suggested_that_may_hold_the_prompt_and_never_one_with_the_reply(record, suggested):
    with pytest.raises(ValueError, match=rf"map one of them, such as .*columns: {{prompt: {suggested}}}}}$"):
        prompt_of(record, default_id="0")


MESSAGES = [said("user", "WRONG")]


@pytest.mark.parametrize(
    ("record", "columns", "expected"),
    [
        ({"question": "WRONG", "problem": "u"}, {"prompt": "problem"}, Prompt("7", ("u",))),
        ({"instruction": "WRONG", "rewritten": "u", "input": "i"}, {"prompt": "rewritten"}, Prompt("7", ("u",), "i")),
        ({"messages": MESSAGES, "problem": "u"}, {"prompt": "problem"}, Prompt("7", ("u",))),
        ({"turns": ["WRONG"], "problem": "u"}, {"prompt": "problem"}, Prompt("7", ("u",))),
        ({"prompt": "WRONG", "task": "u"}, {"text": "task"}, Prompt("7", ("u",))),
        ({"prompt": "u", "messages": MESSAGES}, {"prompt": "prompt"}, Prompt("7", ("u",))),
        ({"instruction": "WRONG", "input": "u"}, {"prompt": "input"}, Prompt("7", ("u",))),  # and not the context, too
        ({"question": "u", "input": "WRONG", "notes": "c"}, {"context": "notes"}, Prompt("7", ("u",), "c")),
        (
            {"question": "u", "system": "WRONG", "rules": "s"},
            {"system_prompt": "rules"},
            Prompt("7", ("u",), system="s"),
        ),
        ({"question": "u", "id": "WRONG", "key": "k"}, {"task_id": "key"}, Prompt("k", ("u",))),
        ({"question": "u", "category": "WRONG", "kind": "k"}, {"category": "kind"}, Prompt("7", ("u",), category="k")),
    ],
)
def test_a_users_mapping_wins_over_every_known_field(record, columns, expected):
    prompts, problems = prompts_of([("file:1", "7", record)], columns)
    assert (prompts, problems) == ([expected], {})


@pytest.mark.parametrize(
    ("columns", "complaint"),
    [
        ({"promt": "q"}, r"columns maps 'promt', which is not a field: did you mean prompt\?"),
        ({"prompt": "q", "messages": "q"}, "maps both messages and prompt, of which only one is read"),
        ({"id": "q", "task_id": "q"}, "maps both id and task_id"),
    ],
)
def test_a_mapping_that_cannot_be_read_is_refused(columns, complaint):
    with pytest.raises(ValueError, match=complaint):
        prompts_of([("file:1", "7", {"q": "u"})], columns)


def test_a_larger_run_contains_the_smaller_one_and_too_few_are_reported_under_the_setting_that_asked(tmp_path):
    small = DataConfig(prompts=lines(tmp_path / "a.jsonl", range(60)), num_train=5, num_dev=2, num_test=1)
    large = replace(small, num_train=30, num_dev=5, num_test=2)
    for split in SPLITS:
        fewer, more = (load_prompts(config, split) for config in (small, large))
        assert more[: len(fewer)] == fewer
    for section in ("data", "decode"):
        with pytest.raises(ValueError, match=rf"^{section}\.num_dev is 50, .* set {section}\.num_dev to"):
            load_prompts(replace(small, num_dev=50), "dev", section=section)
    one = lines(tmp_path / "b.jsonl", range(1))
    with pytest.raises(ValueError, match=r"num_train is 9, .* has 1 train prompts; set data.num_train to at most 1"):
        load_prompts(DataConfig(prompts=one, num_train=9), "train")


def test_splits_follow_what_is_asked_where_the_usual_shares_have_too_few(tmp_path):
    path = lines(tmp_path / "prompts.jsonl", range(700))
    usual = DataConfig(dir=str(tmp_path / "data"), prompts=path, num_train=500, num_dev=9, num_test=9)
    assert settled(usual).split_weights == WEIGHTS
    assert settled(replace(usual, split_weights=(1, 1, 1))).split_weights == (1, 1, 1)
    asked = replace(usual, num_dev=64, num_test=64)
    for num_train in (None, 512, 9):
        data = settled(replace(asked, num_train=num_train))
        assert data.split_weights == (572, 64, 64)
        prompts = [load_prompts(data, split) for split in SPLITS]
        assert list(map(len, prompts)) == [num_train or 572, 64, 64]
        assert len({prompt.id for part in prompts for prompt in part}) == (num_train or 572) + 128
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "manifest.json").write_text(json.dumps({"split_weights": [300, 200, 200]}))
    made = settled(replace(asked, num_train=None))
    assert (made.split_weights, made.num_train) == ((300, 200, 200), 300), "the shares that it was made with"


def test_more_than_there_is_and_stories_without_a_number_are_refused(tmp_path):
    data = DataConfig(dir=str(tmp_path), prompts=lines(tmp_path / "a.jsonl", range(100)), num_dev=60, num_test=60)
    with pytest.raises(
        ValueError, match=r"has 100 different prompts, but data\.num_train, num_dev and num_test are null, 60"
    ):
        settled(replace(data, num_train=None))
    with pytest.raises(ValueError, match=r"set data\.num_train"):
        settled(DataConfig(dir=str(tmp_path), prompts="stories", num_train=None))


def test_a_set_whose_fields_have_other_names_is_read_by_its_own(monkeypatch):
    record = {"prompt": ["one", "two"], "prompt_id": 81, "category": "writing", "reference": []}
    monkeypatch.setattr(hub, "_records", lambda *_: [("", "0", record)])
    config = DataConfig(prompts="mt_bench", num_train=0, num_dev=0, num_test=1)
    assert load_prompts(config, "test") == [Prompt("81", ("one", "two"), category="writing")]


def test_templates_are_the_papers_wrappers(tokenizer):
    prompt = Prompt("a", ("Add.",), context="1 2")
    assert render(prompt, tokenizer, "llama2") == "[INST] Add.\nInput: 1 2 [/INST]"
    assert render(prompt, tokenizer, "chat") == "<u>Add.\n1 2\n<a>"
    assert render(prompt, tokenizer, "plain") == "Add.\n1 2"
    code = render(Prompt("b", ("def f():",)), tokenizer, "humaneval")
    assert code.startswith("[INST] Below is an instruction")
    assert code.endswith("Create a Python script for this problem:\ndef f():\n\n### Response: [/INST]")
    sums = render(Prompt("c", ("1+1?",)), tokenizer, "gsm8k")
    assert sums.endswith("### Instruction:\n1+1?\n\n### Response: Let's think step by step. [/INST]")


def test_replies_stand_between_the_turns(tokenizer):
    prompt = Prompt("a", ("one", "two"), system="be brief")
    llama2 = "[INST] <<SYS>>\nbe brief\n<</SYS>>\n\none [/INST] yes <end>[INST] two [/INST]"
    assert render(prompt, tokenizer, "llama2", ["yes"]) == llama2
    assert render(prompt, tokenizer, "plain", ["yes"]) == "be brief\none\nyes\ntwo"
    chat = encode(replace(prompt, system=""), tokenizer, "chat", ["yes"])
    assert tokenizer.decode(chat) == "<u>one\n<a>yes<end><u>two\n<a>"


def test_a_template_that_is_not_there_is_refused(tokenizer):
    with pytest.raises(ValueError, match=r"data.template is 'vicuna'; it must be one of chat, plain"):
        encode(Prompt("a", ("x",)), tokenizer, "vicuna")
    bare = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    bare.chat_template = None
    with pytest.raises(ValueError, match="has no chat template"):
        encode(Prompt("a", ("x",)), bare, "chat")


STORIES = [story for split in SPLITS for story in stories(split, 700, seed=3)]
"""Enough for every kind to come up dozens of times."""


def test_splits_are_disjoint_whatever_the_seed():
    for split in SPLITS:  # a prompt has one split
        for seed in range(4):
            assert {split_of(story.prompt) for story in stories(split, 300, seed=seed)} == {split}


def test_a_longer_run_begins_with_the_shorter_one_and_no_prompt_and_no_id_repeats_within_one():
    assert stories("dev", 50, seed=1) == stories("dev", 80, seed=1)[:50]
    assert stories("dev", 50, seed=1) != stories("dev", 50, seed=2)
    many = stories("train", 4000)
    assert len({story.id for story in many}) == len({story.prompt for story in many}) == 4000
    assert {story.kind for story in STORIES} == set(KINDS)


def test_no_text_has_changed():
    """The embedded models were trained on these texts."""
    texts = "".join(repr((story.id, story.prompt, story.answer, story.kind)) for story in STORIES)
    digest = "2a79779059f101ddf1727112b6e5dc1fdfd17322c3c7ef3fba413e0a8c0b3dea"
    assert hashlib.sha256(texts.encode()).hexdigest() == digest
