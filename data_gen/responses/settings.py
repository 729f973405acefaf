"""The sampling fields of requests, which must give exactly `Sampling`: labels know nothing else that a server applies.

Where a request leaves a setting unset, servers take it from the model's generation_config.json (vLLM, SGLang,
`transformers serve`) or from their own defaults (llama.cpp). So each kind of server is sent every setting that it
reads, and a setting of the model's file that cannot be sent is refused.
"""

import json
from collections.abc import Mapping
from typing import Any

from configs.schema import ServerConfig
from data_gen.prompts.prompt import say_once
from lm import Sampling

_NO_PENALTY: dict[str, float] = {
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    "guidance_scale": 1.0,
    "num_beams": 1,
}
"""Settings of transformers that change logits, also of greedy decoding -> the value that changes nothing."""
_NO_CUT: dict[str, float] = {"min_p": 0.0, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0}
"""Settings that remove tokens from a sampled distribution -> the value that removes none."""
_OPENAI = {"presence_penalty": 0.0, "frequency_penalty": 0.0}
_UNSENDABLE = (
    *("top_h", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id"),
    *("forced_eos_token_id", "sequence_bias", "stop_strings", "exponential_decay_length_penalty", "penalty_alpha"),
    *("watermarking_config", "dola_layers", "constraints", "force_words_ids"),
)
"""Settings of transformers that no value in a request switches off."""


def request_settings(kind: str, sampling: Sampling, *, max_new_tokens: int, eos_ids: list[int]) -> dict[str, Any]:
    """The sampling fields of a request to a kind of server.

    openai: temperature, top_p and the penalties of OpenAI's interface. vllm (and SGLang): also top_k (-1 keeps
    every token), min_p, the repetition penalty, and a request for token ids. transformers: a whole generation
    config, because its server takes everything else from the model's file.

    Raises:
        ValueError: top_k for a server that does not support it.
    """
    top_p = sampling.top_p or 1.0
    settings: dict[str, Any] = {"max_tokens": max_new_tokens, "temperature": sampling.temperature, "top_p": top_p}
    if kind == "vllm":
        # min_p and repetition_penalty would be those of the model's generation config
        fixed = {"min_p": 0.0, "repetition_penalty": 1.0}
        settings["extra_body"] = {"top_k": sampling.top_k or -1, "return_token_ids": True, **fixed}
    elif kind == "transformers":
        generation = {"do_sample": not sampling.is_greedy, "max_new_tokens": max_new_tokens, "eos_token_id": eos_ids}
        generation |= _NO_PENALTY
        if not sampling.is_greedy:
            generation |= {"temperature": sampling.temperature, "top_k": sampling.top_k or 0, "top_p": top_p} | _NO_CUT
        settings["extra_body"] = {"generation_config": json.dumps(generation)}
    elif sampling.top_k is not None:
        raise ValueError(
            f"sampling.top_k is {sampling.top_k}, which an OpenAI server does not support; set data.server.kind to "
            "vllm or transformers"
        )
    return settings if kind == "transformers" else settings | _OPENAI


def unmodelled(generation: Mapping[str, object]) -> dict[str, object]:
    """The settings of a generation_config.json that change the target's distribution, and that `Sampling` lacks."""
    neutral = _NO_PENALTY | _NO_CUT
    changing = {name: value for name, value in generation.items() if name in _UNSENDABLE and value}
    for name, value in generation.items():
        if name in neutral and value is not None and value != neutral[name]:
            changing[name] = value
    return changing


def check_unsent(server: ServerConfig, sampling: Sampling, generation: Mapping[str, object]) -> None:
    """Raise ValueError if the server would apply a setting that is not the run's `Sampling`; a note where it may.

    Args:
        server: the server, with the additional fields of its requests.
        sampling: the sampling of the labels.
        generation: the settings in the generation_config.json of the target, which the server applies if no request
            overrides them; empty if it has no such file.
    """
    unchanged = _NO_PENALTY | _NO_CUT | _OPENAI
    unchanged |= {"temperature": sampling.temperature, "top_k": sampling.top_k or -1, "top_p": sampling.top_p or 1.0}
    for name, value in server.extra.items():
        if name in unchanged and not _is_same(name, value, unchanged[name]):
            raise ValueError(
                f"data.server.extra has {name} {value!r}, but labels are made with {unchanged[name]:g}; remove it, or "
                "change pair.sampling"
            )
    if server.kind == "openai":
        _check_openai(server, sampling, {name: generation.get(name) for name in (*_NO_PENALTY, *_NO_CUT, "top_k")})
    if server.kind == "transformers" and (names := [name for name in _UNSENDABLE if generation.get(name)]):
        raise ValueError(
            f"generation_config.json of the target sets {names[0]}, which `transformers serve` applies and labels do "
            "not; remove it from that file, or use another server"
        )


def _check_openai(server: ServerConfig, sampling: Sampling, generation: Mapping[str, object]) -> None:
    neutral = _NO_PENALTY | _NO_CUT | {"top_k": -1}
    differing = {
        name: value
        for name, value in generation.items()
        if value is not None and name not in server.extra and not _is_same(name, value, neutral[name])
    }
    if sampling.is_greedy:
        differing = {name: value for name, value in differing.items() if name in _NO_PENALTY}
    if differing:
        values = ", ".join(f"{name} {value}" for name, value in differing.items())
        fields = json.dumps({name: neutral[name] for name in differing})
        raise ValueError(
            f"generation_config.json of the target has {values}, which most servers apply to requests that leave it "
            "unset, as those of data.server.kind openai do, and labels are made without it; set data.server.kind to "
            f"vllm or transformers, or data.server.extra to {fields}"
        )
    if not sampling.is_greedy and "top_k" not in server.extra:
        say_once(
            "note: data.server.kind openai sends temperature and top_p, but not top_k, min_p or repetition_penalty. If "
            "the server has own defaults for these (llama.cpp: top_k 40, min_p 0.05), its responses do not fit the "
            'labels; send such fields by data.server.extra, as {"top_k": -1, "min_p": 0}'
        )


def _is_same(name: str, value: object, expected: int | float) -> bool:
    return value == expected or (name == "top_k" and expected <= 0 and value in (0, -1))
