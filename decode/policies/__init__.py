"""Stopping policies: when to ask the target. The protocol, and how to write your own, is in `decode.policies.base`."""

from decode.policies.base import AfterDraw, BeforeDraw, Outcome, Policy
from decode.policies.confidence import CumulativeTokenProb, MaxProb, TokenProb
from decode.policies.entropy import AdaEDL, Entropy, SelfVerify
from decode.policies.head import HeadPolicy
from decode.policies.length import FixedLength, Heuristic

__all__ = [
    "AdaEDL",
    "AfterDraw",
    "BeforeDraw",
    "CumulativeTokenProb",
    "Entropy",
    "FixedLength",
    "HeadPolicy",
    "Heuristic",
    "MaxProb",
    "Outcome",
    "Policy",
    "SelfVerify",
    "TokenProb",
]
