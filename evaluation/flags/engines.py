"""Engines that people serve with: what each lets one set, by which rule its drafts end, and how a setting is written.

A new engine is its rule (a class in `decode.policies.engines` with its line in RULES, or an existing policy) and its
entry of ENGINES here. Every entry was read in the sources of the version that it names (docs/engines.md).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from json import dumps as to_json
from math import inf
from typing import Any, NamedTuple

import numpy as np

from configs.flag_types import EngineName
from decode.policies.base import Number, Policy
from decode.policies.engines import LlamaCpp
from decode.policies.registry import COARSE, lengths_within, registered
from evaluation.competitor import Competitor, make_competitor
from evaluation.played import Played
from evaluation.traces.replay import Rounds
from lm import Sampling

Setting = Mapping[str, Any]
Values = Mapping[str, Sequence[Any]]


class Drafting(NamedTuple):
    """A way in which an engine's draft chooses tokens."""

    label: str
    sampling_of: Callable[[Sampling], Sampling]
    """The draft's sampling, from the target's."""
    extra: str = ""
    """What it adds to the line to paste, where it is a setting too."""


LIKELIEST = Drafting("its likeliest token", lambda sampling: Sampling(temperature=0))
_PROBABILISTIC = ', "draft_sample_method": "probabilistic"'
AT_TEMPERATURE = Drafting("drawn at the temperature", lambda sampling: Sampling(sampling.temperature), _PROBABILISTIC)
AS_TARGET = Drafting("drawn as the target's", lambda sampling: sampling)


@dataclass(frozen=True)
class ShortDrafts(LlamaCpp):
    """llama.cpp's rule with n-min: shorter drafts are discarded unverified, and their forwards are paid.

    This keeps the output's distribution only where tokens are not drawn (law 4.3): llama.cpp drafts its likeliest. So
    the rule is replayed on traces of likeliest drafts, and no loop has it. No draft begins where fewer than `n_min`
    tokens are allowed. A draft that an end-of-text token ends is verified whatever its length.
    """

    n_min: Number = 0
    ranges = (*LlamaCpp.ranges, ("n_min", 0, inf))  # type: ignore[assignment]

    @property
    def discards_below(self) -> Number:
        """Replay discards shorter drafts (`evaluation.traces.replay`)."""
        return self.n_min


