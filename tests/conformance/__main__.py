"""Print the table of families as Markdown: `python -m tests.conformance [family …]`.

Every family of `families` is built as a tiny random model in float64 on the CPU and compared with plain `generate`
(`checks`). The exit code is 1 if a family is not exact and is not refused.
"""

import argparse
import sys
import warnings
from collections.abc import Sequence
from time import perf_counter

import torch
import transformers
from transformers import PreTrainedModel

from lm import CachedModel
from tests.conformance import checks
from tests.conformance.checks import CASES, LONG
from tests.conformance.families import FAMILIES, WINDOW, Family, build

CAPTION = (
    f"float64 on the CPU, transformers {transformers.__version__}, torch {torch.__version__}. Exact: greedy output is "
    "plain `generate`'s token by token, with a draft that is rejected and with the model as its own draft; sampled "
    "with itself as draft, every token is accepted. "
    f"Prompts of {', '.join(str(case.num_prompt_tokens) for case in CASES)} tokens, answers of "
    f"{', '.join(str(case.num_new_tokens) for case in CASES)}, drafts of "
    f"{', '.join(str(case.draft_length) for case in CASES)}; through `SpeculativeDecoder` and, the texts with drafts "
    f"of {checks.LONG_DRAFT_LENGTH}, through `generate(custom_generate=speculative_generate)`. Windows and chunks: "
    f"{WINDOW}."
)
STEPWISE = "exact, one token at a time"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("families", nargs="*", help="model types; none: all")
    arguments = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    print("| family | cache | outcome | generations |\n| --- | --- | --- | --- |", flush=True)
    families = [family for family in FAMILIES if not arguments.families or family.model_type in arguments.families]
    rows = list(map(_print_row, families))
    print(f"\n{CAPTION}\n\n{summary(rows)}")
    return int(any(outcome == "WRONG" for _, _, outcome in rows))


def summary(rows: Sequence[tuple[str, str, str]]) -> str:
    """The table with one row for each kind of cache and outcome."""
    families: dict[tuple[str, str], list[str]] = {}
    for name, cache, outcome in rows:
        families.setdefault((cache, outcome.split(":")[0]), []).append(name)
    lines = (f"| {cache} | {outcome} | {', '.join(names)} |" for (cache, outcome), names in families.items())
    return "\n".join(["| cache | outcome | families |", "| --- | --- | --- |", *lines])


def _print_row(family: Family) -> tuple[str, str, str]:
    """(family, cache, outcome: `exact`, perhaps with how, `refused: why`, or WRONG)."""
    started_s = perf_counter()
    model = build(family)
    outcome = _outcome(model)
    num_generations = checks.NUM_GENERATIONS * (len(CASES) + len(LONG)) * outcome.startswith("exact")
    print(f"| {family.name} | {family.cache} | {outcome} | {num_generations} |", flush=True)
    print(f"{family.name}: {perf_counter() - started_s:.0f} s", file=sys.stderr, flush=True)
    return family.name, family.cache, outcome


def _outcome(model: PreTrainedModel) -> str:
    if (refusal := checks.refusal_of(model)) is None:
        try:
            checks.assert_exact(model)
            checks.assert_exact_in_transformers(model, LONG)
        except ValueError as error:
            refusal = str(error)
        except AssertionError as error:
            print(error, file=sys.stderr, flush=True)
            return "WRONG"
    if refusal is not None:
        # the reason alone, without the model's name, the error in brackets and the remedy
        return f"refused: {refusal.split('; ')[0].split(' (')[0].split(': ')[-1]}"
    return STEPWISE if CachedModel(model).one_token_at_a_time else "exact"


if __name__ == "__main__":
    sys.exit(main())
