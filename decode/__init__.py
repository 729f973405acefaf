"""Decode with a draft that stops at the right moment; the output is exactly the target's.

    complete(config, "Count to 9.")                          a text, by the head that was trained
    HeadPolicy.from_pretrained(path)                         a head's policy, at the threshold that was tuned for it
    target.generate(..., custom_generate=speculative_generate, draft_model=draft, policy=policy)    in transformers

A policy of your own is a subclass of `Policy` (docs/extending.md); `decode.policies` has those that need no training.
"""

from typing import TYPE_CHECKING

from store.lazy import lazy_exports

if TYPE_CHECKING:  # those that are not in __all__ are for the project itself
    from decode.drafters.hierarchies import InnerRounds, InterleavedDrafter, PreVerifiedDrafter, hsddw
    from decode.drafters.pearl import PearlDecoder
    from decode.drafters.trees import TreeDrafter, dynamic
    from decode.generate.command import complete
    from decode.generate.in_transformers import SpeculativeOutput, speculative_generate
    from decode.loop.counts import Counts
    from decode.loop.decoder import SpeculativeDecoder
    from decode.loop.drafter import Drafter, ModelDrafter, Proposal
    from decode.loop.rounds import Generation, Round
    from decode.loop.session import Session
    from decode.policies.base import Policy
    from decode.policies.head import HeadPolicy
else:
    __getattr__ = lazy_exports(
        __name__,
        {
            "InnerRounds": "decode.drafters.hierarchies",
            "InterleavedDrafter": "decode.drafters.hierarchies",
            "PreVerifiedDrafter": "decode.drafters.hierarchies",
            "hsddw": "decode.drafters.hierarchies",
            "PearlDecoder": "decode.drafters.pearl",
            "TreeDrafter": "decode.drafters.trees",
            "dynamic": "decode.drafters.trees",
            "complete": "decode.generate.command",
            "SpeculativeOutput": "decode.generate.in_transformers",
            "speculative_generate": "decode.generate.in_transformers",
            "SpeculativeDecoder": "decode.loop.decoder",
            "Drafter": "decode.loop.drafter",
            "ModelDrafter": "decode.loop.drafter",
            "Proposal": "decode.loop.drafter",
            "Counts": "decode.loop.counts",
            "Generation": "decode.loop.rounds",
            "Round": "decode.loop.rounds",
            "Session": "decode.loop.session",
            "Policy": "decode.policies.base",
            "HeadPolicy": "decode.policies.head",
        },
    )

__all__ = ["HeadPolicy", "Policy", "SpeculativeOutput", "complete", "speculative_generate"]
