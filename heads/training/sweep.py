"""The LightningModule that trains every head of the grid at once: one optimiser, one pass over the data per epoch.

The heads are independent: the loss is a sum with one term per head, Adam is elementwise, and gradients are clipped per
head. The weights of each head at its best calibrated KL on dev are kept beside the current ones, as the best checkpoint
of a separate run would be.
"""

import copy
import re
import sys
from collections.abc import Sequence
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from transformers import get_cosine_schedule_with_warmup

from configs.schema import HeadsConfig
from heads.batches.features import FEATURE_SETS, Batch, DraftFeatures, of_timing
from heads.grid import grid, scalar_names, specs
from heads.measures.evaluation import Evaluation
from heads.measures.histogram import Histogram, Sums, observe, reach_of
from heads.measures.scores import auroc, fit_temperature, measures
from heads.model.head import AcceptanceHead, HeadShape, Provenance
from heads.training.loss import Targets
from heads.training.stack import HeadStack
from heads.training.trainer import num_optimizer_steps, training_plan


class Sweep(pl.LightningModule):
    """All heads of `heads.grid.grid(config)`.

    Attributes:
        stacks: current weights, by shape.
        best: weights of each head at its best calibrated KL on dev.
        history: one entry per validation: {step, epoch, metric: [value of each head]}.
        results: split, or split/set -> `heads.measures.evaluation.Result`, after `trainer.test`.
    """

    best_kl: Tensor
    temperature: Tensor
    reject_weights: Tensor
    embedding: Tensor | None

    def __init__(
        self,
        heads: dict[str, Any],
        facts: dict[str, Any],
        *,
        draft: DraftFeatures | None = None,
        embedding: Tensor | None = None,
    ) -> None:
        """Args:
        heads: the `heads` section of the config.
        facts: run (name), hidden_size, scalar_stats {feature set: [means, deviations]}, provenance (what heads share).
        draft: computes online features with the frozen draft.
        embedding: the draft's [vocab, hidden] input embeddings, for heads that read them.
        """
        super().__init__()
        self.save_hyperparameters({"heads": heads, "facts": facts})
        settings: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in heads.items()}
        self.config = HeadsConfig(**settings)
        self.facts, shapes = facts, grid(self.config)
        self.scalars, self.specs = scalar_names(shapes), specs(self.config)
        # torch does not allow a dot in a module's name
        self.stacks = nn.ModuleDict(
            {re.sub(r"[^0-9A-Za-z_+-]", "_", str(shape)): self._stack(shape) for shape in shapes}
        )
        self.best = copy.deepcopy(self.stacks).requires_grad_(False)
        self.register_buffer("best_kl", torch.full((len(self.specs),), torch.inf, dtype=torch.float64))
        self.register_buffer("temperature", torch.ones(len(self.specs), dtype=torch.float64))
        self.register_buffer("reject_weights", torch.tensor([spec.reject_weight for spec in self.specs]))
        self.register_buffer("embedding", embedding, persistent=False)
        self.history: list[dict[str, Any]] = []
        self.results: dict[str, Any] = {}
        self._draft = draft

    @property
    def by_shape(self) -> list[HeadStack]:
        """The stacks of the current weights."""
        return list(self.stacks.values())  # type: ignore[arg-type]

    def logits(self, stack: HeadStack, batch: Batch) -> Tensor:
        """[heads, tokens] of one stack."""
        return stack(*self._inputs(stack, batch))

    def on_train_start(self) -> None:
        self.print(training_plan(self.trainer, self.config.batch_size), file=sys.stderr)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Batch:
        """The features of a batch, which the frozen draft computes if they are online."""
        return batch if self._draft is None else self._draft(batch, self.device)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        losses = []
        for weights, stack in zip(self._by_stack(self.reject_weights), self.by_shape, strict=True):
            label = of_timing(batch, stack.shape.timing).acceptance_prob
            accept_weights = torch.full_like(weights, self.config.accept_weight)
            targets = Targets.of(label, accept_weights, weights, self._reach(batch, stack))
            targets = targets._replace(mass=self.trainer.strategy.reduce(targets.mass, reduce_op="mean"))
            step = (self.config.seed, self.current_epoch, batch_idx, self.global_rank)
            dropout = stack.dropout(self.config.dropout, *step)
            losses.append(stack.loss(*self._inputs(stack, batch), targets=targets, dropout=dropout))
        loss = torch.cat(losses)
        if not (is_finite := torch.isfinite(loss.detach())).all():
            names = ", ".join(str(self.specs[index]) for index in (~is_finite).nonzero().flatten().tolist())
            raise ValueError(f"the loss of {names} is not finite at step {self.global_step}; lower heads.learning_rate")
        self.log("train/loss", loss.detach().mean(), prog_bar=True, sync_dist=True)
        return loss.sum()

    def on_validation_epoch_start(self) -> None:
        self._validation = Sums(len(self.specs), self.device)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        histograms = []
        for stack in self.by_shape:
            label = of_timing(batch, stack.shape.timing).acceptance_prob
            logits = self.logits(stack, batch).float()
            histograms.append(observe(logits, label[None], self._reach(batch, stack)[None]))
        self._validation.update(Histogram(*map(torch.cat, zip(*histograms, strict=True))))

    def on_validation_epoch_end(self) -> None:
        histogram = self._validation.compute()
        if self.trainer.sanity_checking:
            return
        temperature = fit_temperature(histogram, self._shift)
        kl = measures(histogram, 1 / temperature, self._shift / temperature).kl
        self._keep_best(kl, temperature)
        columns = {"raw_kl": measures(histogram).kl, "calibrated_kl": kl, "auroc": auroc(histogram)}
        entry = {name: column.tolist() for name, column in columns.items()}
        self.history.append({"step": self.global_step, "epoch": self.current_epoch, **entry})
        for name, values in entry.items():
            self.log_dict({f"dev/{name}/{spec}": value for spec, value in zip(self.specs, values, strict=True)})
        self.log("dev/calibrated_kl", kl.mean(), prog_bar=True)

    def on_test_epoch_start(self) -> None:
        self.use_selected()
        tested: Sequence[str] = self.trainer.datamodule.tested  # type: ignore[attr-defined]
        self._evaluations = {name: Evaluation(self.specs, self._shift, self.temperature) for name in tested}

    def test_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        logits: dict[str, list[Tensor]] = {}
        for stack in self.by_shape:
            logits.setdefault(stack.shape.timing, []).append(self.logits(stack, batch).float())
        evaluation = [*self._evaluations.values()][dataloader_idx]
        evaluation.update({timing: torch.cat(parts) for timing, parts in logits.items()}, batch)

    def on_test_epoch_end(self) -> None:
        self.results = {name: evaluation.compute() for name, evaluation in self._evaluations.items()}

    def configure_optimizers(self) -> Any:
        # fused Adam would unscale float16 gradients after clipping; they must be unscaled before
        is_scaled = getattr(self.trainer.precision_plugin, "scaler", None) is not None
        assert self.config.learning_rate is not None, "settled by heads.training.command"
        optimizer = torch.optim.Adam(self.stacks.parameters(), lr=self.config.learning_rate, fused=not is_scaled)
        total = num_optimizer_steps(self.trainer)
        schedule = get_cosine_schedule_with_warmup(optimizer, round(self.config.warmup_ratio * total), total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        """Clip the gradient norm of each head separately, as if it were trained alone."""
        if gradient_clip_algorithm == "value":
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
            return
        for stack in self.by_shape if gradient_clip_val else ():
            grads = [p.grad for p in stack.parameters() if p.grad is not None]
            norm = torch.stack([grad.flatten(1).norm(dim=1) for grad in grads]).norm(dim=0)
            for grad in grads:
                grad.mul_(_per_head((gradient_clip_val / norm.clamp_min(1e-12)).clamp(max=1), grad))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["history"] = self.history

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.history = checkpoint["history"]

    @torch.no_grad()
    def use_selected(self) -> None:
        """Replace the current weights by each head's best ones; a head that was never validated keeps its current."""
        if self.config.select != "last":
            self._copy(self.best_kl.isfinite(), source=self.best, destination=self.stacks)

    def heads(self) -> dict[str, AcceptanceHead]:
        """Every head by name, with its current weights (see `use_selected`) and its provenance."""
        exported, temperatures = {}, iter(self.temperature.tolist())
        for stack in self.by_shape:
            for index, spec in enumerate(stack.specs):
                provenance = Provenance(
                    accept_weight=self.config.accept_weight,
                    reject_weight=spec.reject_weight,
                    calibration_temperature=next(temperatures),
                    **self.facts["provenance"] | ({} if spec.shape.timing == "fed" else {"mixing_ratio": None}),
                )
                exported[str(spec)] = stack.head(index, provenance).cpu()
        return exported

    def _inputs(self, stack: HeadStack, batch: Batch) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """hidden, scalars and embedding of the tokens that a stack scores."""
        features, inputs = of_timing(batch, stack.shape.timing), stack.shape.inputs
        # `build` passes the draft's embeddings if a head reads them
        embedding = self.embedding[features.token] if inputs.embedding and self.embedding is not None else None
        return features.hidden.to(stack.scalar_mean.dtype), inputs.stacked(features.scalars), embedding

    def _reach(self, batch: Batch, stack: HeadStack) -> Tensor:
        """Weight of each token."""
        drafts = batch[FEATURE_SETS[stack.shape.timing]]
        prob = drafts.acceptance_prob
        return reach_of(prob, drafts.row_lengths) if self.config.reached else torch.ones_like(prob)

    @property
    def _shift(self) -> Tensor:
        """ln(w_rej / w_acc) of every head, float64."""
        return (self.reject_weights / self.config.accept_weight).log().double()

    @torch.no_grad()
    def _keep_best(self, kl: Tensor, temperature: Tensor) -> None:
        is_better = kl < self.best_kl if self.config.select == "best" else torch.ones_like(kl, dtype=torch.bool)
        self.best_kl.copy_(torch.where(is_better, kl, self.best_kl))
        self.temperature.copy_(torch.where(is_better, temperature, self.temperature))
        self._copy(is_better, source=self.stacks, destination=self.best)

    def _copy(self, is_copied: Tensor, *, source: nn.ModuleDict, destination: nn.ModuleDict) -> None:
        for mask, key in zip(self._by_stack(is_copied), self.stacks, strict=True):
            for new, old in zip(source[key].parameters(), destination[key].parameters(), strict=True):
                old.copy_(torch.where(_per_head(mask, old), new, old))

    def _stack(self, shape: HeadShape) -> HeadStack:
        settings = {"hidden_size": self.facts["hidden_size"], "seed": self.config.seed}
        stack = HeadStack(shape, self.config.reject_weights, **settings)
        if shape.inputs.scalars:
            mean, scale = torch.tensor(self.facts["scalar_stats"][FEATURE_SETS[shape.timing]])
            columns = [self.scalars.index(name) for name in shape.inputs.scalars]
            stack.scalar_mean.copy_(mean[columns])
            stack.scalar_scale.copy_(scale[columns])
        return stack

    def _by_stack(self, of_heads: Tensor) -> tuple[Tensor, ...]:
        """A [heads] tensor split by stack."""
        return of_heads.split(len(self.config.reject_weights))


def _per_head(values: Tensor, like: Tensor) -> Tensor:
    """[heads] values reshaped to broadcast with `like`, whose first axis is heads."""
    return values.view(-1, *[1] * (like.dim() - 1))
