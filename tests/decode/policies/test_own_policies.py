"""A policy written module:Class is found, made and refused with a reason; docs/extending.md's keeps the output law."""

import sys
from unittest.mock import patch

import pytest

from decode.policies import Policy
from decode.policies.registry import POLICIES, parse_policy, registered
from tests.toys.enumeration import seeded
from tests.toys.extending import added_to
from tests.toys.loop import PROMPT, assert_lossless, decoder_of

MODULE = """
from dataclasses import dataclass
from decode import Policy

@dataclass(frozen=True)
class Unsure(Policy):
    floor: float = 0.3
    signals = frozenset({"token_prob"})
    grid = {"floor": (0.1, 0.3)}
    def after(self, state, drawn):
        return state, drawn.token_prob < self.floor

class Bare(Policy):
    pass

number = 3
"""


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    """A directory of a user with policies_of_mine.py, and with files that have the names of ours."""
    (tmp_path / "policies_of_mine.py").write_text(MODULE)
    (tmp_path / "broken_policies.py").write_text("import nothing_of_this_name\n")
    for name in ("lm", "heads", "decode"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the user has this')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with patch.dict(POLICIES):
        yield tmp_path
    for name in ("policies_of_mine", "broken_policies"):
        sys.modules.pop(name, None)


def test_a_policy_of_a_module_is_made_with_its_parameters(directory):
    policy = parse_policy("policies_of_mine:Unsure:floor=0.2")
    assert (type(policy).__name__, policy.floor) == ("Unsure", 0.2)
    assert parse_policy("policies_of_mine:Unsure").floor == 0.3
    assert sys.path[-1] == str(directory), "behind everything of ours"
    assert registered("policies_of_mine:Unsure").label == "Unsure (policies_of_mine)"
    assert registered("policies_of_mine:Unsure").values(20) == {"floor": (0.1, 0.3)}


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("nowhere_at_all:Unsure", "No module named 'nowhere_at_all'"),
        ("broken_policies:Unsure", "No module named 'nothing_of_this_name'"),
        ("policies_of_mine:Unsur", "has Unsure, Bare"),
        ("policies_of_mine:number", "is no policy"),
        ("policies_of_mine:Policy", "is no policy"),
        ("policies_of_mine:Bare", "is no dataclass"),
        ("policies_of_mine:Unsure:flour=1", "has no parameter 'flour'; it has floor"),
        ("svip", "or a custom one as module:Class"),
    ],
)
def test_what_is_no_policy_is_refused_with_a_reason(spec, said):
    with pytest.raises(ValueError, match=r".*") as raised:
        parse_policy(spec)
    assert said in str(raised.value)


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
