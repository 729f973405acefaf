"""python -m tests.layout: the tree of the project, one line per file: the first sentence of each docstring."""

from tests.layout.modules import FLOORS, modules


def main() -> None:
    """Print the tree."""
    for floor in FLOORS:
        for module in (module for name, module in modules().items() if name.split(".")[0] == floor):
            depth = module.name.count(".")
            label = f"{module.path.parent.name}/" if module.is_package else module.path.name
            print(f"{'  ' * depth}{label:<{28 - 2 * depth}} {module.summary}")


if __name__ == "__main__":
    main()
