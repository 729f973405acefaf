"""One small contest: every policy and two heads on the dev and test prompts of a toy pair."""

import pytest
import torch

from evaluation.competitor import competitors_of
from evaluation.contest import Contest, Replays, hold, replay_dataset
from evaluation.gain import Splits
from evaluation.times import StopShares
from evaluation.traces.trace import Trace
from heads import AcceptanceHead
from lm import Sampling
from tests.toys.small_pair import trace
from tests.toys.times import times_by_length

CURVE = times_by_length(
    0.2, (1.0, 1.3, 1.5, 1.7, 1.9, 2.1), "measured", {"token_prob": 0.01}, elsewhere=StopShares("", {})
)


@pytest.fixture(scope="session")
def splits() -> Splits[Trace]:
    return Splits(*(trace(Sampling(temperature=0.6), copies=2, seed=seed) for seed in (1, 2)))


@pytest.fixture(scope="session")
def replays(splits) -> Replays:
    torch.manual_seed(0)
    heads = {f"{timing}+s-d1-w1": AcceptanceHead(16, 1, timing, True).eval() for timing in ("fed", "drawn")}
    for head in heads.values():
        torch.nn.init.normal_(head.out.weight)
    few = {"ada_edl": {"initial_lambda": [0.3], "target_rate": [0.7]}}
    competitors = competitors_of(few, heads, max_draft_length=5)
    return replay_dataset(splits, competitors, perfect_head=True, name="made")


@pytest.fixture(scope="session")
def contest(replays) -> Contest:
    return hold(replays, CURVE, dataset="made")
