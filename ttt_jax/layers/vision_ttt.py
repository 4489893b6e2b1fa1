"""ViTTT's token mixer: two inner loops on all tokens of an image, a gated one and a local one."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from ttt_jax.inner_loop.api import ttt
from ttt_jax.inner_loop.fast_nets import GLU
from ttt_jax.inner_loop.presets import vittt_dwconv
from ttt_jax.inner_loop.spec import InnerLoop
from ttt_jax.layers.fast_weights import FastWeights
from ttt_jax.layers.flops import inner_loop_flops
from ttt_jax.layers.linear import Linear
from ttt_jax.layers.rotary_2d import rotate_2d
from ttt_jax.layers.sharded import sharded_ttt
from ttt_jax.sharding import devices_along, on_each_device
from ttt_kernels.glu_step import glu_step, glu_step_beside, kernel_problem


class VisionTTT(nnx.Module):
    """o = [ttt_gated(q1, k1, v1), ttt_local(q2, k2, v2)] W_o,  (q, k, v) = x W_qkv + b.

    The first `hidden_size` channels of q, k and v are heads of a gated fast network, the last
    `hidden_size / heads` the channels of a fast 3×3 depthwise convolution. Both learn from all
    tokens in one step and are then read at all tokens (ViTTT, arXiv 2512.01643, section 4).

    >>> from ttt_jax.inner_loop.presets import vittt_glu
    >>> mixer = VisionTTT(16, 2, spec=vittt_glu(), rotary=False, stddev=0.02, dtype="float32",
    ...                   mode="auto", rngs=nnx.Rngs(0))
    >>> mixer(jnp.ones((2, 3, 4, 16))).shape
    (2, 3, 4, 16)
    """

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        *,
        spec: InnerLoop,
        rotary: bool,
        stddev: float,
        dtype: str,
        mode: str,
        rngs: nnx.Rngs,
    ):
        """Makes projections and initial fast weights, normal; biases are zero.

        Args:
          hidden_size: width of the model.
          heads: heads of the gated branch; divides the width.
          spec: inner loop of the gated branch, from `presets.vittt_glu`.
          rotary: rotary positions of rows and columns on the gated branch's queries and keys.
          stddev: standard deviation of the initial weights, slow and fast.
          dtype: compute dtype; the fast weights are float32 whatever it is.
          mode: of `ttt_jax.ttt`: "auto", "recurrent" or "parallel"; or "kernel": the gated branch
            by `ttt_kernels.glu_step`, as "auto" has it where that is one kernel.
          rngs: random streams; "params" is used.
        """
        head_dim = hidden_size // heads
        self.heads, self.spec, self.mode = heads, spec, mode
        self.rotary, self.dtype = rotary, dtype
        joined = hidden_size + head_dim
        options = dict(stddev=stddev, dtype=dtype, bias=True, rngs=rngs)
        self.qkv = Linear(hidden_size, (3, joined), names=("embed", None, "heads"), **options)
        self.out = Linear(joined, hidden_size, names=("heads", "embed"), **options)
        self.gated = FastWeights(
            spec.fast_net, heads, head_dim, head_dim,
            low_rank=0, gain=stddev * head_dim**0.5, rngs=rngs,
        )  # fmt: skip
        local = vittt_dwconv(1, 1).fast_net
        self.local = FastWeights(local, head_dim, 1, 1, low_rank=0, gain=stddev * 3, rngs=rngs)

    def __call__(self, x):
        """Mixes the tokens of each image.

        Args:
          x: [batch, height, width, hidden_size].

        Returns:
          Same shape, in the compute dtype.
        """
        y, bias = self.branch(x)
        return y + bias.astype(y.dtype)

    def branch(self, x):
        """(the layer without its last bias, that bias), as `GeluMLP.branch`."""
        batch, height, width, hidden = x.shape
        with jax.named_scope("vision_ttt"):
            rows, lead = x.reshape(-1, hidden), (batch, height * width)
            local = vittt_dwconv(height, width)
            head = jax.ShapeDtypeStruct((*lead, 1, hidden // self.heads), self.dtype)
            if devices_along("heads") == 1 and self._takes_kernel(head):
                mixed = self._by_kernel(rows, x.shape, local)
            else:
                q, k, v = self.qkv.split(rows)
                if self.rotary:
                    q, k = (self._rotate(y, x.shape) for y in (q, k))
                mixed = self._by_parts(q, k, v, local, lead)
            y = self.out.product(mixed.reshape(batch * height * width, -1))
            return y.reshape(x.shape), self.out.bias[...]

    def _rotate(self, y, shape):
        """Rotary positions on the gated branch's channels."""
        hidden = shape[-1]
        turned = rotate_2d(y[:, :hidden].reshape(shape)).reshape(-1, hidden)
        return jnp.concatenate([turned, y[:, hidden:]], axis=-1)

    def _by_parts(self, q, k, v, local: InnerLoop, lead: tuple[int, int]):
        """Each branch by itself, on the devices that have its heads; [rows, hidden + head size].

        Cut apart as channels: as heads, the one more would leave no divisor for mesh.model, and all
        would be gathered.
        """
        hidden = q.shape[-1] // (self.heads + 1) * self.heads
        gated = [y[:, :hidden].reshape(*lead, self.heads, -1) for y in (q, k, v)]
        others = [y[:, hidden:].reshape(*lead, 1, -1) for y in (q, k, v)]
        made = self._gated(*gated), _local(local, self._plain_mode(), self.local(), *others)
        return jnp.concatenate([y.reshape(q.shape[0], -1) for y in made], axis=-1)

    def _gated(self, q, k, v):
        """The gated branch, [batch, tokens, heads, head size] in and out."""
        if not self._takes_kernel(q):
            return sharded_ttt(self.spec, self.gated(), q, k, v, mode=self.mode, rows="images")[0]
        q = k if self.spec.query == "key" else q

        def step(w1, w2, q, k, v):
            options = dict(scale=self.spec.loss.scale, clip=self.spec.clip)
            return glu_step({"w1": w1, "w2": w2}, q, k, v, **options)

        weights, tokens = ("heads", None, None), ("images", None, "heads", None)
        arrays = (*(self.gated()[name] for name in ("w1", "w2")), q, k, v)
        return on_each_device(step, arrays, [weights] * 2 + [tokens] * 3, tokens)

    def _plain_mode(self) -> str:
        """The mode of what has no kernel."""
        return "auto" if self.mode == "kernel" else self.mode

    def _by_kernel(self, rows, shape, local: InnerLoop):
        """Both, the gated one by a kernel which leaves the other head to the other.

        [batch * tokens, hidden] in, [batch, tokens, heads + 1, head size] out. q, k and v stay the
        one array that the product makes, and their bias is added by the kernel.
        """
        batch, height, width, hidden = shape
        heads = (3, self.heads + 1, hidden // self.heads)
        qkv, bias = self.qkv.product(rows), self.qkv.bias[...]
        if self.rotary or self.spec.query == "key":
            q, k, v = jnp.moveaxis(qkv + bias.astype(qkv.dtype), 1, 0)
            if self.rotary:
                q, k = (self._rotate(y, shape) for y in (q, k))
            if self.spec.query == "key":
                q = jnp.concatenate([k[:, :hidden], q[:, hidden:]], axis=-1)
            qkv, bias = jnp.stack([q, k, v], axis=1), jnp.zeros_like(bias)
        qkv = qkv.reshape(batch, height * width, *heads)
        beside = functools.partial(_local, local, "auto")
        weights, local_weights = self.gated(), self.local()

        def step(qkv, bias, *arrays):
            w1, w2, *rest = arrays
            options = dict(scale=self.spec.loss.scale, clip=self.spec.clip)
            rest = dict(zip(local_weights, rest, strict=True))
            return glu_step_beside({"w1": w1, "w2": w2}, qkv, bias, beside, rest, **options)

        # Every device takes all heads: their number with the other one has seldom a divisor.
        arrays = [bias.reshape(heads), weights["w1"], weights["w2"], *local_weights.values()]
        tokens = ("images", None, None, None)
        names = [(*tokens, None), *((None,) * array.ndim for array in arrays)]
        return on_each_device(step, (qkv, *arrays), names, tokens)

    def _takes_kernel(self, q) -> bool:
        """Whether the gated branch runs as `glu_step`: "auto" does where that is one kernel."""
        if self.mode != "auto":
            return self.mode == "kernel"
        full_step = type(self.spec.fast_net) is GLU and self.spec.update == "all"
        return full_step and self.spec.direction == "descent" and kernel_problem(q) is None

    def flops(self, height: int, width: int) -> float:
        """Matmul FLOPs of one image, forward.

        Args:
          height: rows of tokens.
          width: their columns.

        Returns:
          2 FLOPs a multiply-add of the projections and of the gated inner loop; the depthwise
          products of the local one are left out, as those of every depthwise convolution.
        """
        tokens = height * width
        hidden, _, joined = self.qkv.kernel.shape[-3:]
        head_dim = joined - hidden
        inner = inner_loop_flops(self.spec, self.heads, head_dim, head_dim, tokens)
        return tokens * (2 * 4 * hidden * joined + inner)


def _local(spec: InnerLoop, mode: str, weights, q, k, v):
    """The convolutional branch of one head's channels, [batch, tokens, 1, channels] in and out."""
    q, k, v = (jnp.swapaxes(y, 2, 3) for y in (q, k, v))  # one channel a head
    return jnp.swapaxes(ttt(spec, weights, q, k, v, mode=mode)[0], 2, 3)
