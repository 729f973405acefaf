"""What is compiled for a GPU belongs to the thread that captured it; nothing is compiled here."""

from concurrent.futures import ThreadPoolExecutor
from threading import current_thread

import pytest
import torch

from decode.loop import fused
from decode.policies import FixedLength
from lm import CachedModel, RandomSampler, Sampling
from tests.toys.small_pair import random_llama


class Graphs:
    """As CUDA graphs are: only the thread that captured them may replay them."""

    num_captured = 0

    def __init__(self, function, device):
        self.function, self.thread = function, current_thread()
        Graphs.num_captured += 1

    def __call__(self):
        assert current_thread() is self.thread, "captured by another thread"
        return self.function()


def stepped(model):
    """q after a prompt and one more token, by compiled steps."""
    draws = RandomSampler(0)
    step = fused.fused_step(FixedLength(2), model, Sampling(), draws)
    model.reset()
    step.step(0, [1, 2, 3], draws)
    return step.step(1, [4], draws)[2]


@pytest.mark.parametrize(("device", "num_per_thread"), [("cuda", 1), ("cpu", 0)])
def test_a_graph_is_replayed_by_the_thread_that_captured_it(device, num_per_thread, monkeypatch):
    monkeypatch.setattr(fused, "GuardFreeGraph", Graphs)
    monkeypatch.setattr(fused, "thread_key", lambda _, key=fused.thread_key: key(torch.device(device)))
    monkeypatch.setattr(Graphs, "num_captured", 0)
    model = CachedModel(random_llama(num_hidden_layers=1), compile="stop")
    expected, threads = stepped(model), torch.get_num_threads()

    def elsewhere():
        torch.set_num_threads(threads)
        return stepped(model)

    with ThreadPoolExecutor(1) as pool:
        if not num_per_thread:  # on a CPU a compiled step is any thread's
            with pytest.raises(AssertionError, match="another thread"):
                pool.submit(elsewhere).result()
            return
        for _ in range(3):
            assert torch.equal(pool.submit(elsewhere).result(), expected)
            assert torch.equal(stepped(model), expected)
    assert Graphs.num_captured == 2
