"""The law of sequences that are decoded in batches of 7, against the target's by enumeration: are the p-values of many
tests uniform?

    PYTHONPATH=.:tests/decode python -m benchmarks.batch_law [--seed 0] [--num_samples 12] [--only rule]

A test is a policy under a sampling, on the toys of `tests/decode` or on a pair of small Llamas in one padded cache:
`num_sequences` answers to two prompts by turns, decoded as a continuous batch, and the chi-square of what they are,
outcomes expected under 5 times pooled by the exact law before any is drawn. Every test is repeated `num_samples` times,
and its p-values come in arms:

    law           the chi-square of the answers, each sample of each test with a seed of its own: uniform, if the batch
                  is lossless
    neighbours    of the same answers, the first two tokens of pairs that are decoded side by side, against the product
                  of their laws
    pooled        `law` again, of all samples of a test together, which shows a fault sqrt(num_samples) times as small
    one_seed      as `law`, where the tests of a sample have one seed: they draw with the same uniforms, so that their
                  p-values lie together
    control       as `law`, of answers that numpy draws from the exact law: how far the chi-square approximation itself
                  is from uniform

The median of n independent p-values has a standard deviation of 1 / (2 sqrt(n + 2)); `sd_of_medians` is what it is
between samples, and `num_effective` the n that has it. Kolmogorov and Smirnov's p-value and the interval of the median
(95 %, by order statistics) take p-values for independent, and are left out where they are not. The last line is one
JSON document.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
import torch
from scipy.stats import binom, chi2, kstest

from configs.command import run
from decode import ModelDrafter, SpeculativeDecoder
from heads import AcceptanceHead
from lm import CachedModel, RandomDraws, Sampling
from lm.uniforms import seed_of
from store.progress import Bar
from tests.toys import small_pair
from tests.toys.loop import AUTOS, POLICIES, RULE, SAMPLINGS, ToySeats, decoder_of

BATCH_SIZE, LENGTH, LEAST_EXPECTED, FALSE_ALARM = 7, 3, 5.0, 1e-4
PROMPTS = ([0, 0, 1], [2, 2, 0])
"""After which the toys' answers are spread under every sampling; an EOS nearly for sure would show no dependence."""
Outcome = tuple[int, ...]
Law = Mapping[tuple, float]


class ToyDecoder(SpeculativeDecoder):
    """The loop, with seats for toys."""

    def _seats(self, model, num):
        return ToySeats(model, num)


