"""Rollouts from every place of a text, side by side, say what a draft says that is fed token by token."""

from itertools import product

import pytest
import torch

from lm.features.glide import Glide
from lm.features.rollout import Rollouts, rollouts_of, run_target
from tests.lm.features.test_feature_models import models
from tests.toys.random_drafts import BLOCKS, PAIRS, TARGETS, config, draft, target

TEXT = [1, 5, 2, 6, 0, 3, 3, 4, 1]
LENGTHS = [2, 3, 5, 8, 9]
DRAWN = [[3, 4, 0, 6], [1, 1, 2, 5], [6, 0, 0, 3], [2, 4, 5, 1], [0, 2, 3, 4]]
"""Tokens of each chain."""


def alone(kind: str, family: str, text: list[int], tokens: list[int]) -> torch.Tensor:
    """The states of one round that begins after `text`: the target has read all but its last token."""
    tapped, model = models(kind, family)
    tapped.feed(text[:-1])
    states = []
    for count in range(len(tokens) + 1):
        model.feed([*text, *tokens[:count]][len(model) :])
        states.append(model.hidden[0])
    return torch.stack(states)


@pytest.mark.parametrize(("kind", "family"), [*PAIRS, *product(BLOCKS, TARGETS)])
def test_each_chain_is_a_round_of_its_own(kind, family):
    chains = rollouts_of(draft(kind, family), run_target(target(family), draft(kind, family), TEXT), TEXT)
    num_steps = int(min(4, chains.max_length - 1))
    for _ in range(2):  # the second time the first chains are in the way
        states = [chains.begin(torch.tensor(LENGTHS))]
        for step in range(num_steps):
            owners = torch.tensor([4, 1, 0, 3, 2])
            fed = chains.feed(torch.tensor([DRAWN[owner][step] for owner in owners.tolist()]), owners)
            states.append(fed[owners.argsort()])
        for owner, length in enumerate(LENGTHS):
            expected = alone(kind, family, TEXT[:length], DRAWN[owner][:num_steps])
            atol = 1e-5 if kind == "mtp" else 1e-12  # layers of these targets compute in float32
            assert torch.allclose(torch.stack([step[owner] for step in states]), expected, atol=atol)


@pytest.mark.parametrize("kind", ["eagle", "glide", "rnn"])
def test_a_chain_that_has_ended_leaves_the_others_as_they_are(kind):
    chains = rollouts_of(draft(kind), run_target(target(), draft(kind), TEXT), TEXT)
    chains.begin(torch.tensor(LENGTHS))
    chains.feed(torch.tensor([tokens[0] for tokens in DRAWN]), torch.arange(5))
    chains.feed(torch.tensor([DRAWN[1][1], DRAWN[3][1]]), torch.tensor([1, 3]))
    last = chains.feed(torch.tensor([DRAWN[3][2]]), torch.tensor([3]))
    assert torch.allclose(last[0], alone(kind, "llama", TEXT[:8], DRAWN[3][:3])[-1], atol=1e-12)


def test_a_glide_draft_of_two_layers_is_refused_with_one_line():
    sizes = {"num_hidden_layers": 2, "large_hidden_size": 16, "large_num_attention_heads": 4}
    made = Glide(config(**sizes), 3).double().eval().bind(target())
    with pytest.raises(ValueError, match="has 2 layers") as refusal:
        Rollouts(made, run_target(target(), made, TEXT), TEXT)
    assert "\n" not in str(refusal.value)
