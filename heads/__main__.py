"""`python -m heads export | import | push | inspect`."""

from configs.command import run
from heads.command import export, import_, inspect, push

if __name__ == "__main__":
    run({"export": export, "import": import_, "push": push, "inspect": inspect})
