"""Train every head of the grid in one run: `python train.py --config FILE`, which is `acceptance-heads train`. The same
command resumes from the last checkpoint.
"""

import sys

from configs.front import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
