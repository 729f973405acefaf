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


def structured(*, out: str, num: int = 600, num_unseen: int = 0, seed: int = 0) -> None:
    """Write prompts whose answers are JSON: half extract a record from a text, half call a function.

    Args:
        out: the JSON Lines file, with id, category and instruction of each prompt; use it as data.prompts.
        num: number of prompts, which all differ.
        num_unseen: number of prompts that have one of two kinds of records or call one of two functions, as no other prompt does. They are test
            prompts, with as many others, and a tenth of `num` is dev: a second file, use it as data.split_ids.
        seed: of the choice of words.
    """
    path = Path(local_path(out, "--out"))
    prompts = structured_prompts(num, num_unseen=num_unseen, seed=seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(json.dumps, prompts)) + "\n", encoding="utf-8")
    print(f"{path}: {num} prompts; use it as data.prompts")
    if num_unseen:
        ids = [prompt["id"] for prompt in prompts]
        listed = {"test": ids[-2 * num_unseen :], "dev": ids[: num // 10]}
        path.with_suffix(".splits.json").write_text(json.dumps(listed), encoding="utf-8")
        print(f"{path.with_suffix('.splits.json')}: their splits; use it as data.split_ids")


def structured_prompts(num: int, *, num_unseen: int = 0, seed: int = 0) -> list[dict[str, str]]:
    """As many different prompts, the unseen ones last; `category` is "extraction" or "function call", of unseen
    ones "unseen extraction" or "unseen function call". ValueError if there are too few for dev, test and training.
    """
    if not 0 <= 20 * num_unseen < 9 * num:
        raise ValueError(f"--num_unseen is {num_unseen}; give at most 44 % of --num, which is {num}")
    random = Random(seed)
    category_of: dict[str, str] = {}
    _add(category_of, num - num_unseen, random, slice(-2) if num_unseen else slice(None), "")
    _add(category_of, num, random, slice(-2, None), "unseen ")
    prompts = []
    for number, (instruction, category) in enumerate(category_of.items()):
        prompts.append({"id": f"structured-{number}", "category": category, "instruction": instruction})
    return prompts


def _add(category_of: dict[str, str], num: int, random: Random, kinds: slice, described: str) -> None:
    """Add prompts of these kinds of records and functions until there are `num`."""
    while len(category_of) < num:
        if len(category_of) % 2:
            category_of.setdefault(_function_call(random, kinds), f"{described}function call")
        else:
            category_of.setdefault(_extraction(random, kinds), f"{described}extraction")


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
    task = f"Extract the data from the text as one JSON object with the keys {record['keys']}."
    return f"{task} Answer with JSON only.\n\nText: {text}"


def _function_call(random: Random, kinds: slice) -> str:
    functions = _lists()["functions"]
    called = ""
    while called not in list(functions)[kinds]:
        offered = random.sample(sorted(functions), _NUM_OFFERED)
        called = random.choice(offered)
    listed = "\n".join(f"- {name}: {functions[name]['arguments']}" for name in offered)
    form = '{"name": ..., "arguments": {...}}'
    return (
        f"You can call one of these functions, listed with their arguments:\n{listed}\n\n"
        f"Answer with one JSON object {form} and nothing else.\n\nRequest: {_filled(functions[called]['request'], random)}"
    )
