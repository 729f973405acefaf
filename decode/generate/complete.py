"""One prompt in, one text out: the speculative loop in a line of Python."""

import torch

from configs.schema import Config
from data_gen.prompts.prompt import Prompt
from data_gen.prompts.templates import encode
from decode.drafters.factory import PairModels
from decode.experiment import Experiment
from decode.loop.decoder import Generation
from decode.policies.base import Policy


def complete(
    config: Config, prompt: str, *, policy: str | Policy | None = None, max_new_tokens: int | None = None
) -> str:
    """What the target writes behind a prompt, drawn as the config says, `decode.seed` included.

    Args:
        config: the experiment; `data.template` wraps the prompt.
        prompt: what the user says.
        policy: when to stop drafting, as itself or as `--policy` has it; None: what `evaluate` or `tune` recommends;
            before they ran the best head of the config, or where none is exported a policy that needs no training.
        max_new_tokens: None: decode.max_new_tokens.

    Raises:
        ValueError: a policy that does not parse, or does not fit the models.
        FileNotFoundError: models or a head that are not there.
    """
    experiment = Experiment(config)
    stop = policy if isinstance(policy, Policy) else experiment.policy(policy or experiment.default_policy.spec)
    pair, decode = experiment.pair, experiment.decode
    models = PairModels(pair, decode.compile, holds_trees=False)
    decoder = models.decoder(
        models.drafter(stop, None), sampling=experiment.sampling, max_draft_length=decode.max_draft_length
    )
    prompt_ids = encode(Prompt("prompt", (prompt,)), pair.tokenizer, experiment.template)
    num_tokens = decode.max_new_tokens if max_new_tokens is None else max_new_tokens
    rounds = decoder.stream(prompt_ids, num_tokens, generator=torch.Generator().manual_seed(decode.seed))
    return str(pair.tokenizer.decode(list(Generation.of(list(rounds)).token_ids), skip_special_tokens=True))
