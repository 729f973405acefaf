"""The papers' commands time as briefly as those of evaluation/."""

from tests.evaluation.conftest import fewest_turns as fewest_turns
