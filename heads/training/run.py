"""A training run: module and data from a config, and the report of the results."""

from dataclasses import asdict
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from configs.schema import Config, PairConfig
from heads.batches.module import FeatureData
from heads.batches.online import DraftFeatures, RowData
from heads.measures.plots import save_plots
from heads.measures.tables import by_set, tables, write_metrics
from heads.measures.verdict import verdict
from heads.training.directory import RunDirectory
from heads.training.recipe import settled
from heads.training.sweep import Sweep
from heads.training.trainer import PAPER_EPOCHS
from lm import FeatureDraft, check_width, emitted_vocab_size, load_model, load_pair
from lm.features.released import released_layout_of
from store.shards import write_atomic

_CPU = torch.device("cpu")


def build(config: Config, *, run: str | None = None, device: torch.device = _CPU) -> tuple[Sweep, FeatureData]:
    """The LightningModule and the data module of a config.

    Args:
        config: the experiment.
        run: name of the run, stored in its checkpoints.
        device: device of this process's training steps.

    Raises:
        FileNotFoundError, ValueError: missing or invalid data, or a draft other than the one that made the data.
    """
    data: FeatureData
    draft = embedding = None
    config = settled(config)
    if config.heads.features == "online":
        if released_layout_of(config.pair.draft):
            raise ValueError(
                "heads.features is online, but a feature draft needs the target's states; set heads.features to cached"
            )
        data = RowData(config.data, config.heads, pair=config.pair)
        vocab_size = emitted_vocab_size(config.pair)
        model = load_model(config.pair.draft, device=device)
        check_width(model, vocab_size, "draft")
        data.draft = draft = DraftFeatures(model, vocab_size=vocab_size, timings=data.timings)
    else:
        data = FeatureData(config.data, config.heads, pair=config.pair)
    if config.heads.reached and not data.manifest.get("draft_length"):
        raise ValueError(
            f"heads.reached is true, but it needs data of a feature draft, and {config.data.dir} was made with a "
            "separate draft model; set heads.reached to false"
        )
    facts = {
        "run": run,
        "hidden_size": data.hidden_size,
        "scalar_stats": _scalar_stats(data),
        "provenance": _provenance(config, data),
    }
    if any(config.heads.embeddings):
        embedding = input_embedding(draft.draft if draft else _draft_of(config.pair), data.hidden_size)
    return Sweep(asdict(config.heads), facts, draft=draft, embedding=embedding), data


def _draft_of(pair: PairConfig) -> PreTrainedModel | FeatureDraft:
    """The draft; loaded with its target if it reads the target's states."""
    if released_layout_of(pair.draft):
        return load_pair(pair).drafting
    return load_model(pair.draft, device=_CPU)


def input_embedding(draft: PreTrainedModel | FeatureDraft, hidden_size: int) -> Float[Tensor, "vocab hidden"]:
    """The draft's input embeddings."""
    layer = draft.embedding if isinstance(draft, FeatureDraft) else draft.get_input_embeddings()
    embedding = layer.get_parameter("weight").detach().float().cpu().clone()
    if embedding.shape[1] != hidden_size:
        raise ValueError(
            f"the draft's embeddings have width {embedding.shape[1]} and its hidden states {hidden_size}, but "
            "heads.embeddings needs equal widths; set it to [false]"
        )
    return embedding


def report(sweep: Sweep, directory: RunDirectory) -> dict[str, Any]:
    """Write val_metrics.json, tables.md and the plots; print the verdict. Returns the results by split."""
    write_metrics(directory.metrics, sweep.results, run=sweep.facts["run"], history=sweep.history)
    texts = [tables(result, sweep.specs, split=name) for name, result in sweep.results.items() if "/" not in name]
    sets = by_set(sweep.results, sweep.specs)
    write_atomic(directory.path / "tables.md", "\n".join([*texts, sets]).encode())
    plots = save_plots(directory.path / "plots", sweep.results["dev"], history=sweep.history, specs=sweep.specs)
    print(verdict(sweep.results["dev"], sweep.specs))
    print(f"all metrics: {directory.path / 'tables.md'}, {directory.metrics}; {len(plots)} plots: {plots[0].parent}")
    print("next: acceptance-heads export --config …")
    return sweep.results


def _scalar_stats(data: FeatureData) -> dict[str, list[list[float]]]:
    """Feature set -> [mean, standard deviation] of each scalar, over the first training shard."""
    stats: dict[str, list[list[float]]] = {}
    for timing in data.timings if any(data.heads.scalars) else ():
        scalars = data.first_scalars(timing).double()
        stats[timing] = [scalars.mean(0).tolist(), scalars.std(0, correction=0).clamp_min(1e-6).tolist()]
    return stats


def _provenance(config: Config, data: FeatureData) -> dict[str, Any]:
    manifest, recorded = data.manifest, data.manifest.get("recorded", {})
    settings = {key: config.trainer.get(key) for key in ("max_epochs", "max_steps", "precision")}
    trainer = {key: value for key, value in settings.items() if value not in (None, -1)}
    return {
        # data of feature drafts is not mixed
        "mixing_ratio": None if manifest.get("draft_length") else manifest["mixing_ratio"],
        "draft": {"path": recorded.get("draft_path"), **manifest["draft"]},
        "target": {"path": recorded.get("target_path"), **manifest["target"]},
        "sampling": manifest["sampling"],
        "training": {
            "prompts": manifest["prompts"],
            "responses": data.num_responses("train"),
            "learning_rate": config.heads.learning_rate,
            "sequences_per_batch": config.heads.batch_size,
            **(trainer or {"max_epochs": PAPER_EPOCHS}),
        },
    }
