from __future__ import annotations

import hashlib
import io
import os
import zipfile
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from smg_wire import tokenizer_bundle
from smg_wire.errors import FailedPrecondition
from smg_wire.tokenizer_bundle import CHUNK_BYTES, Bundle, BundleError, check, pack, unpack

if TYPE_CHECKING:
    from pathlib import Path

TOKENIZER = {
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b'{"a": 1}',
    "config.json": b"{}",
    "generation_config.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "additional_chat_templates/tools.jinja": b"{{ tools }}",
    "o200k.tiktoken": b"aGk= 0",
    "tiktoken.model": b"aGk= 0",
}
OTHERS = {
    "model.safetensors": b"weights",
    "modeling_evil.py": b"import os",
    "README.md": b"words",
    ".git/config": b"",
    "sub/tokenizer.json": b"{}",
}


def write(directory: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return directory


def zipped(entries: dict[str, bytes]) -> Bundle:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    data = buffer.getvalue()
    return Bundle(data, hashlib.sha256(data).hexdigest())


def test_what_is_packed_comes_out_the_same_and_nothing_else_does(tmp_path: Path) -> None:
    bundle = pack(write(tmp_path / "model", {**TOKENIZER, **OTHERS}))
    target = tmp_path / "unpacked"
    paths = unpack(check(bundle.data, bundle.sha256), target)
    found = {path.relative_to(target).as_posix(): path.read_bytes() for path in paths}
    assert found == TOKENIZER


def test_the_same_files_have_the_same_hash_whatever_their_times(tmp_path: Path) -> None:
    first = write(tmp_path / "a", TOKENIZER)
    second = write(tmp_path / "b", dict(reversed(TOKENIZER.items())))
    for path in second.rglob("*"):
        os.utime(path, (1_000_000_000, 1_000_000_000))
        path.chmod(0o700)
    assert pack(first) == pack(second)


def test_another_byte_has_another_hash(tmp_path: Path) -> None:
    directory = write(tmp_path, TOKENIZER)
    before = pack(directory).sha256
    (directory / "tokenizer.json").write_bytes(b"[]")
    assert pack(directory).sha256 != before


def test_the_last_chunk_alone_carries_the_hash() -> None:
    data = os.urandom(2 * CHUNK_BYTES + 1)
    chunks = list(Bundle(data, "f00d").chunks())
    assert [len(part) for part, _ in chunks] == [CHUNK_BYTES, CHUNK_BYTES, 1]
    assert [sha for _, sha in chunks] == ["", "", "f00d"]
    assert b"".join(part for part, _ in chunks) == data


def test_a_bundle_of_whole_chunks_ends_with_a_full_one() -> None:
    chunks = list(Bundle(bytes(2 * CHUNK_BYTES), "f00d").chunks())
    assert [(len(part), sha) for part, sha in chunks] == [(CHUNK_BYTES, ""), (CHUNK_BYTES, "f00d")]


def test_a_directory_that_is_none_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(FailedPrecondition, match="nowhere"):
        pack(tmp_path / "nowhere")


def test_a_directory_without_a_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FailedPrecondition, match="no tokenizer"):
        pack(write(tmp_path, {"config.json": b"{}"}))


def test_a_tokenizer_beyond_the_limits_is_not_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, TOKENIZER)
    total = sum(map(len, TOKENIZER.values()))
    monkeypatch.setattr(tokenizer_bundle, "MAX_UNPACKED_BYTES", total)
    pack(tmp_path)
    monkeypatch.setattr(tokenizer_bundle, "MAX_UNPACKED_BYTES", total - 1)
    with pytest.raises(FailedPrecondition, match=str(total - 1)):
        pack(tmp_path)


def test_a_damaged_bundle_is_refused_with_both_hashes() -> None:
    bundle = zipped({"tokenizer.json": b"{}"})
    with pytest.raises(BundleError, match=bundle.sha256):
        check(bundle.data + b"x", bundle.sha256)


def test_a_bundle_without_a_hash_is_refused() -> None:
    with pytest.raises(BundleError, match="without"):
        check(b"", "")


def test_the_case_of_a_hash_does_not_matter() -> None:
    bundle = zipped({"tokenizer.json": b"{}"})
    assert check(bundle.data, bundle.sha256.upper()) == bundle


