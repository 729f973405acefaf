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
from store.shards import write_atomic


def structured(*, out: str, num: int = 600, num_unseen: int = 0, seed: int = 0) -> None:
    """Write prompts whose answers are JSON: half extract a record from a text, half call a function.

    Args:
        out: the JSON Lines file, with id, category and instruction of each prompt; use it as data.prompts.
        num: number of prompts, which all differ.
        num_unseen: of these, prompts with one of two kinds of records, or that call one of two functions, as no other
            prompt does; they and as many others are test, a tenth of all is dev, as a second file says.
        seed: of the choice of words.
    """
    path = Path(local_path(out, "--out"))
    prompts = structured_prompts(num, num_unseen=num_unseen, seed=seed)
    write_atomic(path, "".join(f"{json.dumps(prompt)}\n" for prompt in prompts).encode())
    print(f"{path}: {num} prompts; use it as data.prompts")
    if num_unseen:
        ids = [prompt["id"] for prompt in prompts]
        splits = path.with_suffix(".splits.json")
        write_atomic(splits, json.dumps({"test": ids[-2 * num_unseen :], "dev": ids[: num // 10]}).encode())
        print(f"{splits}: their splits; use it as data.split_ids")


def structured_prompts(num: int, *, num_unseen: int = 0, seed: int = 0) -> list[dict[str, str]]:
    """Different prompts of category "extraction" or "function call", "unseen" ones last; ValueError for too many."""
    if not 0 <= 20 * num_unseen < 9 * num:
        raise ValueError(f"--num_unseen is {num_unseen}; give at most 44 % of --num, which is {num}")
    random = Random(seed)
    category_of: dict[str, str] = {}
    while len(category_of) < num:
        is_unseen = len(category_of) >= num - num_unseen
        kinds = slice(-2, None) if is_unseen else slice(-2 if num_unseen else None)
        make, category = ((_extraction, "extraction"), (_function_call, "function call"))[len(category_of) % 2]
        category_of.setdefault(make(random, kinds), f"unseen {category}" if is_unseen else category)
    texts = enumerate(category_of.items())
    return [{"id": f"structured-{n}", "category": category, "instruction": text} for n, (text, category) in texts]


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


def _extraction(random: Random, kinds: slice) -> str:
    record = random.choice(_lists()["records"][kinds])
    text = _filled(record["text"], random)
    return (
        f"Extract the data from the text as one JSON object with the keys {record['keys']}. Answer with JSON only.\n\n"
        f"Text: {text}"
    )


def _function_call(random: Random, kinds: slice) -> str:
    functions = _lists()["functions"]
    called = ""
    while called not in list(functions)[kinds]:
        offered = random.sample(sorted(functions), 3)
        called = random.choice(offered)
    listed = "\n".join(f"- {name}: {functions[name]['arguments']}" for name in offered)
    return (
        f"You can call one of these functions, listed with their arguments:\n{listed}\n\n"
        'Answer with one JSON object {"name": ..., "arguments": {...}} and nothing else.\n\n'
        f"Request: {_filled(functions[called]['request'], random)}"
    )
