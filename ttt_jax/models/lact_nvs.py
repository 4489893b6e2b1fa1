"""LaCT-NVS: views of a scene in, new views out, through fast weights that hold the scene.

Source: LaCT (Zhang et al. 2025, arXiv 2505.23884), `lact_nvs` of github.com/a1600012888/LaCT; the
variants 0 to 6 are those of *Test-Time Training with KV Binding Is Secretly Linear Attention*.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx

from ttt_jax.inner_loop.spec import Span
from ttt_jax.inner_loop.updates import State
from ttt_jax.layers.flops import inner_loop_flops
from ttt_jax.layers.full_attention import FullAttention
from ttt_jax.layers.gelu_mlp import GeluMLP
from ttt_jax.layers.layer_norm import LayerNorm
from ttt_jax.layers.linear import Linear, by_rows
from ttt_jax.layers.rays import Cameras, check_patches, patchify, pluecker_rays, unpatchify
from ttt_jax.layers.residual import add_and_norm
from ttt_jax.layers.rms_norm import at_least_float32
from ttt_jax.layers.scene_parts import cut_views, join_views, view_parts
from ttt_jax.layers.scheduled_ttt import ScheduledTTT
from ttt_jax.models.lact_nvs_config import PRESETS, LactNVSConfig, preset
from ttt_jax.models.layer_stack import STACK, draw_layers
from ttt_jax.sharding import constrain

_CHANNELS = 12  # of an input pixel: o, d, o × d, and the colour
_PARTS = 3  # residual parts of a block

__all__ = ["PRESETS", "Cameras", "LactNVS", "LactNVSConfig", "ViewBlock", "preset"]


class ViewBlock(nnx.Module):
    """x + attention within a view, then x + TTT over all views, then x + MLP; each on norm(x)."""

    def __init__(self, config: LactNVSConfig, rngs: nnx.Rngs):
        """Makes a block.

        Args:
          config: the model's configuration.
          rngs: random streams; "params" is used.
        """
        size, dtype = config.hidden_size, config.dtype
        stddev = config.initializer_range
        options = dict(stddev=stddev, dtype=dtype, rngs=rngs)
        options["out_stddev"] = stddev / math.sqrt(_PARTS * config.num_layers)

        def norm():
            return LayerNorm(size, epsilon=config.norm_epsilon)

        self.attention_norm, self.ttt_norm, self.mlp_norm = norm(), norm(), norm()
        self.attention = FullAttention(
            size,
            config.num_attention_heads,
            qk_norm=config.qk_norm,
            implementation=config.attention_implementation,
            **options,
        )
        self.ttt = ScheduledTTT(
            size,
            config.num_fast_heads,
            config.inner_loop([Span(0, 1, True, True)]),
            hidden_multiple=config.fast_hidden_multiple,
            base_rate=config.base_rate,
            mode=config.mode,
            **options,
        )
        self.mlp = GeluMLP(size, int(size * config.mlp_multiple), **options)

    def __call__(self, x, state: State | None, spans: list[Span], parts: int = 1):
        """Runs the block.

        Args:
          x: [batch, views, tokens, hidden], rows cut into parts as by `cut_views`.
          state: of the fast weights, or None for the initial ones.
          spans: of the TTT layer, in tokens counted over all views of a row.
          parts: parts of a scene, on the devices along mesh.seq.

        Returns:
          ([batch, views, tokens, hidden], the state after the spans).
        """
        batch, views, time, size = x.shape
        names = _names(parts)
        rows = names[0]
        x, y = add_and_norm(x, self.attention_norm, rows=rows)
        y = self.attention(y.reshape(batch * views, time, size), rows)
        x, y = add_and_norm(x, self.ttt_norm, branch=y.reshape(x.shape), rows=rows)
        y, state = self.ttt(y.reshape(batch, -1, size), spans, state, parts)
        x, y = add_and_norm(x, self.mlp_norm, branch=y.reshape(x.shape), rows=rows)
        return constrain(x + self.mlp(y, rows), names), state


class LactNVS(nnx.Module):
    """The view-synthesis model, in one pass or in two stages with equal results.

    Calling it updates each layer's fast weights once on the tokens of the input views and applies
    them to all tokens. `reconstruct` returns the updated weights, the scene; `render` reads them
    at any number of new cameras, at a cost that does not depend on the number of input views.

    >>> images = jnp.ones((1, 2, 8, 8, 3))
    >>> cameras = Cameras(jnp.ones((1, 2, 4)), jnp.ones((1, 2, 4, 4)))
    >>> call = lambda: LactNVS(preset("tiny"), nnx.Rngs(0))(images, cameras, cameras)
    >>> jax.eval_shape(call).shape
    (1, 2, 8, 8, 3)
    """

    def __init__(self, config: LactNVSConfig, rngs: nnx.Rngs):
        """Makes the model.

        Args:
          config: the configuration.
          rngs: random streams; "params" is used.

        Raises:
          ValueError: from `config.validate()`.
        """
        config.validate()
        self.config = dataclasses.replace(config)
        size, pixels = config.hidden_size, config.patch_size**2
        options = dict(stddev=config.initializer_range, dtype=config.dtype, rngs=rngs)
        self.embed = Linear(_CHANNELS * pixels, size, names=(None, "embed"), **options)
        self.embed_norm = LayerNorm(size, epsilon=config.norm_epsilon)

        def make_block(key):
            return ViewBlock(config, nnx.Rngs(params=key))

        keys = jax.random.split(rngs.params(), config.num_layers)
        self.layers = draw_layers(make_block, keys, scan=config.scan_layers)
        self.norm = LayerNorm(size, epsilon=config.norm_epsilon)
        self.head = Linear(size, 3 * pixels, names=("embed", None), **options)

    def __call__(self, images, cameras: Cameras, target_cameras: Cameras):
        """Renders the target views in one pass over the tokens of all views.

        Args:
          images: [batch, views, height, width, 3] in [0, 1].
          cameras: [batch, views], of the images.
          target_cameras: [batch, target views], in the same unit and frame, for images of the
            same size.

        Returns:
          [batch, target views, height, width, 3] in [0, 1], float32 (float64 for float64).

        Raises:
          ValueError: if shapes do not fit, or the patch size does not divide the image.
        """
        _check_views(images, cameras)
        parts = view_parts(images.shape[1], target_cameras.poses.shape[1])
        given = self._patches(cameras, images, parts=parts)
        asked = self._patches(target_cameras, None, *images.shape[2:4], parts=parts)
        x = self._tokens(jnp.concatenate([given, asked], 1), parts)
        inputs, total = (math.prod(y.shape[1:3]) for y in (given, x))
        spans = [Span(0, inputs, True, False), Span(0, total, False, True)]
        x, _ = self._run(x, None, spans, parts, keep_states=False)
        return self._images(x[:, given.shape[1] :], *images.shape[2:4], parts)

    def reconstruct(self, images, cameras: Cameras) -> State:
        """Reads the input views into fast weights.

        Args:
          images: [batch, views, height, width, 3] in [0, 1].
          cameras: [batch, views].

        Returns:
          The states of the layers, float32, stacked along a first axis when the layers are
          scanned, else a tuple.

        Raises:
          ValueError: as in `__call__`.
        """
        _check_views(images, cameras)
        parts = view_parts(images.shape[1])
        x = self._tokens(self._patches(cameras, images, parts=parts), parts)
        return self._run(x, None, [Span(0, x.shape[1] * x.shape[2], True, True)], parts)[1]

    def render(self, states: State, target_cameras: Cameras, height: int, width: int):
        """Renders new views of a reconstructed scene.

        Args:
          states: of `reconstruct`.
          target_cameras: [batch, target views].
          height: rows of the images, as in the input views.
          width: columns.

        Returns:
          [batch, target views, height, width, 3] in [0, 1], float32 (float64 for float64).

        Raises:
          ValueError: if shapes do not fit, or the patch size does not divide the image.
        """
        parts = view_parts(target_cameras.poses.shape[1])
        x = self._tokens(self._patches(target_cameras, None, height, width, parts), parts)
        x, _ = self._run(x, states, [Span(0, x.shape[1] * x.shape[2], False, True)], parts)
        return self._images(x, height, width, parts)

    def num_params(self) -> int:
        """Number of parameters.

        Returns:
          The sum of the sizes of all `nnx.Param`s.
        """
        leaves = jax.tree.leaves(nnx.state(self, nnx.Param))
        return sum(math.prod(leaf.shape) for leaf in leaves)

    def flops_per_scene(self, views: int, target_views: int, height: int, width: int) -> float:
        """Matmul FLOPs of a forward pass over one scene; training costs three times as much.

        Args:
          views: input views.
          target_views: target views.
          height: rows of an image.
          width: columns.

        Returns:
          2 FLOPs a multiply-add: projections, attention within views, feed-forward, embedding,
          head, and the inner loop (one update on the input tokens, applied to all).

        Raises:
          ValueError: if the patch size does not divide the image.
        """
        config = self.config
        check_patches(height, width, config.patch_size)
        view = (height // config.patch_size) * (width // config.patch_size)
        tokens, inputs = (views + target_views) * view, views * view
        size, heads = config.hidden_size, config.num_fast_heads
        spec = dataclasses.replace(
            config.inner_loop([Span(0, 1, True, True)]), order="update_then_apply", chunk_size=None
        )
        dims = heads, size // heads, int(size // heads * config.fast_hidden_multiple)
        inner = inputs * inner_loop_flops(spec, *dims, inputs)
        apply = spec.fast_net.shapes(*dims[1:2] * 2, dims[2]).values()
        inner += (tokens - inputs) * 2 * heads * sum(math.prod(shape) for shape in apply)
        rates = len(spec.trained) * heads if spec.rate == "per_token" else 0
        every = 6 * size + 2 * int(size * config.mlp_multiple)  # columns of weights of all tokens
        learnt = 2 * size + rates  # keys, values and rates, of the input tokens
        layer = 2 * size * (tokens * every + inputs * learnt) + 4 * tokens * view * size + inner
        pixels = config.patch_size**2
        ends = 2 * size * pixels * (_CHANNELS * tokens + 3 * (tokens - inputs))
        return float(config.num_layers * layer + ends)

    def _patches(self, cameras: Cameras, images, height: int = 0, width: int = 0, parts: int = 1):
        """[parts · batch, views / parts, tokens, numbers] of views with, or without, colours."""
        if images is not None:
            height, width = images.shape[2:4]
        check_patches(height, width, self.config.patch_size)
        cameras, images = jax.tree.map(lambda x: cut_views(x, parts), (cameras, images))
        with jax.named_scope("embed"):
            rays = pluecker_rays(cameras, height, width)
            colour = jnp.zeros_like(rays[..., :3])
            if images is not None:
                colour = images.astype(rays.dtype) * 2 - 1
            return patchify(jnp.concatenate([rays, colour], -1), self.config.patch_size)

    def _tokens(self, patches, parts: int):
        """[parts · batch, views / parts, tokens, hidden] of patches."""
        with jax.named_scope("embed"):
            return constrain(self.embed_norm(by_rows(self.embed, patches)), _names(parts))

    def _images(self, x, height: int, width: int, parts: int):
        """[batch, target views, height, width, 3]."""
        with jax.named_scope("head"):
            dtype = at_least_float32(self.config.dtype)
            x = jax.nn.sigmoid(by_rows(self.head, self.norm(x), out_dtype=dtype))
            return join_views(unpatchify(x, self.config.patch_size, height, width), parts)

    def _run(self, x, states, spans: list[Span], parts: int, keep_states: bool = True):
        """All blocks; returns x and the layers' states."""

        def body(x, layer, state):
            x, state = layer(x, state, spans, parts)
            return x, state if keep_states else None

        if self.config.remat != "none":
            policies = jax.checkpoint_policies
            keep = {"full": None, "dots": policies.dots_with_no_batch_dims_saveable}
            body = nnx.remat(body, policy=keep[self.config.remat], graph=False)
        if self.config.scan_layers:
            axes = dict(in_axes=(nnx.Carry, 0, 0), out_axes=(nnx.Carry, 0), graph=False)
            return nnx.scan(body, transform_metadata=STACK, **axes)(x, self.layers, states)
        found = []
        for index, layer in enumerate(self.layers):
            x, state = body(x, layer, None if states is None else states[index])
            found.append(state)
        return x, tuple(found)


def _names(parts: int) -> tuple[str | None, ...]:
    """Logical axes of [rows, views, tokens, hidden], whose rows may be parts of scenes."""
    return ("parts" if parts > 1 else "batch", None, None, None)


def _check_views(images, cameras: Cameras) -> None:
    """Raises ValueError unless images and cameras are as many views of as many scenes."""
    if images.ndim != 5 or images.shape[-1] != 3 or images.shape[1] < 1:
        raise ValueError(
            f"images has shape {images.shape}; it must be [batch, views, height, width, 3] with at"
            " least one view"
        )
    lead = images.shape[:2]
    if cameras.intrinsics.shape != (*lead, 4) or cameras.poses.shape != (*lead, 4, 4):
        raise ValueError(
            f"cameras have the shapes {cameras.intrinsics.shape} and {cameras.poses.shape}; for"
            f" images of shape {images.shape} they must be {(*lead, 4)} and {(*lead, 4, 4)}"
        )
