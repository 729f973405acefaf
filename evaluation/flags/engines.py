"""Engines that people serve with: what each lets one set, by which rule its drafts end, and how a setting is written.

A new engine is its rule (a class in `decode.policies.engines` with its line in RULES, or a policy that there is) and
its entry of ENGINES here; `flags --for NAME` then chooses its settings, and docs/flags.md is its page. Every entry was
read in the sources of the version that it names (docs/engines.md).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from json import dumps as to_json
from typing import Any, NamedTuple

from decode.policies.base import Policy
from evaluation.flag_types import EngineName
from evaluation.flags import short_drafts
from evaluation.flags.short_drafts import ShortDrafts
from lm import Sampling

Setting = Mapping[str, Any]


class Drafting(NamedTuple):
    """A way in which an engine's draft chooses tokens."""

    law: Callable[[Sampling], Sampling]
    """The sampling that the draft draws by, from the target's."""
    label: str
    """What tables call it."""
    extra: str = ""
    """What the line says for it, where it is a setting too."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """An engine as `flags` knows it: its rule, its knobs and the line to paste."""

    version: str
    """Version whose sources were read."""
    rule: str
    """Name of its rule in the registry."""
    kind: type[Policy] | None = None
    """Class of its rule, where that has more than the registry's, which every loop can run."""
    values: Callable[[int], Mapping[str, Sequence[Any]]] | None = None
    """Settings to choose from, made of the longest draft; None: those of the registry."""
    default: Setting | None
    """Setting where nothing is said; None: it asks for one."""
    draftings: tuple[Drafting, ...]
    """The default first."""
    line: Callable[[Setting, Drafting], str]
    """The line to paste."""
    off: str
    """Line without speculation."""
    remark: str = ""
    """Caution that stands below every answer."""
    extra_forwards: int = 0
    """Draft forwards that a round pays beyond those of its draft: llama.cpp's draft reads each verification's tokens
    again.
    """
    drafts_whole: bool = False
    """Whether every round drafts the full number, also where a text has no room for it, and each text once more, in the
    step that reads its prompt (vLLM, by its counters).
    """
    has_batches: bool = False
    """Whether many sequences draft in lockstep, each its fixed number."""
    warps_drafts: bool = False
    """Whether its draft applies temperature, top-k and top-p in a way of its own, which no trace has."""

    def check(self, sampling: Sampling) -> None:
        """Raise ValueError for a sampling under which its drafts are not those of a trace."""
        if self.warps_drafts and not (sampling.is_greedy or sampling.is_plain):
            raise ValueError(
                f"transformers applies {sampling} to its draft twice, and its threshold to the result, so that "
                "no trace has its drafts; set pair.sampling to temperature 0, or 1 without top_k and top_p"
            )


def _likeliest(sampling: Sampling) -> Sampling:
    return Sampling(temperature=0)


def _untruncated(sampling: Sampling) -> Sampling:
    return Sampling(sampling.temperature)


def _same(sampling: Sampling) -> Sampling:
    return sampling


def _llama_cpp(setting: Setting, drafting: Drafting) -> str:
    return (
        f"llama-server -m TARGET.gguf -md DRAFT.gguf --spec-type draft-simple --spec-draft-n-max {setting['n_max']} "
        f"--spec-draft-n-min {setting['n_min']} --spec-draft-p-min {setting['p_min']:g}"
    )


def _vllm(setting: Setting, drafting: Drafting) -> str:
    return (
        f'vllm serve TARGET --speculative-config \'{{"method": "draft_model", "model": "DRAFT", '
        f'"num_speculative_tokens": {setting["k"]}{drafting.extra}}}\''
    )


def _sglang(setting: Setting, drafting: Drafting) -> str:
    k = setting["k"]
    return (
        "python -m sglang.launch_server --model-path TARGET --speculative-algorithm STANDALONE "
        f"--speculative-draft-model-path DRAFT --speculative-num-steps {k} --speculative-eagle-topk 1 "
        f"--speculative-num-draft-tokens {k + 1}"
    )


def of_generation_config(setting: Setting) -> dict[str, Any]:
    """The setting as the generation config of transformers' draft has it."""
    return {
        "num_assistant_tokens": setting["num_assistant_tokens"],
        "num_assistant_tokens_schedule": "heuristic_transient" if setting["is_heuristic"] else "constant",
        "assistant_confidence_threshold": setting["assistant_confidence_threshold"],
    }


def _transformers(setting: Setting, drafting: Drafting) -> str:
    written = ", ".join(f"{name}={to_json(value)}" for name, value in of_generation_config(setting).items())
    return f"draft.generation_config.update({written}); target.generate(**inputs, assistant_model=draft)"


def _numbers(longest: int) -> Mapping[str, Sequence[Any]]:
    return {"k": range(1, longest + 1)}


LIKELIEST = Drafting(_likeliest, "its likeliest token")
ENGINES: dict[EngineName, Engine] = {
    "llama.cpp": Engine(
        version="0.5.0-dev (0c1e570)",
        rule="llama_cpp",
        kind=ShortDrafts,
        values=short_drafts.values,
        default={"n_max": 3, "n_min": 0, "p_min": 0.0},
        draftings=(LIKELIEST,),
        line=_llama_cpp,
        off="llama-server -m TARGET.gguf",
        extra_forwards=1,
    ),
    "vllm": Engine(
        version="0.32.0",
        rule="fixed_length",
        values=_numbers,
        default=None,
        draftings=(
            LIKELIEST,
            Drafting(_untruncated, "drawn at the temperature", ', "draft_sample_method": "probabilistic"'),
        ),
        line=_vllm,
        off="vllm serve TARGET",
        remark="Its adaptive verification (V2 runner), which verifies less of each draft, is not replayed.",
        drafts_whole=True,
        has_batches=True,
    ),
    "sglang": Engine(
        version="0.5.23",
        rule="fixed_length",
        values=_numbers,
        default={"k": 3},
        draftings=(LIKELIEST,),
        line=_sglang,
        off="python -m sglang.launch_server --model-path TARGET",
        has_batches=True,
    ),
    "transformers": Engine(
        version="5.23.0",
        rule="assisted",
        default={"num_assistant_tokens": 20, "assistant_confidence_threshold": 0.4, "is_heuristic": False},
        draftings=(Drafting(_same, "drawn as the target's"),),
        line=_transformers,
        off="target.generate(**inputs)",
        warps_drafts=True,
        remark=(
            "With scikit-learn installed transformers moves a threshold above 0 while it generates, away from the "
            "printed one."
        ),
    ),
}
"""Every engine by its name."""
