"""Stopping policies: when to verify a draft. `decode.policies.base` has the protocol."""

from decode.policies import registry
from decode.policies.base import AfterDraw, BeforeDraw, Outcome, Policy
from decode.policies.registry import *  # noqa: F403  # each policy with a name, so that a new one is added there alone

__all__ = ["AfterDraw", "BeforeDraw", "Outcome", "Policy"]
__all__ += registry.__all__
