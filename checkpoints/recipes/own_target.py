"""Drafts for your own target, trained on its responses: `eagle3`, an EAGLE-3 draft with a reduced vocabulary (arXiv
2503.01840), and `small`, a Llama with the target's vocabulary, which every engine can run.

Departures of `eagle3`, for a small target and few texts: the output head is the target's own rows, frozen, so one layer
is trained and saved; this layer is initialised as the target's last and reads the highest of the three features as that
one does; features are divided by their sizes, since a few of a residual stream are hundreds of times as large as the
rest, and the saved weights include that.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from checkpoints.recipes import distillation
from checkpoints.recipes.distillation import Distillation, Draft, Reading
from checkpoints.recipes.feature_drafts import layer_config, save_draft, unrolled
from checkpoints.recipes.published import refuse_files
from configs.paths import local_path
from configs.schema import ModelSource
from lm.features.eagle import Eagle3
from lm.pair import load_model, load_tokenizer
from store.shards import atomic_directory, write_atomic

_RANDOM_SHARE = 0.3  # of torch's initial weights, where EAGLE-3's layer has inputs that the target's has not
_SIGMA_OF_MEDIAN = 1.4826  # standard deviation of a normal over the median of its absolute values
_HEAD_SIZE = 64


def eagle3(
    *,
    target: str,
    responses: str,
    out: str,
    vocab_size: int = 8192,
    num_epochs: int = Distillation.num_epochs,
    num_deep_epochs: int = Distillation.num_deep_epochs,
    learning_rate: float = Distillation.learning_rate,
) -> None:
    """Train an EAGLE-3 draft with a reduced vocabulary on a target's responses; resumes.

    Args:
        target: directory of the target.
        responses: the target's own responses, a file of `acceptance-heads responses`; some of the last 128 are held
            out, and other responses to their prompts are not used.
        out: the folder that gets the draft; OUT-work beside it has the checkpoint, OUT-readings the target's features.
        vocab_size: tokens that the draft can predict: the target's likeliest.
        num_epochs: passes over the responses.
        num_deep_epochs: the last of them, which train three depths; the others train the first token of drafts.
        learning_rate: the peak.
    """
    settings = Distillation(num_epochs=num_epochs, num_deep_epochs=num_deep_epochs, learning_rate=learning_rate)
    _train(target, responses, out, partial(Eagle3Draft, vocab_size=vocab_size), settings)


def small(
    *,
    target: str,
    responses: str,
    out: str,
    hidden_size: int = 192,
    num_layers: int = 2,
    num_epochs: int = Distillation.num_epochs,
    learning_rate: float = 1e-3,
) -> None:
    """Train a small Llama with the target's vocabulary on a target's responses; resumes.

    Args:
        target: directory of the target.
        responses: the target's own responses, as for `eagle3`.
        out: the folder that gets the draft; OUT-work and OUT-readings beside it, as for `eagle3`.
        hidden_size: width of the draft, a multiple of 64.
        num_layers: layers of the draft.
        num_epochs: passes over the responses.
        learning_rate: the peak.
    """
    settings = Distillation(num_depths=1, num_epochs=num_epochs, learning_rate=learning_rate, batch_size=8)
    _train(target, responses, out, partial(SmallDraft, hidden_size=hidden_size, num_layers=num_layers), settings)


def _train(target: str, responses: str, out: str, new_draft: Callable[..., Draft], settings: Distillation) -> None:
    """Read the target, train a draft on that, and write it with its figures."""
    directory = Path(local_path(out, "--out"))
    refuse_files(directory)
    model = load_model(ModelSource(path=target))
    every_text = distillation.read_responses(Path(local_path(responses, "--responses")))
    texts = distillation.without_leakage(every_text)
    if num_dropped := len(every_text) - len(texts):
        print(f"dropped {num_dropped} of {len(every_text)} responses, which share a prompt with held-out responses")
    readings, work = (directory.with_name(f"{directory.name}-{name}") for name in ("readings", "work"))
    paths = distillation.read_target(model, texts, readings, layer_ids=layers_of(model))
    torch.manual_seed(settings.seed)
    draft = new_draft(model.float().requires_grad_(False), paths)
    figures = distillation.distil(draft, paths, work / "checkpoint.pt", settings)
    draft.save(directory)
    write_atomic(directory / "figures.json", json.dumps(figures, indent=1).encode())
    rates = ", ".join(f"{rate:.3f}" for rate in figures["acceptance_rates"])
    print(f"{directory}: acceptance_rate on held-out texts by depth: {rates}")


def layers_of(target: PreTrainedModel) -> tuple[int, int, int]:
    """The layers whose features a draft reads."""
    num_layers = target.config.get_text_config().num_hidden_layers
    return 2, num_layers // 2, num_layers - 3


def likeliest_tokens(paths: Sequence[Path], num: int, *, vocab_size: int) -> Int[Tensor, " reduced"]:
    """The `num` tokens with most of the target's probability over all readings, sorted by id."""
    mass = torch.zeros(vocab_size, dtype=torch.float64)
    for path in paths:
        tensors = load_file(path)
        mass.index_add_(0, tensors["likeliest"].long().flatten(), tensors["log_p"].double().exp().flatten())
    return mass.topk(num).indices.sort().values


