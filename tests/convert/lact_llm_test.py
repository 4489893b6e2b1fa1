"""LaCT-LLM's official weights: read, run, written back, bit for bit."""

import dataclasses
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny_run
from tests.golden_cases import Golden
from ttt_jax import checkpoint, convert, evaluate, sharding
from ttt_jax.config import Config
from ttt_jax.convert import files, lact_llm
from ttt_jax.data.tokenizers import load_tokenizer
from ttt_jax.generate import Sampling, generate_text
from ttt_jax.models import LactLLMConfig
from ttt_jax.models.lact_llm import preset
from ttt_jax.tasks import make_task
from ttt_jax.train_step import init_state, make_trainee

SIZE = dict(vocab_size=48, hidden_size=64, num_layers=2, num_attention_heads=4, low_rank=0)


def _official(folder):
    """The golden model as a Hugging Face folder."""
    case = Golden("lact_lm_a")
    tensors = {n.removeprefix("param/"): x for n, x in case.arrays.items() if n[:6] == "param/"}
    files.write_tensors(folder, tensors, case.hyper)
    return case, tensors


def test_official_folder_to_workdir_and_back(tmp_path):
    """The logits are the official ones, and the file that is written back is the same."""
    case, tensors = _official(tmp_path / "official")
    config = Config(model=preset("tiny", mode="recurrent"))
    count = convert.import_weights(config, tmp_path / "official", tmp_path / "run")
    assert count == sum(x.size for x in tensors.values())
    assert config.model.scan_layers and config.model.weight_norm == "pre"
    loaded, model, step = checkpoint.load_model(tmp_path / "run")
    assert (loaded.model, step) == (config.model, 0)
    logits = model(jnp.asarray(case.arrays["in/input_ids"], jnp.int32))
    case.check("f32/logits", logits)

    assert convert.export_weights(tmp_path / "run", tmp_path / "back") == len(tensors)
    first, second = (tmp_path / name / "model.safetensors" for name in ("official", "back"))
    assert first.read_bytes() == second.read_bytes()
    written = files.read_config(tmp_path / "back")
    assert lact_llm.config_fields(written) == lact_llm.config_fields(case.hyper)
    convert.export_weights(tmp_path / "run", tmp_path / "half.pth", dtype="bfloat16")
    for name, array in files.read_tensors(tmp_path / "half.pth").items():
        assert array.dtype == "bfloat16"
        assert np.array_equal(array, tensors[name].astype(array.dtype))


def test_a_converted_run_is_evaluated_continued_and_trained(tmp_path):
    """Low-rank weights with biases, as a file without a configuration; a fresh optimizer."""
    config = tiny_run.tiny_config(tiny_run.write_text(tmp_path / "text.jsonl"))
    config.model = dataclasses.replace(config.model, variant=0, qkv_bias=True, tie_embeddings=True)
    mesh = sharding.make_mesh()
    trainee = make_trainee(config.model, config.optimizer, config.train.steps, mesh)
    params = jax.tree.map(np.asarray, init_state(trainee, 1).params)
    files.write_tensors(tmp_path / "w.pt", convert.save(config.model, params, {}), None)
    convert.import_weights(config, tmp_path / "w.pt", tmp_path / "run")

    loaded = checkpoint.load_arrays(tmp_path / "run")
    tiny_run.assert_equal_states(loaded.params, params)
    step, result, _ = evaluate.evaluate_workdir(tmp_path / "run")
    assert step == 0 and np.isfinite(result.headline[1])
    model, how = loaded.model(), dict(max_new_tokens=2, sampling=Sampling(), seed=0)
    texts, _ = generate_text(model, load_tokenizer("bytes"), ["a "], **how)
    assert len(texts) == 1
    batches = make_task(config).batches("train")
    state = checkpoint.Checkpoints(tmp_path / "run").restore(trainee.abstract, batches)
    assert int(state.step) == 0
    tiny_run.assert_equal_states(next(batches), next(make_task(config).batches("train")))


@pytest.mark.parametrize(
    "change,words",
    [
        ({"hidden_size": 32}, ["'model.embeddings.weight' is [48, 64]", "embedding/table"]),
        ({"low_rank": 4}, ["'model.layers.0.attn.w0.w_left' ([2, 32, 4]) is missing"]),
        ({"num_layers": 1}, ["'model.layers.1.attn_norm.weight' ([64])", "no place"]),
        ({"qk_norm": False}, ["'model.layers.0.attn.q_norm.weight'", "no place"]),
        ({"variant": 2}, ["'model.layers.0.attn.lr_proj.weight' is [6, 64]", "[2, 64]"]),
    ],
)
def test_a_mismatch_names_the_tensor_and_both_shapes(change, words, tmp_path):
    _, tensors = _official(tmp_path / "official")
    model = preset("tiny", **SIZE | dict(qk_norm=True, intermediate_size=64) | change)
    with pytest.raises(ValueError) as error:
        convert.load(model, tensors)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
    "official,words",
    [
        ({"lr_dim": 4}, "lr_dim=4; only 1"),
        ({"ttt_loss_type": "l2"}, "ttt_loss_type='l2'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ],
)
def test_official_configurations_that_are_not_supported(official, words):
    with pytest.raises(ValueError, match=words):
        lact_llm.config_fields(official)


def test_what_has_no_official_form():
    with pytest.raises(ValueError, match="variant=6.*the official code has variant=0"):
        lact_llm.check(preset("tiny", variant=6))
    with pytest.raises(ValueError, match="is a int: official weights exist for HViTTTConfig"):
        convert.load(3, {})
    fields = lact_llm.config_fields(lact_llm.official_config(preset("760m")))
    assert LactLLMConfig(**fields) == preset("760m", intermediate_size=4096)


def test_the_program_writes_nothing_where_a_tensor_does_not_fit(tmp_path):
    case, tensors = _official(tmp_path / "official")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:5]
    os.remove(tmp_path / "official" / "model.safetensors")
    files.write_tensors(tmp_path / "official" / "model.safetensors", tensors, None)
    root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    done = subprocess.run(
        [sys.executable, "launch/convert.py", "--config=configs/lact_llm.py:tiny",
         f"--official={tmp_path / 'official'}", f"--workdir={tmp_path / 'run'}"],
        cwd=root, env=tiny_run.program_environment(), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith(
        f"error: --official={tmp_path / 'official'}: tensor 'model.norm.weight' is [5] in the "
        "file, but this model's norm/scale makes it"
    )
    assert sorted(os.listdir(tmp_path)) == ["official"]
    assert json.loads((tmp_path / "official" / "config.json").read_text()) == case.hyper
