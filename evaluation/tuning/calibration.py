"""Heads that were trained under another sampling, calibrated to the drafts of a trace."""

from collections.abc import Mapping

import numpy as np
import torch

from evaluation.traces.trace import Trace
from heads.measures.scores import recalibrated
from heads.model.head import AcceptanceHead
from lm import Sampling


def is_of_other_sampling(head: AcceptanceHead, sampling: Sampling) -> bool:
    """Whether the head is known to have been trained under another sampling."""
    return bool(head.provenance.sampling) and Sampling(**head.provenance.sampling) != sampling


def calibrated_on(dev: Trace, heads: Mapping[str, AcceptanceHead]) -> dict[str, AcceptanceHead]:
    """Heads that were trained under another `Sampling`, with slope and offset refitted to these prompts, by new names.

    Where drafts have their own sampling, every head but the fed-time ones is refitted, on the tokens that a round
    drafts first.
    """
    calibrated = {}
    for name, head in heads.items():
        if not is_of_other_sampling(head, dev.sampling) and dev.draft_sampling is None:
            continue
        if dev.draft_sampling is not None:
            if head.timing == "fed":
                continue
            tokens = scored = dev.first_drawn[dev.is_drafted]
        else:
            tokens = np.arange(dev.num_positions)
            if head.timing == "fed":  # it has scored a token once the next one is drawn
                tokens = np.delete(tokens, dev.offsets[:-1])
            scored = dev.before[tokens] if head.timing == "fed" else tokens
        is_prefix = head.timing == "prefix" and dev.draft_sampling is None
        labels = dev.positions["acceptance_rate"] if is_prefix else dev.signal("acceptance_prob")[scored]
        can_be_drawn = np.isfinite(dev.signal("log_token_prob")[tokens])  # by a draft with a reduced vocabulary
        fitted = (dev.logit(head)[tokens][can_be_drawn], labels[can_be_drawn])
        calibrated[f"{name} calibrated here"] = recalibrated(head, *map(torch.from_numpy, fitted))
    return calibrated
