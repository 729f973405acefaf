"""The policy that docs/extending.md adds is made by its name, keeps the output law and stops where it says."""

from decode.policies import Policy
from decode.policies.registry import POLICIES, parse_policy
from tests.toys.enumeration import seeded
from tests.toys.extending import added_to
from tests.toys.loop import PROMPT, assert_lossless, decoder_of


def test_a_policy_of_ones_own_takes_ten_lines_and_cannot_drop_a_token():
    """The page's; one that stops at once still keeps the token."""
    with added_to(POLICIES, "POLICIES"):
        policy = parse_policy("unsure:min_token_prob=0.35,max_entropy=1.0")
        hasty = parse_policy("unsure:min_token_prob=1.0")
    assert_lossless(decoder_of(policy, eos_ids=(2,)), 3)
    ours, hasty_ones = (
        decoder_of(each, eos_ids=()).generate(PROMPT, 60, generator=seeded()).rounds for each in (policy, hasty)
    )
    assert len({len(played.drafted) for played in ours[:-3]}) > 1
    assert {len(played.drafted) for played in hasty_ones[:-1]} == {1}
    assert not any(hasattr(Policy, name) for name in ("drop", "reject", "discard"))
