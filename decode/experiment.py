"""What a config names: models, sampling, datasets, prompts, heads, policies.

Every command of decode/ and evaluation/ turns its config into an `Experiment` and passes the objects that it
takes from it. Each is made at its first use, so that a command that needs no model loads none.
"""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Literal, get_args

from configs.paths import check_local
from configs.schema import Config, DataConfig, ModelSource, PromptSource, SamplingConfig
from data_gen.pipeline.stages import settled
from data_gen.prompts.growth import FirstSplit
from data_gen.prompts.prompt import Prompt, say_once
from data_gen.prompts.sets import Split, is_generated, load_prompts, set_name, sources_of, split_by
from data_gen.prompts.templates import RefusedPromptError, encode
from data_gen.store.manifest import describe_model, read_manifest
from decode.policies.base import Policy
from decode.policies.recommended import best_head, read_verdict
from decode.policies.registry import policy_of, read_spec
from heads.model.files import exported_heads, local_directory, note_on_earlier, read_head_config
from heads.model.fits import check_fits
from heads.model.head import AcceptanceHead, Provenance
from lm import Sampling
from lm.features.released import released_layout_of
from lm.folders import num_weights_in
from store.hub import is_on_disk

if TYPE_CHECKING:  # models take seconds to import, and a replay loads none
    from lm import Pair

Level = Literal["target", "draft", "micro"]
LEVELS: tuple[Level, ...] = get_args(Level)
BETWEEN: tuple[tuple[Level, Level], ...] = (("micro", "draft"), ("draft", "target"))
"""Pairs of a hierarchy that a head may serve: (model that drafts, model that verifies)."""

TRAINING_FREE = "cumulative_token_prob"
"""The default policy without a head: of those without training, the fastest on the measured pairs."""


