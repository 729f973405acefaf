"""PEARL keeps the target's distribution exactly; a draw that two tests share does not."""

from concurrent.futures import ThreadPoolExecutor
from threading import current_thread
from time import sleep
from unittest.mock import Mock

import pytest
import torch

import decode.drafters.pearl
from decode.drafters.pearl import PearlDecoder
from lm import Sampler, Sampling, acceptance_prob
from tests.toys.enumeration import ToyModel, assert_same_law, law_of, seeded
from tests.toys.loop import PROMPT, SAMPLINGS
from tests.toys.random_pairs import greedy_of, random_pair


def assert_target_law(gamma: int, sampling: Sampling, eos_ids: tuple[int, ...] = ()) -> None:
    how = {"sampling": sampling, "eos_ids": frozenset(eos_ids)}
    decoder = PearlDecoder(ToyModel(1), ToyModel(2), gamma=gamma, **how)

    def play(draws: Sampler) -> tuple[int, ...]:
        generation = decoder.generate(PROMPT, 3, generator=draws)
        num_own = sum(one.next_kind is not None for one in generation.rounds)
        assert generation.counts.num_emitted == generation.counts.num_accepted + num_own == len(generation.token_ids)
        return generation.token_ids

    assert_same_law(law_of(play), decoder.target.law(PROMPT, 3, **how))


@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_pearl_keeps_the_target_law(gamma):
    for name, eos_ids in (("plain", (2,)), ("top_k", ()), ("greedy", (2,))):
        assert_target_law(gamma, SAMPLINGS[name], eos_ids)


def test_a_draw_shared_by_a_step_and_the_next_changes_the_law(monkeypatch):
    """The public code's flaw: the test that pre-verified, and passed, shares its uniform with the one after it."""
    passed: list[float] = []

    def shared(tokens, q, p, draws):
        chances = acceptance_prob(torch.tensor(tokens), torch.stack(q), p[: len(tokens)]).tolist()
        if len(tokens) == 1:
            passed[:] = chances
        elif passed:
            chances[0] = min(1.0, chances[0] / passed.pop())  # of a uniform that is known to be below the former
        return chances

    monkeypatch.setattr(decode.drafters.pearl, "revealed_probs", shared)
    with pytest.raises(AssertionError):
        assert_target_law(2, SAMPLINGS["plain"])


def test_greedy_output_equals_transformers_generate_and_two_at_once_write_the_same():
    target, draft = random_pair("llama")
    prompt = [3, 1, 4, 1, 5]
    decoder = PearlDecoder(target, draft, gamma=3, sampling=Sampling(temperature=0.0))
    generation = decoder.generate(prompt, 24)
    assert list(generation.token_ids) == greedy_of(target, prompt, 24)
    assert {len(one.drafted) for one in generation.rounds} >= {1, 3}, "both kinds of step"
    decoder._pool = ThreadPoolExecutor(1)  # as where there are two devices
    assert decoder.generate(prompt, 24).token_ids == generation.token_ids


class Slow(ToyModel):
    """A target whose forward takes a while."""

    is_busy = False

    def feed(self, new_tokens, num_rows=1):
        self.is_busy, self.thread = True, current_thread()
        sleep(0.2)
        rows = super().feed(new_tokens, num_rows)
        self.is_busy = False
        return rows


def test_a_target_beside_its_draft_is_run_by_one_thread_and_an_error_of_the_draft_leaves_no_forward_of_it(monkeypatch):
    monkeypatch.setattr(Slow, "device", torch.device("meta"))  # a place that is not the draft's
    decoder, threads = PearlDecoder(Slow(1), ToyModel(2), gamma=2, eos_ids=frozenset(), is_parallel=True), set()
    for _ in range(3):
        for _round in decoder.stream(PROMPT, 3):
            threads.add(decoder.target.thread)
    assert len(threads) == 1
    assert current_thread() not in threads
    expected = decoder.generate(PROMPT, 6, generator=seeded()).token_ids
    with monkeypatch.context() as patch:
        patch.setattr(decoder.drafter, "propose", Mock(side_effect=RuntimeError("out of memory")))
        with pytest.raises(RuntimeError, match="out of memory"):
            decoder.generate(PROMPT, 6)
        assert not decoder.target.is_busy
    assert decoder.generate(PROMPT, 6, generator=seeded()).token_ids == expected


def test_batches_are_refused():
    with pytest.raises(ValueError, match="a PearlDecoder drafts for one prompt at a time"):
        PearlDecoder(ToyModel(1), ToyModel(2), gamma=2, eos_ids=frozenset()).generate_batch([PROMPT, PROMPT], 3)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [({"gamma": 0}, "gamma is 0; PEARL drafts at least 1"), ({"gamma": 2, "is_parallel": True}, "needs two devices")],
)
def test_what_cannot_be_is_refused_in_one_line(settings, complaint):
    with pytest.raises(ValueError, match=complaint):
        PearlDecoder(ToyModel(1), ToyModel(2), eos_ids=frozenset(), **settings)
