"""The card beside an exported head says what one decides by, and leaves the rest to config.json."""

import pytest

from heads import AcceptanceHead, Provenance
from heads.model.card import description

RECOMMENDED = {
    "max_rejection_prob": 0.713,
    "is_calibrated": False,
    "costs": "measured; stops measured",
    "num_prompts": 50,
    "index_slope": 0.09828,
    "prior_profit": 0.1098,
}


def shown(depth: int, **recommended) -> str:
    head = AcceptanceHead(8, depth, provenance=Provenance(recommended=recommended))
    return description(head.config, num_parameters=1)


@pytest.mark.parametrize(
    ("depth", "blocks"), [(0, "0 residual blocks of"), (1, "1 residual block of"), (2, "2 residual blocks of")]
)
def test_one_block_is_no_blocks(depth, blocks):
    assert blocks in shown(depth)


def test_the_threshold_stands_with_what_it_maximises_and_without_the_constants_of_the_rule():
    card = shown(1, **RECOMMENDED)
    assert "max_rejection_prob 0.713, on the raw probability" in card
    assert "the most predicted tokens per second of a fine grid on 50 prompts of the dev split" in card
    assert "by replay at these costs: measured; stops" in card
    assert "index_slope" not in card
    assert "none yet; run `acceptance-heads tune`" in shown(1)
