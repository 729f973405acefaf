"""The speculative loop: stopping policies, drafters, the lossless loop, traces and replay, evaluation."""

from decode import policies
from decode.counts import Counts
from decode.drafter import Drafter, ModelDrafter, Proposal, Session
from decode.loop import Generation, Round, SpeculativeDecoder

__all__ = ["Counts", "Drafter", "Generation", "ModelDrafter", "Proposal", "Round", "Session", "SpeculativeDecoder", "policies"]
