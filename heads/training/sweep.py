"""The LightningModule that trains every head of the grid at once: one optimiser, one pass over the data per epoch.

The heads are independent: the loss is a sum with one term per head, Adam is elementwise, and gradients are clipped per
head. The weights of each head at its best calibrated KL on dev are kept beside the current ones, as the best checkpoint
of a separate run would be.
"""

import copy
import re
import sys
from collections.abc import Iterator
from contextlib import nullcontext

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import get_cosine_schedule_with_warmup

from configs.schema import HeadsConfig
from heads.batches.features import Batch, of_timing
from heads.batches.loader import BatchLoader
from heads.batches.module import FeatureData
from heads.grid import grid, scalar_names, specs, stacks
from heads.measures.evaluation import Result, SplitMetrics
from heads.measures.histogram import Histogram, observe
from heads.measures.scores import auroc, fit_temperature, measures
from heads.measures.sums import Sums
from heads.model.files import LEAST_KL
from heads.model.head import AcceptanceHead, Provenance
from heads.model.inputs import SIGNALS
from heads.training.loss import tf32_products
from heads.training.progress import num_optimizer_steps, training_plan
from heads.training.stack import HeadStack
from heads.training.start import Start
from store.json_files import Json


class Sweep(pl.LightningModule):
    """All heads of `heads.grid.grid(config)`.

    Attributes:
        stacks: current weights, by shape.
        best: weights of each head at its best calibrated KL on dev.
        history: one entry per validation: {step, epoch, metric: [value of each head]}.
        results: split, or split/set -> `heads.measures.evaluation.Result`, after `trainer.test`.
        stopped_in: where the training of a loaded checkpoint stopped, such as "epoch 3 of 30"; None: it is complete.
    """

    best_kl: Tensor
    temperature: Tensor
    is_started: Tensor

    def __init__(
        self,
        heads: Json,
        facts: Json,
        *,
        embedding: Tensor | None = None,
        allows_tf32: bool = False,
    ) -> None:
        """Args:
        heads: the `heads` section of the config.
        facts: run (name), hidden_size, provenance (what heads share), signals {timing: [slope, offset]} of the draft's
            own signal (`heads.training.start`).
        embedding: the draft's [vocab, hidden] input embeddings, for heads that read them.
        allows_tf32: whether products of training steps may run in TF32 on a GPU; all else is float32.
        """
        super().__init__()
        self.save_hyperparameters({"heads": heads, "facts": facts})
        known = heads.keys() & HeadsConfig.__dataclass_fields__  # a checkpoint may have settings that were removed
        settings: Json = {k: tuple(heads[k]) if isinstance(heads[k], list) else heads[k] for k in known}
        self.config = HeadsConfig(**settings)
        self.facts, shapes = facts, grid(self.config)
        self.scalars, self.specs = scalar_names(shapes), specs(self.config)
        self.stacks = _new_stacks(self.config, facts["hidden_size"])
        self.trained = [stack for stack in self.by_shape if not stack.is_solved]
        if self.trained:
            for stack in self.by_shape:
                stack.requires_grad_(not stack.is_solved)
        self.best = copy.deepcopy(self.stacks).requires_grad_(False)
        self.register_buffer("best_kl", torch.full((len(self.specs),), torch.inf, dtype=torch.float64))
        self.register_buffer("temperature", torch.ones(len(self.specs), dtype=torch.float64))
        self.register_buffer("is_started", torch.tensor(False))
        self.history: list[Result] = []
        self.results: dict[str, Result] = {}
        self.stopped_in: str | None = None
        self._allows_tf32 = allows_tf32
        # no buffer: DDP would broadcast it before each step
        self._embedding = [] if embedding is None else [embedding]

    @property
    def by_shape(self) -> list[HeadStack]:
        """The stacks of the current weights."""
        return list(self.stacks.values())  # type: ignore[arg-type]

    def logits(self, stack: HeadStack, batch: Batch) -> Tensor:
        """[heads, tokens] of one stack."""
        return stack(*self._inputs(stack, batch))

    def on_fit_start(self) -> None:
        self._embedding = [table.to(self.device) for table in self._embedding]

    on_test_start = on_fit_start

    def on_train_start(self) -> None:
        self.print(training_plan(self.trainer, self.config.batch_size), file=sys.stderr)
        if not self.is_started:
            self._start()

    @torch.no_grad()
    def _start(self) -> None:
        """Set the weights that follow from the data (`heads.training.start`), and measure all heads on dev."""
        data: FeatureData = self.trainer.datamodule  # type: ignore[attr-defined]
        start = Start(
            self.by_shape,
            data,
            batches=self._batches,
            inputs=self._inputs,
            reduce=self._sum,
        )
        start.standardise()
        start.start_at_signals(self.facts["signals"])
        start.choose_ridges(start.solve(shows=self.global_rank == 0))
        # processes on different machines may round differently
        for tensor in (tensor for stack in start.stacks for tensor in stack.state_dict().values()):
            tensor.copy_(self.trainer.strategy.reduce(tensor.clone(), reduce_op="mean"))
        self.on_validation_epoch_start()
        for batch in self._batches(data.val_dataloader()):
            self.validation_step(batch, 0)
        self._validated()
        self.is_started.fill_(True)

    def _batches(self, loader: BatchLoader) -> Iterator[Batch]:
        return (self.trainer.strategy.batch_to_device(batch, self.device) for batch in loader)

    def _sum(self, tensor: Tensor) -> Tensor:
        return self.trainer.strategy.reduce(tensor.clone(), reduce_op="sum")  # type: ignore[return-value]

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if not self.trained:  # every head has its optimum; Lightning needs a loss and a step all the same
            return torch.stack([parameter.sum() for parameter in self.stacks.parameters()]).sum() * 0.0
        losses = []
        for stack in self.trained:
            targets = stack.targets(batch)
            targets = targets._replace(mass=self.trainer.strategy.reduce(targets.mass, reduce_op="mean"))
            dropout = stack.dropout(self.config.seed, self.current_epoch, batch_idx, self.global_rank)
            with tf32_products(self.device) if self._allows_tf32 else nullcontext():
                losses.append(stack.loss(*self._inputs(stack, batch), targets=targets, dropout=dropout))
        loss = torch.cat(losses)
        if not (is_finite := torch.isfinite(loss.detach())).all():
            names = [str(spec) for stack in self.trained for spec in stack.specs]
            failed = ", ".join(names[index] for index in (~is_finite).nonzero().flatten().tolist())
            raise ValueError(
                f"the loss of {failed} is not finite at step {self.global_step}; lower heads.learning_rate"
            )
        self.log("train/loss", loss.detach().mean(), prog_bar=True, sync_dist=True)
        return loss.sum()

    def on_validation_epoch_start(self) -> None:
        self._validation = Sums(len(self.specs), self.device)
        self._of_signals = Sums(len(self.by_shape), self.device)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        histograms: list[Histogram] = []
        of_signals: list[Histogram] = []
        for stack in self.by_shape:
            features = of_timing(batch, stack.shape.timing)
            label = features.acceptance_prob[None]
            histograms.append(observe(self.logits(stack, batch).float(), label))
            signal = features.scalars[SIGNALS[stack.shape.timing]]
            of_signals.append(observe(signal.float()[None], label))
        self._validation.update(Histogram(*map(torch.cat, zip(*histograms, strict=True))))
        self._of_signals.update(Histogram(*map(torch.cat, zip(*of_signals, strict=True))))

    def on_validation_epoch_end(self) -> None:
        if self.trainer.sanity_checking:
            return
        entry = self._validated()
        for name, values in entry.items():
            self.log_dict({f"dev/{name}/{spec}": value for spec, value in zip(self.specs, values, strict=True)})
        # labels differ between timings, and so do their KLs: each is divided by its signal's
        fitted = [self.facts["signals"][stack.shape.timing] for stack in self.by_shape]
        slopes, offsets = torch.tensor(fitted, dtype=torch.float64, device=self.device).unbind(-1)
        of_signals = measures(self._of_signals.compute(), slopes, offsets).kl.clamp_min(LEAST_KL)
        of_heads = torch.tensor(entry["calibrated_kl"], device=self.device)
        shares = of_heads / of_signals.repeat_interleave(len(self.config.reject_weights))
        self.log("dev/calibrated_kl", shares.mean(), prog_bar=True)

    def _validated(self) -> dict[str, list[float]]:
        """Metrics of every head on the dev tokens since `on_validation_epoch_start`; keeps the best weights."""
        histogram = self._validation.compute()
        temperature = fit_temperature(histogram, self._shift)
        kl = measures(histogram, 1 / temperature, self._shift / temperature).kl
        self._keep_best(kl, temperature)
        entry = {
            "raw_kl": measures(histogram).kl.tolist(),
            "calibrated_kl": kl.tolist(),
            "auroc": auroc(histogram).tolist(),
        }
        self.history.append({"step": self.global_step, "epoch": self.current_epoch, **entry})
        return entry

    def on_test_epoch_start(self) -> None:
        self.use_selected()
        self._evaluations = {
            name: SplitMetrics(self.specs, self._shift, self.temperature, signals=self.facts["signals"])
            for name in self.trainer.datamodule.tested  # type: ignore[attr-defined]
        }

    def test_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        logits: dict[str, list[Tensor]] = {}
        for stack in self.by_shape:
            logits.setdefault(stack.shape.timing, []).append(self.logits(stack, batch).float())
        evaluation = [*self._evaluations.values()][dataloader_idx]
        evaluation.update({timing: torch.cat(parts) for timing, parts in logits.items()}, batch)

    def on_test_epoch_end(self) -> None:
        self.results = {name: evaluation.compute() for name, evaluation in self._evaluations.items()}

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        # fused Adam would unscale float16 gradients after clipping; they must be unscaled before
        is_scaled = getattr(self.trainer.precision_plugin, "scaler", None) is not None
        assert self.config.learning_rate is not None, "settled by heads.training.command"
        parameters = [parameter for parameter in self.stacks.parameters() if parameter.requires_grad]
        optimizer = torch.optim.Adam(parameters, lr=self.config.learning_rate, fused=not is_scaled)
        total = num_optimizer_steps(self.trainer)
        schedule = get_cosine_schedule_with_warmup(optimizer, round(self.config.warmup_ratio * total), total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip the gradient norm of each head separately, as if it were trained alone."""
        if gradient_clip_algorithm == "value":
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
            return
        for stack in self.trained if gradient_clip_val else ():
            grads = [p.grad for p in stack.parameters() if p.grad is not None]
            norm = torch.stack([grad.flatten(1).norm(dim=1) for grad in grads]).norm(dim=0)
            for grad in grads:
                grad.mul_(_per_head((gradient_clip_val / norm.clamp_min(1e-12)).clamp(max=1), grad))

    def on_save_checkpoint(self, checkpoint: dict[str, object]) -> None:
        checkpoint["history"] = self.history
        checkpoint["num_steps"] = num_optimizer_steps(self.trainer)

    def on_load_checkpoint(self, checkpoint: Json) -> None:
        self.history = checkpoint["history"]
        step = checkpoint["global_step"]
        num_steps = checkpoint.get("num_steps", step)
        num_epochs = self.facts["provenance"]["training"].get("max_epochs")
        if step < num_steps and num_epochs is None:
            self.stopped_in = f"step {step:,} of {num_steps:,}"
        elif step < num_steps:
            self.stopped_in = f"epoch {checkpoint['epoch'] + 1} of {num_epochs}"

    @torch.no_grad()
    def use_selected(self) -> None:
        """Replace the current weights by each head's best ones; a head that was never validated keeps its current."""
        if self.config.select != "last":
            self._copy(self.best_kl.isfinite(), source=self.best, destination=self.stacks)

    def heads(self) -> dict[str, AcceptanceHead]:
        """Every head by name, with its current weights (see `use_selected`) and its provenance."""
        exported = {}
        temperatures = iter(self.temperature.tolist())
        for stack in self.by_shape:
            for index, spec in enumerate(stack.specs):
                shared = dict(self.facts["provenance"])
                if spec.shape.timing != "fed":
                    shared["mixing_ratio"] = None
                if spec.dropout:
                    shared["training"] = {**shared["training"], "dropout": spec.dropout}
                provenance = Provenance(
                    reject_weight=spec.reject_weight,
                    calibration_temperature=next(temperatures),
                    **shared,
                )
                exported[str(spec)] = stack.head(index, provenance).cpu()
        return exported

    def _inputs(self, stack: HeadStack, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """`Inputs.read` of the tokens that a stack scores."""
        features = of_timing(batch, stack.shape.timing)
        inputs = stack.shape.inputs
        # `build` passes the draft's embeddings if a head reads them
        embedding = self._embedding[0][features.token] if inputs.embedding and self._embedding else None
        hidden = features.hidden.to(stack.reject_weights.dtype)
        return inputs.read(hidden, inputs.stacked(features.scalars), embedding)

    @property
    def _shift(self) -> Tensor:
        return torch.cat([stack.shift for stack in self.by_shape])

    @torch.no_grad()
    def _keep_best(self, kl: Tensor, temperature: Tensor) -> None:
        is_better = kl < self.best_kl if self.config.select == "best" else torch.ones_like(kl, dtype=torch.bool)
        self.best_kl.copy_(torch.where(is_better, kl, self.best_kl))
        self.temperature.copy_(torch.where(is_better, temperature, self.temperature))
        self._copy(is_better, source=self.stacks, destination=self.best)

    def _copy(self, is_copied: Tensor, *, source: nn.ModuleDict, destination: nn.ModuleDict) -> None:
        by_stack = is_copied.split(len(self.config.reject_weights))
        for mask, key in zip(by_stack, self.stacks, strict=True):
            for new, old in zip(source[key].parameters(), destination[key].parameters(), strict=True):
                old.copy_(torch.where(_per_head(mask, old), new, old))


def _new_stacks(config: HeadsConfig, hidden_size: int) -> nn.ModuleDict:
    every = nn.ModuleDict()
    for shape, rate in stacks(config):
        stack = HeadStack(shape, config.reject_weights, rate, hidden_size=hidden_size, seed=config.seed)
        # torch does not allow a dot in a module's name
        every[re.sub(r"[^0-9A-Za-z_+-]", "_", str(stack.specs[0]))] = stack
    return every


def _per_head(values: Tensor, like: Tensor) -> Tensor:
    """[heads] values reshaped to broadcast with `like`, whose first axis is heads."""
    return values.view(-1, *[1] * (like.dim() - 1))
