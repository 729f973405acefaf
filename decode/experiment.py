"""What a config names, made once: models, datasets, prompts, heads, policies, the trace, costs.

Every command under decode/ turns its config into an `Experiment`, takes from it the objects that it needs, and hands on those alone. Each
is made when it is first asked for, so that a command that needs no model loads none.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any, Literal

from configs.schema import Config
from data_gen.pipeline.command import cut
from data_gen.prompts.pool import load_prompts
from data_gen.prompts.prompt import Prompt
from data_gen.prompts.splits import Split
from data_gen.prompts.templates import encode
from data_gen.store.manifest import describe_model
from decode.costs.kept import Workload, measured_once
from decode.costs.model import CostModel, check_ratio
from decode.hierarchies.runs import KeptLoop
from decode.hierarchies.trio import Trio, check_micro
from decode.policies.base import Policy
from decode.policies.registry import parse_policy
from decode.traces.disk import settle
from decode.traces.recording import SPLITS, Recording
from heads.model.fits import check_fits
from heads.model.head import AcceptanceHead
from lm import Pair, Sampling, load_pair

Level = Literal["target", "draft", "micro"]
BETWEEN: tuple[tuple[Level, Level], ...] = (("micro", "draft"), ("draft", "target"))
"""The two places of a head in a hierarchy: (model that drafts, model that verifies)."""
_TIMED_PROMPTS = 4
_TIMED_TOKENS = 96


class Experiment:
    """One config, settled."""

    def __init__(self, config: Config, *, needs_micro: bool = False) -> None:
        """Args:
            config: of the command.
            needs_micro: hierarchies are asked for.

        Raises:
            ValueError: there is no micro model and it is needed.
        """
        check_micro(config.pair, is_needed=needs_micro)
        self.models, self.data, self.decode = config.pair, config.data, config.decode
        self.directory = Path(config.decode.dir)
        self.exported = Path(config.heads.dir) / "exported"
        self.sampling = Sampling(**vars(config.pair.sampling))
        self._described: dict[Level, dict[str, Any]] = {}

    @cached_property
    def pair(self) -> Pair:
        """The models, loaded."""
        return load_pair(self.models)

    def trio(self, *, with_hidden: bool = False) -> Trio:
        """The models of a hierarchy; `with_hidden` where heads read their states."""
        return Trio(lambda: self.pair, with_hidden=with_hidden)

    def described(self, level: Level) -> dict[str, Any]:
        """Name, revision and fingerprint of one model; no weights are loaded."""
        if level not in self._described:
            self._described[level] = describe_model(getattr(self.models, level), trust_remote_code=self.models.trust_remote_code)
        return self._described[level]

    @cached_property
    def datasets(self) -> dict[str, str]:
        """Name of each dataset -> where its prompts come from.

        Raises:
            ValueError: two datasets of one name.
        """
        sources = self.decode.datasets or (self.data.prompts,)
        names = [Path(source).stem for source in sources]
        if len(set(names)) < len(names):
            raise ValueError(
                f"decode.datasets are {', '.join(sources)}: two have one name, which their folders are called by; rename a file"
            )
        return dict(zip(names, sources, strict=True))

    def prompts(self, dataset: str, split: Split, *, num: int | None = None) -> list[Prompt]:
        """The first `num` prompts of a split; None: as many as decode.num_dev or decode.num_test says."""
        nums = {"dev": self.decode.num_dev, "test": self.decode.num_test} | ({} if num is None else {split: num})
        return load_prompts(replace(self.data, prompts=self.datasets[dataset], num_dev=nums["dev"], num_test=nums["test"]), split)

    def prompt_ids(self, dataset: str, split: Split, *, num: int | None = None) -> list[list[int]]:
        """Token ids of the same prompts, empty and over-long ones left out; none where none are asked for.

        Raises:
            ValueError: all of them are empty or over-long.
        """
        prompts = self.prompts(dataset, split, num=num)
        encoded = (encode(prompt, self.pair.tokenizer, self.data.template) for prompt in prompts)
        fitting = [ids for ids in encoded if 0 < len(ids) <= self.data.max_prompt_tokens]
        if prompts and not fitting:
            raise ValueError(
                f"no {split} prompt of 1 to {self.data.max_prompt_tokens} tokens in {self.datasets[dataset]}; raise data.max_prompt_tokens "
                f"or decode.num_{split}"
            )
        return fitting

    @cached_property
    def head_paths(self) -> dict[str, str]:
        """Name of each head -> its directory or hub id: those of decode.heads, or all under heads.dir/exported."""
        if self.decode.heads:
            return dict(zip(names_apart(self.decode.heads), dict.fromkeys(self.decode.heads), strict=True))
        found = sorted(path.parent for path in self.exported.glob("**/config.json"))
        return {str(path.relative_to(self.exported)): str(path) for path in found}

    @cached_property
    def heads(self) -> dict[str, AcceptanceHead]:
        """The same, loaded and checked.

        Raises:
            FileNotFoundError: a head that is not there.
            ValueError: a head that does not fit this run.
        """
        return {name: self.load_head(path, name=name) for name, path in self.head_paths.items()}

    def load_head(self, path: str, *, name: str | None = None, drafting: Level = "draft", verifying: Level = "target") -> AcceptanceHead:
        """A head, checked against the two models that it is to stand between; `name` is what messages call it."""
        head = AcceptanceHead.from_pretrained(path)
        if not self.decode.allow_foreign_heads:
            # A head that names no model costs no look at the models, which may lie on the hub.
            draft = self._compared(drafting) if head.provenance.draft else None
            target = self._compared(verifying) if head.provenance.target else None
            check_fits(head, name or path, draft=draft, target=target, sampling=self.sampling.as_dict())
        return head

    def policy(self, spec: str) -> Policy:
        """The policy that `spec` writes down (`decode.policies.registry`); `head` without a path takes the first of decode.heads.

        Raises:
            ValueError: a spec that does not parse, a head that does not fit this run.
            FileNotFoundError: no exported head at that path.
        """
        if spec == "head" and self.decode.heads:
            spec = f"head:{self.decode.heads[0]}"
        return parse_policy(spec, load_head=self.load_head)

    @cached_property
    def recording(self) -> Recording:
        """The trace.

        Raises:
            ValueError: a setting that is out of range.
        """
        for name in ("num_dev", "num_test", "max_draft_length", "max_new_tokens", "prompts_per_shard"):
            if getattr(self.decode, name) < 1:
                raise ValueError(f"decode.{name} is {getattr(self.decode, name)}; it must be at least 1")
        size = self.decode.prompts_per_shard
        return Recording(
            directory=self.directory / "trace",
            shards={name: [spec for split in SPLITS for spec in cut(split, self.prompts(name, split), size)] for name in self.datasets},
            models={level: self.described(level) for level in ("target", "draft")},
            pair=lambda: self.pair,
            sampling=self.sampling,
            heads=list(self.heads.values()) if self.decode.heads and not self.decode.trace_hidden else [],
            data=self.data,
            decode=self.decode,
        )

    def costs(self, ratio: float | None = None) -> CostModel:
        """Times that the YAML gives, or else those of this machine, which are measured once and kept.

        Args:
            ratio: t_target / t_draft of other hardware, in place of theirs.

        Raises:
            ValueError: one of the two times given without the other; a ratio that is not positive.
        """
        if ratio is not None:
            check_ratio(ratio)
            return self.costs().with_ratio(ratio)
        draft_s, target_s = self.decode.t_draft_s, self.decode.t_target_s
        if draft_s is not None and target_s is not None:
            return CostModel.constant(draft_s, target_s)
        if (draft_s, target_s) != (None, None):
            raise ValueError("decode.t_draft_s and decode.t_target_s go together: give both, or neither to measure them")
        return measured_once(self.directory, lambda: self.workload)

    @property
    def workload(self) -> Workload:
        """What is timed to measure costs: a few dev prompts of the first dataset."""
        dataset = next(iter(self.datasets))
        return Workload(
            pair=self.pair,
            prompts=self.prompt_ids(dataset, "dev", num=max(self.decode.num_dev, _TIMED_PROMPTS))[:_TIMED_PROMPTS],
            sampling=self.sampling,
            max_draft_length=self.decode.max_draft_length,
            max_new_tokens=min(self.decode.max_new_tokens, _TIMED_TOKENS),
        )

    def kept_loop(self, dataset: str, trio: Trio) -> KeptLoop:
        """The real loop for the hierarchies of one dataset, with the folder that keeps what it wrote.

        Raises:
            ValueError: the generations of other settings lie there.
        """
        settings = {name: getattr(self.decode, name) for name in ("max_draft_length", "max_new_tokens", "seed")}
        directory = self.directory / "hierarchy" / dataset
        directory.mkdir(parents=True, exist_ok=True)
        models = {level: self.described(level) for level in ("target", "draft", "micro")}
        settle(directory, {"format": 1, **models, "sampling": self.sampling.as_dict(), **settings})
        return KeptLoop(directory=directory, trio=trio, sampling=self.sampling, **settings)

    def _compared(self, level: Level) -> Mapping[str, Any]:
        return {"role": f"pair.{level}", "path": getattr(self.models, level).path, **self.described(level)}


def names_apart(paths: Sequence[str]) -> list[str]:
    """A name for each path, repeated paths left out: its last part, and as many before it as tell it from the others.

    a/best and b/best -> a/best and b/best;  runs/a/best and runs/b/worst -> best and worst
    """
    every = [PurePath(path).parts for path in dict.fromkeys(paths)]
    lengths = [1] * len(every)
    while True:
        names = ["/".join(parts[-length:]) for parts, length in zip(every, lengths, strict=True)]
        shared = Counter(names)
        longer = [min(length + (shared[name] > 1), len(parts)) for name, parts, length in zip(names, every, lengths, strict=True)]
        if longer == lengths:
            return names
        lengths = longer
