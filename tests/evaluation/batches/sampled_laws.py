"""Sequences that are decoded in batches of 7, and chi-square tests of them against the target's law, which is
enumerated.

A case is a policy under a sampling, on toys or on a pair of small Llamas in one padded cache. It answers two prompts in
turns, as a continuous batch. Outcomes that are expected fewer than 5 times are pooled by the exact law before any is
drawn.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

import numpy as np
import torch
from scipy.stats import chi2

from decode import ModelDrafter, SpeculativeDecoder
from heads import AcceptanceHead
from lm import CachedModel, RandomSampler, Sampling
from lm.draws import seed_of
from tests.toys import small_pair
from tests.toys.loop import AUTOS, POLICIES, RULE, SAMPLINGS, ToyBatch, decoder_of

BATCH_SIZE, LENGTH, LEAST_EXPECTED, FALSE_ALARM = 7, 3, 5.0, 1e-4
PROMPTS = ([0, 0, 1], [2, 2, 0])
"""After these the toys' answers are spread under every sampling; an almost certain EOS would show no dependence."""
Outcome = tuple[int, ...]
Law = Mapping[tuple, float]


class ToyDecoder(SpeculativeDecoder):
    """The loop, with seats for toys."""

    def _batch_model(self, model, num):
        return ToyBatch(model, num)


@dataclass(frozen=True)
class LawCase:
    """A decoder, and the distributions that its answers must have."""

    name: str
    decoder: SpeculativeDecoder

    @cached_property
    def laws(self) -> list[Law]:
        """The exact law of the answers to each prompt."""
        return [exact_law(self.decoder, prompt) for prompt in PROMPTS]

    @cached_property
    def joint_law(self) -> Law:
        """The exact joint law of the first two tokens of two neighbours' answers."""
        ours, others = (_beginnings(law) for law in self.laws)
        return {(a, b): p * q for (a, p), (b, q) in product(ours.items(), others.items())}

    def answers(self, num: int, source: int) -> list[Outcome]:
        """Answers to the prompts in turns, each with draws of its own; all bits of the seed count."""
        draws = [RandomSampler(seed_of(source, number)) for number in range(num)]
        prompts = [PROMPTS[number % 2] for number in range(num)]
        made = self.decoder.generate_batch(prompts, LENGTH, batch_size=BATCH_SIZE, generator=draws)
        return [generation.token_ids for generation in made]

    def drawn(self, num: int, source: int) -> list[Outcome]:
        """As many answers, drawn by numpy from the exact laws."""
        generator = np.random.default_rng(source)
        columns = []
        for law in self.laws:
            indices = generator.choice(len(law), num // 2, p=np.array(list(law.values())) / sum(law.values()))
            columns.append([list(law)[index] for index in indices])
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
            decoder.target.reset()
            probs = decoder.sampling.dists(decoder.target.feed([*prompt, *tokens]))[-1].double()
            for token, prob in enumerate((probs / probs.sum()).tolist()):
                if prob > 0:
                    (law if token in decoder.eos_ids else grown)[(*tokens, token)] = probability * prob
        going = grown
    return law | going


def p_value(tables: Sequence[tuple[Counter, Law]]) -> float:
    """The chi-square test of independent tables, each against its law; 0 where an impossible outcome occurred."""
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
    """Outcomes; rare ones share one cell, which takes the next rarest as long as it is itself too rare."""
    cells: list[list[tuple]] = []
    rare: list[tuple] = []
    for outcome in sorted(law, key=lambda outcome: law[outcome]):
        is_rare = num * law[outcome] < LEAST_EXPECTED
        if is_rare or (rare and num * sum(law[other] for other in rare) < LEAST_EXPECTED):
            rare.append(outcome)
        else:
            cells.append([outcome])
    return [*cells, rare] if rare else cells


def _beginnings(law: Law) -> dict[Outcome, float]:
    beginnings: dict[Outcome, float] = {}
    for tokens, prob in law.items():
        beginnings[tokens[:2]] = beginnings.get(tokens[:2], 0.0) + prob
    return beginnings


def cases() -> Iterator[LawCase]:
    """Every policy under every random sampling, and a few policies on real models in one padded batch."""
    random = [name for name in SAMPLINGS if name != "greedy"]
    for (policy, kind), sampling in product((POLICIES | AUTOS).items(), random):
        toy = decoder_of(kind, sampling=SAMPLINGS[sampling])
        how = {"sampling": toy.sampling, "eos_ids": toy.eos_ids, "max_draft_length": toy.max_draft_length}
        yield LawCase(f"toys {policy} {sampling}", ToyDecoder(toy.target, toy.drafter, **how))
    with torch.random.fork_rng():
        torch.manual_seed(2)
        head = AcceptanceHead(16, 1, "drawn", True)
    rules = {name: POLICIES[name] for name in ("fixed_length", "ada_edl", "learned_prob")}
    for name, policy in (rules | {"batch_rule": replace(RULE, head=head)}).items():
        target, drafter = CachedModel(small_pair.model(1, 2)), ModelDrafter(small_pair.model(2), policy)
        how = {"sampling": Sampling(temperature=0.6, top_k=3), "eos_ids": frozenset({small_pair.EOS})}
        yield LawCase(f"llamas {name}", SpeculativeDecoder(target, drafter, **how))
