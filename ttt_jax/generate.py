"""Sampling from a language model with a carried state of constant size.

The prompt and the new tokens go through the same state: the fast weights go on learning past the
prompt, and the time and memory of a token do not depend on how many came before.
"""

import dataclasses
import functools
import os
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ttt_jax import workdirs
from ttt_jax.config import DataConfig

# Prompts are padded to a multiple of this, so that similar lengths share one compilation.
_PROMPT_MULTIPLE = 64
_programs = {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn from the logits.

    Attributes:
      temperature: divides the logits; 0 takes the most likely token.
      top_k: only the k most likely tokens can be drawn; 0 for all.
      top_p: only the fewest tokens whose probabilities add up to p can be drawn, after `top_k`;
        1 for all (Holtzman et al. 2020, eq. 2).

    >>> Sampling(top_p=0.0)
    Traceback (most recent call last):
    ...
    ValueError: top_p=0.0 must be in (0, 1]; 1 keeps all tokens
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self):
        """Raises ValueError for a value out of range."""
        if not self.temperature >= 0:
            raise ValueError(f"temperature={self.temperature} must be at least 0; 0 is greedy")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} must be at least 0; 0 keeps all tokens")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be in (0, 1]; 1 keeps all tokens")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """New tokens and what they took.

    Attributes:
      tokens: one int32 array a prompt: the new tokens, without the end-of-text token.
      compile_seconds: time to compile.
      prefill_seconds: time to read the prompts.
      decode_seconds: time to generate.
      steps: decoding steps run.
    """

    tokens: list[np.ndarray]
    compile_seconds: float
    prefill_seconds: float
    decode_seconds: float
    steps: int

    def summary(self) -> str:
        """One line of throughput.

        Returns:
          Tokens a second over all prompts, milliseconds a step, seconds to compile and prefill.
        """
        rows, seconds = len(self.tokens), max(self.decode_seconds, 1e-9)
        return (
            f"{rows} x {self.steps} tokens: {rows * self.steps / seconds:.1f} tokens/s, "
            f"{1e3 * seconds / max(self.steps, 1):.2f} ms a step "
            f"(prefill {self.prefill_seconds:.2f} s, compile {self.compile_seconds:.1f} s)"
        )


