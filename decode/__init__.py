"""The speculative loop: stopping policies, drafters, and the lossless loop that they run in.

`decode.record_trace`, `decode.replay`, `decode.Trace` and `decode.Recorder` are those of `evaluation.traces`, found
when they are first asked for: whoever only decodes or serves imports none of the room above.
"""

from importlib import import_module
from typing import Any

from decode import policies
from decode.drafters.hierarchies.hsddw import hsddw
from decode.drafters.hierarchies.interleaved import InterleavedDrafter
from decode.drafters.hierarchies.pre_verified import InnerRounds, PreVerifiedDrafter
from decode.drafters.parallel.pearl import PearlDecoder
from decode.drafters.trees.decoder import TreeDecoder
from decode.drafters.trees.drafter import TreeDrafter
from decode.drafters.trees.shapes import Cape, Dynamic, Static
from decode.generate.in_transformers import SpeculativeOutput, speculative_generate
from decode.loop.counts import Counts
from decode.loop.decoder import Generation, Round, SpeculativeDecoder
from decode.loop.drafter import Drafter, ModelDrafter, Proposal
from decode.loop.session import Session

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
    "Round",
    "Session",
    "SpeculativeDecoder",
    "SpeculativeOutput",
    "Static",
    "TreeDecoder",
    "TreeDrafter",
    "hsddw",
    "policies",
    "speculative_generate",
]

_OF_TRACES = {"Recorder": "coupling", "Trace": "trace", "record_trace": "recording", "replay": "replay"}


def __getattr__(name: str) -> Any:
    """The names of `evaluation.traces`, imported when they are first asked for: traces need pyarrow."""
    if name in _OF_TRACES:
        return getattr(import_module(f"evaluation.traces.{_OF_TRACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
