"""Mutants of the data stage: each breaks one law of 4.6.

MUTANTS maps a name to the three arguments of `monkeypatch.setattr`; test_data_mutants.py says which test each of them
fails.
"""

import torch

from data_gen.labels import labeller, laws
from data_gen.labels.labeller import Labeller
from data_gen.labels.laws import acceptance_prob_of, label_draft, label_joint, label_target
from data_gen.pipeline import stages, worker
from data_gen.pipeline.worker import Worker
from data_gen.responses import conversation, in_process
from data_gen.responses.in_process import TargetInProcess, left_padded
from data_gen.store import labels as stored_labels
from lm import Sampling, cross_entropy, forwards
from lm.draws import draw, seed_of, uniforms
from lm.sampling import non_finite

_label_and_mix, _label_batch = Worker.label_and_mix, Labeller._label_batch
_fed_hidden, _respond = Labeller.fed_hidden, TargetInProcess.respond
_to_safetensors = stored_labels.to_safetensors


def _coin_by_equality(self, spec, exchanges, known, progress):
    """A token counts as the target's wherever Y equals X."""
    labelled = _label_and_mix(self, spec, exchanges, known, progress)
    response_ids = torch.tensor([token for exchange in exchanges for token in exchange.response_ids])
    labelled.columns["from_target"] = labelled.columns["draft_ids"] == response_ids
    return labelled


def _coin_inverted(response_ids, draft_ids, from_target):
    """Z takes Y where the coin says X."""
    return torch.where(from_target, draft_ids, response_ids)


def _drawn_shifted(self, exchanges, inputs, with_hidden):
    """Drawn-time states of the position after."""
    columns = _label_batch(self, exchanges, inputs, with_hidden)
    return columns | {name: columns[name].roll(-1, 0) for name in ("drawn",) if name in columns}


def _fed_shifted(self, exchanges, mixed_ids, *, mixes):
    """Fed-time states of the position before."""
    return _fed_hidden(self, exchanges, mixed_ids, mixes=mixes).roll(1, 0)


def _loss_everywhere(columns, layout):
    """Positions whose Z came from X are trained on too."""
    return _to_safetensors(columns | {"from_target": torch.zeros_like(columns["from_target"])}, layout)


def _log_q_untruncated(q_logits, uniform, sampling):
    """log q is the model's own, not that of the run's sampling."""
    labels, q = label_draft(q_logits, uniform, sampling)
    return labels | {"log_q": labels["log_token_prob"]}, q


def _log_p_untruncated(p_logits, draft_ids, sampling):
    """log p is the model's own, not that of the run's sampling."""
    log_p, _ = label_target(p_logits, draft_ids, Sampling())
    return log_p, sampling.probs(p_logits.float())


def _entropy_truncated(q_logits, uniform, sampling):
    """The entropy is that of the run's sampling, not the model's own."""
    labels, q = label_draft(q_logits, uniform, sampling)
    return labels | {"entropy": torch.special.entr(q).sum(-1)}, q


def _drawn_before_warping(q_logits, uniform, sampling):
    """Y comes from the plain softmax, its numbers from the warped q."""
    q = sampling.probs(q_logits.float())
    draft_ids = draw(q_logits.float().softmax(-1), uniform)
    return laws._draft_labels(q_logits.float(), q, draft_ids), q


def _cross_entropy_swapped(q, p, *, q_logits, p_logits):
    """H(p, q) instead of H(q, p)."""
    swapped = {"cross_entropy": cross_entropy(p_logits.float(), q_logits.float())}
    return label_joint(q, p, q_logits=q_logits, p_logits=p_logits) | swapped


def _eos_dropped(self, requests, seed, progress):
    """Responses end before their end-of-sequence token."""
    answers = _respond(self, requests, seed, progress)
    return [answer._replace(response_ids=answer.response_ids[:-1] or answer.response_ids) for answer in answers]


def _padding_seen(rows, device):
    """Padding on the left is attended to."""
    ids, mask = left_padded(rows, device)
    return ids, torch.ones_like(mask)


def _uncut_logits(self, model, hidden):
    """Ids that the tokenizer lacks get probability."""
    logits = forwards.logits_of(model, hidden, model.config.vocab_size)
    return logits, non_finite(logits)


MUTANTS = {
    "acceptance_swapped": (labeller, "acceptance_prob_of", lambda log_p, log_q: acceptance_prob_of(log_q, log_p)),
    "coin_by_equality": (Worker, "label_and_mix", _coin_by_equality),
    "coin_inverted": (worker, "mixed", _coin_inverted),
    "drawn_shifted": (Labeller, "_label_batch", _drawn_shifted),
    "fed_shifted": (Labeller, "fed_hidden", _fed_shifted),
    "loss_everywhere": (stored_labels, "to_safetensors", _loss_everywhere),
    "log_q_untruncated": (labeller, "label_draft", _log_q_untruncated),
    "log_p_untruncated": (labeller, "label_target", _log_p_untruncated),
    "entropy_truncated": (labeller, "label_draft", _entropy_truncated),
    "drawn_before_warping": (laws, "label_draft", _drawn_before_warping),
    "cross_entropy_swapped": (labeller, "label_joint", _cross_entropy_swapped),
    "draws_shared_by_shards": (worker, "seed_of", lambda seed, stage, split, index: seed_of(seed, stage, split)),
    "responses_shared_by_shards": (
        conversation,
        "seed_of",
        lambda seed, stage, split, index, turn: seed_of(seed, stage, split, turn),
    ),
    "coins_of_the_drafts_draws": (worker, "seed_of", lambda seed, stage, split, index: seed_of(seed, split, index)),
    "coins_shared_by_mixes": (worker, "uniforms", lambda seed, count: uniforms(seed, 1).expand(count)),
    "uniforms_shared_by_rows": (
        in_process,
        "uniforms",
        lambda seed, rows, steps: uniforms(seed, 1, steps).expand(rows, steps),
    ),
    "greedy_responses": (in_process, "draw", lambda probs, uniform: probs.argmax(-1)),
    "eos_dropped": (TargetInProcess, "respond", _eos_dropped),
    "padding_seen": (in_process, "left_padded", _padding_seen),
    "uncut_padding": (Labeller, "_logits", _uncut_logits),
    "whole_by_name": (stages, "is_whole", lambda path: path.is_file()),
}
