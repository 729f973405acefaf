"""Law 4.5 for the two caches of a feature draft: after drafts that were rolled back it is as a fresh sequence,
and rollouts from every place of a text say the same.
"""

from itertools import product

import pytest
import torch

from data_gen.labels.rollout import rollouts_of
from lm.features.glide import Glide
from lm.masks import Tree
from tests.toys.enumeration import seeded
from tests.toys.random_drafts import BLOCKS, KINDS, PAIRS, TARGETS, VOCAB, beside, config, draft, target


def models(kind, family="llama"):
    return beside(target(family), draft(kind, family))


def logits_afresh(kind, family, committed, drafted):
    """Of a new sequence whose target has read all but the newest committed token; `drafted` is fed one by one."""
    tapped, model = models(kind, family)
    tapped.feed(committed[:-1])
    for end in range(len(committed), len(committed) + len(drafted) + 1):
        logits = model.feed((committed + drafted)[len(model) : end])
    return logits, model.hidden


@pytest.mark.parametrize(("kind", "family"), [*PAIRS, *product(BLOCKS, TARGETS)])
def test_logits_after_any_rounds_are_those_of_a_fresh_sequence(kind, family):
    tapped, model = models(kind, family)
    assert model.max_length == 0, "nothing is drafted before the target has read the prompt"
    generator = seeded()
    committed = [1, 2, 3]
    tapped.feed(committed)
    for step in range(8):
        committed = committed + torch.randint(VOCAB, (1,), generator=generator).tolist()
        drafted = torch.randint(VOCAB, (step % 4,), generator=generator).tolist()
        for end in range(len(committed), len(committed) + len(drafted) + 1):
            logits = model.feed((committed + drafted)[len(model) : end])
        expected, hidden = logits_afresh(kind, family, committed, drafted)
        atol = 1e-5 if kind == "mtp" else 1e-10  # layers of these targets compute in float32
        torch.testing.assert_close(logits, expected, rtol=0, atol=atol)
        torch.testing.assert_close(model.hidden, hidden, rtol=0, atol=atol)
        tapped.feed((committed + drafted)[len(tapped) :])
        committed = committed + drafted[: step % 3]
        for each in (tapped, model):
            each.roll_back(len(committed))
        assert len(tapped) <= tapped.recorder.num_features == len(committed)
        assert len(tapped) == len(committed) or family == "qwen3_next"
        assert len(model) <= len(committed)


@pytest.mark.parametrize("kind", [*KINDS, *BLOCKS])
def test_a_token_of_which_the_target_has_not_spoken_is_fed_after_the_draft_s_own_output(kind):
    """As in a hierarchy whose outer level adds a token: also if what it follows was rolled back."""
    tapped, model = models(kind)
    tapped.feed([1, 2, 3, 4])
    model.feed([1, 2, 3, 4, 5, 6])
    model.roll_back(5)
    logits = model.feed([1, 2, 3, 4, 5, 0][len(model) :])
    torch.testing.assert_close(logits, logits_afresh(kind, "llama", [1, 2, 3, 4, 5], [0])[0], rtol=0, atol=1e-10)


@pytest.mark.parametrize(("kind", "family"), [pair for pair in PAIRS if pair[0] != "glide"])
def test_a_tree_s_node_has_the_logits_of_its_path_as_a_chain(kind, family):
    committed, tolerance = [1, 2, 3, 4], {"rtol": 0, "atol": 1e-5 if kind == "mtp" else 1e-10}
    tapped, model = models(kind, family)
    tapped.feed(committed[:-1])
    model.feed(committed)
    model.roll_back(len(committed) - 1)
    first_logits = model.feed_tree(committed[len(model) :], Tree((5, 6), (-1, -1)))[1:]
    logits = model.feed_tree([], Tree((5, 6, 0, 1, 2), (-1, -1, 1, 0, 1)))
    for drafted, ours in (([5], first_logits[0]), ([6, 0], logits[0]), ([5, 1], logits[1]), ([6, 2], logits[2])):
        torch.testing.assert_close(ours[None], logits_afresh(kind, family, committed, drafted)[0], **tolerance)
    model.roll_back(len(committed) - 1)
    expected = logits_afresh(kind, family, [1, 2, 3, 0], [])[0]
    torch.testing.assert_close(model.feed([1, 2, 3, 0][len(model) :]), expected, **tolerance)


TEXT = [1, 5, 2, 6, 0, 3, 3, 4, 1]
LENGTHS = [2, 3, 5, 8, 9]
DRAWN = [[3, 4, 0, 6], [1, 1, 2, 5], [6, 0, 0, 3], [2, 4, 5, 1], [0, 2, 3, 4]]
"""Tokens of each chain."""


def alone(kind: str, family: str, text: list[int], tokens: list[int]) -> torch.Tensor:
    """The states of one round that begins after `text`: the target has read all but its last token."""
    counts = range(len(tokens) + 1)
    return torch.cat([logits_afresh(kind, family, text, tokens[:count])[1] for count in counts])


@pytest.mark.parametrize(("kind", "family"), [*PAIRS, *product(BLOCKS, TARGETS)])
def test_each_chain_is_a_round_of_its_own(kind, family):
    chains = rollouts_of(target(family), draft(kind, family), TEXT)
    num_steps = int(min(4, chains.max_length - 1))
    for _ in range(2):  # the second time the first chains are in the way
        states = [[state] for state in chains.begin(torch.tensor(LENGTHS))]
        for step in range(num_steps):
            owners = [4, 1, 0, 3, 2][: 5 - step]  # at each step one has ended
            fed = chains.feed(torch.tensor([DRAWN[owner][step] for owner in owners]), torch.tensor(owners))
            for owner, state in zip(owners, fed, strict=True):
                states[owner].append(state)
        for owner, length in enumerate(LENGTHS):
            expected = alone(kind, family, TEXT[:length], DRAWN[owner][: len(states[owner]) - 1])
            atol = 1e-5 if kind == "mtp" else 1e-12  # layers of these targets compute in float32
            assert torch.allclose(torch.stack(states[owner]), expected, atol=atol)


def test_a_glide_draft_of_two_layers_is_refused_with_one_line():
    sizes = {"num_hidden_layers": 2, "large_hidden_size": 16, "large_num_attention_heads": 4}
    made = Glide(config(**sizes), 3).double().eval().bind(target())
    with pytest.raises(ValueError, match="has 2 layers") as refusal:
        rollouts_of(target(), made, TEXT)
    assert "\n" not in str(refusal.value)
