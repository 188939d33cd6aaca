from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from gguf import GGUFWriter, TokenType

from smg_grpc_servicer.demo_model import source

if TYPE_CHECKING:
    from pathlib import Path

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def byte_alphabet() -> list[str]:
    """The character with which byte-level BPE writes each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {byte: chr(byte) for byte in printable}
    table.update({byte: chr(256 + index) for index, byte in enumerate(others)})
    return [table[byte] for byte in range(256)]


def write_tiny_gguf(path: Path) -> None:
    """A Llama of one layer whose vocabulary is the bytes and whose weights are noise."""
    tokens = [*SPECIAL, *byte_alphabet(), "Ġt", "Ġth"]
    kinds = [TokenType.CONTROL] * len(SPECIAL)
    kinds += [TokenType.NORMAL] * (len(tokens) - len(SPECIAL))
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(16)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_rope_dimension_count(8)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["Ġ t", "Ġt h"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    random = np.random.default_rng(3)
    shapes = {
        "token_embd": (len(tokens), 16),
        "blk.0.attn_q": (16, 16),
        "blk.0.attn_k": (8, 16),
        "output_norm": (16,),
    }
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", random.standard_normal(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_tiny_gguf(path)
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "smg-grpc-servicer"


@pytest.fixture
def installed(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(source, "installed_gguf", lambda: tiny_gguf)
    return tiny_gguf


@pytest.fixture
def not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "installed_gguf", lambda: None)
