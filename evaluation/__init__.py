"""What measures: traces and replay, costs, contests between policies, the clock, tuning and reports.

result = evaluate("experiment.yaml")                     every policy and threshold, as an `Evaluation`
result = evaluate(target=…, draft=…, prompts=[…])        the same for two models and a list of prompts
result.verdict["sentence"], result.best, result.frame()
"""

from typing import TYPE_CHECKING

from store.lazy import lazy_exports

if TYPE_CHECKING:
    from evaluation.from_objects import evaluate
    from evaluation.report.evaluated import Evaluation
else:
    __getattr__ = lazy_exports(
        __name__,
        {
            "evaluate": "evaluation.from_objects",
            "Evaluation": "evaluation.report.evaluated",
        },
    )

__all__ = ["Evaluation", "evaluate"]
