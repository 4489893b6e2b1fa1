"""Official file formats: what is written is read, damage is named, and nothing in a file is run."""

import collections
import io
import os
import pickle
import pickletools
import zipfile

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest

from tests import tiny_run
from ttt_jax import convert
from ttt_jax.convert import files, safetensors_format, torch_archive

_COMMON = [d for d in safetensors_format.DTYPES.values() if d in torch_archive.STORAGES.values()]
_ARRAYS = st.sampled_from(_COMMON).flatmap(
    lambda dtype: hnp.arrays(np.uint8, st.integers(0, 6).map(lambda n: (n, 2, dtype.itemsize))).map(
        lambda raw: (raw & 1 if dtype.kind == "b" else raw).view(dtype)[..., 0]
    )
)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
@hypothesis.given(tensors=st.dictionaries(st.text(min_size=1, max_size=5), _ARRAYS, max_size=4))
@hypothesis.settings(max_examples=20, deadline=None, derandomize=True)
def test_what_is_written_is_read(suffix, tensors, tmp_path_factory):
    """Any name, dtype and shape, bit for bit; equal tensors are equal files; no draft is left."""
    folder = tmp_path_factory.mktemp("files")
    for name in ("one", "two"):
        (folder / name).mkdir()
        files.write_tensors(folder / name / f"x{suffix}", tensors, None)
        assert os.listdir(folder / name) == [f"x{suffix}"]
    first, second = (folder / name / f"x{suffix}" for name in ("one", "two"))
    assert first.read_bytes() == second.read_bytes()
    found = files.read_tensors(first)
    assert found.keys() == tensors.keys()
    for name, array in tensors.items():
        assert found[name].dtype == array.dtype and found[name].shape == array.shape
        assert found[name].tobytes() == array.tobytes()


def test_safetensors_as_the_official_library_writes_them(tmp_path):
    """Its order, header and padding; the bytes are those of its version 0.8.0."""
    tensors = {
        "b": np.arange(3, dtype=np.float32),
        "a": np.arange(2, dtype=ml_dtypes.bfloat16),
        "c": np.ones((1, 2), np.float32),
        "é": np.zeros((0, 2)),
        "s": np.array(3),
    }
    safetensors_format.write(tmp_path / "x.safetensors", tensors)
    data = (tmp_path / "x.safetensors").read_bytes()
    header = (
        '{"__metadata__":{"format":"pt"},"s":{"dtype":"I64","shape":[],"data_offsets":[0,8]},'
        '"é":{"dtype":"F64","shape":[0,2],"data_offsets":[8,8]},'
        '"b":{"dtype":"F32","shape":[3],"data_offsets":[8,20]},'
        '"c":{"dtype":"F32","shape":[1,2],"data_offsets":[20,28]},'
        '"a":{"dtype":"BF16","shape":[2],"data_offsets":[28,32]}}'
    ).encode()
    assert data[8:].startswith(header)
    length = int.from_bytes(data[:8], "little")
    assert length % 8 == 0 and data[8 + len(header) : 8 + length].strip() == b""
    assert data[8 + length :] == b"".join(tensors[name].tobytes() for name in "sébca")


def test_a_written_archive_has_what_torch_load_takes(tmp_path):
    """Opcodes, names and entries that its loader for weights alone knows."""
    torch_archive.write(tmp_path / "x.pt", {"w": np.ones((2, 0, 3)), "b": np.float32([2**0.5])})
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        wanted = ["data.pkl", "byteorder", "data/0", "data/1", "version"]
        assert archive.namelist() == [f"archive/{name}" for name in wanted]
        found = list(pickletools.genops(archive.read("archive/data.pkl")))
    known = "PROTO EMPTY_DICT BINUNICODE GLOBAL EMPTY_TUPLE REDUCE MARK TUPLE BINPERSID BININT"
    known += " LONG1 NEWFALSE SETITEM SETITEMS STOP"
    assert {op.name for op, *_ in found} <= set(known.split())
    assert {argument for op, argument, _ in found if op.name == "GLOBAL"} == {
        "collections OrderedDict",
        "torch._utils _rebuild_tensor_v2",
        "torch DoubleStorage",
        "torch FloatStorage",
    }


