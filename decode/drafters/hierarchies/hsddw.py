"""HSDDW, Hierarchical Speculative Decoding with Dynamic Window (Syu & Lee, Findings of NAACL 2025): micro, draft and
target.

Self-verify: a model keeps the token it drew and stops drafting after it when the entropy H of the distribution exceeds
tau, the running mean of H at the tokens rejected so far in this generation; tau_1 for the micro (rejected by the
draft), tau_2 for the draft (rejected by the target). Both start at 0, and no level proposes more than `window` tokens
(K = 10) at a time.

    pre-verify                   the micro drafts K tokens, the draft verifies them in one forward and goes on alone for
                                 K tokens
    pre-verify + self-verify     the same, each level stopping itself
    full                         inner rounds (micro drafts, draft verifies) until H of the draft at an emitted position
                                 is above tau_2

The first two are rows of the paper's Table 2 (the diagrams of its Figure 5), the third is its Algorithm 2.

Where the printed algorithms and the authors' program (github.com/valexsyu/HSDDW, commit c8fed41) are wrong or silent,
and what is done here. The first three points are law 4.12's reading of the printed listings, the others are read in the
program:

* The window shrinks through a minimum over a set that contains 0, so it would be 0 for good. Here: the first position
  above tau ends it.
* n_tot, the tokens handed to the target, leaves out the resampled token. Here every emitted token is proposed and
  counted.
* The lists of entropies of the two levels are aliases of one list, and tau_1 is updated under tau_2's index. Here each
  level's policy has its own state, fed by its own verification: H of its own distribution at the first token that the
  level above rejected.
* At a position where the draft is unsure, the program replaces the micro's token from the residual *without having
  tested it*, which is biased (a residual is the law given rejection). Here that token is verified as any other and is
  the last of the draft; still one forward.
* The program starts both tau at 10 in the full algorithm, replacing them in the first inner round by its smallest
  entropies; in the other two configurations at 0, as the paper says and as this does throughout.
* In the first two configurations the program goes on alone whatever the pre-verified tokens look like, and of those
  only the inner round's last moves tau_2, with the entropy of the position after all K micro tokens even if one of them
  was rejected. Here the draft's self-verification looks at every token that it emits, and tau_2 takes the entropy of
  the very token that was rejected.
* The program's entropies are of the distributions after temperature, top-k and top-p; here of untruncated ones at
  temperature 1 (law 4.1). The paper's runs have temperature 1 and no truncation, where both agree.
* A draft of the full algorithm has no limit in the program but a test for more than 50 tokens; here the loop's
  max_draft_length is one.
* EOS inside an inner block is tested only after the target's verification there; here nothing is drafted after it.
* The free token after full inner acceptance is always used by the program; `bonus=False` leaves it out.

Neither level needs entropies: `policies` takes any two, trained heads among them, which neither the paper nor Chen's
variant has.
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
        draft: pre-verifies; the paper's is Llama-2 7B. Wrap in a `CachedModel` with `vocab_size` where logits are
            padded.
        configuration: name of the schedule by which levels alternate, and of the levels that stop themselves.
        window: K, the most tokens that a level drafts at a time.
        policies: (micro's, draft's), in place of the configuration's own.
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
