"""From prompts to training data: target responses, token-mixed acceptance targets and draft hidden states, as
resumable shards.

X, Y, P and Z are those of law 4.6 (docs/laws.md); X includes the end-of-sequence token when the target wrote one. A
*row* is one response with its per-position columns; a *shard* is a fixed range of prompts, the unit of work, seeding
and resuming.

    config = make_data(prompts, target="org/large", draft="org/small", dir="runs/mine")      from a list of prompts
"""

from typing import TYPE_CHECKING

from store.lazy import lazy_exports

if TYPE_CHECKING:
    from data_gen.from_prompts import make_data
else:
    __getattr__ = lazy_exports(
        __name__,
        {
            "make_data": "data_gen.from_prompts",
        },
    )

__all__ = ["make_data"]
