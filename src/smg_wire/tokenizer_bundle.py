"""The zip that GetTokenizer streams: packed by a worker, checked and unpacked by its client.

Chunks are 64 KiB; the last one carries the SHA-256 of the whole zip, and no other does.
"""

from __future__ import annotations

import hashlib
import io
import struct
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from smg_wire.errors import FailedPrecondition, SmgError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

CHUNK_BYTES = 64 * 1024

# A client refuses a bundle beyond these; the published router's are the same.
MAX_ZIP_BYTES = 200 * 1024**2
MAX_UNPACKED_BYTES = 500 * 1024**2
MAX_ENTRIES = 50
# File systems take no more in one part of a path.
_MAX_NAME = 255

# What tokenizers, chat templates and media processors are made of, as Hugging Face names it.
# No Python: a client must not run what a worker sends.
_PATTERNS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tekken.json",
    "*.model",
    "*.tiktoken",
    "config.json",
    "generation_config.json",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
)
# One of these must be there, or there is no tokenizer.
_VOCABULARIES = (
    "tokenizer.json",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
    "*.model",
    "*.tiktoken",
)

# The oldest time that a zip can hold: the same files then give the same hash on every worker.
_EPOCH = (1980, 1, 1, 0, 0, 0)


# What zipfile raises for damaged, encrypted and exotic archives, and for names that collide.
_UNREADABLE = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    LookupError,
    RuntimeError,
    ValueError,
    OverflowError,
    FileExistsError,
    NotADirectoryError,
    IsADirectoryError,
)


class BundleError(SmgError):
    """A bundle is damaged, too large, or would write outside its directory."""


@dataclass(frozen=True)
class Bundle:
    """A packed bundle: the zip's bytes and their SHA-256 in hexadecimal."""

    data: bytes
    sha256: str

    def chunks(self) -> Iterator[tuple[bytes, str]]:
        """Yield (data, sha256); the hash is empty on all but the last."""
        for start in range(0, len(self.data), CHUNK_BYTES):
            last = start + CHUNK_BYTES >= len(self.data)
            yield self.data[start : start + CHUNK_BYTES], self.sha256 if last else ""


def pack(directory: Path) -> Bundle:
    """Pack the tokenizer files of a model directory. Reads files: not for an event loop.

    Raises:
        FailedPrecondition: the directory is none, or holds no tokenizer, or too large a one.
    """
    if not directory.is_dir():
        raise FailedPrecondition(f"no tokenizer files: {directory} is not a local directory")
    if not any(_matching(directory, _VOCABULARIES)):
        raise FailedPrecondition(f"no tokenizer files in {directory}")
    names = sorted(set(_matching(directory, _PATTERNS)))
    total = sum((directory / name).stat().st_size for name in names)
    if total > MAX_UNPACKED_BYTES or len(names) > MAX_ENTRIES:
        raise FailedPrecondition(
            f"the tokenizer is {len(names)} files of {total} bytes: "
            f"the limits are {MAX_ENTRIES} files and {MAX_UNPACKED_BYTES} bytes"
        )
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in names:
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, (directory / name).read_bytes())
    data = buffer.getvalue()
    return Bundle(data, hashlib.sha256(data).hexdigest())


def _matching(directory: Path, patterns: Iterable[str]) -> Iterator[str]:
    for pattern in patterns:
        for path in directory.glob(pattern):
            if path.is_file():
                yield path.relative_to(directory).as_posix()


def check(data: bytes, sha256: str) -> Bundle:
    """Return the received bundle if it is whole.

    Raises:
        BundleError: the hash is missing or another, or the zip is too large.
    """
    if len(data) > MAX_ZIP_BYTES:
        raise BundleError(f"the tokenizer bundle has {len(data)} bytes: at most {MAX_ZIP_BYTES}")
    if not sha256:
        raise BundleError("the tokenizer bundle came without its SHA-256")
    found = hashlib.sha256(data).hexdigest()
    if found != sha256.lower():
        raise BundleError(f"the tokenizer bundle's SHA-256 is {found}, announced was {sha256}")
    return Bundle(data, found)


def unpack(bundle: Bundle, directory: Path) -> list[Path]:
    """Write a bundle's files below `directory` and return them. Not for an event loop.

    Raises:
        BundleError: no zip, too many or too large files, or a name that leads outside.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(bundle.data)) as archive:
            entries = [entry for entry in archive.infolist() if not entry.is_dir()]
            _check_entries(entries)
            return [_extract(archive, entry, directory) for entry in entries]
    except _UNREADABLE as error:
        raise BundleError(f"the tokenizer bundle is not a readable zip: {error}") from error


def _check_entries(entries: list[zipfile.ZipInfo]) -> None:
    if len(entries) > MAX_ENTRIES:
        raise BundleError(f"the tokenizer bundle has {len(entries)} files: at most {MAX_ENTRIES}")
    total = sum(entry.file_size for entry in entries)
    if total > MAX_UNPACKED_BYTES:
        raise BundleError(
            f"the tokenizer bundle unpacks to {total} bytes: at most {MAX_UNPACKED_BYTES}"
        )
    for entry in entries:
        path = PurePosixPath(entry.filename)
        if len(entry.filename) > _MAX_NAME:
            raise BundleError(f"the tokenizer bundle names a file with more than {_MAX_NAME} bytes")
        if path.is_absolute() or ".." in path.parts or "\\" in entry.filename:
            raise BundleError(f"the tokenizer bundle names a file outside: {entry.filename!r}")


def _extract(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, directory: Path) -> Path:
    # The announced size was checked; reading one byte more than it shows a zip that lies.
    with archive.open(entry) as source:
        content = source.read(entry.file_size + 1)
    if len(content) != entry.file_size:
        raise BundleError(f"{entry.filename} in the tokenizer bundle is not of the size it says")
    target = directory / entry.filename
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(content)
    return target
