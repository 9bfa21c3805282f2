"""Checksums of files, and which file of a folder is the newest undamaged one."""

import hashlib
import os
import random
import subprocess
import zipfile

import pytest

from tfdist.training import checkpoint_files
from tfdist.training.checkpoint_files import damage, newest_checkpoint, newest_first


def archive(path, text="weights"):
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("model.weights.h5", text)
    return path


def listed(path):
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    path.with_name(path.name + ".sha256").write_text(f"{digest}  {path.name}\n")
    return path


@pytest.mark.parametrize(
    ("times", "order"),
    [
        ({}, []),
        ({"a.keras": 1}, ["a.keras"]),
        ({"9.keras": 3, "10.keras": 2, "8.keras": 9}, "10.keras 9.keras 8.keras"),
        ({"r3/s-1": 1, "r3/s-02": 0}, "r3/s-02 r3/s-1"),  # the same 3 in both
        # Two numbers differ, of which one may be a loss: the times count.
        ({"1-0.9": 1, "2-0.8": 3, "3-0.7": 2}, "2-0.8 3-0.7 1-0.9"),
        ({"best.keras": 2, "step-7.keras": 1}, "best.keras step-7.keras"),
        # One number differs, which is part of a loss.
        ({"best-0.5123": 1, "best-0.4981": 2}, "best-0.4981 best-0.5123"),
        ({"best-2.5.keras": 1, "best-1.5.keras": 2}, "best-1.5.keras best-2.5.keras"),
        ({"1e-05": 1, "1e-06": 2}, "1e-06 1e-05"),
        ({"3e-05": 1, "2e-05": 2}, "2e-05 3e-05"),
        ({"v1.0-s9": 2, "v1.0-s10": 1}, "v1.0-s10 v1.0-s9"),
        ({"9.h5": 2, "10.h5": 1}, "10.h5 9.h5"),
        ({"a-none": 1, "a-7": 1}, "a-none a-7"),  # the same time: by name
    ],
)
def test_the_order_follows_a_single_number_or_the_time(times, order):
    assert newest_first(times) == (order.split() if isinstance(order, str) else order)


def test_damaged_files_are_skipped_with_the_reason(tmp_path, caplog):
    files = [listed(archive(tmp_path / f"{i}.keras", f"{i}")) for i in (8, 9, 10)]
    assert newest_checkpoint(tmp_path) == files[2]
    assert caplog.messages == []
    files[2].write_bytes(files[2].read_bytes()[:-1])
    files[1].with_name("9.keras.sha256").write_bytes(b"\xff")
    assert newest_checkpoint(tmp_path / "*.keras*") == files[0]
    assert [m.partition(": its SHA-256 is ")[0] for m in caplog.messages] == [
        f"Skipped the checkpoint {files[2]}",
        f"Skipped the checkpoint {files[1]}",
    ]
    files[0].unlink()
    with pytest.raises(ValueError, match=r"10\.keras: .*9\.keras: .* an older check"):
        newest_checkpoint(tmp_path)


def test_a_folder_without_checkpoints_is_an_error(tmp_path):
    (tmp_path / "1.keras.sha256").write_text("of a save that was killed")
    (tmp_path / ".partial-01234567-1.keras").write_text("of the same save")
    for path in (tmp_path, tmp_path / "*", tmp_path / "1.keras"):
        with pytest.raises(FileNotFoundError, match="There is no checkpoint"):
            newest_checkpoint(path)


def test_a_file_that_is_removed_meanwhile_is_no_error(tmp_path, monkeypatch):
    old = archive(tmp_path / "1.keras")
    gone = str(tmp_path / "2.keras")
    found = [gone, str(old)]
    monkeypatch.setattr(checkpoint_files, "_candidates", lambda path: found)
    assert newest_checkpoint(tmp_path) == old


def test_a_name_with_the_characters_of_a_pattern_is_a_name(tmp_path):
    folder = tmp_path / "run[1]"
    folder.mkdir()
    file = archive(folder / "[a]*.keras")
    assert newest_checkpoint(file) == newest_checkpoint(folder) == file


@pytest.mark.parametrize("name", ["m.keras", "m.weights.h5"])
def test_a_file_of_keras_alone_is_not_damaged(name, tmp_path):
    assert damage(archive(tmp_path / name)) is None


def test_every_flipped_bit_is_found(tmp_path):
    draw = random.Random(1)
    file = listed(archive(tmp_path / "m.keras"))
    whole = file.read_bytes()
    for _ in range(50):
        place = draw.randrange(8 * len(whole))
        flipped = bytearray(whole)
        flipped[place // 8] ^= 1 << place % 8
        file.write_bytes(flipped)
        assert damage(file), place


@pytest.mark.parametrize("cut", [0, 1, 40, -1])
def test_a_truncated_file_without_a_checksum_is_damaged(cut, tmp_path):
    file = archive(tmp_path / "m.keras")
    file.write_bytes(file.read_bytes()[:cut])
    assert "is not a complete .keras file" in damage(file)


def test_wrong_bytes_in_an_archive_without_a_checksum_are_found(tmp_path):
    file = archive(tmp_path / "m.keras")
    file.write_bytes(file.read_bytes().replace(b"weights", b"weighty", 2))
    assert damage(file)


def test_a_file_that_cannot_be_read_is_skipped(tmp_path):
    (tmp_path / "2.keras").mkdir()
    old = archive(tmp_path / "1.keras")
    assert "cannot be read" in damage(tmp_path / "2.keras")
    assert newest_checkpoint(tmp_path) == old


def test_sha256sum_checks_the_file(tmp_path):
    file = listed(archive(tmp_path / "m.keras"))
    line = f"{checkpoint_files.sha256_of(file)}  m.keras\n"
    checksum = checkpoint_files.checksum_file(file)
    assert checksum.read_text() == line
    command = ["sha256sum", "-c", checksum.name]  # noqa: S607
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "m.keras: OK\n")


def test_the_checksum_of_a_link_is_beside_the_file(tmp_path):
    (tmp_path / "disk").mkdir()
    file = listed(archive(tmp_path / "disk" / "m.keras"))
    os.symlink(file, tmp_path / "latest.keras")
    assert damage(tmp_path / "latest.keras") is None
    file.write_bytes(b"x")
    assert damage(tmp_path / "latest.keras")
