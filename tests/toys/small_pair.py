"""A pair of tiny random Llamas, sharp enough that acceptance varies, and traces of them."""

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from data_gen.responses.exchange import Exchange, Request
from data_gen.responses.target import TargetInProcess
from evaluation.traces.coupling import Recorder
from evaluation.traces.recording import record_trace
from evaluation.traces.trace import Trace
from lm import Sampling

SIZES = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def llama(**changes: Any) -> LlamaConfig:
    """The configuration of a tiny Llama: `SIZES` with `changes`, such as llama(vocab_size=40)."""
    return LlamaConfig(**(SIZES | changes))


def random_llama(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """A tiny random Llama in float64."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(llama(**changes)).double().eval()


VOCAB, EOS, LIMIT, LENGTH = 12, 11, 14, 5
PROMPTS = [[1 + i % 5, 2 + i % 7, 3 + i % 3] for i in range(40)]


@cache
def model(seed: int, layers: int = 1) -> LlamaForCausalLM:
    ids = {"eos_token_id": EOS, "bos_token_id": None, "pad_token_id": None}
    sizes = {"vocab_size": VOCAB, "num_hidden_layers": layers, "max_position_embeddings": 64}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(llama(**sizes, **ids, initializer_range=0.6)).eval()


class Words(PreTrainedTokenizerBase):
    """As many ids as the pair has logits."""

    def __len__(self) -> int:
        return VOCAB

    def get_vocab(self) -> dict[str, int]:
        return {str(token): token for token in range(VOCAB)}


def recorder(sampling: Sampling, length: int = LENGTH) -> Recorder:
    return Recorder(model(2), model(1, 2), sampling, VOCAB, frozenset({EOS}), length)


def trace(sampling: Sampling, *, copies: int = 1, seed: int = 0, draft_sampling=None) -> Trace:
    """Responses of the target to every prompt, `copies` times each, as a trace."""
    return traced_by(replace(recorder(sampling), draft_sampling=draft_sampling), PROMPTS * copies, LIMIT, seed)


def traced_by(recorder: Recorder, prompts: list[list[int]], limit: int, seed: int = 0) -> Trace:
    """One response of the recorder's target to each prompt, as a trace."""
    ids = {"vocab_size": recorder.vocab_size, "eos_ids": recorder.eos_ids}
    source = TargetInProcess(recorder.target, recorder.sampling, **ids, max_new_tokens=limit, batch_size=64)
    answers = source.respond([Request(str(i), "", ids) for i, ids in enumerate(prompts)], seed, lambda count: None)
    pairs = enumerate(zip(prompts, answers, strict=True))
    exchanges = [Exchange(str(i), "", ids, one.response_ids, one.finish_reason) for i, (ids, one) in pairs]
    return record_trace(recorder, exchanges, max_new_tokens=limit, seed=seed + 1)