class Eagle3Draft:
    """The draft in training, initialised from the target; the last of the shards `paths` is held out."""

    def __init__(self, target: PreTrainedModel, paths: Sequence[Path], *, vocab_size: int) -> None:
        config = layer_config(target, is_tied=False)
        of_target = target.config.get_text_config()
        body: Any = target.base_model
        target_ids = likeliest_tokens(paths[:-1], vocab_size, vocab_size=of_target.vocab_size)
        # standard deviations, from the median absolute values, which a few huge entries do not move
        sizes = load_file(paths[0])["features"].float().abs().median(0).values
        self._sizes = sizes.clamp(min=1e-6) * _SIGMA_OF_MEDIAN
        config.draft_vocab_size, config.eagle_aux_hidden_state_layer_ids = vocab_size, list(layers_of(target))
        self._draft = Eagle3(config, layers_of(target), target_size=of_target.hidden_size)
        self._draft.norm.load_state_dict(body.norm.state_dict())
        self._draft.target_ids = target_ids
        self._draft.bind(target)
        self.module: nn.Module = self._draft
        self._initialise_as(body.layers[-1], of_target.hidden_size)
        self.index_of = torch.full((of_target.vocab_size,), -1)
        self.index_of[target_ids] = torch.arange(len(target_ids))

    @torch.no_grad()
    def _initialise_as(self, last: Any, width: int) -> None:
        """Copy a layer of the target, which reads the highest feature unchanged; other weights are small and random."""
        layer: Any = self._draft.layers[0]
        for module, source in (
            (layer.mlp, last.mlp),
            (layer.hidden_norm, last.input_layernorm),
            (layer.post_attention_layernorm, last.post_attention_layernorm),
            (layer.self_attn.o_proj, last.self_attn.o_proj),
        ):
            module.load_state_dict(source.state_dict())
        for name in ("q_proj", "k_proj", "v_proj"):
            getattr(layer.self_attn, name).weight[:, width:] = getattr(last.self_attn, name).weight
        self._draft.fc.weight.mul_(_RANDOM_SHARE)
        self._draft.fc.weight[:, -width:] += self._sizes[-width:].diag()

    def logits(self, batch: Reading, num_depths: int) -> Iterator[Float[Tensor, "learned reduced"]]:
        is_learned = batch.is_learned[:, 1:]  # entry t predicts token t + 2, as the target does at position t + 1
        for outputs in islice(unrolled(self._draft, batch.ids, batch.features.float() / self._sizes), num_depths):
            assert self._draft.lm_head is not None
            yield self._draft.lm_head(outputs.hidden[is_learned])

    def save(self, directory: Path) -> None:
        """Write the draft in the layout of EAGLE-3, without the rows that are the target's own."""
        target_ids = self._draft.target_ids
        assert target_ids is not None
        state = {name: tensor for name, tensor in self._draft.state_dict().items() if not name.startswith("lm_head.")}
        tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in state.items()}
        tensors["fc.weight"] = self._draft.fc.weight / self._sizes
        tensors["d2t"] = target_ids - torch.arange(len(target_ids))
        save_draft(directory, self._draft.config, "LlamaForCausalLMEagle3", tensors)


class SmallDraft:
    """A Llama in training; its tied embeddings start as the target's in their principal directions."""

    def __init__(self, target: PreTrainedModel, paths: Sequence[Path], *, hidden_size: int, num_layers: int) -> None:
        of_target = target.config.get_text_config()
        if hidden_size % _HEAD_SIZE or not 0 < hidden_size <= of_target.hidden_size:
            limit = f"use a multiple of {_HEAD_SIZE} up to {of_target.hidden_size}"
            raise ValueError(f"hidden_size is {hidden_size}; {limit}")
        names = ("vocab_size", "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
        config = LlamaConfig(
            **{name: getattr(of_target, name) for name in names},
            hidden_size=hidden_size,
            intermediate_size=4 * hidden_size,
            num_hidden_layers=num_layers,
            num_attention_heads=hidden_size // _HEAD_SIZE,
            tie_word_embeddings=True,
        )
        self._tokenizer = load_tokenizer(ModelSource(path=str(target.name_or_path)))
        self._model = LlamaForCausalLM(config)
        self._model.model.embed_tokens.weight.data.copy_(_reduced(target.get_output_embeddings().weight, hidden_size))
        self.module: nn.Module = self._model
        self.index_of = torch.arange(of_target.vocab_size)

    def logits(self, batch: Reading, num_depths: int) -> Iterator[Float[Tensor, "learned vocab"]]:
        """Logits at one depth: a model that reads tokens alone predicts the same at every depth."""
        hidden = self._model.model(input_ids=batch.ids, use_cache=False).last_hidden_state
        yield self._model.lm_head(hidden[batch.is_learned])

    def save(self, directory: Path) -> None:
        """Write the draft in bfloat16, with the tokenizer."""
        with atomic_directory(directory) as folder:
            self._model.bfloat16().save_pretrained(folder)
            self._tokenizer.save_pretrained(folder)


@torch.no_grad()
def _reduced(rows: Float[Tensor, "vocab hidden"], size: int) -> Float[Tensor, "vocab small"]:
    """The rows in their first `size` principal directions, scaled as the embeddings of a new model."""
    centred = rows.float() - rows.float().mean(0)
    _, directions = torch.linalg.eigh(centred.T @ centred)
    reduced = centred @ directions[:, -size:]
    return reduced * (0.02 / reduced.std())
