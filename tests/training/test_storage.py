"""Files that are there wholly or not at all, and tensors in parts."""

import ast
import errno
import hashlib
import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

import xorflow
from xorflow._files import read_json, write_bytes, write_json
from xorflow.errors import CheckpointError
from xorflow.training import checkpoint
from xorflow.training.checkpoint import load_tensors, save_tensors


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(checkpoint, "PART_BYTES", 1000)
    return 1000


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert torch.equal(found[name], tensor), name


MIXED = {
    "float": torch.randn(3, 4),
    "double": torch.randn(5, dtype=torch.float64),
    "half": torch.randn(2, 2).to(torch.bfloat16),
    "count": torch.tensor(7),
    "scalar": torch.tensor(0.5),
    "bytes": torch.arange(9, dtype=torch.uint8),
    "mask": torch.tensor([True, False]),
    "transposed": torch.arange(6.0).reshape(2, 3).T,
    "empty": torch.zeros(0, 3),
}


def test_round_trip_of_types_scalars_and_views(tmp_path: Path) -> None:
    save_tensors(tmp_path, "weights", MIXED)
    assert sorted(os.listdir(tmp_path)) == ["weights.index.json", "weights.safetensors"]
    assert_equal(load_tensors(tmp_path, "weights"), MIXED)


def test_round_trip_in_parts(tmp_path: Path, small_parts: int) -> None:
    """They are cut as any file may be: joined in the order of their names, they are one of safetensors."""
    tensors = MIXED | {"long": torch.randn(1777), "tall": torch.randn(700, 3)}
    save_tensors(tmp_path, "weights", tensors)
    parts = sorted(tmp_path.glob("weights.safetensors.*"))
    assert len(parts) > 3
    assert all(path.stat().st_size <= small_parts for path in parts)
    assert_equal(load_tensors(tmp_path, "weights"), tensors)
    assert_equal(safetensors.torch.load(b"".join(path.read_bytes() for path in parts)), tensors)


def test_a_file_stays_below_16_mib(tmp_path: Path) -> None:
    tensors = {"large": torch.arange(9 * 2**20, dtype=torch.float32).reshape(9, -1), "bias": torch.ones(3)}
    save_tensors(tmp_path, "weights", tensors)
    sizes = [path.stat().st_size for path in tmp_path.glob("weights.safetensors.*")]
    assert len(sizes) == 3
    assert max(sizes) < 16 * 2**20
    assert_equal(load_tensors(tmp_path, "weights"), tensors)


