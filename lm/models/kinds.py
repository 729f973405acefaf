"""How much of a loop is compiled: nothing, the stop alone, or whole steps."""

from typing import Literal

from lm.models.cached import CachedModel
from lm.models.compiled import CompiledModel
from lm.models.compiled_tail import CompiledTailModel

Compile = bool | Literal["stop"]
"""`decode.compile`."""
KINDS: dict[Compile, type[CachedModel]] = {False: CachedModel, "stop": CompiledTailModel, True: CompiledModel}
