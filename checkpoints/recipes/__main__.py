"""`python -m checkpoints.recipes COMMAND`

tiny (the default)     train the embedded models again
eagle3, small          train a draft for your own target
smollm2, coder_pair    make directories of published models without a hub
structured             write prompts whose answers are JSON
record                 copy a trace without its prompts
"""

from checkpoints.recipes.own_target import eagle3, small
from checkpoints.recipes.published import coder_pair, smollm2
from checkpoints.recipes.structured import structured
from checkpoints.recipes.tiny import tiny
from configs.command import run
from evaluation.traces.disk import record

if __name__ == "__main__":
    commands = (tiny, smollm2, coder_pair, eagle3, small, structured, record)
    run({command.__name__: command for command in commands}, default="tiny")