class Experiment:
    """The models, prompts, heads and sampling of a config."""

    def __init__(self, config: Config, *, needs_micro: bool = False) -> None:
        """`needs_micro`: the command decodes hierarchies; ValueError without a micro model, or with a feature draft."""
        if needs_micro:
            from lm.pair import refuse_feature_draft

            refuse_feature_draft(config.pair)
            if config.pair.micro is None:
                raise ValueError("pair.micro is not set; set pair.micro.path to a third model, smaller than the draft")
        self._config = config
        self.models = config.pair
        self.decode = config.decode
        self.arguments = config.arguments
        self.is_step = config.is_step
        self.directory = Path(config.decode.dir)
        self.exported = Path(config.heads.dir) / "exported"
        self.sampling = Sampling(**vars(config.pair.sampling))
        self.template = config.data.template
        self._described: dict[Level, dict[str, Any]] = {}
        self.presumed: set[Level] = set()
        """Missing models, which are assumed to be those of a record."""
        if self.decode.as_recorded:
            self._take_record()

    @cached_property
    def data(self) -> DataConfig:
        """The prompts and their splits, as in training."""
        return settled(self._config.data, say=None)  # `data` has printed it

    @cached_property
    def pair(self) -> "Pair":
        """The loaded models."""
        from lm import load_pair

        return load_pair(self.models)

    @cached_property
    def has_feature_draft(self) -> bool:
        """Whether the draft reads the target's hidden states."""
        return released_layout_of(self.models.draft) is not None

    def with_feature_draft(self, path: str) -> "Experiment":
        """This experiment with another draft, which must be a feature draft; the target is not loaded again."""
        from lm import feature_draft_of

        check_local(path, "the path of a feature draft", may_be_on_hub=True)
        source = ModelSource(path=path, dtype=self.models.target.dtype)
        if released_layout_of(source) is None:
            raise ValueError(f"{path} is no feature draft, such as an EAGLE; set pair.draft to use another model")
        changed = Experiment(replace(self._config, pair=replace(self.models, draft=source)))
        changed.pair = replace(self.pair, drafting=feature_draft_of(changed.models.draft, self.pair.target))
        return changed

    def with_trace(self, directory: str) -> "Experiment":
        """This experiment on the trace in another decode.dir, under its sampling; heads of any sampling may compete."""
        sampling = read_manifest(Path(directory) / "trace", command="trace", keys=["sampling"])["sampling"]
        pair = replace(self.models, sampling=SamplingConfig(**sampling))
        decode = replace(self._config.decode, dir=directory, allow_foreign_heads=True)
        return Experiment(replace(self._config, pair=pair, decode=decode))

    @property
    def identity(self) -> dict[str, object]:
        """Models, by their weights or commit wherever they are, and sampling that a verdict is about."""
        models: dict[str, object] = {}
        for level in BETWEEN[1]:
            described = self.described(level)
            known = {key: described[key] for key in ("weights", "commit", "quantization") if described.get(key)}
            models[level] = known or {"name": described["name"], "revision": described.get("revision")}
        return models | {"sampling": self.sampling.as_dict()}

    def described(self, level: Level) -> dict[str, Any]:
        """Name, revision and fingerprint of one model, without its weights."""
        if level not in self._described:
            self._described[level] = describe_model(getattr(self.models, level), known=self._recorded.get(level))
        return self._described[level]

    @cached_property
    def _recorded(self) -> Mapping[str, Any]:
        """The manifest of the trace in decode.dir; empty without one."""
        folder = self.directory / "trace"
        return read_manifest(folder, command="trace") if (folder / "manifest.json").is_file() else {}

    def presume(self, recorded: Mapping[Level, Mapping[str, Any]]) -> None:
        """Assume that missing models are those of a manifest, level -> description, if they have the same names;
        FileNotFoundError for a missing model of another name.
        """
        for level, description in recorded.items():
            try:
                self.described(level)
            except FileNotFoundError:
                if PurePath(getattr(self.models, level).path).name != PurePath(description["name"]).name:
                    raise
                self._described[level] = dict(description)
                self.presumed.add(level)

    @property
    def absent_models(self) -> list[str]:
        """The models of a record that are neither in a directory nor in the hub's cache."""
        paths = {level: getattr(self.models, level).path for level in BETWEEN[1][::-1] if level in self.presumed}
        return [f"{path} (pair.{level}.path)" for level, path in paths.items() if not is_on_disk(path)]

    def _take_record(self) -> None:
        """Take models, sampling, limits and datasets from the trace in decode.dir."""
        keys = ("target", "draft", "sampling", "max_draft_length", "max_new_tokens")
        record = read_manifest(self.directory / "trace", command="trace", keys=keys)
        self._described = {"target": record["target"], "draft": record["draft"]}
        self.presumed = {"target", "draft"}
        self.sampling = Sampling(**record["sampling"])
        self.decode = replace(
            self.decode, max_draft_length=record["max_draft_length"], max_new_tokens=record["max_new_tokens"]
        )
        # format 1 has hashes of the prompts, not their numbers
        parts = record["split"] if "split" in record else record["prompts"]
        names = dict.fromkeys(part.rpartition(".")[0] for part in parts)
        self.data = self._config.data
        self.datasets = {name: PromptSource(path=name) for name in names}
        self.training_sets = dict(list(self.datasets.items())[:1])

    @cached_property
    def num_draft_weights(self) -> int:
        """Number of the draft's parameters; only a feature draft is loaded."""
        if self.has_feature_draft:
            return sum(parameter.numel() for parameter in self.pair.drafting.parameters())
        in_file = num_weights_in(self.models.draft.path)
        if in_file is not None:
            return in_file
        from lm.pair import without_weights

        return without_weights(self.models.draft).num_parameters()

    @cached_property
    def training_sets(self) -> dict[str, PromptSource]:
        """Datasets that heads are trained on: name -> source."""
        return sources_of(self.data)

    @cached_property
    def datasets(self) -> dict[str, PromptSource]:
        """Datasets to evaluate: name -> source. Settings chosen on the first are used on the transfer sets."""
        sources = self.decode.datasets
        if not sources:
            return self.training_sets
        names = [set_name(source) for source in sources]
        if len(set(names)) < len(names):
            raise ValueError(f"decode.datasets are {', '.join(sources)}; two have the same name: rename a file")
        trained = {source.path: source for source in self.training_sets.values()}
        return {
            name: trained.get(source, PromptSource(path=source)) for name, source in zip(names, sources, strict=True)
        }

    def is_training_set(self, dataset: str) -> bool:
        """Whether heads are trained on prompts of this dataset."""
        return self.datasets[dataset] in self.training_sets.values()

    def prompts(self, dataset: str, split: Split, *, num: int | None = None) -> list[Prompt]:
        """The first `num` prompts of a split; None: as many as decode.num_dev or decode.num_test says.

        A transfer set, which no head was trained on, is cut by `decode.transfer_weights`, and may have fewer
        prompts; those that are also in the training data are left out.
        """
        nums = {"dev": self.decode.num_dev, "test": self.decode.num_test} | ({} if num is None else {split: num})
        data = replace(self.data, prompts=self.datasets[dataset], num_dev=nums["dev"], num_test=nums["test"])
        if self.is_training_set(dataset):
            return load_prompts(data, split, section="decode")
        transfer = self._of_transfer(data)
        prompts = load_prompts(transfer, split, may_be_fewer=True, section="decode")
        if self._trained_content.isdisjoint(prompt.content for prompt in prompts):
            return prompts
        return self._without_trained(transfer, dataset, split)[: nums[split]]

    def _of_transfer(self, data: DataConfig) -> DataConfig:
        """The settings by which transfer sets are split; the manifest of the trace has their first splits."""
        weights = (0, *self.decode.transfer_weights)
        return replace(data, dir=str(self.directory / "trace"), split_weights=weights, split_ids=None)

    @property
    def transfer_sets(self) -> dict[str, PromptSource]:
        """Files and other sets of prompts that no head is trained on: name -> source."""
        sources = {name: source for name, source in self.datasets.items() if not self.is_training_set(name)}
        return {name: source for name, source in sources.items() if not is_generated(source)}

    def transfer_splits(self) -> dict[str, FirstSplit]:
        """How each transfer set is split, for the manifest of its trace (`data_gen.prompts.growth`)."""
        entries: dict[str, FirstSplit] = {}
        for name, source in self.transfer_sets.items():
            config = self._of_transfer(replace(self.data, prompts=source))
            own = {"seed": config.seed, "split_weights": list(config.split_weights or ())}
            entries[name] = dict(split_by(config)[name]) | own
        return entries

    @cached_property
    def _trained_content(self) -> frozenset[tuple[str, ...]]:
        """Content of the prompts that heads are trained on (train) or chosen by (dev)."""
        splits: tuple[Split, ...] = ("train", "dev")
        try:
            trained = [load_prompts(self.data, split, may_be_fewer=True) for split in splits]
        except FileNotFoundError as error:
            say_once(f"note: transfer sets are not compared with the training data, which cannot be read: {error}")
            return frozenset()
        return frozenset(prompt.content for prompts in trained for prompt in prompts)

    def _without_trained(self, transfer: DataConfig, dataset: str, split: Split) -> list[Prompt]:
        """All prompts of a split of a transfer set but those of the training data; ValueError if none is left."""
        everything = replace(transfer, num_dev=sys.maxsize, num_test=sys.maxsize)
        prompts = load_prompts(everything, split, may_be_fewer=True, section="decode")
        rest = [prompt for prompt in prompts if prompt.content not in self._trained_content]
        num_shared = len(prompts) - len(rest)
        if not rest:
            raise ValueError(
                f"all {num_shared} {split} prompts of {self.datasets[dataset].path} (decode.datasets) are also in the "
                "training data (data.prompts), so it is no transfer set; remove it, or name another set"
            )
        say_once(
            f"{dataset}: {num_shared} of {len(prompts)} {split} prompts are also in the training data and are left out"
        )
        return rest

    def prompt_ids(self, dataset: str, split: Split, *, num: int | None = None) -> list[list[int]]:
        """Token ids of the prompts that `encoded` returns."""
        return [ids for _, ids in self.encoded(dataset, split, num=num)]

    def encoded(self, dataset: str, split: Split, *, num: int | None = None) -> list[tuple[Prompt, list[int]]]:
        """The prompts of `prompts` with their token ids, without those that are empty, over-long or refused by
        the chat template; ValueError if none is left.
        """
        prompts = [prompt for prompt in self.prompts(dataset, split, num=num) if prompt.is_text]
        fitting: list[tuple[Prompt, list[int]]] = []
        for prompt in prompts:
            with suppress(RefusedPromptError):  # errors.jsonl of the trace has it
                ids = encode(prompt, self.pair.tokenizer, self.template)
                if 0 < len(ids) <= self.data.max_prompt_tokens:
                    fitting.append((prompt, ids))
        if prompts and not fitting:
            raise ValueError(
                f"no {split} prompt of 1 to {self.data.max_prompt_tokens} tokens in {self.datasets[dataset].path}; "
                f"raise data.max_prompt_tokens or decode.num_{split}"
            )
        return fitting

    @cached_property
    def head_paths(self) -> dict[str, str]:
        """Heads of decode.heads, or of the newest run under heads.dir/exported: name -> directory or hub id."""
        if self.decode.heads:
            return dict(zip(names_apart(self.decode.heads), dict.fromkeys(self.decode.heads), strict=True))
        directories, others = exported_heads(self.exported)
        if others:
            say_once(note_on_earlier(others, self.exported))
        return {str(directory.relative_to(self.exported)): str(directory) for directory in directories}

    @cached_property
    def heads(self) -> dict[str, AcceptanceHead]:
        """The heads of `head_paths` that serve chains, loaded and checked; ValueError for candidate heads alone."""
        loaded = {name: self.load_head(path, name=name) for name, path in self.head_paths.items()}
        of_chains = {name: head for name, head in loaded.items() if head.timing != "candidate"}
        if loaded and not of_chains:
            raise ValueError(
                f"{', '.join(loaded)} are candidate heads, which stop trees; use them with `evaluation tables --paper "
                "svip-trees` (--stops) or `decode generate` (--tree), or train heads of another timing"
            )
        return of_chains

    def load_head(
        self, path: str, *, name: str | None = None, drafting: Level = "draft", verifying: Level = "target"
    ) -> AcceptanceHead:
        """A head, checked against the models that it serves; `name` is for messages."""
        head = AcceptanceHead.from_pretrained(path)
        if not self.decode.allow_foreign_heads:
            self._check_fits(head.provenance, name or path, drafting, verifying)
        return head

    def _check_fits(
        self, trained: Provenance, name: str, drafting: Level = "draft", verifying: Level = "target"
    ) -> None:
        # a head without a record needs no description of models, which may be on the hub
        draft = self._compared(drafting) if trained.draft else None
        target = self._compared(verifying) if trained.target else None
        check_fits(trained, name, draft=draft, target=target, sampling=self.sampling.as_dict())

    def policy(self, spec: str) -> Policy:
        """The policy of a spec (`decode.policies.registry`); `head` and `auto` without a path use the best head."""
        name, parameters = read_spec(spec)
        if name == "head" and "head" not in parameters:
            if (best := best_head(self._fitting_heads or self.head_paths)) is None:
                raise FileNotFoundError(
                    f"policy {spec!r} needs a head, and there is none in {self.exported}; run `acceptance-heads "
                    "export`, or give one: head:PATH"
                )
            path, settings, _ = best
            parameters = {"head": path, **(parameters or settings)}
        return policy_of(name, parameters, self.load_head)

    @cached_property
    def default_policy(self) -> tuple[str, str]:
        """The policy if none is named (the verdict's, the best head or one without training), and a one-line reason."""
        verdict = read_verdict(self.directory, self.head_paths)
        if verdict is not None and verdict["of"] == self.identity:
            return verdict["policy"], f"{verdict['sentence']} It is {verdict['speed']}"
        if (best := best_head(self._fitting_heads)) is not None:
            _, _, reason = best
            return "head", f"head {reason}"
        if self.head_paths:
            reason = f"no head was trained for this sampling ({self.sampling.text}) and these models"
        else:
            reason = f"no head in {self.exported} (`acceptance-heads train` and `export` make them)"
        return TRAINING_FREE, f"{TRAINING_FREE}, which needs no training: {reason}"

    @property
    def _fitting_heads(self) -> dict[str, str]:
        """Heads that may decode in this run: name -> path. Only config.json is read."""
        if self.decode.allow_foreign_heads:
            return self.head_paths
        fitting = {}
        for name, path in self.head_paths.items():
            trained = Provenance.from_dict(read_head_config(Path(local_directory(path), "config.json")))
            with suppress(ValueError):
                self._check_fits(trained, name)
                fitting[name] = path
        return fitting

    def _compared(self, level: Level) -> Mapping[str, object]:
        return {"role": f"pair.{level}", "path": getattr(self.models, level).path, **self.described(level)}


def names_apart(paths: Sequence[str]) -> list[str]:
    """A name for each distinct path: its last part, and as many before it as make it unique.

    a/best and b/best -> a/best and b/best;  runs/a/best and runs/b/worst -> best and worst
    """
    every = [PurePath(path).parts for path in dict.fromkeys(paths)]
    ends = Counter(parts[-num:] for parts in every for num in range(1, len(parts) + 1))
    names = (next((parts[-num:] for num in range(1, len(parts)) if ends[parts[-num:]] == 1), parts) for parts in every)
    return ["/".join(name) for name in names]
