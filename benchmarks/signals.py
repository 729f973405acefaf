"""What heads know beyond the draft's own signal, on recorded traces: `python -m benchmarks.signals`.

A folder has record/trace, and heads whose logits that trace holds. KL is in nats per drafted token. Signals are
logistics of one number, fitted to nine tenths of the prompts and scored on the last tenth; heads are calibrated as in
their config.json. Tokens of a feature draft are those of every recorded draft, weighted by the probability that
verification reaches them. Prefix heads, whose label is the acceptance_rate, are compared at the responses' positions.
Records of version 0.2.0 have logit q as a function of log q, which float32 rounds: above 10 it is inexact.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from configs.command import run
from evaluation.traces.disk import read_trace, recorded_keys
from evaluation.traces.trace import Trace
from heads import AcceptanceHead
from heads.measures.histogram import observe
from heads.measures.scores import fit_logistic, measures
from lm.signals import logit_of_log

FOLDS = 10
RECORDS = ("checkpoints/coder", "checkpoints/smollm2")
"""The shipped records."""


class Tokens(NamedTuple):
    """Some tokens of a trace; arrays [token]."""

    index: np.ndarray
    """Flat index in the trace."""
    label: np.ndarray
    weight: np.ndarray
    prompt: np.ndarray
    """Number of the prompt, which decides the fold."""

    def at(self, rows: np.ndarray) -> "Tokens":
        """Some of them."""
        return Tokens(*(column[rows] for column in self))

    def kl(self, logit: np.ndarray) -> float:
        """KL of sigmoid(logit)."""
        columns = (torch.from_numpy(values.astype(np.float64))[None] for values in (logit, self.label, self.weight))
        return float(measures(observe(*columns)).kl)

    def fitted_kl(self, signal: np.ndarray) -> float:
        """KL of sigmoid(a signal + b), with a and b of the prompts of the other folds."""
        logit = np.empty(len(signal))
        for fold in range(FOLDS):
            is_held_out = self.prompt % FOLDS == fold
            fit = self.at(~is_held_out)
            columns = (signal[~is_held_out], fit.label, fit.weight)
            tensors = (torch.from_numpy(values.astype(np.float64))[None] for values in columns)
            slope, offset = map(float, fit_logistic(observe(*tensors)))
            logit[is_held_out] = slope * signal[is_held_out] + offset
        return self.kl(logit)


def drawn_tokens(trace: Trace) -> Tokens:
    """The tokens that the draft draws: at each position that it drafts, or of every draft of a feature draft."""
    prompts = np.repeat(trace.prompt_of_row, np.diff(trace.offsets))
    positions = trace.is_drafted.nonzero()[0]
    index = trace.first_drawn[positions]
    prob = trace.drafts["acceptance_prob"]
    reach = np.ones(len(index))
    if trace.num_passing is not None:
        positions = np.repeat(np.arange(trace.num_positions), trace.branch_lengths)
        index = trace.num_positions + np.arange(len(positions))
        reach = np.ones(len(index))
        for depth in range(1, int(trace.depths.max()) + 1):
            later = (trace.depths == depth).nonzero()[0]
            reach[later] = reach[later - 1] * prob[index[later - 1]]
    tokens = Tokens(index, prob[index], reach, prompts[positions])
    return tokens.at(~np.isnan(tokens.label) & np.isfinite(trace.signal("log_token_prob")[index]))


def positions_of(trace: Trace) -> Tokens:
    """The positions of the responses, before a token is drawn."""
    prompts = np.repeat(trace.prompt_of_row, np.diff(trace.offsets))
    index = trace.is_drafted.nonzero()[0]
    return Tokens(index, trace.positions["acceptance_rate"][index], np.ones(len(index)), prompts[index])


def scored_tokens(trace: Trace, tokens: Tokens, head: AcceptanceHead) -> tuple[np.ndarray, Tokens]:
    """A head's calibrated logits, and the tokens that it scores: a fed-time head those that another one follows."""
    logit = np.asarray(head.calibrated_logit(trace.logit(head).astype(np.float64)))
    if head.timing != "fed":
        return logit[tokens.index], tokens
    follower = np.full(len(trace.token), -1)
    every = np.arange(len(trace.token))
    has_before = trace.before != every
    follower[trace.before[has_before]] = every[has_before]
    scored = tokens.at(follower[tokens.index] >= 0)
    return logit[follower[scored.index]], scored


def kl_beside_signal(folder: Path) -> dict[str, tuple[float, float]]:
    """Name of each signal and head -> its KL, and that of the signal that it must beat, on the same tokens."""
    directory = folder / "record" / "trace"
    trace = read_trace(directory, recorded_keys(directory))
    drawn = drawn_tokens(trace)
    positions = positions_of(trace)
    log_q = trace.signal("log_token_prob").astype(np.float64)
    logit_q = logit_of_log(torch.from_numpy(log_q)).numpy()
    logit_max = logit_of_log(torch.from_numpy(np.log(trace.signal("max_prob").astype(np.float64)))).numpy()
    own = {"drawn": drawn.fitted_kl(logit_q[drawn.index]), "prefix": positions.fitted_kl(logit_max[positions.index])}
    result = {"log q(y)": (drawn.fitted_kl(log_q[drawn.index]), own["drawn"]), "logit q(y)": (own["drawn"],) * 2}
    entropy = positions.fitted_kl(trace.signal("entropy")[positions.index])
    result |= {"H(q)": (entropy, own["prefix"]), "logit max q": (own["prefix"],) * 2}
    for path in sorted((folder / "heads").iterdir()):
        head = AcceptanceHead.from_pretrained(path).eval()
        logit, tokens = scored_tokens(trace, positions if head.timing == "prefix" else drawn, head)
        signal = own["prefix"] if head.timing == "prefix" else tokens.fitted_kl(logit_q[tokens.index])
        result[path.name] = (tokens.kl(logit), signal)
    return result


def signals(*, folders: tuple[str, ...] = RECORDS) -> None:
    """Print a table for each folder.

    Args:
        folders: directories with record/trace and heads.
    """
    for folder in folders:
        print(f"{folder}\n{'':30}KL     own signal")
        for name, (kl, signal) in kl_beside_signal(Path(folder)).items():
            note = "  worse: export would refuse it" if "-" in name and kl >= signal else ""
            print(f"{name:28} {kl:.4f}  {signal:.4f}{note}")


if __name__ == "__main__":
    run({"signals": signals}, default="signals")