@pytest.mark.parametrize("length", [100, 300])
def test_a_tensor_with_two_names_is_saved_once(tmp_path: Path, small_parts: int, length: int) -> None:
    shared = torch.randn(length)
    tensors = {
        "a": shared,
        "b": shared,
        "half": shared[: length // 2],
        "none": shared[:0],
        "void": shared[:0],
    }
    save_tensors(tmp_path, "weights", tensors)
    size = sum(path.stat().st_size for path in tmp_path.glob("weights.safetensors*"))
    assert size < 1.5 * shared.numel() * 4 + 1000  # of the header
    assert_equal(load_tensors(tmp_path, "weights"), tensors)


def test_a_name_of_nothing_is_refused(tmp_path: Path) -> None:
    save_tensors(tmp_path, "weights", {"a": torch.ones(2)})
    edit_index(tmp_path, same={"b": "c"})
    with pytest.raises(CheckpointError, match="names tensors that are not there"):
        load_tensors(tmp_path, "weights")


def edit_index(folder: Path, **changes: object) -> None:
    path = folder / "weights.index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes), encoding="utf-8")


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = tmp_path / "file.bin"
    write_bytes(path, b"old")

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(
        CheckpointError, match=r"could not write .*file.bin: No space left on device; .*--resume"
    ):
        write_bytes(path, b"new")
    assert os.listdir(tmp_path) == ["file.bin"]
    assert path.read_bytes() == b"old"


def test_an_interrupted_write_leaves_nothing_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_bytes(tmp_path / "file.bin", b"new")
    assert os.listdir(tmp_path) == []


def test_json_round_trip_and_readable_by_others(tmp_path: Path) -> None:
    write_json(tmp_path / "a" / "b.json", {"x": [1, None, "ü"]})
    assert read_json(tmp_path / "a" / "b.json", "it") == {"x": [1, None, "ü"]}
    assert (tmp_path / "a" / "b.json").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "missing"), (b"{", "damaged"), (b"\xff\xfe", "damaged"), (b"[1]", "damaged")],
)
def test_bad_json_is_named_by_its_role(tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "x.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"the plan is {words}.*x\.json"):
        read_json(path, "the plan")


def test_damaged_weights_are_refused(tmp_path: Path, small_parts: int) -> None:
    save_tensors(tmp_path, "weights", {"a": torch.randn(600)})
    part = tmp_path / "weights.safetensors.00002"
    whole = part.read_bytes()
    part.write_bytes(whole[:-7])
    with pytest.raises(CheckpointError, match="weights are damaged"):
        load_tensors(tmp_path, "weights")
    part.unlink()
    with pytest.raises(CheckpointError, match="weights are missing"):
        load_tensors(tmp_path, "weights")


@pytest.mark.parametrize(
    "changes",
    [
        {"sha256": None}, {"sha256": {"weights.safetensors": 3}}, {"sha256": {}}, {"same": []}, {"same": {"b": []}},
    ],
    ids=str,
)  # fmt: skip
def test_a_damaged_index_is_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    save_tensors(tmp_path, "weights", {"a": torch.randn(600)})
    edit_index(tmp_path, **changes)
    with pytest.raises(CheckpointError, match="weights are damaged"):
        load_tensors(tmp_path, "weights")


@pytest.mark.parametrize(
    "name", ["/etc/hostname", "../weights.safetensors", "..", "", "a/b", "a\0b", "a\ud800"]
)
def test_files_of_weights_lie_in_the_folder(tmp_path: Path, name: str) -> None:
    run = tmp_path / "run"
    save_tensors(run, "weights", {"a": torch.ones(2)})
    (tmp_path / "weights.safetensors").write_bytes((run / "weights.safetensors").read_bytes())
    edit_index(run, sha256={name: "0" * 64})
    with pytest.raises(CheckpointError, match="named without folders"):
        load_tensors(run, "weights")


def test_an_index_of_other_tensors_is_refused(tmp_path: Path) -> None:
    save_tensors(tmp_path, "beginning", {"a": torch.zeros(2)})
    save_tensors(tmp_path, "weights", {"a": torch.ones(2)})
    (tmp_path / "beginning.index.json").rename(tmp_path / "weights.index.json")
    with pytest.raises(CheckpointError, match=r"names a file of other tensors, 'beginning\.safetensors'"):
        load_tensors(tmp_path, "weights")


@pytest.mark.parametrize("name", ["weights.safetensors", "weights.index.json"])
def test_a_link_out_of_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    run = tmp_path / "run"
    save_tensors(run, "weights", {"a": torch.ones(2)})
    (run / name).rename(tmp_path / "elsewhere")
    (run / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="a link to another place"):
        load_tensors(run, "weights")


@pytest.mark.parametrize("link", [os.link, os.symlink])
def test_one_file_is_no_two_parts(tmp_path: Path, link: Callable[[Path, Path], None]) -> None:
    save_tensors(tmp_path, "weights", {"a": torch.ones(2)})
    whole = tmp_path / "weights.safetensors"
    link(whole, tmp_path / "weights.safetensors.2")
    digest = hashlib.sha256(whole.read_bytes()).hexdigest()
    edit_index(tmp_path, sha256={"weights.safetensors": digest, "weights.safetensors.2": digest})
    with pytest.raises(CheckpointError, match=r"names one file twice, as weights\.safetensors\.2"):
        load_tensors(tmp_path, "weights")


def test_each_of_sixty_flipped_bits_is_found(tmp_path: Path) -> None:
    save_tensors(tmp_path, "weights", MIXED)
    path, chance = tmp_path / "weights.safetensors", random.Random(0)
    whole = path.read_bytes()
    for _ in range(60):
        damaged = bytearray(whole)
        damaged[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="is not the file that was written"):
            load_tensors(tmp_path, "weights")


def test_nothing_in_the_package_unpickles() -> None:
    """Neither pickle nor a function that uses it: torch.load, torch.save, or numpy with allow_pickle=True."""
    for path in Path(xorflow.__file__).parent.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {alias.name for alias in node.names} | {getattr(node, "module", None)}
                assert not names & {"pickle", "cactivepickle", "dill", "joblib", "shelve"}, path
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                assert ast.unparse(node.func) not in ("torch.load", "torch.save"), path
                pickled = [k for k in node.keywords if k.arg == "allow_pickle"]
                assert all(ast.unparse(k.value) == "False" for k in pickled), path
