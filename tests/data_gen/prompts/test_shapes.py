"""Six public shapes of prompt sets through `init` and `data`; `pytest -s` prints each record and the decoded prompt."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from configs.command import config_of, parser_for
from data_gen.pipeline.command import make
from evaluation.costs.init import init
from lm import load_pair_tokenizer
from tests.data_gen.on_disk import rows_of

SYSTEM = "Answer in one word."
SYSTEM_TURN = {"role": "system", "content": SYSTEM}
ASSISTANT, GPT = {"role": "assistant", "content": "gone"}, {"from": "gpt", "value": "gone"}
OF_DOLLY, OF_SHAREGPT = {"response": "gone", "category": "qa"}, {"system": SYSTEM, "tools": "[]"}
OF_DPO = {"chosen": [ASSISTANT], "rejected": [ASSISTANT]}
SHAPES: dict[str, tuple[Callable[[int], dict[str, Any]], tuple[str, ...]]] = {
    "alpaca": (
        lambda n: {"instruction": f"Add {n} to it.", "input": f"It is {n}.", "output": "gone", "system": SYSTEM},
        ("Add {n} to it.", "It is {n}.", SYSTEM),
    ),
    "dolly": (
        lambda n: OF_DOLLY | {"instruction": f"What is {n}?", "context": f"{n} is a number."},
        ("What is {n}?", "{n} is a number."),
    ),
    "sharegpt": (
        lambda n: OF_SHAREGPT | {"conversations": [{"from": "human", "value": f"Say {n}."}, GPT]},
        ("Say {n}.", SYSTEM),
    ),
    "messages": (
        lambda n: {
            "messages": [
                {"role": "developer", "content": SYSTEM},
                {"role": "user", "content": [{"type": "text", "text": f"Count to {n}."}]},
                ASSISTANT | {"content": None, "tool_calls": [{"name": "gone"}]},
            ]
        },
        ("Count to {n}.", SYSTEM),
    ),
    "lmsys": (
        lambda n: {"conversation_id": f"c{n}", "conversation": [{"role": "user", "content": f"Hi {n}"}, ASSISTANT]},
        ("Hi {n}",),
    ),
    "dpo": (
        lambda n: OF_DPO | {"prompt": [SYSTEM_TURN, {"role": "user", "content": f"Rate {n}."}]},
        ("Rate {n}.", SYSTEM),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_the_model_reads_every_part_of_a_record(shape, toy_pair, tmp_path, monkeypatch):
    record_of, parts = SHAPES[shape]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("evaluation.costs.init._SAMPLE", 0)
    records = [record_of(number) for number in range(16)]
    Path("set.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    path = init(target=str(toy_pair / "target"), draft=str(toy_pair / "draft"), prompts="set.jsonl")
    parser = parser_for(make)
    lengths = ["--data.max_new_tokens", "4", "--data.max_prompt_tokens", "200"]
    config = config_of(parser, parser.parse_args(["--config", str(path), *lengths]))
    make(config)
    tokenizer = load_pair_tokenizer(config.pair)
    rows = [row for split in ("train", "dev", "test") for row in rows_of(config, split)]
    assert len(rows) == 16
    for row in rows:
        number = int(row["id"].removeprefix("c"))
        decoded = tokenizer.decode(row["prompt_ids"])
        print(f"{json.dumps(records[number])}\n    {decoded!r}")
        assert all(part.format(n=number) in decoded for part in parts)
        assert "gone" not in decoded
