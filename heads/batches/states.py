"""Hidden states of the draft for training, a function of rows and labels (`data_gen.labels.states`): computed once and
cached (`heads.states: cached`), or for each batch (`online`). Both give the same numbers up to float32's rounding, by
up to 4e-6: on a CPU the sums of torch's attention depend on the width that a group of texts is padded to.

    data.dir/states/{timing}/{split}-{index:05d}.safetensors      hidden [tokens, hidden], in the order of the labels

With heads.layer the folder is {timing}-layer{n}. A shard's sidecar has the sums of the rows and labels that it was
computed from, the draft, the layer and the dtype; a shard of others is computed again. Processes share the shards as
those of `acceptance-heads data` do, so a killed run continues with the shards that are missing.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

import safetensors.torch
import torch
from jaxtyping import Float
from torch import Tensor

from configs.schema import DataConfig, HeadsConfig, ModelSource, PairConfig
from data_gen.labels.states import DraftStates, RolloutStates, StateSource, StateTiming, Text
from data_gen.pipeline.share import Share
from data_gen.store.manifest import Manifest, describe_model, same_model
from heads.batches.features import Batch, Features, FeatureShard, Row, check_numbers, with_states
from lm import FeatureDraft, check_width, load_model, load_pair, load_pair_tokenizer, model_config, vocab_size_of
from lm.features.released import released_layout_of
from lm.forwards import alike
from lm.pair import free_memory, is_out_of_memory
from lm.sampling import REMEDY
from store.json_files import Json
from store.lock import LOCK, only_writer
from store.progress import Bar
from store.shards import broken_shards, clean_partial, is_whole, read_sidecar, sidecar_path, write_shard

_WAIT_S = 7 * 24 * 3600.0
"""Longest wait for another run that fills the same cache."""
_OF_DRAFT = ("weights", "commit", "config", "quantization")
"""What identifies a draft in manifest.json."""


class States:
    """Hidden states of a directory's responses."""

    def __init__(self, pair: PairConfig, data: DataConfig, *, heads: HeadsConfig, manifest: Manifest) -> None:
        """`manifest` is that of the data. ValueError for a layer of a feature draft."""
        if heads.layer is not None and released_layout_of(pair.draft):
            raise ValueError(
                f"heads.layer is {heads.layer}, but pair.draft is a feature draft, which has no other hidden "
                "states; remove heads.layer"
            )
        self.pair = pair
        self.data = data
        self.heads = heads
        self.manifest = manifest

    @property
    def is_online(self) -> bool:
        """Whether states are computed for each batch."""
        return self.heads.states == "online"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the states, cached or not."""
        dtype: torch.dtype = getattr(torch, self.heads.state_dtype)
        return dtype

    def folder(self, timing: StateTiming) -> Path:
        """The folder of the cache of one timing."""
        name = timing if self.heads.layer is None else f"{timing}-layer{self.heads.layer}"
        return Path(self.data.dir, "states", name)

    def path(self, labels: Path, timing: StateTiming) -> Path | None:
        """The cached states of a shard; None if they are computed for each batch."""
        return None if self.is_online else self.folder(timing) / labels.name

    def key(self, shard: FeatureShard) -> Json:
        """What the states of a shard depend on besides timing and layer, which their folder names. The rows have every
        token that a draft reads, but for those of a feature draft's drafts, which only the labels have.
        """
        draft = self.manifest["draft"]
        of_labels = read_sidecar(shard.labels)["sha256"] if self.manifest.get("draft_length") else None
        return {
            "rows_sha256": read_sidecar(shard.rows)["sha256"],
            "labels_sha256": of_labels,
            "draft": {name: draft[name] for name in _OF_DRAFT if draft.get(name)} | {"dtype": self.pair.draft.dtype},
            "dtype": self.heads.state_dtype,
        }

    @cached_property
    def source(self) -> StateSource:
        """The draft, loaded; ValueError if it is not the one of the data."""
        described = describe_model(self.pair.draft)
        if same_model(described, self.manifest["draft"]) is False:
            raise ValueError(
                f"pair.draft {self.pair.draft.path} is not the draft that {self.data.dir} was made with (weights "
                f"differ); set pair.draft to that one, or data.dir to data of this draft"
            )
        if released_layout_of(self.pair.draft):
            models = load_pair(replace(self.pair, micro=None))
            assert isinstance(models.drafting, FeatureDraft), "its layout is one of a feature draft"
            return RolloutStates(models.drafting, models.target, draft_every=self.manifest.get("draft_every") or 1)
        layer = self.heads.layer
        draft = load_model(self.pair.draft)
        check_width(draft.config, vocab_size_of(load_pair_tokenizer(self.pair), model_config(self.pair.draft)), "draft")
        num_layers = draft.config.get_text_config().num_hidden_layers
        if layer is not None and layer > num_layers:
            raise ValueError(f"heads.layer is {layer}, but the draft has {num_layers} layers; choose 0 to {num_layers}")
        return DraftStates(draft, layer=layer)

    def use(self, device: torch.device) -> None:
        """Load models on this device unless the config names one."""
        target, draft = (_on(device, source) for source in (self.pair.target, self.pair.draft))
        self.pair = replace(self.pair, target=target, draft=draft)

    def fill(self, shards: Sequence[FeatureShard], share: Share) -> None:
        """Compute the cached states that are missing, stale or damaged in this process's share of some shards, and wait
        for those of other processes.

        Raises:
            FileNotFoundError: the draft is not on this machine.
            ValueError: it is another draft, its states are not finite, the disk is full, or another process failed.
        """
        root = Path(self.data.dir, "states")
        own = share.of(shards)
        self._forget_damaged(own)
        if self._missing(own):
            if share.rank == 0 and Path(self.data.dir, "features").is_dir():
                print(f"note: nothing reads {self.data.dir}/features, which an earlier version wrote; delete it")
            name = f"{LOCK}-{share.rank}-of-{share.world_size}"
            with only_writer(root, setting="data.dir", name=name, wait_s=_WAIT_S):
                self._fill(self._missing(own), shows=share.rank == 0)
            self.__dict__.pop("source", None)
            free_memory()
        share.wait_for_others(str(root), lambda: not self._missing(shards))
        if self._missing(shards):
            raise ValueError(f"the cache of hidden states in {root} is incomplete, because another process failed")

    def _missing(self, shards: Sequence[FeatureShard]) -> dict[StateTiming, list[FeatureShard]]:
        """Timing -> the shards without states that were computed from their rows and labels with this draft and dtype;
        empty if there are none.
        """
        missing: dict[StateTiming, list[FeatureShard]] = {}
        for timing in self.heads.state_timings:
            for shard in shards:
                path = self.folder(timing) / shard.labels.name
                if not is_whole(path) or read_sidecar(path).get("key") != self.key(shard):
                    missing.setdefault(timing, []).append(shard)
        return missing

    def _forget_damaged(self, shards: Sequence[FeatureShard]) -> None:
        """Delete the sidecars of damaged shards of the cache, so that they are computed again."""
        width = int(self.manifest["draft"]["hidden_size"])
        check = partial(check_numbers, columns=(), width=width)
        missing = self._missing(shards)
        for timing in self.heads.state_timings:
            present = [shard for shard in shards if shard not in missing.get(timing, ())]
            paths = [self.folder(timing) / shard.labels.name for shard in present]
            for path, problem in broken_shards(paths, command="train", check=check, fact=f"finite {width}"):
                print(f"warning: {problem.partition(';')[0]}; computing it again", file=sys.stderr)
                sidecar_path(path).unlink()

    def _fill(self, missing: Mapping[StateTiming, Sequence[FeatureShard]], *, shows: bool) -> None:
        total = sum(len(shard.lengths) for of_timing in missing.values() for shard in of_timing)
        title = f"states: {next(iter(missing), '')}"
        with Bar(total=total, unit="rows", desc=title, disable=not shows or not missing) as bar:
            for timing, shards in missing.items():
                bar.set_description(f"states: {timing}")
                folder = self.folder(timing)
                if num_stale := sum(is_whole(folder / shard.labels.name) for shard in shards):
                    reason = "were computed from other rows, or with another draft or dtype"
                    print(f"{folder}: {num_stale} shards {reason}; computing them again", file=sys.stderr)
                clean_partial(folder, names={shard.labels.stem for shard in shards})
                for shard in shards:
                    self._write(shard, timing)
                    bar.update(len(shard.lengths))

    def _write(self, shard: FeatureShard, timing: StateTiming) -> None:
        hidden = self._of_shard(shard.texts(0, len(shard.lengths)), timing)
        if not hidden.isfinite().all():
            row = int((~hidden.isfinite().all(-1)).nonzero()[0])
            raise ValueError(
                f"the draft's {timing} hidden states of token {row} of {shard.labels} are not finite in "
                f"heads.state_dtype {self.heads.state_dtype}; {REMEDY}"
            )
        content = safetensors.torch.save({"hidden": hidden})
        path = self.folder(timing) / shard.labels.name
        write_shard(path, content, rows=len(shard.lengths), tokens=len(hidden), key=self.key(shard))

    @torch.inference_mode()
    def _of_shard(self, texts: Sequence[Text], timing: StateTiming) -> Float[Tensor, "token hidden"]:
        """The states of all responses, on the CPU; half the batch size where memory runs out."""
        lengths = [len(text.draft_ids) for text in texts]
        costs = [len(text.prompt_ids) + len(text.response_ids) for text in texts]
        width = int(self.manifest["draft"]["hidden_size"])
        size = self.data.batch_size
        while True:
            hidden = torch.empty(sum(lengths), width, dtype=self.dtype)
            parts = hidden.split(lengths)
            try:
                for rows in alike(costs, size):
                    states = self.source([texts[row] for row in rows], timing).to("cpu", self.dtype)
                    for row, of_row in zip(rows, states.split([lengths[row] for row in rows]), strict=True):
                        parts[row].copy_(of_row)
                return hidden
            except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
                if not is_out_of_memory(error) or size == 1:
                    raise
            size = max(1, min(size, len(texts)) // 2)
            free_memory()

    def of_rows(self, rows: Mapping[StateTiming, Sequence[Row]]) -> Batch:
        """The features of some rows, whose states are computed now."""
        return {timing: self._features(of_timing, timing) for timing, of_timing in rows.items()}

    def _features(self, rows: Sequence[Row], timing: StateTiming) -> Features:
        texts = [row.text for row in rows if row.text is not None]
        states = self.source(texts, timing)
        parts = zip(states.split([len(text.draft_ids) for text in texts]), rows, strict=True)
        hidden = torch.cat([part[row.drafted.to(part.device)] for part, row in parts])
        return with_states(rows, hidden.to(self.dtype))


def _on(device: torch.device, source: ModelSource) -> ModelSource:
    names_device = source.device_map is not None or source.tp_plan is not None
    return source if names_device else replace(source, device_map=str(device))
