"""Online features equal cached ones up to the precision in which those are stored; the frozen draft stays out of
checkpoints.
"""

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from heads.batches.features import of_timing
from heads.batches.online import DraftFeatures, Row
from heads.training.sweep import Sweep
from lm.forwards import hidden_states, logits_of
from tests.toys.small_pair import llama


@pytest.fixture(scope="module")
def draft() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(llama(vocab_size=40, intermediate_size=24, num_hidden_layers=1)).eval()


def rows() -> list[Row]:
    generator = torch.Generator().manual_seed(1)

    def ids(count: int) -> list[int]:
        return torch.randint(0, 40, (count,), generator=generator).tolist()

    made = []
    for length in (5, 9):
        probs = torch.rand(length, generator=generator).tolist()
        coins = [(torch.rand(length, generator=generator) < 0.3).tolist() for _ in range(2)]
        log_p, rates = (
            (-torch.rand(length, generator=generator)).tolist(),
            torch.rand(length, generator=generator).tolist(),
        )
        made.append(Row(ids(4), ids(length), ids(length), probs, log_p, rates, coins))
    return made


@pytest.mark.parametrize("mixing", [0, 1])
def test_fed_states_are_those_after_each_token_of_the_mixed_sequence(draft, mixing: int):
    made = rows()
    batch = DraftFeatures(draft, vocab_size=40, timings=("fed", "drawn"))(made, torch.device("cpu"))
    row, coins = made[1], made[1].from_target[mixing]
    mixed = [x if coin else y for coin, x, y in zip(coins, row.response_ids, row.draft_ids, strict=True)]
    lengths = batch["fed"].row_lengths.tolist()
    start = sum(lengths[: 2 + mixing])
    expected = hidden_states(draft, [row.prompt_ids + mixed], [len(row.prompt_ids)])[~torch.tensor(coins)]
    torch.testing.assert_close(batch["fed"].hidden[start : start + lengths[2 + mixing]], expected, atol=1e-5, rtol=1e-5)


def test_drawn_states_are_those_that_the_tokens_were_drawn_from(draft):
    made = rows()
    drawn = DraftFeatures(draft, vocab_size=40, timings=("drawn",))(made, torch.device("cpu"))["drawn"]
    row = made[0]
    expected = hidden_states(draft, [row.prompt_ids + row.response_ids[:-1]], [len(row.prompt_ids) - 1])
    torch.testing.assert_close(drawn.hidden[:5], expected, atol=1e-5, rtol=1e-5)
    log_probs = logits_of(draft, expected, 40).float().log_softmax(-1)
    torch.testing.assert_close(
        drawn.scalars["log_token_prob"][:5],
        log_probs[torch.arange(5), torch.tensor(row.draft_ids)],
        atol=1e-5,
        rtol=1e-5,
    )
    assert torch.equal(drawn.token[:5], torch.tensor(row.draft_ids))
    assert of_timing({"drawn": drawn}, "prefix").acceptance_prob[:5].tolist() == pytest.approx(row.acceptance_rate)
    assert of_timing({"drawn": drawn}, "candidate").acceptance_prob[:5].log().tolist() == pytest.approx(row.log_p)


def test_the_frozen_draft_is_no_part_of_the_module(draft, tmp_path: Path):
    facts = {"hidden_size": 16, "scalar_stats": {}, "provenance": {}}
    sweep = Sweep(
        {"depths": [1], "timings": ["fed"], "scalars": [False]},
        facts,
        draft=DraftFeatures(draft, vocab_size=40, timings=("fed",)),
    )
    theirs = {tensor.data_ptr() for tensor in draft.parameters()}
    assert not theirs & {tensor.data_ptr() for tensor in sweep.state_dict().values()}
    assert not theirs & {tensor.data_ptr() for tensor in sweep.parameters()}
    loss = sweep.logits(sweep.items()[0][1], sweep._features(rows())).sum()
    loss.backward()
    assert all(parameter.grad is None for parameter in draft.parameters())
