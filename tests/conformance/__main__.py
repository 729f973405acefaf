"""Print the table of families as Markdown: `python -m tests.conformance [--backend inductor | aot_eager | none] [family
…]`.

Every family of `families` is built as a tiny random model in float64 on the CPU and held against plain `generate`
(`checks`), eager and compiled: with inductor, which decoding uses, half a minute a family on an idle core; aot_eager
captures the same graphs and makes no C++ of them, which takes seconds. What is not exact ends the command with exit
code 1.
"""

import argparse
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import NamedTuple

import torch
import transformers
from transformers import PreTrainedModel

from lm import CachedModel, CompiledModel
from tests.conformance.checks import (
    CASES,
    LONG,
    LONG_DRAFT_LENGTH,
    NUM_GENERATIONS,
    assert_exact,
    assert_exact_in_transformers,
    refusal_of,
)
from tests.conformance.families import FAMILIES, WINDOW, Family, build

CAPTION = (
    f"float64 on the CPU, transformers {transformers.__version__}, torch {torch.__version__}. Exact: greedy output is "
    "plain `generate`'s "
    "token by token, with a draft that is rejected and with the model as its own draft; sampled with itself as draft, "
    "every token is "
    f"accepted. Prompts of {', '.join(str(case.num_prompt_tokens) for case in CASES)} tokens, answers of "
    f"{', '.join(str(case.num_new_tokens) for case in CASES)}, drafts of "
    f"{', '.join(str(case.draft_length) for case in CASES)}; eager "
    f"through `SpeculativeDecoder` and, the texts with drafts of {LONG_DRAFT_LENGTH}, through "
    "`generate(custom_generate="
    f"speculative_generate)`; compiled through the decoder. Windows and chunks are {WINDOW}."
)
_CAPACITY = 160
"""Room in a compiled model's cache for the longest text, and for the padding of its last feed."""
STEPWISE = "exact, one token at a time"


class Row(NamedTuple):
    """The outcome of one family; a cell is `exact`, perhaps with how, `refused: why`, `fails to compile: why` or
    WRONG.
    """

    family: str
    cache: str
    eager: str
    compiled: str
    num_generations: int


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("families", nargs="*", help="model types; none: all")
    parser.add_argument(
        "--backend", choices=["inductor", "aot_eager", "none"], default="inductor", help="what compiles; none: nothing"
    )
    arguments = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    print("| family | cache | eager | compiled | generations |\n| --- | --- | --- | --- | --- |", flush=True)
    if arguments.backend == "aot_eager":
        compiled_by = torch.compile
        eager = {"backend": "aot_eager"}
        torch.compile = lambda function, **settings: compiled_by(function, **(settings | eager))  # type: ignore
    chosen = [family for family in FAMILIES if not arguments.families or family.model_type in arguments.families]
    rows = [_print_row(family, is_compiling=arguments.backend != "none") for family in chosen]
    print(f"\nCompiled by {arguments.backend}. {CAPTION}\n\n{in_short(rows)}")
    return int(any("WRONG" in row for row in rows))


def in_short(rows: Sequence[Row]) -> str:
    """The table with one row for each kind of cache and outcome."""
    outcomes: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        outcomes.setdefault((row.cache, *(cell.split(":")[0] for cell in (row.eager, row.compiled))), []).append(
            row.family
        )
    lines = (
        f"| {cache} | {eager} | {compiled} | {', '.join(names)} |"
        for (cache, eager, compiled), names in outcomes.items()
    )
    return "\n".join(["| cache | eager | compiled | families |", "| --- | --- | --- | --- |", *lines])


def _print_row(family: Family, *, is_compiling: bool) -> Row:
    """Try one family, and print its row."""
    started_s = perf_counter()
    model = build(family)
    eager = _cell(lambda: refusal_of(model, CachedModel), lambda: _check_eager(model))
    compiled = "not tried"
    if is_compiling:
        kind = partial(CompiledModel, capacity=_CAPACITY)
        compiled = (
            eager
            if eager.startswith("refused")
            else _cell(lambda: refusal_of(model, kind), lambda: assert_exact(model, kind))
        )
        torch._dynamo.reset()
    num_runs = NUM_GENERATIONS * (
        len(CASES) * (eager.startswith("exact") + (compiled == "exact")) + len(LONG) * eager.startswith("exact")
    )
    eager = STEPWISE if eager == "exact" and CachedModel(model).is_stepwise else eager
    row = Row(family.name, family.cache, eager, compiled, num_runs)
    print(f"| {' | '.join(map(str, row))} |", flush=True)
    print(f"{family.name}: {perf_counter() - started_s:.0f} s", file=sys.stderr, flush=True)
    return row


def _check_eager(model: PreTrainedModel) -> None:
    assert_exact(model, CachedModel)
    assert_exact_in_transformers(model, LONG)


def _cell(refusal: Callable[[], str | None], check: Callable[[], None]) -> str:
    why = refusal()
    if why is None:
        try:
            check()
        except ValueError as error:
            why = str(error)
        except torch._dynamo.exc.TorchDynamoException as error:
            return f"fails to compile: {type(error).__name__}"
        except AssertionError as error:
            print(error, file=sys.stderr, flush=True)
            return "WRONG"
    return "exact" if why is None else f"refused: {_in_short(why)}"


def _in_short(why: str) -> str:
    """The reason alone: without the model's name before it, and the error in brackets and the remedy after it."""
    return why.split("; ")[0].split(" (")[0].split(": ")[-1]


if __name__ == "__main__":
    sys.exit(main())
