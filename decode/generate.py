"""python -m decode generate: one prompt through the speculative loop, with its rounds in colour."""

from configs import Config


def generate(config: Config, *, prompt: str, policy: str = "fixed_length") -> None:
    """One prompt, showing accepted, residual and bonus tokens in colour."""
    print(config, prompt, policy)
