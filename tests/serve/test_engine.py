"""The vLLM side, against stand-ins for vLLM's own objects: what is refused, and what a step of its runner becomes."""

from types import SimpleNamespace as Some

import pytest
import torch

from decode.policies import FixedLength
from lm import Sampling
from serve import KEY
from serve.engine import stops
from serve.engine.cpu import repeated_per_token
from serve.engine.plugin import TRIED, check_conditions
from serve.engine.proposer import stopping
from serve.engine.stops import rows_of, sampling_of
from serve.settings import Policies, Settings

VERSION = f"{TRIED[-1]}.0"


def config(**changes) -> Some:
    """A configuration that is supported, but for the changes."""
    known = {
        "speculative_config": Some(method="draft_model", parallel_drafting=False, use_heterogeneous_vocab=False),
        "scheduler_config": Some(async_scheduling=False),
        "use_v2_model_runner": False,
        "parallel_config": Some(tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1),
        "additional_config": {},
    }
    return Some(**known | changes)


@pytest.mark.parametrize(
    ("changes", "version", "remedy"),
    [
        ({}, "0.99.1", f"install vllm=={TRIED[-1]}"),
        ({"speculative_config": None}, VERSION, '"method": "draft_model"'),
        ({"speculative_config": Some(method="eagle")}, VERSION, '"method": "draft_model"'),
        ({"speculative_config": Some(method="draft_model", parallel_drafting=True)}, VERSION, "remove it"),
        ({"scheduler_config": Some(async_scheduling=True)}, VERSION, "--no-async-scheduling"),
        ({"use_v2_model_runner": True}, VERSION, "VLLM_USE_V2_MODEL_RUNNER=0"),
        ({"parallel_config": Some(tensor_parallel_size=2)}, VERSION, "--tensor-parallel-size 1"),
        ({"parallel_config": Some(pipeline_parallel_size=2)}, VERSION, "--pipeline-parallel-size 1"),
    ],
)
def test_what_is_not_supported_is_one_line_that_says_what_to_set(changes: dict, version: str, remedy: str):
    check_conditions(config(), VERSION)
    with pytest.raises(ValueError, match=KEY) as raised:
        check_conditions(config(**changes), version)
    assert remedy in str(raised.value)
    assert "\n" not in str(raised.value)


def params(**changes) -> Some:
    known = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_tokens": 10, "extra_args": None}
    known |= {"ignore_eos": False, "stop_token_ids": [7], "all_stop_token_ids": {7, 9}}
    return Some(**known | changes)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, Sampling()),
        ({"temperature": 0.0}, Sampling(temperature=0.0)),
        ({"temperature": 0.7, "top_k": 50, "top_p": 0.9}, Sampling(0.7, 50, 0.9)),
        ({"top_k": -1}, Sampling()),
    ],
)
def test_a_request_is_sampled_as_it_says(given: dict, expected: Sampling):
    assert sampling_of(params(**given)) == expected


POLICIES = Policies(Settings(policy="fixed_length:k=2"), hidden_size=4, draft=dict, target=dict, warn=print)


def step(*, is_discarded: bool = False, sampled: tuple[int, ...] = (3, 4, -1), **changes):
    """The row of one request, with a prompt of 4 tokens, that has 2 tokens and drafted 3 and 5."""
    request = Some(sampling_params=params(**changes), num_prompt_tokens=4)
    batch = Some(req_ids=["a"], num_tokens_no_spec=[6], spec_token_ids=[[3, 5]])
    (row,) = rows_of([sampled], {"a": request}, batch, [is_discarded], POLICIES)
    return row


def test_a_step_of_the_runner_becomes_a_row():
    row = step()
    assert (row.verified, row.num_accepted) == ((3, 5), 1)
    assert row.room == 10 - (2 + 2) - 1  # the token that verification adds has to fit
    assert row.num_before == 2 + 2
    assert row.stop_ids == {7, 9}
    assert row.policy == FixedLength(2)
    assert step(extra_args={KEY: "fixed_length:k=3"}).policy == FixedLength(3)
    ignoring = step(sampled=(3, 9, -1), ignore_eos=True)
    assert ignoring.room > 0
    assert ignoring.stop_ids == {7}


