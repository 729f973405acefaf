"""From prompts to training data: target responses, token-mixed acceptance targets and draft hidden states, as resumable
shards.

Notation of law 4.6 (SpecDec++ section 3.3, arXiv 2405.19715), used throughout this package:

    X   the target's response to a prompt, X_1 … X_n, its end-of-sequence token included when it wrote one
    Y   Y_i ~ q(. | prompt, X_<i): what the draft would have proposed at position i
    P   P_i = min(1, p(Y_i | prompt, X_<i) / q(Y_i | prompt, X_<i))
    Z   the mixed sequence: Z_i = X_i with probability r, else Y_i, decided by a coin

A *row* is one response with its per-position columns; a *shard* is a fixed range of prompts, the unit of work, seeding
and resuming.

    config = make_data(prompts, target="org/large", draft="org/small", dir="runs/mine")      from a list of prompts
"""

from typing import TYPE_CHECKING

from store.lazy import lazily

if TYPE_CHECKING:
    from data_gen.from_prompts import make_data
else:
    __getattr__ = lazily(__name__, __file__)

__all__ = ["make_data"]
