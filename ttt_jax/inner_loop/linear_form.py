"""``LinearAttentionForm``: the arrays of a linear attention that equals an inner loop."""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class LinearAttentionForm:
    """The arrays of a linear attention that equals an inner loop on given tokens.

    A source is one token in one inner step of one update (``sources`` of them, in that order).

    Attributes:
      q_hat: ``[batch, time, heads, features]``, ``φ(q_t)`` at the weights that token ``t`` reads.
      k_hat: ``[batch, sources, heads, features]``, ``rate · φ(k_i)`` at the weights that learn it.
      v_hat: ``[batch, copies, sources, heads, value_dim]``: source ``i`` adds ``k̂ᵀ v̂``.
        One copy (in its own update), or with momentum one for each update, 0 before its own.
      S0: initial state, ``[batch, heads, features, value_dim]``.
      A: factors on the key side, ``[reads, updates + 1, batch, heads, 1 or features]``: what is
        left after ``n`` updates of the initial state (index 0) and of update ``u`` (index
        ``u + 1``). ``None`` where nothing is forgotten.
      D: the same on the value side, ``[..., value_dim]``: weight norm, or ``None``.
      gate: output gate, ``[batch, time, heads, value_dim]``, or ``None``.
      reads: for each token how many updates it has seen, ``[time]`` int.
      update_of: for each source its update, ``[sources]`` int.
      token_of: for each source its token, ``[sources]`` int.
      updates: number of updates.
      static_kernel: whether ``φ`` is the same at all times (then ``q̂``, ``k̂`` need no inner loop).
    """

    q_hat: jax.Array
    k_hat: jax.Array
    v_hat: jax.Array
    S0: jax.Array
    A: jax.Array | None
    D: jax.Array | None
    gate: jax.Array | None
    reads: jax.Array
    update_of: jax.Array
    token_of: jax.Array
    updates: int
    static_kernel: bool

    def states(self) -> jax.Array:
        """``S_n`` by number of updates, ``[updates + 1, batch, heads, features, value_dim]``.

        ``S_n = A_{n,0} S₀ D_{n,0} + Σ_{u<n} A_{n,u+1} (Σ_i k̂_iᵀ v̂_{u,i}) D_{n,u+1}``.
        """
        updates = self.updates
        own = jnp.arange(updates)[:, None] == self.update_of
        values = self.v_hat if self.v_hat.shape[1] == updates else self.v_hat[:, :1]
        if values.shape[1] == 1 and updates != 1:
            added = jnp.einsum("ue,behf,behv->ubhfv", own * 1.0, self.k_hat, values[:, 0])
        else:
            added = jnp.einsum("behf,buehv->ubhfv", self.k_hat, values)
        terms = jnp.concatenate([self.S0[None], added])
        number = jnp.arange(updates + 1)
        seen = (number[:, None] >= number)[:, :, None, None, None, None]
        terms = jnp.where(seen, terms, 0)
        if self.A is not None:
            terms = terms * self.A[..., :, None]
        if self.D is not None:
            terms = terms * self.D[..., None, :]
        return jnp.sum(terms, 1)

    def apply(self) -> jax.Array:
        """``o_t = q̂_t S_{n(t)}`` (times the gate): ``[batch, time, heads, value_dim]``."""
        states = self.states()[self.reads]
        out = jnp.einsum("bthf,tbhfv->bthv", self.q_hat, states)
        return out if self.gate is None else out * self.gate

    def scores(self) -> jax.Array:
        """How much token ``t`` takes of source ``i``: ``q̂_t A_i k̂_iᵀ``, 0 where it has not seen it.

        Returns:
          ``[batch, heads, time, sources]``. Without momentum, weight norm and gate the output is
          ``scores @ v̂ + q̂ A₀ S₀``.
        """
        seen = self.update_of < self.reads[:, None]
        if self.A is None:
            mixing = jnp.einsum("bthf,behf->bhte", self.q_hat, self.k_hat)
        else:
            kept = self.A[self.reads][:, self.update_of + 1]  # [time, sources, batch, heads, .]
            kept = jnp.broadcast_to(kept, (*kept.shape[:4], self.q_hat.shape[-1]))
            mixing = jnp.einsum("bthf,tebhf,behf->bhte", self.q_hat, kept, self.k_hat)
        return jnp.where(seen, mixing, 0)

    def __str__(self) -> str:
        kernel = "static" if self.static_kernel else "trained: it changes with the updates"
        rows = [
            ("q̂", self.q_hat, f"φ(q), kernel {kernel}"),
            ("k̂", self.k_hat, "rate · φ(k), one row a source"),
            ("v̂", self.v_hat, "what each source adds" + self._copies()),
            ("S₀", self.S0, "initial state"),
            ("A", self.A, "forgetting, key side"),
            ("D", self.D, "weight norm, value side"),
            ("gate", self.gate, "output gate"),
        ]
        lines = ["linear attention: o_t = q̂_t (A S₀ D + Σ_i A_i k̂_iᵀ v̂_i D_i)"]
        for name, array, meaning in rows:
            shape = "none" if array is None else str(list(array.shape))
            lines.append(f"  {name:<5}{shape:<24}{meaning}")
        lines.append(f"  {self.updates} updates, {self.q_hat.shape[1]} tokens")
        return "\n".join(lines)

    def _copies(self) -> str:
        return "" if self.v_hat.shape[1] == 1 else ", by update (momentum)"


_STATIC = ["updates", "static_kernel"]
jax.tree_util.register_dataclass(
    LinearAttentionForm,
    [f.name for f in dataclasses.fields(LinearAttentionForm) if f.name not in _STATIC],
    meta_fields=_STATIC,
)