@pytest.mark.parametrize(
    "ended",
    [{"is_discarded": True}, {"max_tokens": 4}, {"max_tokens": 5}]
    + [{"sampled": tokens} for tokens in ((3, 9, -1), (9, 4, 5), (-1, -1))],
)
def test_a_request_that_has_ended_or_not_begun_has_no_room(ended: dict):
    assert step(**ended).room == 0


def test_numbers_of_requests_are_spread_over_their_tokens():
    spread = repeated_per_token(torch.tensor([0.5, 0.0, 2.0]), torch.tensor([2, 2, 5], dtype=torch.int32), 5, 0, 1)
    assert spread.tolist() == [0.5, 0.5, 2.0, 2.0, 2.0]
    assert repeated_per_token(torch.tensor([0.0, 3.0]), torch.tensor([1, 2]), 2, 0, 1).tolist() == [1.0, 3.0]


class Base:
    """vLLM's proposer, as far as it is overridden: a draft step says 10 + the step's number in every row."""

    def __init__(self, vllm_config, device, runner=None):
        self.model = Some(compute_logits=lambda hidden: torch.zeros(len(hidden), 16), embed_input_ids=None)
        self.steps = 0

    def prepare_next_token_ids_padded(self, sampled_token_ids, requests, gpu_input_batch, discard_request_mask):
        self.num_rows = len(sampled_token_ids)
        return "next"

    def propose(self, num_speculative_tokens, *, sampling_metadata):
        drawn = []
        for self.steps in range(num_speculative_tokens):
            drawn.append(self._sample_draft_tokens(torch.zeros(self.num_rows, 4), sampling_metadata)[0])
        return torch.stack(drawn, 1)

    def _sample_draft_tokens(self, hidden_states, sampling_metadata):
        return self._sample_from_logits(self.model.compute_logits(hidden_states), sampling_metadata)

    def _sample_from_logits(self, logits, sampling_metadata):
        return torch.full((len(logits),), 10 + self.steps), logits.softmax(-1) if sampling_metadata else None


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stops, "policies_of", lambda config: POLICIES)
    monkeypatch.setattr(stops.cpu, "mend", lambda: None)
    return stopping(Base)(Some(additional_config={KEY: {}}), torch.device("cpu"))


def prepare(served, specs: list[str]) -> None:
    requests = {
        str(i): Some(sampling_params=params(max_tokens=100, extra_args={KEY: spec}), num_prompt_tokens=4)
        for i, spec in enumerate(specs)
    }
    batch = Some(req_ids=list(requests), num_tokens_no_spec=[4] * len(specs), spec_token_ids=[[] for _ in specs])
    sampled, discarded = torch.tensor([[3]] * len(specs)), torch.zeros(len(specs), dtype=torch.bool)
    assert served.prepare_next_token_ids_padded(sampled, requests, batch, discarded) == "next"


@pytest.mark.parametrize(
    ("lengths", "longest", "is_sampled", "expected"),
    [
        ((1, 0, 3), 20, True, [[10], [], [10, 11, 12]]),
        ((1, 0, 3), 20, False, [[10], [], [10, 11, 12]]),
        ((9, 1), 2, True, [[10, 11], [10]]),  # the scheduler allows no more
        ((0,), 5, True, [[]]),
    ],
)
def test_a_proposer_drafts_for_each_request_as_long_as_its_policy_says(served, lengths, longest, is_sampled, expected):
    prepare(served, [f"fixed_length:k={length}" for length in lengths])
    assert served.propose(longest, sampling_metadata=is_sampled) == expected
    num_steps = max(map(len, expected))
    assert served.steps == max(0, num_steps - 1)  # then the loop was left
    if is_sampled and num_steps:
        assert served._last_draft_probs.shape == (len(lengths), num_steps, 16)
    else:
        assert served._last_draft_probs is None


def test_a_server_that_asks_for_nothing_is_as_it_was():
    plain = stopping(Base)(Some(additional_config={}), torch.device("cpu"))
    plain.num_rows = 2
    assert plain.propose(3, sampling_metadata=True).tolist() == [[10, 11, 12]] * 2
