"""The speculative loop: stopping policies, drafters, the lossless loop, traces and replay, evaluation."""

from decode import policies
from decode.generate.in_transformers import SpeculativeOutput, speculative_generate
from decode.hierarchies.hsddw import hsddw
from decode.hierarchies.interleaved import InterleavedDrafter
from decode.hierarchies.pre_verified import InnerRounds, PreVerifiedDrafter
from decode.loop.counts import Counts
from decode.loop.decoder import Generation, Round, SpeculativeDecoder
from decode.loop.drafter import Drafter, ModelDrafter, Proposal, Session
from decode.traces.coupling import Recorder
from decode.traces.recording import record_trace
from decode.traces.replay import replay
from decode.traces.trace import Trace

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
