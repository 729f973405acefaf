"""`python -m heads export | import | inspect`."""

from configs.command import run
from heads.command import export, import_, inspect

if __name__ == "__main__":
    run({"export": export, "import": import_, "inspect": inspect})