def sample(key, logits, sampling: Sampling):
    """Draws one token for each row.

    Args:
      key: a `jax.random` key.
      logits: [batch, vocabulary], float.
      sampling: how to draw.

    Returns:
      [batch], int32.

    >>> sample(jax.random.key(0), jnp.array([[0.0, 2.0, 1.0]]), Sampling(temperature=0.0))
    Array([1], dtype=int32)
    """
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits / sampling.temperature
    if sampling.top_k == 0 and sampling.top_p == 1:
        return jax.random.categorical(key, logits).astype(jnp.int32)
    order = jnp.argsort(-logits, axis=-1)
    ranked = jnp.take_along_axis(logits, order, axis=-1)
    if sampling.top_k:
        ranked = jnp.where(jnp.arange(ranked.shape[-1]) < sampling.top_k, ranked, -jnp.inf)
    if sampling.top_p < 1:
        probabilities = jax.nn.softmax(ranked, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        ranked = jnp.where(before < sampling.top_p, ranked, -jnp.inf)
    rank = jax.random.categorical(key, ranked)
    return jnp.take_along_axis(order, rank[:, None], axis=-1)[:, 0].astype(jnp.int32)


@jax.jit
def _prefill(model, tokens, segment_ids):
    """Logits after each row's last real token, and the cache."""
    cache = model.init_cache(tokens.shape[0])
    features, cache = model.decode_features(tokens, cache, segment_ids=segment_ids)
    last = jnp.sum(segment_ids >= 0, axis=1) - 1
    features = jnp.take_along_axis(features, last[:, None, None], axis=1)
    return model.logits(features)[:, 0], cache


@functools.partial(jax.jit, static_argnames=("steps", "sampling", "end_id", "vocab_size"))
def _decode_loop(model, logits, cache, key, *, steps, sampling, end_id, vocab_size):
    """Up to `steps` tokens [batch, steps], −1 after a row's end; and the steps run."""
    batch = logits.shape[0]
    out = jnp.full((batch, steps), -1, jnp.int32)

    def unfinished(carry):
        step, _, _, _, done = carry
        return (step < steps) & ~jnp.all(done)

    def body(carry):
        step, logits, cache, out, done = carry
        token = sample(jax.random.fold_in(key, step), logits[:, :vocab_size], sampling)
        done = done | (token == end_id)
        out = out.at[:, step].set(jnp.where(done, -1, token))
        segment_ids = jnp.where(done, -1, 0)[:, None]
        logits, cache = model.decode(token[:, None], cache, segment_ids=segment_ids)
        return step + 1, logits[:, 0], cache, out, done

    start = (jnp.int32(0), logits, cache, out, jnp.zeros(batch, bool))
    step, _, _, out, _ = jax.lax.while_loop(unfinished, body, start)
    return out, step


def _compiled(function, *arguments, **static):
    """The compiled program for such arguments, kept so that a second call finds it.

    Compiling apart from running is what makes the reported throughput that of the tokens alone.
    """
    leaves, structure = jax.tree.flatten(arguments)
    kinds = tuple((leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves)
    key = (function, structure, kinds, tuple(sorted(static.items())))
    if key not in _programs:
        _programs[key] = function.lower(*arguments, **static).compile()
    return _programs[key]


def generate(
    model,
    prompts: Sequence[np.ndarray],
    *,
    max_new_tokens: int,
    sampling: Sampling = Sampling(),
    seed: int = 0,
    end_id: int | None = None,
    vocab_size: int | None = None,
) -> Generation:
    """Continues every prompt.

    Args:
      model: a language model with `init_cache`, `decode` and `decode_features`.
      prompts: integer arrays of at least one token each, of any lengths.
      max_new_tokens: most tokens to add to a prompt, at least 1.
      sampling: how to draw.
      seed: of the random numbers.
      end_id: a row ends where this token is drawn; None for rows of full length.
      vocab_size: only ids below are drawn; None for the model's whole vocabulary.

    Returns:
      The new tokens and timings.

    Raises:
      ValueError: if a prompt is empty or holds an id that the model does not have, or the model
        cannot hold so many tokens; nothing has been computed then.

    >>> from ttt_jax.models import build, lact_llm
    >>> model = build(lact_llm.preset("tiny", variant=6))
    >>> result = generate(model, [np.array([1, 2, 3])], max_new_tokens=2)
    >>> result.tokens[0].shape
    (2,)
    """
    config = model.config
    vocab_size = config.vocab_size if vocab_size is None else vocab_size
    prompts = [np.asarray(prompt) for prompt in prompts]
    _check_prompts(prompts, max_new_tokens, config)
    longest = max(len(prompt) for prompt in prompts)
    width = -(-longest // _PROMPT_MULTIPLE) * _PROMPT_MULTIPLE
    tokens = np.zeros((len(prompts), width), np.int32)
    segment_ids = np.full(tokens.shape, -1, np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
        segment_ids[row, : len(prompt)] = 0

    arguments = (model, jnp.asarray(tokens), jnp.asarray(segment_ids))
    start = time.perf_counter()
    prefill = _compiled(_prefill, *arguments)
    compiled = time.perf_counter()
    logits, cache = jax.block_until_ready(prefill(*arguments))
    prefilled = time.perf_counter()
    arguments = (model, logits, cache, jax.random.key(seed))
    options = dict(steps=max_new_tokens, sampling=sampling, vocab_size=vocab_size)
    options["end_id"] = -1 if end_id is None else end_id
    loop = _compiled(_decode_loop, *arguments, **options)
    ready = time.perf_counter()
    out, steps = jax.block_until_ready(loop(*arguments))
    end = time.perf_counter()
    rows = [row[row >= 0] for row in np.asarray(out)]
    return Generation(
        tokens=rows,
        compile_seconds=compiled - start + ready - prefilled,
        prefill_seconds=prefilled - compiled,
        decode_seconds=end - ready,
        steps=int(steps),
    )


def generate_text(
    model,
    tokenizer,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    sampling: Sampling = Sampling(),
    seed: int = 0,
) -> tuple[list[str], Generation]:
    """Continues texts, each until the tokenizer's end-of-text token.

    Args:
      model: as in `generate`.
      tokenizer: from `ttt_jax.data.tokenizers.load_tokenizer`.
      prompts: texts; an empty one starts a new document.
      max_new_tokens: most tokens to add to a prompt.
      sampling: how to draw.
      seed: of the random numbers.

    Returns:
      (the new text of each prompt, the tokens and timings).

    Raises:
      ValueError: if the tokenizer has more ids than the model, or from `generate`.
    """
    if tokenizer.vocab_size > model.config.vocab_size:
        raise ValueError(
            f"tokenizer.vocab_size={tokenizer.vocab_size} is above the model's"
            f" vocab_size={model.config.vocab_size}; use the tokenizer of its training"
        )
    first = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    ids = [np.concatenate([first, tokenizer.encode(text)]).astype(np.int32) for text in prompts]
    result = generate(
        model,
        ids,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        seed=seed,
        end_id=tokenizer.eos_id,
        vocab_size=tokenizer.vocab_size,
    )
    return [tokenizer.decode(row) for row in result.tokens], result


def check_text_run(workdir: str | os.PathLike[str]) -> None:
    """Checks, before a model is loaded, that the run in `workdir` is one of text.

    Args:
      workdir: the run's folder; one without a run is left to what loads it.

    Raises:
      ValueError: the run is one of images or views.

    >>> check_text_run("/no/such/folder")
    """
    config = workdirs.read_config(workdir)
    if config is not None and not isinstance(config.data, DataConfig):
        raise ValueError(
            f"workdir={str(workdir)!r} holds a {type(config.model).__name__} trained on "
            f"{type(config.data).__name__}, and only text can be sampled; "
            "launch/evaluate.py --pictures=FOLDER draws what it predicts"
        )


def _check_prompts(prompts, max_new_tokens, config):
    if max_new_tokens < 1:
        raise ValueError(f"{max_new_tokens=} must be at least 1")
    if not prompts:
        raise ValueError("prompts is empty; give at least one prompt")
    for index, prompt in enumerate(prompts):
        if prompt.ndim != 1 or prompt.size == 0 or prompt.dtype.kind not in "iu":
            raise ValueError(
                f"prompts[{index}] has shape {prompt.shape} and dtype {prompt.dtype}; it must be a"
                " list of at least one token id: start an empty prompt with a begin-of-text token"
            )
        if prompt.min() < 0 or prompt.max() >= config.vocab_size:
            raise ValueError(
                f"prompts[{index}] holds ids from {prompt.min()} to {prompt.max()}; the model has"
                f" 0 to {config.vocab_size - 1}"
            )
    limit = config.decode_limit()
    longest = max(len(prompt) for prompt in prompts) + max_new_tokens
    if limit is not None and longest > limit:
        raise ValueError(
            f"the longest prompt and {max_new_tokens=} make {longest} tokens; this model without a"
            f" window holds max_decode_length={limit}: raise it in the configuration"
        )
