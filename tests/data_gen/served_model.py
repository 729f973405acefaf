"""What vLLM answers to completion requests, by a model in this process: for `tests.toys.answering`."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lm import Sampling
from tests.toys.answering import completion


class ServedModel:
    """An `answer` of `Answering`. Log-probabilities are over all ids of a padded vocabulary; tokens are drawn from
    those of the tokenizer.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        logprobs_mode: str = "raw_logprobs",
        max_logprobs: int = 500,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.logprobs_mode, self.max_logprobs = logprobs_mode, max_logprobs

    def __call__(self, body: dict[str, Any], attempt: int) -> tuple[int, dict]:
        num = body.get("logprobs") or 0
        if num > self.max_logprobs:
            return 400, {"error": {"message": f"logprobs of {num}, which is greater than max allowed"}}
        sampling = Sampling(
            temperature=body["temperature"],
            top_k=body["top_k"] if body["top_k"] > 0 else None,
            top_p=body.get("top_p", 1.0),
        )
        generator = torch.Generator().manual_seed(body["seed"])
        ids, told, prompt = list[int](), list[dict[int, float]](), body["prompt"]
        while len(ids) < body["max_tokens"] and ids[-1:] != [1]:
            logits = self._logits([*prompt, *ids])[-1]
            probs = sampling.probs(logits[: len(self.tokenizer)])
            ids.append(int(torch.multinomial(probs, 1, generator=generator)))
            told.append(self._top(logits, num, ids[-1], sampling))
        logprobs = {"top_logprobs": [{f"token_id:{name}": value for name, value in place.items()} for place in told]}
        more: dict[str, Any] = {"token_ids": ids, "logprobs": logprobs if num else None}
        if body.get("prompt_logprobs"):
            rows = self._logits(prompt)
            more["prompt_logprobs"] = [None] + [
                {
                    str(name): {"logprob": value}
                    for name, value in self._top(row, body["prompt_logprobs"], token, sampling).items()
                }
                for row, token in zip(rows, prompt[1:], strict=False)
            ]
        reason = "stop" if ids[-1] == 1 else "length"
        return completion(self.tokenizer.decode(ids, skip_special_tokens=True), reason, **more)

    @torch.inference_mode()
    def _logits(self, ids: list[int]) -> Tensor:
        return self.model(torch.tensor([ids])).logits[0].float()

    def _top(self, logits: Tensor, num: int, token: int, sampling: Sampling) -> dict[int, float]:
        """The drawn token, and the likeliest."""
        values = {
            "raw_logprobs": logits.log_softmax(-1),
            "raw_logits": logits,
            "processed_logprobs": sampling.probs(logits).log(),
            "tempered": (logits / (sampling.temperature or 1)).log_softmax(-1),
        }[self.logprobs_mode].clamp(min=-9999.0)
        likeliest = values.topk(min(num, len(values)))
        return {token: float(values[token])} | dict(
            zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True)
        )
