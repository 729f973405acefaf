"""Each mutant of the data stage breaks one law of 4.6 and fails the test that MUTANTS names with it.

In its own module that test runs on the real stage, and passes; here it runs on the mutant, and must raise
AssertionError.
"""

import inspect

import pytest
import torch

from configs.schema import SamplingConfig
from data_gen.labels import labeller, laws, states
from data_gen.labels.labeller import Labeller
from data_gen.labels.laws import acceptance_prob_of, label_draft, label_target
from data_gen.labels.states import DraftStates
from data_gen.pipeline import stages, worker
from data_gen.pipeline.worker import Worker
from data_gen.responses import exchange, target
from data_gen.responses.target import TargetInProcess, left_padded
from data_gen.store import rows as stored_labels
from lm import Sampling, forwards
from lm.draws import draw, seed_of, uniforms
from lm.sampling import non_finite
from tests.data_gen.labels import test_labels as tests_of_laws
from tests.data_gen.pipeline import test_resume as resume
from tests.data_gen.pipeline import test_run as rows

_label_and_mix, _states, _respond = Worker.label_and_mix, DraftStates.__call__, TargetInProcess.respond
_to_safetensors = stored_labels.to_safetensors


def _coin_by_equality(self, spec, exchanges, known, progress):
    labelled = _label_and_mix(self, spec, exchanges, known, progress)
    response_ids = torch.tensor([token for exchange in exchanges for token in exchange.response_ids])
    labelled.columns["from_target"] = labelled.columns["draft_ids"] == response_ids
    return labelled


def _drawn_shifted(self, texts, timing):
    return _states(self, texts, timing).roll(-1 if timing == "drawn" else 0, 0)


def _fed_shifted(self, texts, timing):
    return _states(self, texts, timing).roll(1 if timing == "fed" else 0, 0)


def _loss_everywhere(columns, layout):
    """Positions whose Z came from X are trained on too."""
    return _to_safetensors(columns | {"from_target": torch.zeros_like(columns["from_target"])}, layout)


def _log_q_untruncated(q_logits, uniform, sampling, known):
    labels, q = label_draft(q_logits, uniform, sampling, known)
    return labels | {"log_q": labels["log_token_prob"]}, q


def _log_p_untruncated(p, known, q, *, p_logits, **logits):
    plain = label_target(Sampling().probs(p_logits.float()), known)
    return label_target(p, known, q, p_logits=p_logits, **logits) | {"log_p": plain["log_p"]}


def _entropy_truncated(q_logits, uniform, sampling, known):
    labels, q = label_draft(q_logits, uniform, sampling, known)
    return labels | {"entropy": torch.special.entr(q).sum(-1)}, q


def _drawn_before_warping(q_logits, uniform, sampling):
    """Y comes from the plain softmax, its numbers from the warped q."""
    return label_draft(q_logits, None, sampling, draw(q_logits.float().softmax(-1), uniform))


def _cross_entropy_swapped(p, known, q, *, q_logits, p_logits):
    return label_target(p, known, q, q_logits=p_logits, p_logits=q_logits)


def _eos_dropped(self, requests, seed, progress):
    answers = _respond(self, requests, seed, progress)
    return [answer._replace(response_ids=answer.response_ids[:-1] or answer.response_ids) for answer in answers]


def _uniforms_of_one_row(seed, rows, steps):
    return uniforms(seed, 1, steps).expand(rows, steps)


def _padding_seen(rows, device):
    ids, mask = left_padded(rows, device)
    return ids, torch.ones_like(mask)


def _uncut_logits(self, model, hidden):
    """Ids that the tokenizer lacks get probability."""
    logits = forwards.logits_of(model, hidden, model.config.vocab_size)
    return logits, non_finite(logits)


PLAIN, TRUNCATED = ({"sampling": SamplingConfig(**values)} for values in ({}, {"temperature": 0.7, "top_k": 20}))
INDEPENDENT = rows.test_labels_equal_an_independent_uncached_computation
SEEDS = tests_of_laws.test_every_draw_of_a_run_has_a_seed_of_its_own
LAW = tests_of_laws.test_responses_follow_the_targets_law
BATCHES = tests_of_laws.test_a_response_does_not_depend_on_who_shares_its_batch
OF_SAMPLING, WARPED = tests_of_laws.test_draft_tokens_follow_the_q_of_the_sampling, Sampling(temperature=0.6, top_k=3)
COINS = rows.test_the_coin_decides_the_mixing_also_where_both_tokens_are_equal
LOST = resume.test_a_lost_or_truncated_shard_is_made_again_byte_for_byte
MUTANTS = {
    "acceptance swapped": (INDEPENDENT, PLAIN, laws, "acceptance_prob_of", lambda p, q: acceptance_prob_of(q, p)),
    "coin by equality": (COINS, {}, Worker, "label_and_mix", _coin_by_equality),
    "coin inverted": (INDEPENDENT, PLAIN, states, "mixed", lambda x, y, from_x: torch.where(from_x, y, x)),
    "drawn shifted": (INDEPENDENT, PLAIN, DraftStates, "__call__", _drawn_shifted),
    "fed shifted": (INDEPENDENT, PLAIN, DraftStates, "__call__", _fed_shifted),
    "loss everywhere": (INDEPENDENT, PLAIN, stored_labels, "to_safetensors", _loss_everywhere),
    "log q untruncated": (INDEPENDENT, TRUNCATED, labeller, "label_draft", _log_q_untruncated),
    "log p untruncated": (INDEPENDENT, TRUNCATED, labeller, "label_target", _log_p_untruncated),
    "entropy truncated": (INDEPENDENT, TRUNCATED, labeller, "label_draft", _entropy_truncated),
    "drawn before warping": (OF_SAMPLING, {"sampling": WARPED}, laws, "label_draft", _drawn_before_warping),
    "cross-entropy swapped": (INDEPENDENT, PLAIN, labeller, "label_target", _cross_entropy_swapped),
    "draws shared by shards": (SEEDS, {}, worker, "seed_of", lambda *parts: seed_of(*parts[:-1])),
    "responses shared by shards": (SEEDS, {}, exchange, "seed_of", lambda *parts: seed_of(*parts[:3], parts[4])),
    "coins of the draft's draws": (SEEDS, {}, worker, "seed_of", lambda seed, stage, *more: seed_of(seed, *more)),
    "uniforms shared by rows": (LAW, {}, target, "uniforms", _uniforms_of_one_row),
    "greedy responses": (LAW, {}, target, "draw", lambda probs, uniform: probs.argmax(-1)),
    "eos dropped": (BATCHES, {}, TargetInProcess, "respond", _eos_dropped),
    "padding seen": (BATCHES, {}, target, "left_padded", _padding_seen),
    "uncut padding": (INDEPENDENT, PLAIN, Labeller, "_logits", _uncut_logits),
    "whole by name": (LOST, {}, stages, "is_whole", lambda path: path.is_file()),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_every_mutant_of_the_data_stage_fails_its_named_test(mutant, request, monkeypatch):
    test, given, *patch = MUTANTS[mutant]
    names = inspect.signature(test).parameters.keys() - given.keys()
    arguments = given | {name: request.getfixturevalue(name) for name in sorted(names)}
    monkeypatch.setattr(*patch)
    with pytest.raises(AssertionError):
        test(**arguments)
