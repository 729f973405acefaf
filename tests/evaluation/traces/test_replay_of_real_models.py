"""Replay against real decoding on the embedded pair, paired by prompt: equal counts at temperature 0, and z-scores of
drafted tokens and rounds where tokens are random.
"""

import numpy as np
import pytest
import torch

from configs.schema import DataConfig, ModelSource, PairConfig
from data_gen.prompts.sets import load_prompts
from data_gen.prompts.templates import encode
from decode.drafters.factory import PairModels
from decode.policies import HeadPolicy
from evaluation.traces.coupling import Recorder
from evaluation.traces.replay import replay_settings
from evaluation.traces.trace import Trace
from heads import AcceptanceHead
from lm import Pair, Sampling, load_pair
from tests.evaluation.traces.test_played import MODEL_RULES
from tests.toys.loop import BothHeads
from tests.toys.small_pair import traced_by

pytestmark = pytest.mark.slow
LENGTH, NUM_TOKENS, COPIES, NUM_PROMPTS = 8, 40, 8, 8
LIMIT = 4.0
"""Of 22 z-scores one exceeds it with a probability of 1.4e-3; seeds are fixed."""


def head(timing: str) -> AcceptanceHead:
    """A head with random weights, which stops now and then."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        made = AcceptanceHead(96, 1, timing, True)
        torch.nn.init.normal_(made.out.weight, std=0.05)
    return made.eval()


FED, DRAWN = head("fed"), head("drawn")
POLICIES = MODEL_RULES | {
    "fed_head": HeadPolicy(FED, 0.5),
    "drawn_head": HeadPolicy(DRAWN, 0.5),
    "both_heads": BothHeads((FED, DRAWN)),
}


@pytest.fixture(scope="module")
def pair() -> Pair:
    target, draft = (ModelSource(path=f"checkpoints/tiny/{role}", dtype="float32") for role in ("target", "draft"))
    return load_pair(PairConfig(target=target, draft=draft))


@pytest.fixture(scope="module")
def prompts(pair: Pair) -> list[list[int]]:
    return [encode(prompt, pair.tokenizer, "chat") for prompt in load_prompts(DataConfig(num_test=NUM_PROMPTS), "test")]


@pytest.fixture(scope="module", params=[Sampling(), Sampling(temperature=0)], ids=["plain", "greedy"])
def recorded(request, pair: Pair, prompts: list[list[int]]) -> tuple[Sampling, Trace]:
    sampling = request.param
    recorder = Recorder(pair.draft, pair.target, sampling, pair.vocab_size, pair.eos_ids, LENGTH)
    return sampling, traced_by(recorder, prompts * (1 if sampling.is_greedy else COPIES), NUM_TOKENS)


@pytest.mark.parametrize("policy", POLICIES)
def test_replay_counts_what_decoding_counts_on_a_real_pair(pair, prompts, recorded, policy):
    sampling, trace = recorded
    models, generator = PairModels(pair), torch.Generator().manual_seed(0)
    drafter = models.drafter(POLICIES[policy])
    decoder = models.decoder(drafter, sampling=sampling, max_draft_length=LENGTH)
    decoded = [decoder.generate(ids, NUM_TOKENS, generator=generator).counts for ids in prompts]
    replayed = replay_settings(trace, POLICIES[policy]).counts
    for name in ("num_drafted", "num_target"):
        found = getattr(replayed, name)[0].reshape(-1, len(prompts)).astype(float)
        real = np.array([getattr(counts, name) for counts in decoded], dtype=float)
        if sampling.is_greedy:
            assert found[0].tolist() == real.tolist()
            continue
        variance = (found.var(axis=0, ddof=1) * (1 + 1 / COPIES)).sum()
        z = float((real - found.mean(axis=0)).sum() / np.sqrt(max(variance, 1e-9)))
        assert abs(z) < LIMIT, f"{name}: z = {z:.2f}"
