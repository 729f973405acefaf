"""Story problems and other small tasks with worked answers: the text of the embedded trio, and the prompts of its
experiments.

No prompt is in two splits, for any seed (`split_of`), and a longer run begins with a shorter one.

Each kind of task is a function that draws a prompt, the lines of a worked answer and its result from one
`random.Random`. An answer alternates between phrases, whose first token is a free choice that determines the
rest; free words inside an aside; and derived tokens (results, sorted items, counts). Its last line is `Answer:
…`. The text depends on the order of the random draws, which must not change. Words and phrases are in
stories.json; the phrases of a bank begin with different words.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count as count_up
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

_WORDS: dict[str, list[Any]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
Task = tuple[str, list[str], str]
"""(prompt, lines of the answer, result)"""


def _pick(rng: Random, bank: str) -> Any:
    return rng.choice(_WORDS[bank])


def _step(rng: Random, reasons: str, equation: str, subject: str = "") -> str:
    return f"{_pick(rng, 'leads')} {subject}{_pick(rng, reasons)}: {equation}."


def story(rng: Random) -> Task:
    """Two to four changes to a number of things that somebody has."""
    name = _pick(rng, "names")
    thing = _pick(rng, "things")
    start = total = rng.randint(12, 60)
    events = []
    lines = [f"At the start {name} has {start} {thing}."]
    for _ in range(rng.choice((2, 2, 2, 3, 3, 4))):
        # mostly a loss when there are many things, a gain when there are few
        is_loss = total > 50 or (total > 20 and rng.random() < 0.5)
        number = rng.randint(2, min(total - 5, 30)) if is_loss else rng.randint(2, 35)
        events.append(_pick(rng, "losses" if is_loss else "gains").format(k=number))
        reason = _pick(rng, "loss_reasons" if is_loss else "gain_reasons")
        sign, after = ("-", total - number) if is_loss else ("+", total + number)
        lines.append(f"{_pick(rng, 'leads')} {reason}: {total} {sign} {number} = {after}.")
        total = after
    changes = ", then ".join(events)
    prompt = f"{name} has {start} {thing}. {name} {changes}. How many {thing} does {name} have in the end?"
    return prompt, lines, f"{total} {thing}"


def receipt(rng: Random) -> Task:
    """Two positions of a price list, multiplied and added."""
    name = _pick(rng, "names")
    things = rng.sample(_WORDS["things"], 3)
    prices = [rng.randint(2, 9) for _ in things]
    bought = rng.sample(range(3), 2)
    counts = [rng.randint(2, 9) for _ in bought]
    listed = ", ".join(f"{thing} cost {price}" for thing, price in zip(things, prices, strict=True))
    wanted = " and ".join(f"{count} {things[i]}" for count, i in zip(counts, bought, strict=True))
    parts = [count * prices[i] for count, i in zip(counts, bought, strict=True)]
    lines = [
        _step(rng, "group_reasons", f"{count} * {prices[i]} = {part}", f"the {things[i]}: ")
        for count, i, part in zip(counts, bought, parts, strict=True)
    ]
    lines.append(f"{_pick(rng, 'leads')} both together make {parts[0]} + {parts[1]} = {sum(parts)}.")
    prompt = f"At the market {listed} coins each. {name} buys {wanted}. What does {name} pay?"
    return prompt, lines, f"{sum(parts)} coins"


def stock(rng: Random) -> Task:
    """The sum or the difference of two numbers in a list."""
    things = rng.sample(_WORDS["things"], 4)
    numbers = rng.sample(range(2, 50), 4)
    (a, x), (b, y) = rng.sample(list(zip(things, numbers, strict=True)), 2)
    listed = ", ".join(f"{number} {thing}" for thing, number in zip(things, numbers, strict=True))
    lines = [f"{_pick(rng, 'leads')} the list says that there are {n} {t}." for t, n in ((a, x), (b, y))]
    if rng.random() < 0.5:
        lines.append(_step(rng, "gain_reasons", f"{x} + {y} = {x + y}"))
        return f"A shop has {listed}. How many {a} and {b} are there together?", lines, str(x + y)
    more = max(x, y)
    less = min(x, y)
    lines.append(_step(rng, "loss_reasons", f"{more} - {less} = {more - less}"))
    return f"A shop has {listed}. By how much do the numbers of {a} and {b} differ?", lines, str(more - less)


def sort(rng: Random) -> Task:
    """Three to five numbers or words, in order."""
    count = rng.randint(3, 5)
    if rng.random() < 0.6:
        items = [str(number) for number in rng.sample(range(2, 100), count)]
        ordered = sorted(items, key=int)
        task = "Sort these numbers, the smallest first"
    else:
        items = rng.sample(_WORDS["fruits"], count)
        ordered = sorted(items)
        task = "Sort these words by the alphabet"
    return f"{task}: {', '.join(items)}.", [_sequence(rng, ordered)], ", ".join(ordered)


def sums(rng: Random) -> Task:
    """Two to four small independent calculations."""
    calculations = [_calculation(rng) for _ in range(rng.randint(2, 4))]
    lines = [f"{_pick(rng, 'leads')} {_pick(rng, 'sum_leads')} {term} = {result}." for term, result in calculations]
    results = ", ".join(str(result) for _, result in calculations)
    return f"Work out {', '.join(term for term, _ in calculations)}.", lines, results


def _calculation(rng: Random) -> tuple[str, int]:
    """("14 + 9", 23): a sum, a difference or a product, never negative."""
    sign = rng.choice("++--*")
    if sign == "*":
        x = rng.randint(2, 9)
        y = rng.randint(2, 9)
        return f"{x} * {y}", x * y
    y, x = sorted((rng.randint(2, 60), rng.randint(2, 60)))
    return (f"{x} + {y}", x + y) if sign == "+" else (f"{x} - {y}", x - y)


def copy(rng: Random) -> Task:
    """Three to five words, as they are or from the last to the first."""
    items = rng.sample(_WORDS[rng.choice(("fruits", "colours", "things", "names"))], rng.randint(3, 5))
    is_reversed = rng.random() < 0.5
    reply = items[::-1] if is_reversed else items
    task = "Say these words from the last to the first" if is_reversed else "Say these words in the same order"
    return f"{task}: {', '.join(items)}.", [_sequence(rng, reply)], ", ".join(reply)


def count(rng: Random) -> Task:
    """How often a word occurs in a list, and at which positions."""
    choices = rng.sample(_WORDS["fruits"], 3)
    items = [rng.choice(choices) for _ in range(rng.randint(5, 8))]
    wanted = rng.choice(items)
    positions = [str(position) for position, item in enumerate(items, 1) if item == wanted]
    lines = [f"{_pick(rng, 'leads')} we find {wanted} at place {position}." for position in positions]
    return f"How often is the word {wanted} in this list: {', '.join(items)}?", lines, f"{len(positions)} times"


def compare(rng: Random) -> Task:
    """Who of three has the most, and by how much more than another."""
    names = rng.sample(_WORDS["names"], 3)
    thing = _pick(rng, "things")
    numbers = rng.sample(range(2, 99), 3)
    (most, winner), (second, runner_up), _ = sorted(zip(numbers, names, strict=True), reverse=True)
    holdings = ", ".join(f"{name} has {number}" for number, name in zip(numbers, names, strict=True))
    lines = [
        f"{_pick(rng, 'leads')} the largest number is {most}, and it belongs to {winner}.",
        f"{_pick(rng, 'leads')} the second largest is {second}, from {runner_up}.",
        _step(rng, "loss_reasons", f"{most} - {second} = {most - second}"),
    ]
    prompt = f"Of {thing}, {holdings}. Who has the most, and how many more than the next?"
    return prompt, lines, f"{winner}, {most - second} more"


def convert(rng: Random) -> Task:
    """A number of one unit in a smaller unit, and some of the smaller added."""
    unit, smaller, factor = _pick(rng, "units")
    number = rng.randint(2, 9)
    extra = rng.randint(2, 20)
    product = number * factor
    lines = [
        _step(rng, "group_reasons", f"{number} * {factor} = {product}"),
        _step(rng, "gain_reasons", f"{product} + {extra} = {product + extra}"),
    ]
    return f"How many {smaller} are {number} {unit} and {extra} {smaller}?", lines, f"{product + extra} {smaller}"


def _sequence(rng: Random, items: list[str]) -> str:
    others = [f"{_pick(rng, 'item_leads')} {item}" for item in items[1:]]
    return "; ".join([f"The list begins with {items[0]}", *others]) + "."


def _answer(rng: Random, lines: list[str], result: str) -> str:
    """Opening, the lines with occasional asides of free words, a closing, and the final line."""
    with_asides = [f"{line} {_aside(rng)}" if rng.random() < 0.25 else line for line in lines]
    return f"{_pick(rng, 'openings')} {' '.join(with_asides)} {_pick(rng, 'closings')}\nAnswer: {result}"


def _aside(rng: Random) -> str:
    aside = _pick(rng, "asides")
    banks = {"size": "sizes", "colour": "colours", "furniture": "furniture", "place": "places", "animal": "animals"}
    return aside.format(**{name: _pick(rng, bank) for name, bank in banks.items()})


KINDS: dict[str, tuple[Callable[[Random], Task], int]] = {
    "story": (story, 5),
    "receipt": (receipt, 2),
    "stock": (stock, 2),
    "sums": (sums, 3),
    "sort": (sort, 2),
    "copy": (copy, 2),
    "count": (count, 1),
    "compare": (compare, 2),
    "convert": (convert, 2),
}
"""kind -> (the function that draws a task of it, its share among the kinds)"""


@dataclass(frozen=True)
class Story:
    """A task: its prompt and its worked answer."""

    id: str
    """Kind and hash of the prompt, the same in every run."""
    prompt: str
    answer: str
    """Step by step, with a last line `Answer: …`."""
    kind: str
    """A key of `KINDS`."""


def stories(split: str, num_stories: int, *, seed: int = 0) -> list[Story]:
    """The first `num_stories` problems of a split."""
    return list(islice(story_stream(split, seed), num_stories))


def split_of(prompt: str) -> str:
    """The split to which a prompt belongs: 80 % of all prompts are train, 10 % dev, 10 % test."""
    percent = int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:8], "big") % 100
    return "train" if percent < 80 else "dev" if percent < 90 else "test"


def story_stream(split: str, seed: int) -> Iterator[Story]:
    """An endless sequence of problems of one split, without repetitions."""
    known_ids = set()
    for index in count_up():
        rng = Random(f"{split}/{seed}/{index}")
        (kind,) = rng.choices(list(KINDS), [share for _, share in KINDS.values()])
        prompt, lines, result = KINDS[kind][0](rng)
        story_id = f"{kind}-{hashlib.sha256(prompt.encode()).hexdigest()[:12]}"
        if story_id not in known_ids and split_of(prompt) == split:
            known_ids.add(story_id)
            yield Story(story_id, prompt, _answer(rng, lines, result), kind)
