"""`python -m checkpoints.recipes`: train the embedded models anew (target, draft, micro, and the feature drafts of the
target).
"""

from checkpoints.recipes.command import tiny
from configs.command import run

if __name__ == "__main__":
    run({"tiny": tiny}, default="tiny")
