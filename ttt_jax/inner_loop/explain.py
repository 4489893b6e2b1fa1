"""``explain``: is this inner loop a linear attention, and can its chunks run at once? With reasons."""

import dataclasses

from ttt_jax.inner_loop import parallel
from ttt_jax.inner_loop.spec import InnerLoop


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What ``explain`` found; prints as a page.

    Attributes:
      reducible: whether the layer is exactly a linear attention ``o = q̂ (S₀ + Σ k̂ᵀ v̂)``.
      parallel: whether all chunks can be evaluated at once.
      not_reducible: one reason a line, empty where it is reducible.
      not_parallel: one reason a line, empty where it is parallel.
    """

    spec: InnerLoop
    reducible: bool
    parallel: bool
    not_reducible: tuple[str, ...]
    not_parallel: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"linear attention: {'yes' if self.reducible else 'no'}"]
        lines += [f"  - {reason}" for reason in self.not_reducible]
        lines.append(f"parallel over chunks: {'yes' if self.parallel else 'no'}")
        lines += [f"  - {reason}" for reason in self.not_parallel]
        modes = ["recurrent"] + (["parallel"] if self.parallel else [])
        lines.append(f"modes: {', '.join(modes)}")
        return "\n".join(lines)


def explain(spec: InnerLoop) -> Explanation:
    """Says whether ``spec`` is a linear attention and whether it runs in parallel, and why not.

    Source: the paper's Theorem 5.2 (reducible) and section 6 (parallel).

    Example:
      >>> from ttt_jax.inner_loop import presets
      >>> print(explain(presets.lact_llm(variant=1)))
      linear attention: yes
      parallel over chunks: no
        - weight_norm divides by the norm of the state; use weight_norm=None
      modes: recurrent
    """
    reasons = []
    if spec.fast_net.last is None:
        reasons.append(
            f"fast_net={type(spec.fast_net).__name__} has no linear, bias-free last layer, so its "
            "output is not a product of features with a state"
        )
    found = parallel.obstacles(spec)
    return Explanation(spec, not reasons, not found, tuple(reasons), tuple(found))
