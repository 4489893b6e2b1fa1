"""Sampling: greedy against the full forward, the distribution of the filters, and refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.small import forward, lact_config, small_model, tokens, transformer_config
from ttt_jax import config_files, workdirs
from ttt_jax import generate as generate_module
from ttt_jax.generate import Sampling, check_text_run, generate, generate_text, sample

GREEDY = Sampling(temperature=0.0)


@pytest.mark.parametrize("name", ["v0", "full"])
def test_greedy_tokens_are_the_argmax_of_the_full_forward(name):
    """Prompts off, on and past the chunk of 8 in one batch, 20 new tokens each."""
    config = {
        "v0": lact_config(variant=0, use_newton_schulz=False),
        "full": transformer_config(window_size=None, max_decode_length=64),
    }[name]
    model = small_model(config)
    lengths = (1, 3, 7, 8, 9, 24)
    prompts = [np.asarray(tokens(1, n, seed=n)[0]) for n in lengths]
    result = generate(model, prompts, max_new_tokens=20, sampling=GREEDY)
    assert result.steps == 20
    rows = np.zeros((6, 44), np.int32)
    for index, (prompt, new) in enumerate(zip(prompts, result.tokens, strict=True)):
        rows[index, : len(prompt) + 20] = np.concatenate([prompt, new])
    best = np.argmax(forward(model, jnp.asarray(rows)), axis=-1)
    for index, length in enumerate(lengths):
        np.testing.assert_array_equal(
            result.tokens[index], best[index, length - 1 : length + 19], f"prompt of {length}"
        )


def test_the_end_token_ends_a_row_and_not_the_others():
    model = small_model(lact_config(variant=6))
    prompts = [np.array([1, 2]), np.array([3])]
    free = generate(model, prompts, max_new_tokens=12, sampling=GREEDY)
    end = int(free.tokens[0][3])
    stopped = generate(model, prompts, max_new_tokens=12, sampling=GREEDY, end_id=end)
    for all_tokens, kept in zip(free.tokens, stopped.tokens, strict=True):
        ends = np.flatnonzero(all_tokens == end)
        np.testing.assert_array_equal(kept, all_tokens[: ends[0] if ends.size else 12])
    assert "tokens/s" in stopped.summary()


def test_seeds_and_vocabulary_of_a_sample():
    model = small_model(lact_config(variant=6))
    prompts = [np.array([1, 2, 3])] * 4
    first, again, other = (
        np.stack(generate(model, prompts, max_new_tokens=16, seed=seed, vocab_size=9).tokens)
        for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(first, again)
    programs = len(generate_module._programs)
    generate(model, prompts, max_new_tokens=16, seed=2, vocab_size=9)
    assert len(generate_module._programs) == programs  # nothing is compiled again
    assert np.any(first != other)
    assert np.any(first[0] != first[1])  # rows draw independently
    assert first.max() < 9


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(), [0, 1, 2, 3, 4]),
        (Sampling(top_k=2), [1, 3]),
        (Sampling(top_p=0.5), [1, 3]),
        (Sampling(top_p=0.4), [1]),
        (Sampling(top_p=0.95), [0, 1, 3, 4]),
        (Sampling(top_k=3, top_p=0.6), [1, 3]),
        (Sampling(temperature=0.5, top_k=4), [0, 1, 3, 4]),
        (GREEDY, [1]),
    ],
)
def test_filters_keep_the_right_tokens_at_the_right_odds(sampling, kept):
    """Frequencies of 8192 draws lie within five standard deviations of the truncated odds."""
    odds = np.array([0.16, 0.42, 0.02, 0.3, 0.1])
    logits = jnp.log(jnp.broadcast_to(jnp.asarray(odds, jnp.float32), (8192, 5)))
    drawn = np.bincount(sample(jax.random.key(0), logits, sampling), minlength=5) / 8192
    expected = np.zeros(5)
    expected[kept] = odds[kept] ** (1 / sampling.temperature if sampling.temperature else 1)
    expected /= expected.sum()
    deviation = np.sqrt(expected * (1 - expected) / 8192)
    assert np.all(np.abs(drawn - expected) <= 5 * deviation)


class Letters:
    """A tokenizer of "a" to "t", after begin and end of text."""

    vocab_size, bos_id, eos_id = 22, 0, 1

    def encode(self, text):
        return np.array([ord(c) - ord("a") + 2 for c in text], np.int32)

    def decode(self, ids):
        return "".join(chr(ord("a") + int(i) - 2) for i in ids)


def test_text_goes_through_the_tokenizer():
    model = small_model(lact_config(variant=6))
    texts, result = generate_text(model, Letters(), ["abc", ""], max_new_tokens=5, sampling=GREEDY)
    direct = generate(
        model,
        [np.array([0, 2, 3, 4]), np.array([0])],
        max_new_tokens=5,
        sampling=GREEDY,
        end_id=1,
        vocab_size=22,
    )
    assert texts == [Letters().decode(row) for row in direct.tokens]
    assert len(result.tokens) == 2


def test_refusals_come_before_any_work():
    model = small_model(transformer_config(window_size=None, max_decode_length=16))
    prompt = np.array([1])
    cases = [
        (dict(prompts=[], max_new_tokens=1), "at least one prompt"),
        (dict(prompts=[prompt], max_new_tokens=0), "max_new_tokens=0 must be at least 1"),
        (dict(prompts=[np.zeros(0, np.int32)], max_new_tokens=1), "at least one token id"),
        (dict(prompts=[np.array([0.5])], max_new_tokens=1), "dtype float64"),
        (dict(prompts=[np.array([23])], max_new_tokens=1), "the model has 0 to 22"),
        (dict(prompts=[prompt], max_new_tokens=16), "max_decode_length=16: raise it"),
    ]
    for arguments, message in cases:
        with pytest.raises(ValueError, match=message):
            generate(model, **arguments)
    Letters.vocab_size = 24
    with pytest.raises(ValueError, match="use the tokenizer of its training"):
        generate_text(model, Letters(), ["a"], max_new_tokens=1)
    Letters.vocab_size = 22
    for arguments in (dict(temperature=-1.0), dict(top_k=-1), dict(top_p=1.5)):
        with pytest.raises(ValueError, match=next(iter(arguments))):
            Sampling(**arguments)


def test_a_run_of_images_or_views_is_refused_before_it_is_loaded(tmp_path):
    for name, kinds in {
        "vittt:tiny": "ViTTTConfig trained on ImageConfig",
        "lact_nvs:tiny": "LactNVSConfig trained on ViewsConfig",
    }.items():
        workdirs.write_config(tmp_path, config_files.load(name))
        with pytest.raises(ValueError, match=f"{kinds}, and only text .*--pictures=FOLDER"):
            check_text_run(tmp_path)
    workdirs.write_config(tmp_path, config_files.load("lact_llm:tiny"))
    check_text_run(tmp_path)
