"""The acceptance-prediction head: weights, calibration and files. `heads.model.formula` has its forward pass.

    raw probability         sigmoid(f)                   what the paper's thresholds apply to
    calibrated probability  sigmoid((f + ln(w_rej / w_acc)) / temperature)

The loss's optimum is f* = logit(P) - ln(w_rej / w_acc) (law 4.7), so the shift undoes the loss weights; the temperature
is fitted on dev. `timing` names the hidden state that a head reads and what it predicts:

    fed        the state after the token was fed to the draft (the paper's); acceptance_prob
    drawn      the state whose distribution the token is drawn from (law 4.8b); acceptance_prob
    prefix     the same state before the token is drawn (law 4.8c); acceptance_rate, the mean over possible tokens
    candidate  the same state, for a token that a tree offers; p(y), with which the target accepts it

Departures from the official code: one logit instead of two (a softmax over two logits sees only their difference), and
separate blocks instead of one shared block.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import numpy as np
import torch
from huggingface_hub import ModelCard, PyTorchModelHubMixin
from jaxtyping import Float
from safetensors.torch import save
from torch import Tensor, nn

from configs.paths import local_path
from heads.model.card import model_card
from heads.model.files import (
    WEIGHTS,
    checked,
    local_directory,
    read_head_config,
    read_head_files,
    write_head_config,
)
from heads.model.formula import PAPERS, architecture_of, stack_forward
from heads.model.inputs import Inputs
from heads.model.published import portable
from lm.signals import SCALARS
from store.json_files import Json
from store.shards import write_atomic

Timing = Literal["fed", "drawn", "prefix", "candidate"]
TIMING_LABELS = {"fed": "fed-time", "drawn": "drawn-time", "prefix": "prefix", "candidate": "candidate"}
"""Timing -> adjective before "head" in messages."""
Logit = TypeVar("Logit", float, np.ndarray, Tensor)
_MAX_DEPTH = 1000
_MAX_WIDTH = 10**6


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Training data and metrics of one head, JSON values only: the part of config.json beside its architecture."""

    accept_weight: float = 1.0
    reject_weight: float = 1.0
    """Loss weights (law 4.7); calibration undoes the shift that they cause."""
    calibration_temperature: float = 1.0
    """Fitted on dev; 1: calibration is the shift alone."""
    mixing_ratio: float | None = None
    """r of the fed-time features (law 4.6); None: no mixing."""
    draft: Json = field(default_factory=dict)
    """path and revision of the model whose hidden states the head reads."""
    target: Json = field(default_factory=dict)
    """path and revision of the model whose acceptance it predicts."""
    sampling: Json = field(default_factory=dict)
    """temperature, top_k, top_p of the data; empty: unknown (an imported head)."""
    training: Json = field(default_factory=dict)
    """Data, recipe and steps, for the model card."""
    license: str | None = None
    """Of the head's weights on the hub; None: not stated."""
    metrics: Json = field(default_factory=dict)
    """Measured on dev; those of test under `test`; train_… on training responses."""
    recommended: Json = field(default_factory=dict)
    """A threshold and the times it was chosen for; written by `acceptance-heads tune`."""

    def __post_init__(self) -> None:
        for name in ("accept_weight", "reject_weight", "calibration_temperature"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise ValueError(f"{name} is {value}; use a positive number")

    @classmethod
    def from_dict(cls, values: Json) -> "Provenance":
        """From a config.json; keys that are not fields are ignored."""
        return cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values})


@dataclass(frozen=True, order=True)
class HeadShape:
    """Inputs, depth and architecture; ValueError if they are impossible. Heads of one shape take equally long, and are
    trained as one stack, which shares its matrix products.
    """

    timing: Timing
    inputs: Inputs
    depth: int
    architecture: str = PAPERS

    def __post_init__(self) -> None:
        if not 0 <= self.depth <= _MAX_DEPTH:
            raise ValueError(f"depth is {self.depth}; it must be from 0 (a linear head) to {_MAX_DEPTH}")
        if self.timing not in get_args(Timing):
            raise ValueError(f"timing is {self.timing!r}; use one of {', '.join(get_args(Timing))}")
        architecture_of(self.architecture)
        if self.timing == "prefix" and self.inputs.reads_token:
            readable = ", ".join(name for name, scalar in SCALARS.items() if not scalar.reads_token)
            raise ValueError(
                f"scalars are {list(self.inputs.scalars)} and embedding is {self.inputs.embedding}, but a "
                "prefix head scores a token before it is drawn; set embedding to false and use only the "
                f"scalars {readable}"
            )

    @property
    def is_specdec(self) -> bool:
        """Whether this is SpecDec++'s own head: fed-time, on the hidden state alone."""
        return (self.timing, self.inputs, self.architecture) == ("fed", Inputs(), PAPERS)

    @property
    def kind(self) -> str:
        """Timing and inputs, such as drawn+s+e; +ARCHITECTURE if it is not the paper's."""
        kind = self.timing + self.inputs.label
        return kind if self.architecture == PAPERS else f"{kind}+{self.architecture}"

    def __str__(self) -> str:
        """Kind and depth, such as drawn+s+e-d4."""
        return f"{self.kind}-d{self.depth}"

    def head(self, hidden_size: int, provenance: Provenance | None = None) -> "AcceptanceHead":
        """A head of this shape with random weights."""
        return AcceptanceHead(
            hidden_size,
            self.depth,
            self.timing,
            *self.inputs,
            architecture=self.architecture,
            provenance=provenance,
        )


