"""One process writes into a folder, files are plain, and who may read them is for the umask to say."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from xorflow._files import LOCK, MOST_JSON, Lock, inside, read_bytes, read_json, write_bytes, write_json
from xorflow.errors import CheckpointError, DataError, in_one_line

HOLD = """
import sys, time
from pathlib import Path
from xorflow._files import Lock
lock = Lock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def test_the_second_is_told_who_has_a_folder_and_the_lock_dies_with_its_process(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process:
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(CheckpointError, match=rf"one process at a time .* process {process.pid} has"):
            Lock(tmp_path)
        process.send_signal(signal.SIGKILL)
    assert (tmp_path / LOCK).exists()
    Lock(tmp_path).release()
    assert not (tmp_path / LOCK).exists()


def test_within_a_process_too_a_folder_is_held_once(tmp_path: Path) -> None:
    lock = Lock(tmp_path / "new")
    with pytest.raises(CheckpointError, match="this process has"):
        Lock(tmp_path / "new")
    lock.release()
    assert not (tmp_path / "new").exists()  # it was made to be held, and nothing came into it


def test_a_link_in_the_place_of_a_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine", encoding="utf-8")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK).symlink_to(tmp_path / "mine")
    with pytest.raises(OSError):
        Lock(tmp_path / "run")
    assert (tmp_path / "mine").read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_the_umask_says_who_may_read_a_file(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        write_bytes(tmp_path / "file", b"content")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o666 & ~mask


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "a name too long", "large"])
def test_only_plain_files_of_a_bounded_size_are_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    elif kind == "large":
        path.write_bytes(bytes(11))
    else:
        path = tmp_path / ("n" * 300)
    with pytest.raises(OSError):
        read_bytes(path, 10)


def test_a_device_in_the_place_of_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match=r"it cannot be read: .*: it is no plain file"):
        read_json(tmp_path / "config.json", "it")
    with pytest.raises(CheckpointError, match="a link to another place"):
        inside(tmp_path, "config.json")


@pytest.mark.parametrize(
    "text", ['{"a": NaN}', '{"a": -Infinity}', '{"a": 1e999}', f'{{"a": {"9" * 5000}}}', "[" * 10**5]
)
def test_json_holds_finite_numbers(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"it is damaged: .* is no readable JSON"):
        read_json(tmp_path / "x.json", "it")


def test_json_is_written_so_that_it_can_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        write_json(tmp_path / "x.json", {"nll": float("nan")})
    with pytest.raises(CheckpointError, match="has at most"):
        write_json(tmp_path / "x.json", {"text": "a" * MOST_JSON})
    assert os.listdir(tmp_path) == []


def test_the_error_of_a_write_is_that_of_its_caller(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"could not write .*; choose another"):
        write_bytes(tmp_path / ("n" * 300), b"", "choose another", DataError)


@pytest.mark.parametrize(
    ("came", "shown"),
    [
        (f"got {'x' * 5000!r}; leave it out", 220),
        (f"got {'x y ' * 5000!r}; leave it out", 220),
        ("x" * 5000, 200),
        ("two words " * 5000, 2000),
    ],
)
def test_a_line_repeats_little_of_what_came(came: str, shown: int) -> None:
    assert len(in_one_line(came)) <= shown


def test_a_line_holds_nothing_that_a_terminal_obeys() -> None:
    assert in_one_line("a\nb\x1b[31m\x00\udcff") == "a b\\x1b[31m\\x00\\udcff"


def test_our_own_words_between_two_short_values_are_not_cut() -> None:
    ours = "is a rule that takes a whole line and more to say, " * 6
    assert in_one_line(f"run 'wide': {ours}in run 'deep' too") == f"run 'wide': {ours}in run 'deep' too"
