"""Experiments and models that are installed with the code. A local file or directory of the same name wins."""

from dataclasses import replace
from pathlib import Path

from configs.hints import meant
from configs.paths import check_local
from configs.schema import ModelSource, PairConfig

_YAMLS = {path.name: path for path in sorted(Path(__file__).parent.glob("*.yaml"))}
# a checkout or site-packages: both hold configs/ and checkpoints/ side by side
_ROOT = Path(__file__).parents[1]
_SHIPPED = (Path("checkpoints/tiny"), Path("checkpoints/smollm2"))
NAMES = tuple(name.removesuffix(".yaml") for name in _YAMLS)
"""Names that `--config` accepts besides a path."""


def experiment_file(given: str) -> str:
    """The YAML that `--config` names: a local file, or a shipped one (`tiny`, `configs/tiny.yaml`); else ValueError."""
    check_local(given, "--config")
    if ":" in given or Path(given).is_file():  # a colon: the YAML itself
        return given
    shipped = _YAMLS.get(Path(given).name.removesuffix(".yaml") + ".yaml")
    if shipped is None or Path(given).parent not in (Path(), Path("configs")):
        raise ValueError(f"{given!r} is neither a file nor a shipped experiment; {meant(Path(given).stem, NAMES)}")
    return str(shipped)


def with_shipped_models(pair: PairConfig) -> PairConfig:
    """`pair`, where the shipped models in `checkpoints/` come from the installation unless a local directory exists."""
    micro = pair.micro and _located(pair.micro)
    return replace(pair, target=_located(pair.target), draft=_located(pair.draft), micro=micro)


def _located(source: ModelSource) -> ModelSource:
    path = Path(source.path)
    is_shipped = path.parent in _SHIPPED and not path.exists() and (_ROOT / path).is_dir()
    return replace(source, path=str(_ROOT / path)) if is_shipped else source
