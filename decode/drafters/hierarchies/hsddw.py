"""HSDDW, Hierarchical Speculative Decoding with Dynamic Window (Syu & Lee, Findings of NAACL 2025): micro, draft and
target.

Self-verify: a model keeps the token it drew and stops drafting after it when the entropy H of the distribution exceeds
tau, the running mean of H at the tokens rejected so far in this generation; tau_1 for the micro (rejected by the
draft), tau_2 for the draft (rejected by the target). Both start at 0, and no level proposes more than `window` tokens
(K = 10) at a time.

    pre-verify                   the micro drafts K tokens, the draft verifies them in one forward and then drafts K
                                 tokens alone
    pre-verify + self-verify     the same, each level stopping itself
    full                         inner rounds (micro drafts, draft verifies) until H of the draft at an emitted position
                                 is above tau_2

The first two are rows of the paper's Table 2 (the diagrams of its Figure 5), the third is its Algorithm 2.

Departures where the printed algorithms (first three points) and the authors' program (github.com/valexsyu/HSDDW, commit
c8fed41) are wrong or incomplete:

* The window shrinks through a minimum over a set that contains 0, so it would stay 0. Here: the first position above
  tau ends it.
* n_tot, the tokens passed to the target, omits the resampled token. Here every emitted token is proposed and counted.
* The entropy lists of the two levels are aliases of one list, and tau_1 is updated under tau_2's index. Here each
  level's policy has its own state: H of its own distribution at the first token that the level above rejected.
* At a position where the draft is unsure, the program replaces the micro's token from the residual *without testing
  it*, which is biased (a residual is the distribution given rejection). Here that token is verified as any other and is
  the last of the draft; still one forward.
* The program starts both tau at 10 in the full algorithm, replacing them in the first inner round by its smallest
  entropies; in the other two configurations at 0, as the paper says and as this does throughout.
* In the first two configurations the program drafts alone whatever the pre-verified tokens are, and of those only the
  inner round's last moves tau_2, with the entropy of the position after all K micro tokens even if one was rejected.
  Here the draft's self-verification sees every token that it emits, and tau_2 takes the entropy of the rejected token.
* The program's entropies are of distributions after temperature, top-k and top-p; here of untruncated ones at
  temperature 1 (law 4.1). The paper's runs have temperature 1 and no truncation, where both agree.
* A draft of the full algorithm ends in the program only at more than 50 tokens; here at the loop's max_draft_length.
* The program tests for EOS inside an inner block only after the target's verification; here nothing is drafted after
  it.
* The program always uses the free token after full inner acceptance; `bonus=False` omits it.

Levels can also stop by other policies than entropies (`policies`), among them trained heads.
"""

from typing import Literal, get_args

from transformers import PreTrainedModel

from decode.drafters.hierarchies.pre_verified import InnerRounds, PreVerifiedDrafter
from decode.loop.drafter import ModelDrafter
from decode.policies.base import Policy
from decode.policies.plain import FixedLength, SelfVerify
from lm import CachedModel

Configuration = Literal["pre-verify", "pre-verify + self-verify", "full"]
CONFIGURATIONS: tuple[Configuration, ...] = get_args(Configuration)


def hsddw(
    micro: PreTrainedModel | CachedModel,
    draft: PreTrainedModel | CachedModel,
    *,
    configuration: Configuration = "full",
    window: int = 10,
    policies: tuple[Policy, Policy] | None = None,
    bonus: bool = True,
) -> PreVerifiedDrafter:
    """The drafter of one of HSDDW's configurations.

    Args:
        micro: drafts; the paper's is a 68M Llama.
        draft: pre-verifies; the paper's is Llama-2 7B. Wrap it in a `CachedModel` with `vocab_size` if logits are
            padded.
        configuration: how levels alternate, and which levels stop themselves.
        window: K, the maximum number of tokens that a level drafts at a time.
        policies: (micro's, draft's), instead of the configuration's.
        bonus: use the draft's free token after full inner acceptance.

    Raises:
        ValueError: an unknown configuration, a negative window.
    """
    if configuration not in CONFIGURATIONS:
        raise ValueError(f"configuration is {configuration!r}; one of {', '.join(CONFIGURATIONS)}")
    if configuration == "full":
        rounds = InnerRounds(window=window, bonus=bonus)
    else:
        rounds = InnerRounds(window=window, max_rounds=1, num_alone=window, bonus=bonus)
    stops = (FixedLength(window), Policy()) if configuration == "pre-verify" else (SelfVerify(), SelfVerify())
    micro_policy, draft_policy = policies or stops
    return PreVerifiedDrafter(ModelDrafter(micro, micro_policy), draft, draft_policy, rounds=rounds)
