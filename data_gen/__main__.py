"""`python -m data_gen [COMMAND] --config FILE`, a command of `acceptance-heads`; make, the default, is its `data`."""

import sys

from configs import front

_NAMES = {"make": "data", "import": "import-data"}


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    name, *rest = argv if argv and not argv[0].startswith("-") else ["make", *argv]
    front.main([_NAMES.get(name, name), *rest])


if __name__ == "__main__":
    main()