@dataclass(frozen=True)
class LawCase:
    """A decoder, and what its answers have to be distributed as."""

    name: str
    decoder: SpeculativeDecoder

    @cached_property
    def laws(self) -> list[Law]:
        """The exact law of the answers to each prompt."""
        return [exact_law(self.decoder, prompt) for prompt in PROMPTS]

    @cached_property
    def joint_law(self) -> Law:
        """The exact joint law of the first tokens of two neighbours' answers."""
        ours, others = (_beginnings(law) for law in self.laws)
        return {(a, b): p * q for (a, p), (b, q) in product(ours.items(), others.items())}

    def answers(self, num: int, source: int) -> list[Outcome]:
        """Answer the prompts by turns, each with draws of its own; the seed counts with all its bits."""
        draws = [RandomDraws(seed_of(source, place)) for place in range(num)]
        prompts = [PROMPTS[place % 2] for place in range(num)]
        return [
            each.token_ids
            for each in self.decoder.generate_batch(prompts, LENGTH, batch_size=BATCH_SIZE, generator=draws)
        ]

    def drawn(self, num: int, source: int) -> list[Outcome]:
        """Answers drawn from the exact laws themselves, as many as the batch gave."""
        generator = np.random.default_rng(source)
        columns = [_choices(law, num // 2, generator) for law in self.laws]
        return [answer for pair in zip(*columns, strict=True) for answer in pair]

    def law_p(self, answers: Sequence[Outcome]) -> float:
        """The p-value of the answers to both prompts."""
        return p_value([(Counter(answers[turn::2]), law) for turn, law in enumerate(self.laws)])

    def neighbours_p(self, answers: Sequence[Outcome]) -> float:
        """The p-value of pairs of neighbours."""
        pairs = zip(answers[::2], answers[1::2], strict=True)
        return p_value([(Counter((a[:2], b[:2]) for a, b in pairs), self.joint_law)])


@torch.inference_mode()
def exact_law(decoder: SpeculativeDecoder, prompt: Sequence[int]) -> dict[Outcome, float]:
    """Law of the target alone after the prompt: the product of its probabilities, over every sequence."""
    law: dict[Outcome, float] = {}
    going: dict[Outcome, float] = {(): 1.0}
    for _ in range(LENGTH):
        grown: dict[Outcome, float] = {}
        for tokens, probability in going.items():
            ids = [*prompt, *tokens]
            decoder.target.reset()
            probs = decoder.sampling.laws_after(decoder.target.forward(ids), ids)[-1].double()
            for token, prob in enumerate((probs / probs.sum()).tolist()):
                if prob > 0:
                    (law if token in decoder.eos_ids else grown)[(*tokens, token)] = probability * prob
        going = grown
    return law | going


def p_value(tables: Sequence[tuple[Counter, Law]]) -> float:
    """The chi-square test of independent tables, each against its law; 0 where something impossible was seen."""
    statistic, freedom = 0.0, 0
    for observed, law in tables:
        if observed.keys() - law.keys():
            return 0.0
        num = observed.total()
        cells = _cells(law, num)
        for cell in cells:
            expected = num * sum(law[outcome] for outcome in cell)
            statistic += (sum(observed[outcome] for outcome in cell) - expected) ** 2 / expected
        freedom += len(cells) - 1
    return float(chi2.sf(statistic, freedom))


def _cells(law: Law, num: int) -> list[list[tuple]]:
    """Outcomes, those that are expected too rarely in one cell; it takes in the rarest of the others where it is itself
    too rare.
    """
    cells: list[list[tuple]] = []
    rare: list[tuple] = []
    for outcome in sorted(law, key=lambda outcome: law[outcome]):
        if num * law[outcome] < LEAST_EXPECTED or (
            rare and num * sum(law[outcome_] for outcome_ in rare) < LEAST_EXPECTED
        ):
            rare.append(outcome)
        else:
            cells.append([outcome])
    return [*cells, rare] if rare else cells


def _beginnings(law: Law) -> dict[Outcome, float]:
    beginnings: dict[Outcome, float] = {}
    for tokens, prob in law.items():
        beginnings[tokens[:2]] = beginnings.get(tokens[:2], 0.0) + prob
    return beginnings


def _choices(law: Law, num: int, generator: np.random.Generator) -> list[Outcome]:
    outcomes = list(law)
    places = generator.choice(len(outcomes), num, p=np.array(list(law.values())) / sum(law.values()))
    return [outcomes[place] for place in places]


def cases() -> Iterator[LawCase]:
    """Every policy under every sampling that leaves something to chance, and a few on real models in one padded
    batch.
    """
    for (policy, kind), sampling in product(
        (POLICIES | AUTOS).items(), (name for name in SAMPLINGS if name != "greedy")
    ):
        toy = decoder_of(kind, sampling=SAMPLINGS[sampling])
        how = {"sampling": toy.sampling, "eos_ids": toy.eos_ids, "max_draft_length": toy.max_draft_length}
        yield LawCase(f"toys {policy} {sampling}", ToyDecoder(toy.target, toy.drafter, **how))
    with torch.random.fork_rng():
        torch.manual_seed(2)
        head = AcceptanceHead(16, 1, "drawn", True)
    rules = {name: POLICIES[name] for name in ("fixed_length", "ada_edl", "learned_prob")} | {
        "batch_rule": replace(RULE, head=head)
    }
    for name, policy in rules.items():
        target, drafter = CachedModel(small_pair.model(1, 2)), ModelDrafter(small_pair.model(2), policy)
        sampling = Sampling(temperature=0.6, top_k=3)
        yield LawCase(
            f"llamas {name}",
            SpeculativeDecoder(target, drafter, sampling=sampling, eos_ids=frozenset({small_pair.EOS})),
        )


def uniformity(p: np.ndarray, *, are_independent: bool = True) -> dict[str, Any]:
    """Summary of p-values [sample, test]: their median with its interval, and how far they are from uniform."""
    num, medians = p.size, np.median(p, axis=1)
    found: dict[str, Any] = {"num": num, "median": float(np.median(p)), "least": float(p.min())}
    if are_independent:
        places = binom.ppf([0.025, 0.975], num, 0.5).astype(int)
        low, high = np.sort(p, axis=None)[np.clip(places, 0, num - 1)].tolist()
        found |= {"median_low": low, "median_high": high, "ks_p": float(kstest(p.ravel(), "uniform").pvalue)}
    if len(p) > 1:
        spread = float(medians.std(ddof=1))
        expected = 0.5 / np.sqrt(p.shape[1] + 2)
        found |= {"sd_of_medians": spread, "sd_expected": float(expected), "num_effective": 0.25 / spread**2 - 2}
        found["medians"] = [round(median, 3) for median in medians.tolist()]
    return found


def batch_law(*, seed: int = 0, num_samples: int = 12, num_sequences: int = 210, only: str = "") -> None:
    """p-values of every test in every arm, and whether they are uniform.

    Args:
        seed: of everything.
        num_samples: of each test in each arm.
        num_sequences: of each sample; an even number.
        only: a part of the names of the cases that are wanted, as in `rule` for those of `BatchAuto`.
    """
    if num_sequences % 2 or num_sequences < 2 * BATCH_SIZE:
        raise ValueError(
            f"num_sequences is {num_sequences}; it must be an even number of at least {2 * BATCH_SIZE}, half to each "
            "prompt"
        )
    every = [case for case in cases() if only in case.name]
    if not every:
        raise ValueError(f"no case has {only!r} in its name; there are {', '.join(case.name for case in cases())}")
    values: dict[str, list[list[float]]] = {name: [] for name in ("law", "neighbours", "one_seed", "control")}
    pooled: list[list[Outcome]] = [[] for _ in every]
    for sample in Bar(range(num_samples), desc=f"{len(every)} tests", unit="samples"):
        answers = [case.answers(num_sequences, seed_of(seed, "law", sample, case.name)) for case in every]
        values["law"].append([case.law_p(of_case) for case, of_case in zip(every, answers, strict=True)])
        values["neighbours"].append([case.neighbours_p(of_case) for case, of_case in zip(every, answers, strict=True)])
        values["one_seed"].append(
            [case.law_p(case.answers(num_sequences, seed_of(seed, "one seed", sample))) for case in every]
        )
        values["control"].append(
            [case.law_p(case.drawn(num_sequences, seed_of(seed, "control", sample, case.name))) for case in every]
        )
        for all_of_case, of_case in zip(pooled, answers, strict=True):
            all_of_case += of_case
    values["pooled"] = [[case.law_p(of_case) for case, of_case in zip(every, pooled, strict=True)]]
    found = {name: uniformity(np.array(rows), are_independent=name != "one_seed") for name, rows in values.items()}
    for name, facts in found.items():
        print(
            f"{name:<12}",
            ", ".join(f"{key} {value:.3g}" for key, value in facts.items() if isinstance(value, int | float)),
        )
    fewest = sorted(zip(values["pooled"][0], (case.name for case in every), strict=True))[:3]
    print(
        json.dumps(
            {"cases": len(every), "num_sequences": num_sequences, "seed": seed, "arms": found, "least_pooled": fewest}
        )
    )
    for name in ("law", "neighbours", "pooled"):
        if not found[name]["ks_p"] > FALSE_ALARM:
            raise ValueError(
                f"the p-values of {name} are not uniform (Kolmogorov and Smirnov: {found[name]['ks_p']:.1e}): a batch "
                "has another law"
            )


if __name__ == "__main__":
    run({"batch_law": batch_law}, default="batch_law")
