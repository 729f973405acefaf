"""A pair of models that fit, one sampling transform, verification, and a KV cache that rolls back.

Symbols, used in every docstring of the project (design: Leviathan's orientation, arXiv 2211.17192):

    p                the target's next-token distribution
    q                the draft's next-token distribution
    acceptance_prob  of a drafted token x: min(1, p(x) / q(x))
    acceptance_rate  at a position: sum over v of min(p(v), q(v)) = 1 - TV(p, q), the mean of acceptance_prob under q
"""

from typing import TYPE_CHECKING

from store.lazy import lazy_exports

if TYPE_CHECKING:
    from lm.draws import GreedySampler, RandomSampler, Sampler
    from lm.features.base import FeatureDraft
    from lm.features.loading import feature_draft_of
    from lm.features.model import DraftModel, FeatureModel, feature_model
    from lm.model import CachedModel
    from lm.pair import Pair, check_width, load_model, load_pair, load_pair_tokenizer, model_config, vocab_size_of
    from lm.sampling import Sampling
    from lm.signals import cross_entropy, entropy
    from lm.verification import acceptance_prob, acceptance_rate, next_dist, residual_probs, verify
else:
    __getattr__ = lazy_exports(
        __name__,
        {
            "GreedySampler": "lm.draws",
            "RandomSampler": "lm.draws",
            "Sampler": "lm.draws",
            "FeatureDraft": "lm.features.base",
            "feature_draft_of": "lm.features.loading",
            "DraftModel": "lm.features.model",
            "FeatureModel": "lm.features.model",
            "feature_model": "lm.features.model",
            "CachedModel": "lm.model",
            "Pair": "lm.pair",
            "check_width": "lm.pair",
            "load_model": "lm.pair",
            "load_pair": "lm.pair",
            "load_pair_tokenizer": "lm.pair",
            "model_config": "lm.pair",
            "vocab_size_of": "lm.pair",
            "Sampling": "lm.sampling",
            "cross_entropy": "lm.signals",
            "entropy": "lm.signals",
            "acceptance_prob": "lm.verification",
            "acceptance_rate": "lm.verification",
            "next_dist": "lm.verification",
            "residual_probs": "lm.verification",
            "verify": "lm.verification",
        },
    )