class _Attack:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def _archive(path, content: bytes, storage: bytes = b"\0" * 8):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/data/0", storage)
    return path


def test_a_pickle_runs_nothing(tmp_path):
    """A named function is not called, and what it would have made is no tensor."""
    bomb = {"model": {"weight": _Attack(tmp_path / "made")}, "config": _Attack(tmp_path / "too")}
    path = _archive(tmp_path / "x.pth", pickle.dumps(bomb))
    with pytest.raises(ValueError, match="'weight' is a mkdir, not a tensor"):
        files.read_tensors(path)
    assert not (tmp_path / "made").exists() and not (tmp_path / "too").exists()


def test_other_parts_of_a_training_checkpoint_are_passed_over(tmp_path):
    """Classes of other packages beside the weights: a configuration, a NumPy scalar."""
    torch_archive.write(tmp_path / "x.pt", {"w": np.arange(2.0)})
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        content, storage = archive.read("archive/data.pkl"), archive.read("archive/data/0")
    extra = {"max_accuracy": np.float64(0.5), "optimizer": collections.Counter(a=1)}
    more = b"".join(
        b"X" + len(name).to_bytes(4, "little") + name.encode() + pickle.dumps(value, 2)[2:-1]
        for name, value in extra.items()
    )
    path = _archive(tmp_path / "y.pt", content[:-1] + b"(" + more + b"u.", storage)
    assert files.read_tensors(path)["w"].tolist() == [0.0, 1.0]


def _tensor_call(offset, size, stride):
    """A pickle of one tensor on storage 0 of two float32 numbers."""
    numbers = torch_archive._numbers
    return (
        b"\x80\x02}X\x01\0\0\0wctorch._utils\n_rebuild_tensor_v2\n(("
        + b"X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x02tQ"
        + torch_archive._number(offset) + numbers(size) + numbers(stride)
        + b"\x89ccollections\nOrderedDict\n)RtRs."
    )


@pytest.mark.parametrize(
    "offset,size,stride", [(1, (2,), (1,)), (0, (2, 2), (1, 1)), (-1, (1,), (1,)), (0, (2,), (-1,))]
)
def test_a_tensor_cannot_reach_outside_its_storage(tmp_path, offset, size, stride):
    good = _archive(tmp_path / "good.pt", _tensor_call(0, (2, 1), (1, 2)))
    assert files.read_tensors(good)["w"].shape == (2, 1)
    path = _archive(tmp_path / "x.pt", _tensor_call(offset, size, stride))
    with pytest.raises(ValueError, match="reaches element"):
        files.read_tensors(path)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
@hypothesis.given(place=st.floats(0, 1, exclude_max=True), value=st.integers(0, 255))
@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
def test_a_changed_byte_is_an_error_or_another_array(suffix, place, value, tmp_path_factory):
    """No other kind of error, and no more memory than the file has."""
    path = tmp_path_factory.mktemp("fuzz") / f"x{suffix}"
    files.write_tensors(path, {"w": np.arange(6.0).reshape(2, 3)}, None)
    data = bytearray(path.read_bytes())
    data[int(place * len(data))] = value
    path.write_bytes(data)
    try:
        found = files.read_tensors(path)
    except ValueError:
        return
    assert all(isinstance(array, np.ndarray) for array in found.values())


