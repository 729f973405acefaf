"""SpecDec++ (arXiv 2405.19715), Table 2: forward times by regression, stand-alone and inside speculative decoding,
clocked per dataset.

    stand-alone   seconds on forwards, over generations by the draft alone and by the target alone
    SpecDec       seconds on (N_draft, N_target), over generations at every K of the paper
    SpecDec++     the same at every threshold of the paper, by one of its heads

Generations of all settings take turns, on a few prompts at several lengths, in the loop that is configured. Departure:
the first round of each, which reads the prompt, is left out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import mean, stdev
from typing import NamedTuple

import numpy as np
import torch

from decode.experiment import Experiment
from decode.loop.decoder import Generation
from decode.policies import FixedLength, HeadPolicy
from evaluation.costs.machine import loop_of
from evaluation.costs.measure import fit_costs
from evaluation.sheet import Sheet
from heads.model.head import AcceptanceHead

LENGTHS = (2, 4, 6, 8, 10, 12, 14)
THRESHOLDS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""K and h of the paper."""
_PROMPTS = 4
_SHARES = (0.25, 0.5, 0.75, 1.0)
"""Shares of decode.max_new_tokens, by prompt: a regression needs generations of several lengths."""


class ForwardTimes(NamedTuple):
    """Seconds per forward, and how well they explain the clock."""

    t_draft_s: float
    t_target_s: float
    r2: str


def forward_times(experiment: Experiment, head: AcceptanceHead) -> Sheet:
    """Table 2.

    Args:
        experiment: whose pair and datasets are timed.
        head: stops the drafts of the rows of SpecDec++.
    """
    times: dict[str, dict[str, ForwardTimes]] = {"stand-alone": {}, "SpecDec": {}, "SpecDec++": {}}
    for dataset in experiment.datasets:
        generated = generations(experiment, experiment.prompt_ids(dataset, "test", num=_PROMPTS), head)
        (t_draft, r2_draft), (t_target, r2_target) = (alone(generated[name]) for name in ("draft", "target"))
        times["stand-alone"][dataset] = ForwardTimes(t_draft, t_target, f"{r2_draft:.4f} & {r2_target:.4f}")
        for setting in ("SpecDec", "SpecDec++"):
            fit = fit_costs(generated[setting])
            times[setting][dataset] = ForwardTimes(fit.t_draft_s, fit.t_target_s, f"{fit.r2:.4f}")
    rows = [row for setting, by_dataset in times.items() for row in time_rows(setting, by_dataset)]
    return Sheet("SpecDec++ Table 2: forward times in seconds by regression, clocked", rows)


def time_rows(setting: str, times: Mapping[str, ForwardTimes]) -> list[dict[str, str]]:
    """One row per dataset, and their average with its deviation."""
    rows = [
        {
            "Setting": setting,
            "Dataset": dataset,
            "t_draft": f"{each.t_draft_s:.5f}",
            "t_target": f"{each.t_target_s:.5f}",
            "R^2": each.r2,
        }
        for dataset, each in times.items()
    ]
    average = {"Setting": setting, "Dataset": "average"}
    for column, values in (
        ("t_draft", [t.t_draft_s for t in times.values()]),
        ("t_target", [t.t_target_s for t in times.values()]),
    ):
        average[column] = f"{mean(values):.5f}" + (f" ± {stdev(values):.5f}" if len(values) > 1 else "")
    return [*rows, average]


def generations(
    experiment: Experiment, prompts: Sequence[list[int]], head: AcceptanceHead
) -> dict[str, list[Generation]]:
    """Generations of every setting over the prompts, in turns, none ended by an EOS; the first of each decoder is a
    warm-up.
    """
    loop, decode = loop_of(experiment), experiment.decode
    of_draft = replace(loop, pair=replace(loop.pair, target=loop.pair.draft))
    decoders = {
        "draft": [of_draft.decoder(FixedLength(0))],
        "target": [loop.decoder(FixedLength(0))],
        "SpecDec": [loop.decoder(FixedLength(length)) for length in LENGTHS],
        "SpecDec++": [loop.decoder(HeadPolicy(head, threshold)) for threshold in THRESHOLDS],
    }
    generator = torch.Generator().manual_seed(decode.seed)
    generated: dict[str, list[Generation]] = {name: [] for name in decoders}
    for turn, prompt in enumerate([prompts[0], *prompts]):
        length = max(2, round(decode.max_new_tokens * _SHARES[turn % len(_SHARES)]))
        for name, members in decoders.items():
            played = [each.generate(prompt, length, generator=generator) for each in members]
            generated[name] += played if turn else []
    return generated


def alone(generated: Sequence[Generation]) -> tuple[float, float]:
    """(seconds per forward, R²) of one model that generates without drafts: least squares over generations, no
    intercept.
    """
    later = [generation.rounds[1:] for generation in generated]
    forwards = np.array([float(len(rounds)) for rounds in later])
    seconds = np.array([sum(one.draft_s + one.target_s for one in rounds) for rounds in later])
    time_s = float(forwards @ seconds / (forwards @ forwards))
    residual, spread = seconds - forwards * time_s, seconds - seconds.mean()
    return time_s, 1 - float(residual @ residual) / float(spread @ spread)
