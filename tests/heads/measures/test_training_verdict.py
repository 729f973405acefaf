"""The sentence at the end of a training: the best head of each timing against what needs no training."""

from heads.grid import HeadSpec, grid, specs
from heads.measures.report import beats_signal, verdict
from tests.toys.made_up import make_config


def result_of(kl: dict[str, float], sweep: list[HeadSpec]) -> dict:
    """Made-up measurements: a head's KL by its timing, 0.4 for each signal alone, 0.5 for a constant."""
    of_heads = {str(spec): kl[spec.shape.timing] + 0.01 * spec.shape.depth for spec in sweep}
    heads = {name: {"calibrated_kl": value, "auroc": 0.7} for name, value in of_heads.items()}
    alone = {"log_token_prob": {"calibrated_kl": 0.4, "auroc": 0.6}}
    alone |= {"negative_entropy": {"calibrated_kl": 0.45, "auroc": 0.55}}
    return {"heads": heads, "signals": dict.fromkeys(kl, alone), "labels": {key: {"constant_kl": 0.5} for key in kl}}


def sweep(tmp_path, *timings: str) -> list[HeadSpec]:
    return specs(grid(make_config(tmp_path, tmp_path, timings=timings, scalars=(True,)).heads))


def test_the_best_head_of_each_timing_stands_beside_log_q_and_a_constant(tmp_path):
    heads = sweep(tmp_path, "fed", "drawn")
    result = result_of({"fed": 0.44, "drawn": 0.3}, heads)
    fed, drawn, warning = verdict(result, heads).splitlines()
    assert fed.startswith(
        "Best fed-time head on dev: fed+s-d0-w1 with KL 0.440 nats per token and AUROC 0.700, 10% more KL than log q(y)"
        " alone (KL 0.400"
    )
    assert "25% less KL than log q(y) alone" in drawn
    assert warning.startswith("Warning: no fed-time head beats log q(y) alone, which needs no training. Do not decode")
    assert beats_signal(result, heads) == {"fed": False, "drawn": True}
    assert "Warning" not in verdict(result_of({"fed": 0.3, "drawn": 0.3}, heads), heads)


def test_a_prefix_head_is_held_against_the_entropy_which_knows_no_token_either(tmp_path):
    heads = sweep(tmp_path, "drawn")
    _, last = verdict(result_of({"drawn": 0.41}, heads), heads).splitlines()
    assert last.startswith("No head beats the draft's own")
    heads = sweep(tmp_path, "prefix")
    assert beats_signal(result_of({"prefix": 0.42}, heads), heads) == {"prefix": True}
    said = verdict(result_of({"prefix": 0.42}, heads), heads)
    assert said.startswith("Best prefix head on dev: prefix")
    assert "H(q) alone (KL 0.450" in said
