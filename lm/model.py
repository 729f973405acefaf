"""Law 4.5: a causal language model with a KV cache that can be extended and rolled back.

The cache holds a prefix of committed[:-1], and callers feed committed[len(model):] next. Rolling back is exact,
but may go further back than requested (`lm.cache`); other models are refused (`lm.selfcheck`).

After the text, the cache can hold the nodes of one tree. A node sees the text and its own path, at its position there.
Nodes are added level by level, as a draft does, or all at once, as the target does; then `keep` moves the accepted path
to the end of the text and drops the others. That is exact for full attention with explicit positions.
"""

import sys
from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from lm import forwards
from lm.cache import CAPACITY, BufferLayer, Snapshots, is_attention, make_cache
from lm.masks import EMPTY, Tree, additive, tree_feed
from lm.rope import RopeSwitch, rope_switch_of
from lm.selfcheck import check_cache, check_tree

Logits = Float[Tensor, "rows vocab"]
_MAX_PENDING = 32  # text tokens that are fed together with nodes; the rest of a longer text (the prompt) is fed before


class ModelledText:
    """One text in one causal model: what the model is, and how long the text may become. Subclasses hold the text.

    Attributes:
        hidden: [rows, hidden] final hidden states (after the final norm, as the LM head reads them) of the rows
            that the last forward returned; may be None unless `keep_hidden` was called.
        device: device that takes token ids.
        num_prompt: tokens of the text that are fed at once, which `max_length` may depend on.
    """

    device: torch.device
    hidden: Float[Tensor, "rows hidden"] | None = None
    num_prompt = sys.maxsize
    with_hidden = False
    holds_trees = False
    _length = 0
    _max_length = float("inf")
    _rope_switch = RopeSwitch("")
    _is_long = False  # the text is read with the long RoPE frequencies (`lm.rope`)

    def __init__(self, model: PreTrainedModel, *, vocab_size: int | None) -> None:
        """Logits are cut to `vocab_size`: the extra ids of a padded vocabulary get probability 0; None: all."""
        self.model = model
        self.vocab_size = vocab_size
        self._max_length = float(getattr(model.config.get_text_config(), "max_position_embeddings", None) or "inf")

    def __len__(self) -> int:
        """Entries of the cache: tokens of the text, and nodes."""
        return self._length

    @property
    def output_device(self) -> torch.device:
        """Device of logits and hidden states, which differs from `device` if the model is spread over several
        devices; accelerate's hook on the model brings logits back to it.
        """
        return self.device if hasattr(self.model, "_hf_hook") else forwards.output_device_of(self.model)

    @property
    def hidden_size(self) -> int:
        return self.model.config.get_text_config().hidden_size

    @property
    def max_length(self) -> float:
        """Maximum number of tokens of a text with this prompt that may be fed; infinite if the config has no limit."""
        return self.limit_of(self.num_prompt)

    def limit_of(self, num_prompt: int) -> float:
        """`max_length` for a text with such a prompt (`lm.rope`)."""
        switch = self._rope_switch
        return self._max_length if switch.is_long(num_prompt - 1) else min(self._max_length, float(switch.bound))

    @property
    def eos_ids(self) -> frozenset[int]:
        """The ids that end a sequence: those of the generation config, else of the config."""
        of_generation = forwards.eos_ids_of(self.model.generation_config)
        return of_generation or forwards.eos_ids_of(self.model.config.get_text_config())

    def check_mode(self) -> None:
        """Raise ValueError if the model is in train mode."""
        forwards.refuse_training(self.model)

    @property
    def num_logits(self) -> int:
        width = forwards.num_logits_of(self.model)
        return width if self.vocab_size is None else min(width, self.vocab_size)

    @property
    def num_embeddings(self) -> int:
        """Rows of the input embeddings."""
        return next(self.model.get_input_embeddings().parameters()).shape[0]

    def embedding(self, tokens: Int[Tensor, " tokens"]) -> Float[Tensor, "tokens hidden"]:
        """Input embeddings, on the device of `tokens`."""
        return self.model.get_input_embeddings()(tokens.to(self.device)).to(tokens.device)

    def keep_hidden(self) -> None:
        """Keep final hidden states from now on, at the cost of a hook if the model is more than body and head;
        ValueError if the model has none.
        """
        forwards.lm_head_of(self.model)
        self.with_hidden = True

    def _check_side(self, num_first: int, end: int) -> None:
        """Raise ValueError if a text of `end` tokens, at first `num_first` of them at once, crosses a RoPE switch."""
        if self._length == 0:
            self._is_long = self._rope_switch.is_long(num_first)
        if end > self._rope_switch.bound and not self._is_long:
            raise self._rope_switch.refusal(f"the text has {end} tokens", "shorten the prompt, or lower max_new_tokens")