class AcceptanceHead(nn.Module, PyTorchModelHubMixin):
    """Predicts the acceptance_prob of a drafted token from the draft's final hidden state.

    Attributes:
        inputs: its inputs beside the hidden state.
        provenance: its training data and metrics, stored in config.json.
        shape_name: timing, inputs and depth, such as drawn+s+e-d4.
    """

    def __init__(
        self,
        hidden_size: int,
        depth: int,
        timing: Timing = "fed",
        scalars: bool | Sequence[str] = False,
        embedding: bool = False,
        is_normalised: bool = False,
        *,
        architecture: str = PAPERS,
        provenance: Provenance | None = None,
    ) -> None:
        """Args:
            hidden_size: width of the draft's hidden state.
            depth: D, the number of residual blocks; 0 is a linear head.
            scalars: true: also read log q(y), H(q) and logit q(y), or H(q) and logit max q for a prefix head; or
                scalars by name, in this order.
            embedding: also read the draft's input embedding of the token (of width hidden_size).
            is_normalised: normalise hidden state and embedding to mean 0 and variance 1 first (not in the paper).
            architecture: key of `heads.model.formula.ARCHITECTURES`.

        Raises:
            ValueError: an impossible or unknown value, or a prefix head that reads the token.
        """
        super().__init__()
        if not 1 <= hidden_size <= _MAX_WIDTH:
            raise ValueError(f"hidden_size is {hidden_size}; use the draft's width, from 1 to {_MAX_WIDTH:,}")
        self.hidden_size = hidden_size
        self.depth = depth
        self.timing = timing
        self.architecture = architecture
        self.inputs = Inputs.of(scalars, embedding, timing, is_normalised)
        self.shape_name = str(HeadShape(timing, self.inputs, depth, architecture))
        self.provenance = provenance or Provenance()
        num_inputs = self.inputs.width(hidden_size)
        self.mix = _zeros(num_inputs if depth else 0, hidden_size)
        # with torch's initialisation, as in the official code, which comments out its zero initialisation
        self.blocks = nn.ModuleList([architecture_of(architecture).block(hidden_size) for _ in range(depth)])
        self.skip = _zeros(num_inputs, 1, bias=False)
        self.out = nn.Linear(hidden_size, 1)

    def forward(
        self,
        hidden: Float[Tensor, "*tokens hidden"],
        scalars: Float[Tensor, "*tokens scalar"] | None = None,
        embedding: Float[Tensor, "*tokens hidden"] | None = None,
    ) -> Float[Tensor, "*tokens"]:
        """The logit f of each token; its sigmoid is the raw probability.

        Args:
            hidden: the draft's final hidden state (after the final norm), at the head's timing; any float dtype.
            scalars: those of `inputs`, in their order; only if the head reads any.
            embedding: the draft's input embedding of the token; only if the head reads it.

        ValueError if an input is missing, or given to a head that does not read it.
        """
        dtype = self.out.weight.dtype
        stream, inputs = self.inputs.read(hidden.to(dtype), scalars, embedding)
        # one head is a stack of one, so that the formula is written once
        weights = {name: parameter[None] for name, parameter in self.named_parameters()}
        x = None if inputs is None else inputs.to(dtype).reshape(1, -1, inputs.shape[-1])
        stream = stream.reshape(1, -1, self.hidden_size)
        logit = stack_forward(weights, stream, x, architecture=architecture_of(self.architecture))
        return logit.view(hidden.shape[:-1])

    @property
    def calibration_shift(self) -> float:
        """ln(w_rej / w_acc), which undoes the loss weights."""
        return math.log(self.provenance.reject_weight / self.provenance.accept_weight)

    @property
    def temperature(self) -> float:
        """The calibration temperature fitted on dev."""
        return self.provenance.calibration_temperature

    def calibrated_logit(self, logit: Logit) -> Logit:
        """(logit + shift) / temperature, for a float, an array or a tensor."""
        return (logit + self.calibration_shift) / self.temperature

    def calibrated(self, logit: Float[Tensor, "*tokens"]) -> Float[Tensor, "*tokens"]:
        """sigmoid(calibrated_logit): an estimate of acceptance_prob."""
        return self.calibrated_logit(logit).sigmoid()

    @property
    def config(self) -> Json:
        """Entries of config.json."""
        entries = {
            "architectures": [type(self).__name__],
            "hidden_size": self.hidden_size,
            "num_layers": self.depth,
            "timing": self.timing,
            "architecture": self.architecture,
            **self.inputs.config,
            **asdict(self.provenance),
        }
        return portable(entries)  # type: ignore[no-any-return]

    def fingerprint(self) -> str:
        """sha256 over architecture and weights: the key of the head's scores in a trace."""
        shape = f"{self.timing} {self.inputs.config['scalars']} {self.inputs.embedding} {self.depth}"
        # departures from the paper's head are named only where they apply, so that older traces keep their keys
        if self.inputs.is_normalised:
            shape += " normalised"
        if self.architecture != PAPERS:
            shape += f" {self.architecture}"
        digest = hashlib.sha256(shape.encode())
        for name, tensor in sorted(self.state_dict().items()):
            digest.update(name.encode())
            digest.update(tensor.detach().float().cpu().numpy().tobytes())
        return digest.hexdigest()

    @property
    def num_parameters(self) -> int:
        """Number of weights."""
        return sum(parameter.numel() for parameter in self.parameters())

    def generate_model_card(self, *_args: object, **_kwargs: object) -> ModelCard:
        """The model card (README.md)."""
        return model_card(self.config, num_parameters=self.num_parameters)

    def save_pretrained(self, save_directory: str | Path, **arguments: Any) -> str | None:
        """Write the head into a directory, which is created if needed; `arguments` are `PyTorchModelHubMixin`'s. A URL
        or a full disk raises ValueError.
        """
        return super().save_pretrained(local_path(save_directory, "save_directory"), **arguments)

    def _save_pretrained(self, save_directory: Path) -> None:
        tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in self.state_dict().items()}
        write_atomic(save_directory / WEIGHTS, save(tensors, metadata={"format": "pt"}))
        write_head_config(save_directory / "config.json", self.config)
        self.generate_model_card().save(save_directory / "README.md")

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | Path, *, map_location: str | torch.device = "cpu", **download: Any
    ) -> "AcceptanceHead":
        """A head from a directory or from the hub (owner/name), read strictly from safetensors. `download` has the
        arguments of `huggingface_hub.snapshot_download`.

        Raises:
            FileNotFoundError: no head there, or a file is missing.
            ValueError: an invalid config.json; a pickled checkpoint; tensors missing, unexpected, misshapen or not
                finite.
        """
        directory = local_directory(pretrained_model_name_or_path, **download)
        return cls.from_tensors(*read_head_files(directory), source=directory).to(map_location)

    @classmethod
    def from_tensors(cls, config: Json, tensors: Mapping[str, Tensor], *, source: Path) -> "AcceptanceHead":
        """A head with these weights; ValueError, which names the directory `source`, if they do not fit the config."""
        try:
            with torch.device("meta"):
                head = cls.from_config(config)
        except ValueError as error:
            raise ValueError(f"{source / 'config.json'}: {error}") from error
        try:
            head.load_state_dict(checked(tensors), assign=True)
        except (RuntimeError, ValueError) as error:
            raise ValueError(
                f"weights of head {str(source)!r} do not fit its config.json: {' '.join(str(error).split())}; "
                "export the head again"
            ) from error
        return head.eval()

    @classmethod
    def from_config(cls, config: Json) -> "AcceptanceHead":
        """A head with random weights, from a config.json."""
        return cls(
            config["hidden_size"],
            config["num_layers"],
            config.get("timing", "fed"),
            *Inputs.from_config(config),
            architecture=config.get("architecture", PAPERS),
            provenance=Provenance.from_dict(config),
        )


def _zeros(num_inputs: int, num_outputs: int, *, bias: bool = True) -> nn.Linear | None:
    """A layer of zeros, since a new head reads only the hidden state; None without inputs."""
    if not num_inputs:
        return None
    layer = nn.Linear(num_inputs, num_outputs, bias=bias)
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer


def update_config(directory: str | Path, **changes: Any) -> None:
    """Change keys of a saved head's config.json, as `tune` does with `recommended`, and write its model card again. The
    card comes first: if the process is killed in between, the same change writes both.
    """
    path = Path(directory) / "config.json"
    before = read_head_config(path)
    config = before | changes
    if config == before:
        return
    write_atomic(path.with_name("README.md"), str(AcceptanceHead.from_config(config).generate_model_card()).encode())
    write_head_config(path, config)
