"""Ways of answering the same prompts on a clock: our loop, and transformers' assisted generation under its schedules.

EOS is switched off in all, so that they write the same number of tokens, unless a text may end there. Seconds are those
of `evaluation.sources.clock`, prompt included. Every policy of ours starts a prompt from the same seed. transformers'
schedules are those that its documentation names:

    default       `generate(assistant_model=…)` where nothing is set: drafts of up to 20 tokens that end where the draft
                  gives a token less than the confidence threshold, which starts at 0.4 and, where scikit-learn is
                  installed, moves with what is accepted
    heuristic     num_assistant_tokens_schedule: two more tokens after a draft that was accepted whole, else one less;
                  the threshold is constant
    constant K    drafts of K tokens, no threshold

A schedule keeps what it has learnt from prompt to prompt, as it would for its users. Temperature and top-p go to
`generate` as they are; transformers itself then applies them to the draft twice, when drawing and when verifying.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from time import perf_counter

import torch
from transformers import PreTrainedModel
from transformers.utils import is_sklearn_available, logging

from decode.loop.counts import Counts
from evaluation.sources.clock import Arm, Clocked, Request
from lm import Pair, Sampling

DEFAULT = "transformers: default"
HEURISTIC = "transformers: heuristic"
CONSTANT = "transformers: constant"
UNASSISTED = "transformers: no assistant"
SCHEDULES = (DEFAULT, HEURISTIC, CONSTANT)
HEURISTICALLY: dict[str, object] = {"num_assistant_tokens_schedule": "heuristic"}
_LEARNT = ("num_assistant_tokens", "assistant_confidence_threshold")


class _FirstToken:
    """A streamer of transformers that notes when the first new token is there."""

    at_s = 0.0

    def __init__(self) -> None:
        self._num_put = 0

    def put(self, _: torch.Tensor) -> None:
        self._num_put += 1
        if self._num_put == 2:  # the first is the prompt
            self.at_s = perf_counter()

    def end(self) -> None:
        pass


def constant(k: int) -> dict[str, object]:
    """Entries of the draft's generation config for drafts of a fixed length."""
    return {
        "num_assistant_tokens": k,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }


def about_default() -> str:
    """One line about the default schedule of the installed transformers."""
    moves = "moves (scikit-learn)" if is_sklearn_available() else "fixed at 0.4 (no scikit-learn)"
    return f"confidence threshold {moves}"


def assisted(
    pair: Pair,
    sampling: Sampling,
    changes: Mapping[str, object] | None,
    *,
    assistant: PreTrainedModel | None = None,
    ends_at_eos: bool = False,
) -> Arm:
    """Assisted generations; `changes` are settings of the draft's generation config, the only one that transformers
    reads (None: plain generation without a draft), and `assistant` is a language model that drafts instead of the
    pair's draft. With `ends_at_eos` a generation ends at the target's EOS; else it has as many tokens as are requested.
    """
    drafts = None if changes is None else assistant or pair.draft
    settings = dict(changes or {})

    def written(request: Request) -> Clocked:
        prompt, num_tokens, seed = request
        torch.manual_seed(seed)
        ids = torch.tensor([prompt], device=pair.target.device)
        streamer = _FirstToken()
        with _set(pair.target, drafts, settings, ends_at_eos=ends_at_eos):
            started_s = perf_counter()
            output = pair.target.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_tokens,
                assistant_model=drafts,
                streamer=streamer,
                **_sampling_settings(sampling),
            )  # type: ignore[operator]
            whole_s = perf_counter() - started_s
            if drafts is not None:
                settings.update({name: getattr(drafts.generation_config, name) for name in _LEARNT})
        counts = Counts(num_emitted=output.shape[1] - len(prompt))
        assert ends_at_eos or counts.num_emitted == num_tokens, "every arm writes the same number of tokens"
        return Clocked(counts=counts, whole_s=whole_s, first_token_s=streamer.at_s - started_s)

    return written


def _sampling_settings(sampling: Sampling) -> dict[str, object]:
    if sampling.is_greedy:
        return {"do_sample": False}
    return {
        "do_sample": True,
        "temperature": float(sampling.temperature),
        "top_k": sampling.top_k or 0,
        "top_p": sampling.top_p or 1.0,
    }


@contextmanager
def _set(
    target: PreTrainedModel, drafts: PreTrainedModel | None, settings: Mapping[str, object], *, ends_at_eos: bool
) -> Iterator[None]:
    """Copies of the generation configs, the draft's with these settings, and without EOS unless texts end there."""
    configs = {model: model.generation_config for model in (target, drafts) if model is not None}
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # transformers calls its own assistant in a way that it deprecates
    try:
        for model, config in configs.items():
            model.generation_config = deepcopy(config)
            changes = {} if ends_at_eos else {"eos_token_id": None}
            model.generation_config.update(**changes | (dict(settings) if model is drafts else {}))
        yield
    finally:
        logging.set_verbosity(verbosity)
        for model, config in configs.items():
            model.generation_config = config
