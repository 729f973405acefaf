"""How often the host and an accelerator wait for each other: reads of the host, and uploads (`tests.toys.devices`)."""

from pathlib import Path

import pytest
import torch

from decode import ModelDrafter, SpeculativeDecoder, TreeDrafter
from decode.drafters.trees import SHAPES
from decode.policies import Entropy, FixedLength, HeadPolicy
from heads import AcceptanceHead
from lm import CachedModel, Sampling
from tests.toys.devices import FakeDevices, put
from tests.toys.enumeration import seeded
from tests.toys.small_pair import random_llama

DEVICE = "cuda:0"
PROMPT = [1, 2, 3]
SAMPLINGS = {"sampled": Sampling(), "greedy": Sampling(temperature=0.0)}
ALLOWED = {
    # draft: reads per step and per round, uploads per step and per round
    "a chain of fixed length": (0, 3, 0, 1),
    "a chain whose policy reads signals or heads": (1, 2, 0, 1),
    "a tree of fixed depth": (1, 2, 1, 2),
    "a tree whose policy reads signals": (2, 3, 1, 2),
    "a batch": (1, 2, 2, 2),
}
"""A step is a drafted token, a level of a tree, or a draft step of a whole batch, whatever the number of its rows."""


def head_of(timing: str) -> AcceptanceHead:
    torch.manual_seed(0)
    return AcceptanceHead(16, 1, timing, scalars=True, embedding=timing != "prefix").double()


CASES = [
    ("a chain of fixed length", FixedLength(3)),
    ("a chain whose policy reads signals or heads", Entropy(5.0)),
    *(("a chain whose policy reads signals or heads", HeadPolicy(head_of(time), 0.999)) for time in ("fed", "drawn")),
    ("a tree of fixed depth", FixedLength(3)),
    ("a tree whose policy reads signals", Entropy(5.0)),
    ("a batch", FixedLength(3)),
    ("a batch", HeadPolicy(head_of("drawn"), 0.9)),
]


@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize(("kind", "policy"), CASES)
def test_reads_and_uploads_are_no_more_than_allowed(kind, policy, sampling, num_layers):
    """However many layers the models have; each model's prompt may be one more upload."""
    models = [CachedModel(random_llama(seed, num_hidden_layers=num_layers), holds_trees=True) for seed in (0, 1)]
    for module in (*(model.model for model in models), *policy.heads):
        put(module, DEVICE)
    drafter = TreeDrafter(models[1], policy, SHAPES["cape"]) if "tree" in kind else ModelDrafter(models[1], policy)
    decoder = SpeculativeDecoder(
        models[0], drafter, sampling=SAMPLINGS[sampling], max_draft_length=4, eos_ids=frozenset()
    )
    with FakeDevices() as devices:
        if kind == "a batch":
            batch = decoder.batch([PROMPT, [4], [5, 6]], 9, batch_size=3, generator=seeded())
            num_reads, num_uploads = devices.num_host_reads, devices.num_uploads
            rounds = list(batch)
            num_steps = sum(len(played.steps) for played in rounds)
        else:
            decoder.generate(PROMPT, 1)  # moves the head
            num_reads, num_uploads = devices.num_host_reads, devices.num_uploads
            rounds = decoder.generate(PROMPT, 12, generator=seeded()).rounds
            num_steps = sum(played.counts.num_draft_forwards for played in rounds)
        num_reads = devices.num_host_reads - num_reads
        num_uploads = devices.num_uploads - num_uploads
    of_steps = ALLOWED[kind]
    assert 0 < num_reads <= of_steps[0] * num_steps + of_steps[1] * len(rounds)
    assert 0 < num_uploads <= of_steps[2] * num_steps + of_steps[3] * len(rounds) + 2


def test_the_table_of_the_docs_is_this_one():
    page = Path("docs/how-it-works.md").read_text()
    for name, numbers in ALLOWED.items():
        assert f"| {name} | " + " | ".join(map(str, numbers)) + " |" in page
