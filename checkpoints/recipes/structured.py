"""Prompts for structured answers: records to extract from a short text, and functions to call, as JSON.

Such answers alternate between what follows from the format (keys, quotation marks, braces) and values that the model
has to find in the prompt. Texts are put together from the lists in structured.yaml.
"""

import json
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import yaml

from configs.paths import local_path

_NUM_OFFERED = 3  # functions per prompt


def structured(*, out: str, num: int = 600, seed: int = 0) -> None:
    """Write prompts whose answers are JSON: half extract a record from a text, half call a function.

    Args:
        out: the JSON Lines file, with id, category and instruction of each prompt; use it as data.prompts.
        num: number of prompts, which all differ.
        seed: of the choice of words.
    """
    path = Path(local_path(out, "--out"))
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(prompt) for prompt in structured_prompts(num, seed=seed)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{path}: {num} prompts; use it as data.prompts")


def structured_prompts(num: int, *, seed: int = 0) -> list[dict[str, str]]:
    """As many different prompts; `category` is "extraction" or "function call"."""
    random = Random(seed)
    category_of: dict[str, str] = {}
    while len(category_of) < num:
        if len(category_of) % 2:
            category_of.setdefault(_function_call(random), "function call")
        else:
            category_of.setdefault(_extraction(random), "extraction")
    prompts = []
    for number, (instruction, category) in enumerate(category_of.items()):
        prompts.append({"id": f"structured-{number}", "category": category, "instruction": instruction})
    return prompts


@cache
def _lists() -> dict[str, Any]:
    return yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


def _filled(template: str, random: Random) -> str:
    words = {key: random.choice(values) for key, values in _lists()["words"].items()}
    numbers = {
        "few": random.randint(2, 9),
        "stars": random.randint(2, 5),
        "many": random.randint(11, 95),
        "house": random.randint(1, 140),
        "price": random.randint(12, 480),
        "number": random.randint(1000, 9999),
    }
    return template.format(**words, **numbers).strip()


def _extraction(random: Random) -> str:
    record = random.choice(_lists()["records"])
    text = _filled(record["text"], random)
    task = f"Extract the data from the text as one JSON object with the keys {record['keys']}."
    return f"{task} Answer with JSON only.\n\nText: {text}"


def _function_call(random: Random) -> str:
    functions = _lists()["functions"]
    offered = random.sample(sorted(functions), _NUM_OFFERED)
    called = functions[random.choice(offered)]
    listed = "\n".join(f"- {name}: {functions[name]['arguments']}" for name in offered)
    form = '{"name": ..., "arguments": {...}}'
    return (
        f"You can call one of these functions, listed with their arguments:\n{listed}\n\n"
        f"Answer with one JSON object {form} and nothing else.\n\nRequest: {_filled(called['request'], random)}"
    )