@dataclass(frozen=True, kw_only=True)
class Engine:
    """An engine as `flags` knows it: its rule, its settings and the line to paste."""

    name: EngineName
    version: str
    """Version whose sources were read."""
    rule: str = "fixed_length"
    """Name of its rule in the registry."""
    kind: type[Policy] | None = None
    """Class of its rule, where that can do more than the registry's, which every loop can run."""
    values: Callable[[int], Values] = lambda longest: {"k": range(1, longest + 1)}
    """Settings to choose from, by the longest draft."""
    default: Values | None = None
    """One value of each."""
    draftings: tuple[Drafting, ...] = (LIKELIEST,)
    """The default first."""
    line: Callable[[Setting, Drafting], str]
    """The line to paste."""
    number: str
    """The part of that line for a number k of drafted tokens, whatever the kind of draft."""
    off: str
    """The line without speculation."""
    remark: str = ""
    """A caution below every answer."""
    extra_forwards: int = 0
    """Draft forwards that a round pays beyond its draft: llama.cpp's draft reads what was verified again."""
    drafts_whole: bool = False
    """Every round drafts the full number, also where a text has no room for it, and each text once more, in the step
    that reads its prompt (vLLM, by its counters).
    """
    has_batches: bool = False
    """Whether many sequences draft in lockstep, each its fixed number."""
    warps_drafts: bool = False
    """Whether its draft applies temperature, top-k and top-p in a way that no trace has."""

    def check(self, sampling: Sampling) -> None:
        """Raise ValueError for a sampling under which its drafts are not those of a trace."""
        if self.warps_drafts and not (sampling.is_greedy or sampling.is_plain):
            raise ValueError(
                f"{self.name} applies {sampling} to its draft twice, and its threshold to the result, so that no trace "
                "has its drafts; set pair.sampling to temperature 0, or 1 without top_k and top_p"
            )

    def competitor(self, family: str, longest: int, values: Values | None = None) -> Competitor:
        """The engine's stopping rule at these settings, or at all that `flags` compares."""
        return make_competitor(family, self.rule, values or self.values(longest), kind=self.kind)

    def played(self, played: Played, settings: Sequence[Setting]) -> Played:
        """What the engine does where its rule did this."""
        if not self.drafts_whole:
            return played
        lengths = np.array([[setting["k"]] for setting in settings])
        rounds = played.counts.num_target
        counts = replace(played.counts, num_draft_forwards=lengths * (rounds + 1))
        is_length = np.arange(played.lengths.shape[-1]) == lengths[..., None]
        return replace(played, counts=counts, lengths=is_length * rounds[..., None])

    def rounds(self, rounds: Rounds, num_rows: int) -> Rounds:
        """The rounds of a batch, where fixed lengths of 0, 1, … tokens are these rounds (lanes are length * num_rows +
        row). The step that reads a prompt drafts, too: a round that verifies nothing (`evaluation.batches.load`).
        """
        if not self.drafts_whole:
            return rounds
        lengths = rounds.lane // num_rows
        whole = rounds._replace(forwards=lengths, drafted=lengths)
        lanes = np.arange(num_rows, lengths.max() * num_rows + num_rows)
        unread = np.full_like(lanes, -1)
        none = np.zeros_like(lanes)
        prompts = Rounds(lane=lanes, drafted=unread, accepted=none, forwards=lanes // num_rows, emitted=none)
        return Rounds.joined([prompts, whole]).by_lane()


def _transformers(setting: Setting, _: Drafting) -> str:
    schedule = "heuristic_transient" if setting["is_heuristic"] else "constant"
    return (
        f"draft.generation_config.update(num_assistant_tokens={setting['num_assistant_tokens']}, "
        f'num_assistant_tokens_schedule="{schedule}", '
        f"assistant_confidence_threshold={to_json(setting['assistant_confidence_threshold'])}); "
        "target.generate(**inputs, assistant_model=draft)"
    )


LLAMA_CPP = Engine(
    name="llama.cpp",
    version="0.5.0-dev (0c1e570)",
    rule="llama_cpp",
    kind=ShortDrafts,
    values=lambda longest: {"n_max": lengths_within(longest), "n_min": (0, 1, 2, 3, 5), "p_min": COARSE},
    default={"n_max": (3,), "n_min": (0,), "p_min": (0.0,)},
    line=lambda setting, _: (
        f"llama-server -m TARGET.gguf -md DRAFT.gguf --spec-type draft-simple --spec-draft-n-max {setting['n_max']} "
        f"--spec-draft-n-min {setting['n_min']} --spec-draft-p-min {setting['p_min']:g}"
    ),
    number="--spec-draft-n-max {k} --spec-draft-n-min 0 --spec-draft-p-min 0",
    off="llama-server -m TARGET.gguf",
    extra_forwards=1,
)
VLLM = Engine(
    name="vllm",
    version="0.32.0",
    draftings=(LIKELIEST, AT_TEMPERATURE),
    line=lambda setting, drafting: (
        f'vllm serve TARGET --speculative-config \'{{"method": "draft_model", "model": "DRAFT", '
        f'"num_speculative_tokens": {setting["k"]}{drafting.extra}}}\''
    ),
    number='"num_speculative_tokens": {k}',
    off="vllm serve TARGET",
    remark="Its adaptive verification (V2 runner), which verifies less of each draft, is not replayed.",
    drafts_whole=True,
    has_batches=True,
)
SGLANG = Engine(
    name="sglang",
    version="0.5.23",
    default={"k": (3,)},
    line=lambda setting, _: (
        "python -m sglang.launch_server --model-path TARGET --speculative-algorithm STANDALONE "
        f"--speculative-draft-model-path DRAFT --speculative-num-steps {setting['k']} --speculative-eagle-topk 1 "
        f"--speculative-num-draft-tokens {setting['k'] + 1}"
    ),
    number="--speculative-num-steps {k} --speculative-eagle-topk 1 --speculative-num-draft-tokens {all}",
    off="python -m sglang.launch_server --model-path TARGET",
    has_batches=True,
)
TRANSFORMERS = Engine(
    name="transformers",
    version="5.23.0",
    rule="assisted",
    values=registered("assisted").values,
    default={"num_assistant_tokens": (20,), "assistant_confidence_threshold": (0.4,), "is_heuristic": (False,)},
    draftings=(AS_TARGET,),
    line=_transformers,
    number='num_assistant_tokens={k}, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0',
    off="target.generate(**inputs)",
    warps_drafts=True,
    remark="With scikit-learn installed transformers moves a threshold above 0 while it generates.",
)
ENGINES: dict[EngineName, Engine] = {engine.name: engine for engine in (LLAMA_CPP, VLLM, SGLANG, TRANSFORMERS)}