def test_a_bundle_above_the_size_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = zipped({"tokenizer.json": b"{}"})
    monkeypatch.setattr(tokenizer_bundle, "MAX_ZIP_BYTES", len(bundle.data))
    check(bundle.data, bundle.sha256)
    monkeypatch.setattr(tokenizer_bundle, "MAX_ZIP_BYTES", len(bundle.data) - 1)
    with pytest.raises(BundleError, match=str(len(bundle.data) - 1)):
        check(bundle.data, bundle.sha256)


@pytest.mark.parametrize(
    "name", ["../evil", "/etc/evil", "a/../../evil", "..\\evil", "a/..", "C:\\evil"]
)
def test_a_name_that_leads_outside_is_refused_before_anything_is_written(
    name: str, tmp_path: Path
) -> None:
    target = tmp_path / "in"
    with pytest.raises(BundleError, match="outside"):
        unpack(zipped({"tokenizer.json": b"{}", name: b"x"}), target)
    assert list(tmp_path.rglob("*")) == []


def test_a_link_in_a_bundle_does_not_become_a_link(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        entry = zipfile.ZipInfo("tokenizer.json")
        entry.external_attr = 0o120777 << 16
        archive.writestr(entry, "/etc/passwd")
    (path,) = unpack(Bundle(buffer.getvalue(), ""), tmp_path)
    assert not path.is_symlink()
    assert path.read_bytes() == b"/etc/passwd"


def test_a_bomb_is_refused_before_it_unfolds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_bundle, "MAX_UNPACKED_BYTES", 1000)
    unpack(zipped({"tokenizer.json": bytes(1000)}), tmp_path / "fits")
    with pytest.raises(BundleError, match="1001 bytes"):
        unpack(zipped({"tokenizer.json": bytes(500), "vocab.json": bytes(501)}), tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_a_zip_that_lies_about_a_size_is_refused(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tokenizer.json", bytes(100_000))
    honest = buffer.getvalue()
    lying = honest.replace((100_000).to_bytes(4, "little"), (10).to_bytes(4, "little"))
    assert lying != honest
    with pytest.raises(BundleError):
        unpack(Bundle(lying, ""), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_too_many_files_are_refused(tmp_path: Path) -> None:
    most = tokenizer_bundle.MAX_ENTRIES
    assert len(unpack(zipped({f"{n}.model": b"" for n in range(most)}), tmp_path / "a")) == most
    with pytest.raises(BundleError, match=str(most + 1)):
        unpack(zipped({f"{n}.model": b"" for n in range(most + 1)}), tmp_path / "b")


def test_what_is_no_zip_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="not a readable zip"):
        unpack(Bundle(b"PK but not really", ""), tmp_path)


def test_an_encrypted_zip_is_refused(tmp_path: Path) -> None:
    data = bytearray(zipped({"tokenizer.json": b"{}"}).data)
    for signature, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.index(signature) + offset] |= 1
    with pytest.raises(BundleError, match="encrypted"):
        unpack(Bundle(bytes(data), ""), tmp_path)


def test_a_name_that_no_file_can_have_is_refused(tmp_path: Path) -> None:
    for name in ("x" * 256, "sub/" + "x" * 1000):
        with pytest.raises(BundleError, match="255"):
            unpack(zipped({name: b""}), tmp_path)
    empty = zipped({"a": b""}).data.replace(b"\0\0a", b"\0\0\0")
    with pytest.raises(BundleError):
        unpack(Bundle(empty, ""), tmp_path)


def test_a_file_that_is_also_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError):
        unpack(zipped({"a": b"x", "a/b": b"y"}), tmp_path)


def _deflated() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in TOKENIZER.items():
            archive.writestr(name, content * 20)
    return buffer.getvalue()


_DEFLATED = _deflated()


@given(
    st.lists(
        st.tuples(st.integers(0, len(_DEFLATED) - 1), st.integers(0, 255)), min_size=1, max_size=6
    )
)
@hypothesis_settings(max_examples=300, deadline=None)
def test_bytes_that_were_tampered_with_unpack_inside_or_are_refused(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]]
) -> None:
    data = bytearray(_DEFLATED)
    for place, value in changes:
        data[place] = value
    target = tmp_path_factory.mktemp("tampered") / "in"
    try:
        paths = unpack(Bundle(bytes(data), ""), target)
    except BundleError:
        paths = []
    assert all(path.resolve().is_relative_to(target.resolve()) for path in paths)
    assert [path.name for path in target.parent.iterdir()] in ([], ["in"])
