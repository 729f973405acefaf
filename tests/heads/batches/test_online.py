"""Online features equal cached ones up to the precision of those; the frozen draft stays out of checkpoints."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from heads.batches.features import DraftFeatures, Row
from heads.training.sweep import Sweep
from lm.forwards import hidden_states
from tests.toys.small_pair import llama


@pytest.fixture(scope="module")
def draft() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(llama(vocab_size=40, intermediate_size=24, num_hidden_layers=1)).eval()


def rows() -> dict[str, list[Row]]:
    """Of two responses, of which fed-time features have two mixings."""
    generator, made = torch.Generator().manual_seed(1), {"fed": list[Row](), "drawn": list[Row]()}

    def ids(count: int) -> list[int]:
        return torch.randint(0, 40, (count,), generator=generator).tolist()

    for length in (5, 9):
        numbers = {name: torch.rand(length, generator=generator) for name in ("acceptance_prob", "entropy")}
        numbers["token"] = torch.tensor(ids(length), dtype=torch.int32)
        drafted = [(torch.rand(length, generator=generator) > 0.3).nonzero().squeeze(-1) for _ in range(2)]
        drafted.append(torch.arange(length))
        texts = ids(4), ids(length)
        for timing, each in zip(("fed", "fed", "drawn"), drafted, strict=True):
            of_drafted = {name: value[each] for name, value in numbers.items()}
            made[timing].append(Row(of_drafted, each, torch.tensor([len(each)]), None, *texts))
    return made


@pytest.mark.parametrize("mixing", [0, 1])
def test_fed_states_are_those_after_each_token_of_the_mixed_sequence(draft, mixing: int):
    made = rows()
    row, fed = made["fed"][2 + mixing], DraftFeatures(draft)(made, torch.device("cpu"))["fed"]
    mixed = list(row.response_ids)
    for position, token in zip(row.drafted.tolist(), row.numbers["token"].tolist(), strict=True):
        mixed[position] = token
    states = fed.hidden.split(fed.row_lengths.tolist())[2 + mixing]
    expected = hidden_states(draft, [row.prompt_ids + mixed], [len(row.prompt_ids)])[row.drafted]
    torch.testing.assert_close(states, expected, atol=1e-5, rtol=1e-5)


def test_drawn_states_are_those_that_the_tokens_were_drawn_from(draft):
    made = rows()
    drawn = DraftFeatures(draft)(made, torch.device("cpu"))["drawn"]
    row, numbers = made["drawn"][0], made["drawn"][0].numbers
    expected = hidden_states(draft, [row.prompt_ids + row.response_ids[:-1]], [len(row.prompt_ids) - 1])
    torch.testing.assert_close(drawn.hidden[:5], expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(drawn.token[:5], numbers["token"].long())
    assert torch.equal(drawn.acceptance_prob[:5], numbers["acceptance_prob"])
    assert torch.equal(drawn.scalars["entropy"][:5], numbers["entropy"])
    empty = {timing: [of_timing[0].without_tokens()] for timing, of_timing in made.items()}
    features = DraftFeatures(draft)(empty, torch.device("cpu"))["fed"]
    assert (features.hidden.shape, len(features.token), len(features.row_lengths)) == ((0, 16), 0, 0)


def test_the_frozen_draft_is_no_part_of_the_module(draft, tmp_path: Path):
    facts = {"hidden_size": 16, "scalar_stats": {}, "provenance": {}}
    settings = {"depths": [1], "timings": ["fed"], "scalars": [False]}
    sweep = Sweep(settings, facts, draft=DraftFeatures(draft))
    theirs = {tensor.data_ptr() for tensor in draft.parameters()}
    assert not theirs & {tensor.data_ptr() for tensor in sweep.state_dict().values()}
    assert not theirs & {tensor.data_ptr() for tensor in sweep.parameters()}
    loss = sweep.logits(sweep.by_shape[0], sweep.on_after_batch_transfer(rows(), 0)).sum()
    loss.backward()
    assert all(parameter.grad is None for parameter in draft.parameters())
