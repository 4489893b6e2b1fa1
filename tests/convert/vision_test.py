"""Official weights of LaCT-NVS, ViTTT and H-ViTTT: files to parameters and back, bit for bit.

That the parameters compute what the official code does is shown by tests/models/*_golden_test.py,
which load them by the same tables.
"""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from tests.golden_cases import Golden
from ttt_jax import checkpoint, convert
from ttt_jax.config import Config, TrainConfig
from ttt_jax.config_images import ImageConfig
from ttt_jax.convert import files
from ttt_jax.models import HViTTTConfig, LactNVSConfig, ViTTTConfig, build

MODELS = {
    "nvs_model_a": LactNVSConfig(
        hidden_size=64,
        num_layers=2,
        num_attention_heads=2,
        num_fast_heads=2,
        patch_size=4,
        fast_hidden_multiple=1,
        mlp_multiple=2,
    ),
    "vittt_model_a": ViTTTConfig(
        num_classes=10,
        image_size=32,
        patch_size=8,
        hidden_size=48,
        num_layers=2,
        num_heads=3,
        mlp_ratio=2.0,
    ),
    "h_vittt_model_a": HViTTTConfig(
        num_classes=10, image_size=32, widths=(16, 24), depths=(1, 1), heads=(2, 3), mlp_ratio=2.0
    ),
}


def _tensors(name):
    arrays = Golden(name).arrays
    return {k.split("/", 1)[1]: x for k, x in arrays.items() if k.startswith(("param/", "buffer/"))}


@pytest.mark.parametrize("name", MODELS)
def test_official_file_to_parameters_and_back(name, tmp_path):
    """Into the scanned form and the other one; the file that is written back is the same."""
    tensors = _tensors(name)
    files.write_tensors(tmp_path / "official.pth", tensors, None)
    read = files.read_tensors(tmp_path / "official.pth")
    if name != "nvs_model_a":  # PyTorch's count of batches holds nothing that was learned
        read["norm.num_batches_tracked"] = np.zeros((), np.int64)
    for scan_layers in (True, False):
        config = dataclasses.replace(MODELS[name], scan_layers=scan_layers)
        params, buffers = convert.load(config, read)
        model = nnx.eval_shape(lambda config=config: build(config))
        for kind, found in ((nnx.Param, params), (nnx.BatchStat, buffers)):
            wanted = nnx.to_pure_dict(nnx.state(model, kind))
            assert jax.tree.structure(found) == jax.tree.structure(wanted)
            shapes = [[x.shape for x in jax.tree.leaves(tree)] for tree in (found, wanted)]
            assert shapes[0] == shapes[1]
        back = convert.save(config, params, buffers)
        assert set(back) == set(tensors)
        files.write_tensors(tmp_path / f"{scan_layers}.pth", {n: back[n] for n in tensors}, None)
        assert (tmp_path / f"{scan_layers}.pth").read_bytes() == (
            tmp_path / "official.pth"
        ).read_bytes()


def test_statistics_and_averages_go_through_a_workdir(tmp_path):
    """H-ViTTT's running statistics; a run that keeps an average of its parameters."""
    tensors = _tensors("h_vittt_model_a")
    files.write_tensors(tmp_path / "official.pth", tensors, None)
    config = Config(
        model=MODELS["h_vittt_model_a"], data=ImageConfig(), train=TrainConfig(ema_decay=0.9)
    )
    convert.import_weights(config, tmp_path / "official.pth", tmp_path / "run")
    loaded = checkpoint.load_arrays(tmp_path / "run")
    mean = tensors["patch_embed.conv.0.norm.running_mean"]
    assert np.array_equal(loaded.buffers["stem"]["norms"][0]["mean"], mean)
    convert.export_weights(tmp_path / "run", tmp_path / "back.pth")
    back = files.read_tensors(tmp_path / "back.pth")
    assert back.keys() == tensors.keys()
    assert all(np.array_equal(back[name], array) for name, array in tensors.items())
    with pytest.raises(ValueError, match="this model has no folder form"):
        convert.export_weights(tmp_path / "run", tmp_path / "folder")
    with pytest.raises(ValueError, match="run' is not empty"):
        convert.import_weights(config, tmp_path / "official.pth", tmp_path / "run")


@pytest.mark.parametrize("name", MODELS)
def test_mismatches(name, tmp_path):
    tensors, config = _tensors(name), MODELS[name]
    first = next(iter(tensors))
    with pytest.raises(ValueError, match=f"{first}' .* is missing"):
        convert.load(config, {n: x for n, x in tensors.items() if n != first})
    with pytest.raises(ValueError, match=rf"{first}' is \[1\] in the file"):
        convert.load(config, tensors | {first: np.zeros(1)})
    with pytest.raises(ValueError, match=r"'extra' \(\[2\]\) of the file has no place"):
        convert.load(config, tensors | {"extra": np.zeros(2)})
    with pytest.raises(ValueError, match="variant=2.*the official code has variant=0"):
        convert.save(dataclasses.replace(config, variant=2), {}, {})
