"""``explain``: is this inner loop a linear attention, can its chunks run at once, and what is left
to remove on the way to plain linear attention? With reasons.
"""

import dataclasses
import textwrap

from ttt_jax.inner_loop import kernel, linear_attention, parallel, sequence_parallel_cost
from ttt_jax.inner_loop.checks import check_is_spec
from ttt_jax.inner_loop.fast_nets import Linear
from ttt_jax.inner_loop.losses import DotProduct
from ttt_jax.inner_loop.spec import InnerLoop


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of the reduction to linear attention.

    Attributes:
      removes: what the step takes away.
      why: why the layer stays a linear attention without it, and what that buys.
      finding: what the paper measured when it was removed.
      spec: the inner loop after the step.
    """

    removes: str
    why: str
    finding: str
    spec: InnerLoop


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What ``explain`` found; prints as a page.

    Attributes:
      spec: the inner loop in question.
      not_reducible: why it is no linear attention, one reason each; empty where it is one.
      not_parallel: why its chunks cannot run at once; empty where they can.
      not_kernel: why no operation of it has a kernel; empty where one has.
      path: the steps that are left to plain linear attention.
    """

    spec: InnerLoop
    not_reducible: tuple[str, ...]
    not_parallel: tuple[str, ...]
    not_kernel: tuple[str, ...]
    path: tuple[Step, ...]

    @property
    def reducible(self) -> bool:
        """Whether the layer is exactly ``o = q̂ (S₀ + Σ k̂ᵀ v̂)``, up to factors on the state."""
        return not self.not_reducible

    @property
    def parallel(self) -> bool:
        """Whether all chunks can be evaluated at once."""
        return not self.not_parallel

    @property
    def modes(self) -> tuple[str, ...]:
        """The modes of ``ttt`` that run this inner loop."""
        parallel = () if self.not_parallel else ("parallel",)
        return ("recurrent", *parallel, *(() if self.not_kernel else ("kernel",)))

    @property
    def across_devices(self) -> str:
        """How the inner loop runs on a sequence that is cut over devices, and what that costs."""
        return sequence_parallel_cost.describe(self.spec)

    def __str__(self) -> str:
        lines = [_title(self.spec), ""]
        yes = "Yes, by an affine scan, O(d³) a chunk: exact but dear, so mode='auto' is recurrent."
        for question, reasons, answer in (
            ("Is it a linear attention?", self.not_reducible, "Yes."),
            (
                "Can its chunks run in parallel?",
                self.not_parallel,
                yes if parallel.is_dear(self.spec) else "Yes.",
            ),
            ("Do kernels serve it?", self.not_kernel, "Yes."),
        ):
            lines.append(f"{question} {'No:' if reasons else answer}")
            lines += [_wrap("- " + reason, 2) for reason in reasons]
        lines.append(_wrap(f"Can a sequence be cut over devices? {self.across_devices}", 0))
        lines.append(f"Modes: {', '.join(self.modes)}.")
        if self.path:
            lines += ["", "Left on the way to plain linear attention, o = q (W + Σ kᵀv):"]
            for number, step in enumerate(self.path, 1):
                lines.append(_wrap(f"{number}. {step.removes}. {step.why}", 2, 5))
                lines.append(_wrap(f"Paper: {step.finding}", 5, 5))
        return "\n".join(lines)


def explain(spec: InnerLoop) -> Explanation:
    """Says whether ``spec`` is a linear attention and runs in parallel, why not, and what is left.

    Args:
      spec: the inner loop.

    Returns:
      An ``Explanation``; print it.

    Raises:
      ValueError: ``spec`` is not an ``InnerLoop``.

    Source: the paper's Theorem 5.2 (is it linear attention), section 6 (parallel), Table 1 (path).

    Example:
      >>> from ttt_jax.inner_loop import presets
      >>> found = explain(presets.lact_llm(variant=1))
      >>> found.reducible, found.parallel, found.modes
      (True, False, ('recurrent', 'kernel'))
      >>> [step.removes for step in found.path][:2]
      ['weight norm', 'the hidden layer of the fast network']
    """
    check_is_spec(spec)
    return Explanation(
        spec,
        tuple(linear_attention.obstacles(spec)),
        tuple(parallel.obstacles(spec)),
        tuple(kernel.obstacles(spec)),
        tuple(reduction_path(spec)),
    )


