"""What the timing of stops finds: in the loop, by rounds in turns, between the shallowest and the deepest head."""

from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from time import sleep

import pytest
import torch

from decode.loop.drafter import ModelDrafter
from decode.policies import Entropy, FixedLength, HeadPolicy
from evaluation.costs.stops import (
    Rotation,
    drafted_length,
    mixtures_of,
    policies_by_kind,
    shuffled,
    time_stops,
    unstopping,
)
from heads import AcceptanceHead
from lm import Pair, Sampling
from tests.toys.random_drafts import BLOCK, draft, target


@dataclass(frozen=True)
class Slow(Entropy):
    """A stop that takes so many seconds, and would end every draft at once."""

    max_sqrt_entropy: float = 0.0
    seconds: float = 0.01

    def after(self, state, drawn):
        sleep(self.seconds)
        return super().after(state, drawn)


def test_a_stop_is_timed_in_rounds_that_it_does_not_shorten(loop):
    found = time_stops(loop, {"slow": Slow(), "entropy": Entropy(0.0)})
    assert 0.005 < found["slow"][0] < 0.05
    assert found["slow"][0] > found["entropy"][0] >= 0
    assert found["entropy"][1] > 0


def test_twice_the_work_is_twice_the_stop(loop):
    found = time_stops(loop, {"slow": Slow(), "slower": Slow(seconds=0.02)})
    assert found["slower"][0] / found["slow"][0] == pytest.approx(2, rel=0.3)


def test_a_head_is_timed_on_a_draft_that_keeps_its_hidden_states(loop):
    head = AcceptanceHead(loop.pair.draft.config.hidden_size, 1, "drawn", scalars=True)
    assert set(time_stops(loop, policies_by_kind([head]))) == {"entropy", "token_prob", "max_prob", "drawn+s-d1"}


def test_heads_between_the_shallowest_and_the_deepest_lie_on_their_line(loop):
    width = loop.pair.draft.config.hidden_size
    policies = {f"fed-d{depth}": HeadPolicy(AcceptanceHead(width, depth)) for depth in (0, 1, 4)}
    policies["drawn-d2"] = HeadPolicy(AcceptanceHead(width, 2, "drawn"))
    assert mixtures_of(policies)["fed-d1"] == {"fed-d0": 0.75, "fed-d4": 0.25}
    assert [kind for kind, mixture in mixtures_of(policies).items() if mixture == {kind: 1.0}] == [
        "fed-d0",
        "fed-d4",
        "drawn-d2",
    ]
    assert list(time_stops(loop, policies)) == list(policies)


def test_two_heads_together_are_timed_themselves():
    heads = [AcceptanceHead(8, depth, timing) for depth, timing in ((0, "drawn"), (1, "fed"), (2, "fed"), (3, "fed"))]
    both = HeadPolicy(heads[0], also=heads[2])
    policies = {"fed-d1": HeadPolicy(heads[1]), both.stop_kind: both, "fed-d3": HeadPolicy(heads[3])}
    assert mixtures_of(policies) == {kind: {kind: 1.0} for kind in policies}


def test_a_loop_that_drafts_nothing_has_no_stops(loop):
    with pytest.raises(ValueError, match="none has a token; raise them, or give"):
        time_stops(replace(loop, max_new_tokens=1), {"entropy": Entropy()})


def test_a_rotation_drafts_in_its_order_and_feeds_each_draft_one_token_first(loop):
    head = AcceptanceHead(loop.pair.draft.config.hidden_size, 1)
    arms = {"fixed": FixedLength(4), "entropy": unstopping(Entropy(0.0)), "head": unstopping(HeadPolicy(head))}
    drafters = {kind: ModelDrafter(loop.models.draft_for(policy), policy) for kind, policy in arms.items()}
    fed, order = [], ["fixed", "entropy", "head", "entropy"]

    def watched(feed, new_tokens, num_rows=1):
        fed.append(len(new_tokens))
        return feed(new_tokens, num_rows)

    rotation = Rotation(drafters, iter(order * 9), length=4)
    decoder = loop.models.decoder(rotation, sampling=Sampling(), max_draft_length=4, eos_ids=frozenset())
    rounds = decoder.stream([5, 6, 7], 24, generator=torch.Generator().manual_seed(0))
    next(rounds)  # the prompt is read
    for model in {id(drafter.model): drafter.model for drafter in drafters.values()}.values():
        model.feed = partial(watched, model.feed)
    try:
        for _ in range(2):
            fed.clear()
            next(rounds, None)
            assert fed[-4:] == [1, 1, 1, 1]
    finally:
        for drafter in drafters.values():
            vars(drafter.model).pop("feed", None)
    assert [kind for kind, _ in rotation.drafts][:3] == order[:3]


def test_a_feature_draft_that_waits_for_the_prompt_does_not_lose_its_turn(loop):
    order, arms = ["", "entropy"], {"": FixedLength(4), "entropy": unstopping(Entropy(0.0))}
    drafters = {kind: ModelDrafter(loop.models.draft_for(policy), policy) for kind, policy in arms.items()}
    rotation = Rotation(drafters, cycle(order), length=4)
    decoder = loop.models.decoder(rotation, sampling=Sampling(), max_draft_length=4, eos_ids=frozenset())
    asked = drafters[""].propose
    drafters[""].propose = lambda committed, max_tokens: asked(committed, 0 if len(committed) == 3 else max_tokens)
    decoder.generate([5, 6, 7], 24, generator=torch.Generator().manual_seed(0))
    assert [kind for kind, _ in rotation.drafts][:3] == ["", "entropy", ""]


def test_a_stop_of_blocks_is_timed_on_whole_blocks(loop):
    pair = Pair(target("llama"), draft("rnn"), None, loop.pair.tokenizer)
    blocks = replace(loop, pair=pair, max_draft_length=9, prompts=[[1, 2, 3]])
    assert drafted_length(blocks) == BLOCK
    found = time_stops(blocks, {"slow": Slow(seconds=0.03)})
    assert found["slow"][0] > 0.015 * BLOCK, "its work at every place is paid once a round"


def test_every_cycle_has_all_kinds_in_an_order_of_its_own():
    kinds = ["fixed", "fixed", "a", "b", "c"]
    drawn = list(islice(shuffled(kinds), 50))
    cycles = [tuple(drawn[start : start + 5]) for start in range(0, 50, 5)]
    assert all(Counter(names) == Counter(kinds) for names in cycles)
    assert len(set(cycles)) > 5
