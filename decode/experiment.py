"""What a config names, settled once: models, sampling, datasets, prompts, heads, policies.

Every command under decode/ turns its config into an `Experiment`, and hands on the objects that it takes from it: those
of this class, the trace (`evaluation.traces.recording.trace_folder`), the costs (`evaluation.costs.machine.costs_for`),
the loop of the hierarchies (`evaluation.hierarchies.decoded.StoredLoop`). Each is made when it is first asked for, so
that a command that needs no model loads none.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any, Literal, NamedTuple, get_args

from configs.paths import check_local
from configs.schema import Config, DataConfig, ModelSource, PromptSource
from data_gen.pipeline.sizes import settled
from data_gen.prompts.hub import set_name
from data_gen.prompts.pool import load_prompts, sources_of
from data_gen.prompts.prompt import Prompt
from data_gen.prompts.splits import Split
from data_gen.prompts.templates import encode
from data_gen.store.identity import describe_model
from data_gen.store.manifest import read_manifest
from decode.drafters.factory import check_micro
from decode.policies.base import Policy
from decode.policies.chosen import UNTUNED, best_head, read_verdict
from decode.policies.registry import policy_of, read_spec
from heads.model.fits import check_fits
from heads.model.head import AcceptanceHead
from lm import Pair, Sampling, feature_draft_of, load_pair, refuse_feature_draft, without_weights
from lm.features.released import released_layout_of

Level = Literal["target", "draft", "micro"]
LEVELS: tuple[Level, ...] = get_args(Level)
BETWEEN: tuple[tuple[Level, Level], ...] = (("micro", "draft"), ("draft", "target"))
"""The two places of a head in a hierarchy: (model that drafts, model that verifies)."""

TRAINING_FREE = "cumulative_token_prob"
"""The policy that decodes where there is no head: of those without training, ahead on the pairs that were measured."""


class DefaultPolicy(NamedTuple):
    """The policy that is taken where none is named, and a line that says why."""

    spec: str
    reason: str


class Experiment:
    """A config whose models, prompts, heads and sampling are settled."""

    def __init__(self, config: Config, *, needs_micro: bool = False) -> None:
        """Args:
            config: the command's.
            needs_micro: whether hierarchies are asked for.

        Raises:
            ValueError: hierarchies of no micro model, or with a draft that reads the target.
        """
        if needs_micro:
            refuse_feature_draft(config.pair)
            check_micro(config.pair)
        self.models, self.decode, self._data = config.pair, config.decode, config.data
        self.directory = Path(config.decode.dir)
        self.exported = Path(config.heads.dir) / "exported"
        self.sampling, self.template = Sampling(**vars(config.pair.sampling)), config.data.template
        self._described: dict[Level, dict[str, Any]] = {}
        self.presumed: set[Level] = set()
        """Models that are not here, and are taken to be those of a record."""
        if self.decode.as_recorded:
            self._take_record()

    @cached_property
    def data(self) -> DataConfig:
        """The prompts and their splits, as data and training have them."""
        return settled(self._data, is_verbose=False)  # `data` has printed it

    @cached_property
    def pair(self) -> Pair:
        """The loaded models."""
        return load_pair(self.models)

    @cached_property
    def has_feature_draft(self) -> bool:
        """Whether the draft reads the target's states."""
        return released_layout_of(self.models.draft) is not None

    def with_feature_draft(self, path: str) -> "Experiment":
        """This experiment with another draft, one that reads the target, which is not loaded a second time.

        Raises:
            ValueError: no feature draft, or one that does not fit the target.
        """
        check_local(path, "the path of a feature draft", may_be_on_hub=True)
        source = ModelSource(path=path, dtype=self.models.target.dtype)
        if released_layout_of(source) is None:
            raise ValueError(
                f"{path} is no feature draft's directory (an EAGLE's or a GliDe's); pair.draft takes models of their "
                "own"
            )
        changed, target = copy(self), self.pair.target
        for name in ("has_feature_draft", "num_draft_weights", "heads"):
            changed.__dict__.pop(name, None)
        changed.models, changed._described = replace(self.models, draft=source), {}
        changed.pair = replace(self.pair, drafting=feature_draft_of(changed.models, target))
        return changed

    @property
    def identity(self) -> dict[str, Any]:
        """Models and sampling that a verdict is of."""
        models = {"target": self.models.target.path, "draft": self.models.draft.path}
        return {**models, "sampling": self.sampling.as_dict()}

    def described(self, level: Level) -> dict[str, Any]:
        """Name, revision and fingerprint of one model; no weights are loaded."""
        if level not in self._described:
            self._described[level] = describe_model(getattr(self.models, level))
        return self._described[level]

    def presume(self, recorded: Mapping[Level, Mapping[str, Any]]) -> None:
        """Take models that are not here for those of a record, where they have its names.

        Args:
            recorded: level -> the description of its model, as a manifest has it.

        Raises:
            FileNotFoundError: a model that is not here, and whose name is another.
        """
        for level, description in recorded.items():
            try:
                self.described(level)
            except FileNotFoundError:
                if PurePath(getattr(self.models, level).path).name != PurePath(description["name"]).name:
                    raise
                self._described[level] = dict(description)
                self.presumed.add(level)

    def _take_record(self) -> None:
        """Let the trace in decode.dir decide what is evaluated.

        Raises:
            FileNotFoundError: there is none.
        """
        keys = ("target", "draft", "sampling", "max_draft_length", "max_new_tokens", "prompts")
        record = read_manifest(self.directory / "trace", command="trace", keys=keys)
        self._described = {"target": record["target"], "draft": record["draft"]}
        self.presumed = {"target", "draft"}
        self.sampling = Sampling(**record["sampling"])
        limits = {name: record[name] for name in ("max_draft_length", "max_new_tokens")}
        self.decode = replace(self.decode, **limits)
        names = dict.fromkeys(key.rpartition(".")[0] for key in record["prompts"])
        self.data = self._data
        self.datasets = {name: PromptSource(path=name) for name in names}
        self.home = dict(list(self.datasets.items())[:1])

    @cached_property
    def num_draft_weights(self) -> int:
        """Parameters of the draft; none is loaded, unless it is a feature draft."""
        if self.has_feature_draft:
            return sum(parameter.numel() for parameter in self.pair.drafting.parameters())
        return without_weights(self.models.draft).num_parameters()

    @cached_property
    def home(self) -> dict[str, PromptSource]:
        """The sets that heads are trained on: name -> where it is."""
        return sources_of(self.data)

    @cached_property
    def datasets(self) -> dict[str, PromptSource]:
        """Name of each dataset -> where its prompts come from; what is chosen on the first travels to those that are
        not home.

        Raises:
            ValueError: two datasets of one name.
        """
        sources = self.decode.datasets
        if not sources:
            return self.home
        names = [set_name(source) for source in sources]
        if len(set(names)) < len(names):
            raise ValueError(
                f"decode.datasets are {', '.join(sources)}: two have one name, which their folders are called by; "
                "rename a file"
            )
        at_home = {source.path: source for source in self.home.values()}
        return {
            name: at_home.get(source, PromptSource(path=source)) for name, source in zip(names, sources, strict=True)
        }

    def is_home(self, dataset: str) -> bool:
        """Whether heads are trained on prompts of this dataset."""
        return self.datasets[dataset] in self.home.values()

    def prompts(self, dataset: str, split: Split, *, num: int | None = None) -> list[Prompt]:
        """The first `num` prompts of a split; None: as many as decode.num_dev or decode.num_test says.

        A set that no head was trained on is cut by `decode.abroad_weights`, and where it has fewer than asked for, all
        of them are taken.
        """
        nums = {"dev": self.decode.num_dev, "test": self.decode.num_test} | ({} if num is None else {split: num})
        data = replace(self.data, prompts=self.datasets[dataset], num_dev=nums["dev"], num_test=nums["test"])
        if self.is_home(dataset):
            return load_prompts(data, split, section="decode")
        abroad = replace(data, split_weights=(0, *self.decode.abroad_weights), split_ids=None)
        return load_prompts(abroad, split, may_be_fewer=True, section="decode")

    def prompt_ids(self, dataset: str, split: Split, *, num: int | None = None) -> list[list[int]]:
        """Token ids of the prompts that `encoded` returns."""
        return [ids for _, ids in self.encoded(dataset, split, num=num)]

    def encoded(self, dataset: str, split: Split, *, num: int | None = None) -> list[tuple[Prompt, list[int]]]:
        """The prompts of `prompts` with their token ids, empty and over-long ones left out; none where none are asked
        for.

        Raises:
            ValueError: all of them are empty or over-long.
        """
        prompts = [prompt for prompt in self.prompts(dataset, split, num=num) if prompt.is_text]
        encoded = ((prompt, encode(prompt, self.pair.tokenizer, self.template)) for prompt in prompts)
        fitting = [(prompt, ids) for prompt, ids in encoded if 0 < len(ids) <= self.data.max_prompt_tokens]
        if prompts and not fitting:
            raise ValueError(
                f"no {split} prompt of 1 to {self.data.max_prompt_tokens} tokens in {self.datasets[dataset].path}; "
                f"raise data.max_prompt_tokens or decode.num_{split}"
            )
        return fitting

    @cached_property
    def head_paths(self) -> dict[str, str]:
        """Name of each head -> its directory or hub id: those of decode.heads, or all under heads.dir/exported."""
        if self.decode.heads:
            return dict(zip(names_apart(self.decode.heads), dict.fromkeys(self.decode.heads), strict=True))
        directories = sorted(path.parent for path in self.exported.glob("**/config.json"))
        return {str(directory.relative_to(self.exported)): str(directory) for directory in directories}

    @cached_property
    def heads(self) -> dict[str, AcceptanceHead]:
        """The heads of `head_paths` that serve chains, loaded and checked.

        Raises:
            FileNotFoundError: a head that is not there.
            ValueError: a head that does not fit this run; candidate heads alone.
        """
        loaded = {name: self.load_head(path, name=name) for name, path in self.head_paths.items()}
        chosen = {name: head for name, head in loaded.items() if head.timing != "candidate"}
        if loaded and not chosen:
            raise ValueError(
                f"{', '.join(loaded)} are candidate heads, which stop trees: give them to `evaluation tables --paper "
                "svip-trees` (--stops) or `decode generate` (--tree), or train heads of another timing"
            )
        return chosen

    def load_head(
        self, path: str, *, name: str | None = None, drafting: Level = "draft", verifying: Level = "target"
    ) -> AcceptanceHead:
        """A head, checked against the two models that it is to stand between; `name` is what messages call it."""
        head = AcceptanceHead.from_pretrained(path)
        if not self.decode.allow_foreign_heads:
            # A head that names no model costs no look at the models, which may lie on the hub.
            draft = self._compared(drafting) if head.provenance.draft else None
            target = self._compared(verifying) if head.provenance.target else None
            check_fits(head, name or path, draft=draft, target=target, sampling=self.sampling.as_dict())
        return head

    def policy(self, spec: str) -> Policy:
        """The policy that `spec` writes down (`decode.policies.registry`); `head` and `auto` without a path take the
        best of `head_paths`.

        Raises:
            ValueError: a spec that does not parse, a head that does not fit this run.
            FileNotFoundError: no exported head at that path.
        """
        name, parameters = read_spec(spec)
        if name == "head" and "head" not in parameters:
            if (best := best_head(self.head_paths)) is None:
                raise FileNotFoundError(
                    f"policy {spec!r} needs a head, and there is none in {self.exported}; run `acceptance-heads "
                    "export`, or name one: head:PATH"
                )
            parameters = ({} if best.is_tuned or parameters else UNTUNED) | {"head": best.path} | parameters
        return policy_of(name, parameters, self.load_head)

    @cached_property
    def default_policy(self) -> DefaultPolicy:
        """What decodes where no policy is named: the verdict, else the best head, else a policy without training."""
        if (verdict := read_verdict(self.directory, self.head_paths, self.identity)) is not None:
            return DefaultPolicy(verdict["policy"], f"{verdict['sentence']} It is {verdict['speed']}")
        best = best_head(self.head_paths)
        if best is not None:
            return DefaultPolicy("head", f"head {best.reason}")
        return DefaultPolicy(
            TRAINING_FREE,
            f"{TRAINING_FREE}, which needs no training: no head in {self.exported} "
            "(`acceptance-heads train` and `export` make them)",
        )

    def _compared(self, level: Level) -> Mapping[str, Any]:
        return {"role": f"pair.{level}", "path": getattr(self.models, level).path, **self.described(level)}


def names_apart(paths: Sequence[str]) -> list[str]:
    """A name for each path, repeated paths left out: its last part, and as many before it as tell it from the others.

    a/best and b/best -> a/best and b/best;  runs/a/best and runs/b/worst -> best and worst
    """
    split_paths = [PurePath(path).parts for path in dict.fromkeys(paths)]
    lengths = [1] * len(split_paths)
    while True:
        names = ["/".join(parts[-length:]) for parts, length in zip(split_paths, lengths, strict=True)]
        shared = Counter(names)
        longer = [
            min(length + (shared[name] > 1), len(parts))
            for name, parts, length in zip(names, split_paths, lengths, strict=True)
        ]
        if longer == lengths:
            return names
        lengths = longer