def test_damaged_files_are_named(tmp_path):
    names = ("x.safetensors", "x.pth")
    for name in names:
        files.write_tensors(tmp_path / name, {"w": np.arange(100.0)}, None)
        data = (tmp_path / name).read_bytes()
        for cut in (0, 7, 60, len(data) - 1):
            (tmp_path / name).write_bytes(data[:cut])
            with pytest.raises(ValueError, match=name):
                files.read_tensors(tmp_path / name)
    (tmp_path / "old.pt").write_bytes(pickle.dumps({"w": 1}))
    with pytest.raises(ValueError, match="PyTorch before 1.6"):
        files.read_tensors(tmp_path / "old.pt")
    _archive(tmp_path / "object.pt", pickle.dumps([1, 2]))
    with pytest.raises(ValueError, match="holds a list; a state dict is needed"):
        files.read_tensors(tmp_path / "object.pt")
    with pytest.raises(ValueError, match="x.pth exists"):
        files.write_tensors(tmp_path / "x.pth", {}, None)
    with pytest.raises(ValueError, match="neither model.safetensors"):
        files.read_tensors(tmp_path)
    with pytest.raises(ValueError, match="is complex128"):
        files.write_tensors(tmp_path / "z.pt", {"w": np.ones(1, complex)}, None)
    assert io.BytesIO(data).read(2) == b"PK" and not (tmp_path / "z.pt").exists()


def _index(folder, text):
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text(text)
    return folder


def test_what_is_missing_or_of_another_kind_is_named_with_a_way_out(tmp_path):
    """No bare error of the system, nor of JSON."""
    (tmp_path / "empty.pt").touch()
    (tmp_path / "empty.safetensors").touch()
    (tmp_path / "text").touch()
    (tmp_path / "folder.pt").mkdir()
    for path, words in (
        ("missing.pt", "missing.pt cannot be read .No such file or directory.; use a folder, or a"),
        ("missing.safetensors", "missing.safetensors cannot be read .No such file"),
        ("text/x.pt", "cannot be read .Not a directory."),
        ("missing", "missing: no such file or folder; use a folder, or a file that ends with"),
        ("text", "text: use a folder, or a file that ends with .safetensors"),
        ("empty.pt", "empty.pt is not a zip archive"),
        ("empty.safetensors", "no safetensors file, or it is cut short: 0 bytes"),
        ("folder.pt", "folder.pt holds neither model.safetensors nor pytorch_model.bin"),
        (_index(tmp_path / "a", "{"), "index.json cannot be read as JSON .*; fetch it again"),
        (_index(tmp_path / "b", "[]"), "index.json is a JSON list, no object; fetch it again"),
        (_index(tmp_path / "c", "{}"), 'index.json has no "weight_map"'),
        (
            _index(tmp_path / "d", '{"weight_map": {"w": "1.safetensors"}}'),
            "index.json names 1.safetensors, which is not there; fetch it too",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            files.read_tensors(tmp_path / path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json cannot be read as JSON .*; fetch it again"):
        files.read_config(tmp_path)
    for path in ("text/x.pt", "text/x.safetensors"):
        with pytest.raises(ValueError, match=r"x\.\w+ cannot be written \(.*\); give another name"):
            files.write_tensors(tmp_path / path, {}, None)


@pytest.mark.parametrize("path", ["new/folder/x.pt", "new/folder/x.safetensors", "new/folder"])
def test_missing_folders_are_made(path, tmp_path):
    files.write_tensors(tmp_path / path, {"w": np.ones(2)}, {})
    assert files.read_tensors(tmp_path / path)["w"].tolist() == [1.0, 1.0]


def test_the_flag_of_a_path_is_named(tmp_path):
    config = tiny_run.tiny_config(tmp_path / "none.jsonl")
    for official, workdir, words in (
        ("no.pt", "run", "--official=no.pt: no.pt cannot be read .No such file"),
        ("", "run", "--official=: has no name"),
        ("no.pt", tmp_path, "workdir='.*' is not empty"),
        ("no.pt", tmp_path / "file", "workdir='.*file' cannot be written to"),
        ("no.pt", "", "workdir='' has no name"),
    ):
        (tmp_path / "file").touch()
        with pytest.raises(ValueError, match=words):
            convert.import_weights(config, official, workdir)
    for official in ("", tmp_path / "file"):
        with pytest.raises(ValueError, match="--export=.*(has no name|exists)"):
            convert.export_weights(tmp_path, official)