def reduction_path(spec: InnerLoop) -> list[Step]:
    """The steps from ``spec`` to linear attention that are left, in the paper's order.

    Source: the paper's Table 1; numbers are LaCT-LLM's perplexity, LaCT-NVS's PSNR and ViTTT-B's
    top-1 accuracy before and after each step.

    Example:
      >>> from ttt_jax.inner_loop import presets
      >>> [len(reduction_path(presets.lact_llm(n))) for n in range(7)]
      [6, 5, 4, 3, 2, 1, 0]
    """
    return [] if not isinstance(spec.loss, DotProduct) else list(_steps(spec))


def _steps(spec: InnerLoop):
    def removed(**changes):
        nonlocal spec
        spec = dataclasses.replace(spec, **changes)
        return spec

    if not spec.static_features and spec.fast_net.last is not None:
        yield Step(
            "training the matrices inside the kernel φ",
            "Only the last layer is the linear attention's state; the others only make φ depend on "
            "the past. Frozen, φ is an ordinary feature map.",
            "it helps: perplexity 16.43 to 15.93, PSNR 25.94 to 25.97, top-1 79.34 to 79.63.",
            removed(update="last_layer", rate=_last_rate(spec)),
        )
    if spec.weight_norm is not None:
        yield Step(
            "weight norm",
            "It is a diagonal factor on the value side, but one that depends on the state: without "
            "it the update no longer does, and all chunks run at once.",
            "small cost: perplexity 15.93 to 16.31, PSNR 25.97 to 25.93.",
            removed(weight_norm=None),
        )
    if type(spec.fast_net) is not Linear and spec.fast_net.last is not None:
        yield Step(
            "the hidden layer of the fast network",
            "φ becomes the identity; the state is a matrix from keys to values.",
            "perplexity 16.31 to 16.23; PSNR 25.93 to 25.71, top-1 79.63 to 79.39: the one step "
            "that costs the vision tasks something.",
            removed(fast_net=Linear(), update="all"),
        )
    if spec.rate == "per_token":
        yield Step(
            "learning rates per token",
            "They scale keys or values, which the projections can learn to do.",
            "perplexity 16.23 to 16.12, PSNR 25.71 to 25.70.",
            removed(rate=1.0),
        )
    if spec.momentum is not None:
        yield Step(
            "momentum",
            "It repeats each value with weights that decay (Theorem 5.3).",
            "it helps: perplexity 16.12 to 15.97; the vision tasks have none.",
            removed(momentum=None),
        )
    if spec.clip:
        yield Step(
            "clip of the update",
            "Dividing each column by its norm plus one is a diagonal factor on the values, one for "
            "the whole sequence; without it they add up as they are.",
            "top-1 79.39 to 79.54: it was not needed.",
            removed(clip=False),
        )
    if spec.orthogonalise is not None:
        yield Step(
            "orthogonalisation of the update",
            "Newton-Schulz multiplies each chunk's values by one matrix; without it the layer is "
            "one linear attention, and tokens add up in any order.",
            "it is what language modelling misses most: perplexity 15.97 to 16.80; PSNR 25.70 to "
            "25.73.",
            removed(orthogonalise=None),
        )


def _last_rate(spec: InnerLoop):
    """The last layer's own constant rate, or what ``rate`` already is."""
    if not isinstance(spec.rate, tuple):
        return spec.rate
    return spec.rate[spec.trained.index(spec.fast_net.last)]


def _title(spec: InnerLoop) -> str:
    net, loss = type(spec.fast_net).__name__, type(spec.loss).__name__
    if isinstance(spec.order, str):
        chunk = "the whole sequence" if spec.chunk_size is None else f"chunks of {spec.chunk_size}"
        order = f"{chunk}, {spec.order.replace('_', ' ')}"
    else:
        order = f"{len(spec.order)} explicit spans"
    return f"Inner loop: {net}, {loss} loss, {order}"


def _wrap(text: str, indent: int, hanging: int | None = None) -> str:
    later = " " * (indent + 2 if hanging is None else hanging)
    return textwrap.fill(text, 98, initial_indent=" " * indent, subsequent_indent=later)