class CachedModel(ModelledText):
    """One sequence, perhaps followed by one tree, in one causal model."""

    one_token_at_a_time = False
    """After the prompt, feed one token at a time, as `generate` does; some recurrent layers need it."""
    recorder: Any = None  # a `FeatureRecorder` of what a feature draft reads; feature drafts import this module
    _tree = EMPTY  # the nodes that are in the cache
    _snapshots: Snapshots | None = None

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        vocab_size: int | None = None,
        holds_trees: bool = False,
        recorder: Any = None,
    ) -> None:
        """Any causal language model of transformers whose cache can be rolled back. `feed_tree` and `keep` need
        `holds_trees`; `recorder` records what a feature draft reads. ValueError for a model in train mode, or whose
        cache cannot be rolled back or hold a tree.
        """
        super().__init__(model, vocab_size=vocab_size)
        self.check_mode()
        self.recorder = recorder
        self.holds_trees = holds_trees
        self._parameters = signature(type(model).forward).parameters
        self._make_cache(CAPACITY)
        self.reset()
        check_cache(self)
        if holds_trees:
            check_tree(self)

    def reset(self, num_tokens: int = 0) -> None:
        """Empty the cache for a new sequence, and inspect the model again, which may have moved or changed. Room for
        `num_tokens` is made at once: a longer text may be fed, but what the cache holds is copied as it grows.
        """
        self.device = forwards.device_of(self.model)
        self._single = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        self._positions = torch.arange(max(num_tokens, CAPACITY), device=self.device)[None]
        self._rope_switch = rope_switch_of(self.model)
        self._parts = forwards.body_and_lm_head(self.model)
        if self.holds_trees:
            num_tokens += CAPACITY  # for the nodes of a tree
        self._length = 0
        self._tree = EMPTY
        if self._snapshots is not None or num_tokens > self._capacity:
            self._make_cache(max(num_tokens, self._capacity))
        for layer in self._buffers:  # also what a forward left that has failed
            layer.roll_back(0)
        if self.recorder is not None:
            self.recorder.reset(num_tokens)

    def forget(self, length: int) -> None:
        """Allow the cache to drop copies that only a return to fewer than `length` tokens would need."""
        if self._snapshots is not None:
            self._snapshots.forget(length)

    def _make_cache(self, capacity: int) -> None:
        self._capacity = capacity
        self.cache = make_cache(self.model, capacity)
        layers = self.cache.layers
        self._buffers = [layer for layer in layers if isinstance(layer, BufferLayer)]
        self._counted = [(index, layer) for index, layer in enumerate(layers) if isinstance(layer, CacheLayerMixin)]
        self._snapshots = None if is_attention(self.cache) else Snapshots(self.cache)
        self._length = 0

    def roll_back(self, length: int) -> None:
        """Drop the tree, and keep at most the first `length` tokens of the text."""
        length = min(length, self._length - len(self._tree))
        self._tree = EMPTY
        if self.recorder is not None:
            self.recorder.buffer.roll_back(length)
        if length >= self._length:
            return
        if self._snapshots is not None:
            restored = self._snapshots.restore(length)
            if restored is None:
                self._make_cache(self._capacity)
                return
            length = restored
        for layer in self._buffers:
            layer.roll_back(length)
        self._length = length
        self._check_lengths()

    def feed(self, new_tokens: Sequence[int], num_rows: int = 1) -> Logits:
        """Append tokens to the text: the logits after each of the last `num_rows` of them, in the model's dtype."""
        assert 1 <= num_rows <= len(new_tokens), f"{num_rows} rows requested of {len(new_tokens)} fed tokens"
        self._check_side(len(new_tokens) - num_rows + 1, self._length + len(new_tokens))
        if torch.is_inference_mode_enabled():  # the loop enters it once a round: entering costs as much as a softmax
            return self._feed_text(new_tokens, num_rows)
        with torch.inference_mode():
            return self._feed_text(new_tokens, num_rows)

    @torch.inference_mode()
    def feed_drawn(self, token: Int[Tensor, " 1"]) -> Float[Tensor, "1 vocab"]:
        """Append a token that was drawn on the device, without a transfer to the host: the logits after it."""
        self._check_side(0, self._length + 1)
        return self._feed(token.view(1, 1).to(self.device), self._next_positions(1), 1)

    @torch.inference_mode()
    def feed_tree(self, new_tokens: Sequence[int], tree: Tree) -> Logits:
        """Append tokens to the text, if no nodes are in the cache, and nodes to a tree that begins with those
        that are: the logits after the last of the tokens, if there are any, and after each new node.
        """
        num_cached = len(self._tree)
        num_text = self._length - num_cached + len(new_tokens)
        self._check_side(num_text, num_text + tree.depth)
        assert not (new_tokens and num_cached), "roll back before the text grows: it would leave its tree"
        if len(new_tokens) > _MAX_PENDING:
            self.feed(new_tokens[:-1])
            new_tokens = new_tokens[-1:]
        ids, positions, mask = tree_feed(tree, num_cached, num_text, pending=new_tokens, device=self.device)
        inputs = {"position_ids": positions[None], "attention_mask": additive(mask, self.model.dtype)[None, None]}
        logits = self._feed(ids[None], inputs, len(tree) - num_cached + bool(new_tokens))
        self._tree = tree
        return logits

    @torch.inference_mode()
    def keep(self, path: Sequence[int]) -> None:
        """Append the nodes of this path to the text, and drop the other nodes."""
        length = len(self) - len(self._tree)
        entries = torch.tensor([length + node for node in path], dtype=torch.long, device=self.device)
        for layer in self._buffers if self.recorder is None else [*self._buffers, self.recorder.buffer]:
            layer.keep_entries(length, entries)
        self._length = length + len(path)
        self._tree = EMPTY
        self._check_lengths()

    def _feed_text(self, fed: Sequence[int], num_rows: int) -> Logits:
        if not (self.one_token_at_a_time and len(fed) > 1):
            return self._feed(self._ids_of(fed), self._next_positions(len(fed)), num_rows)
        # the prompt at once, as `generate` feeds it, and what was drafted after it one by one
        num_first = 1 if self._length > 0 else len(fed) - num_rows + 1
        steps = []
        for tokens in (fed[:num_first], *([token] for token in fed[num_first:])):
            ids = torch.tensor([tokens], device=self.device)
            steps.append((self._feed(ids, self._next_positions(len(tokens)), 1), self.hidden))
        logits, hidden = zip(*steps[-num_rows:], strict=True)
        self.hidden = None if self.hidden is None else torch.cat(hidden)
        return torch.cat(logits)

    def _ids_of(self, tokens: Sequence[int]) -> Int[Tensor, "1 fed"]:
        """On the device: one or two as numbers of a launch, which waits for nothing, more in a transfer."""
        if len(tokens) == 1:
            return self._single.fill_(tokens[0])
        if len(tokens) == 2 and self.device.type != "cpu":
            return torch.cat([torch.full_like(self._single, token) for token in tokens], dim=1)
        return torch.tensor([tokens], device=self.device)

    def _next_positions(self, num_fed: int) -> dict[str, Tensor]:
        end = self._length + num_fed
        if end > self._positions.shape[1]:
            self._positions = torch.arange(2 * end, device=self.device)[None]
        return {"position_ids": self._positions[:, self._length : end]}

    def _feed(self, ids: Int[Tensor, "1 fed"], inputs: Mapping[str, Tensor], num_rows: int) -> Logits:
        """One forward of tokens with positions, and perhaps a mask; all that extends the cache passes here."""
        if self._snapshots is not None:
            self._snapshots.take(self._length)
        if self.recorder is None:
            logits, _ = self._run(ids, inputs, num_rows)
        else:
            with self.recorder.watching(has_body=self._parts is not None) as outputs:
                logits, states = self._run(ids, inputs, num_rows)
            self.recorder.append(self._length, outputs, logits.new_empty(ids.shape[1], 0) if states is None else states)
        self._length += ids.shape[1]
        self._check_lengths()
        return logits if self.vocab_size in (None, logits.shape[-1]) else logits[:, : self.vocab_size]

    def _run(
        self, ids: Int[Tensor, "1 fed"], inputs: Mapping[str, Tensor], num_rows: int
    ) -> tuple[Logits, Float[Tensor, "fed hidden"] | None]:
        """(logits of the last rows, hidden states of all rows if the model is body and head)."""
        if self._parts is not None:
            body, head = self._parts
            states = body(input_ids=ids, past_key_values=self.cache, use_cache=True, **inputs).last_hidden_state[0]
            self.hidden = states[-num_rows:]
            return head(self.hidden), states
        # without positions, some families count from 0 in every forward
        settings = self.accepted(past_key_values=self.cache, cache_params=self.cache, logits_to_keep=num_rows, **inputs)
        with forwards.recorded(
            [forwards.lm_head_of(self.model)] if self.with_hidden else [], inputs=True
        ) as head_inputs:
            logits = self.model(input_ids=ids, use_cache=True, **settings).logits[0, -num_rows:]
        hidden = head_inputs.get(0)
        # accelerate's hook on the model brings back its logits, but not what the LM head has read
        self.hidden = None if hidden is None else hidden.to(logits.device)
        return logits, None

    def accepted(self, **settings: object) -> dict[str, object]:
        """The settings whose names are parameters of the model's forward."""
        return {name: value for name, value in settings.items() if name in self._parameters}

    def _check_lengths(self) -> None:
        """Check law 4.5 on every layer that counts tokens; a layer never written to shares another layer's keys."""
        for index, layer in self._counted:
            if (length := layer.get_seq_length()) != self._length and layer.is_initialized:
                held = f"layer {index} ({type(layer).__name__}) of the cache holds {length} tokens"
                raise AssertionError(f"{held} and the model has {self._length}")
