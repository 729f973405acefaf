"""The speculative loop: stopping policies, drafters, the lossless loop, traces and replay, evaluation."""

from decode import policies
from decode.counts import Counts
from decode.custom_generate import SpeculativeOutput, speculative_generate
from decode.drafter import Drafter, ModelDrafter, Proposal, Session
from decode.hierarchies.hsddw import hsddw
from decode.hierarchies.interleaved import InterleavedDrafter
from decode.hierarchies.pre_verified import InnerRounds, PreVerifiedDrafter
from decode.loop import Generation, Round, SpeculativeDecoder
from decode.record import record_trace
from decode.recorder import Recorder
from decode.replay import replay
from decode.trace import Trace

__all__ = [
    "Counts",
    "Drafter",
    "Generation",
    "InnerRounds",
    "InterleavedDrafter",
    "ModelDrafter",
    "PreVerifiedDrafter",
    "Proposal",
    "Recorder",
    "Round",
    "Session",
    "SpeculativeDecoder",
    "SpeculativeOutput",
    "Trace",
    "hsddw",
    "policies",
    "record_trace",
    "replay",
    "speculative_generate",
]
