"""The speculative loop: stopping policies, drafters, the lossless loop, traces and replay, evaluation."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from decode import policies
from decode.generate.in_transformers import SpeculativeOutput, speculative_generate
from decode.hierarchies.hsddw import hsddw
from decode.hierarchies.interleaved import InterleavedDrafter
from decode.hierarchies.pre_verified import InnerRounds, PreVerifiedDrafter
from decode.loop.counts import Counts
from decode.loop.decoder import Generation, Round, SpeculativeDecoder
from decode.loop.drafter import Drafter, ModelDrafter, Proposal, Session
from decode.parallel.pearl import PearlDecoder
from decode.trees.decoder import TreeDecoder
from decode.trees.drafter import TreeDrafter
from decode.trees.shapes import Cape, Dynamic, Static

if TYPE_CHECKING:
    from decode.traces.coupling import Recorder
    from decode.traces.recording import record_trace
    from decode.traces.replay import replay
    from decode.traces.trace import Trace

__all__ = [
    "Cape",
    "Counts",
    "Drafter",
    "Dynamic",
    "Generation",
    "InnerRounds",
    "InterleavedDrafter",
    "ModelDrafter",
    "PearlDecoder",
    "PreVerifiedDrafter",
    "Proposal",
    "Recorder",
    "Round",
    "Session",
    "SpeculativeDecoder",
    "SpeculativeOutput",
    "Static",
    "Trace",
    "TreeDecoder",
    "TreeDrafter",
    "hsddw",
    "policies",
    "record_trace",
    "replay",
    "speculative_generate",
]

_OF_TRACES = {"Recorder": "coupling", "Trace": "trace", "record_trace": "recording", "replay": "replay"}


def __getattr__(name: str) -> Any:
    """What belongs to traces, imported when it is first asked for: traces need pyarrow, and whoever only decodes or serves does not."""
    if name in _OF_TRACES:
        return getattr(import_module(f"decode.traces.{_OF_TRACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
