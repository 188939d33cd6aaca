"""GetTokenizer."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from smg_wire.tokenizer_bundle import CHUNK_BYTES, check, unpack

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conformance.driver import Client, Facts


class TestTokenizerBundle:
    async def test_chunks_are_64_kib_and_the_last_one_carries_the_hash(
        self, client: Client
    ) -> None:
        chunks = await client.tokenizer()
        assert [len(data) for data, _ in chunks[:-1]] == [CHUNK_BYTES] * (len(chunks) - 1)
        assert 0 < len(chunks[-1][0]) <= CHUNK_BYTES
        whole = b"".join(data for data, _ in chunks)
        assert [sha for _, sha in chunks[:-1]] == [""] * (len(chunks) - 1)
        assert chunks[-1][1] == hashlib.sha256(whole).hexdigest()

    async def test_each_call_gives_the_same_bundle(self, client: Client) -> None:
        assert await client.tokenizer() == await client.tokenizer()

    async def test_what_it_holds_is_a_tokenizer(
        self, client: Client, facts: Facts, tmp_path: Path
    ) -> None:
        from tokenizers import Tokenizer

        chunks = await client.tokenizer()
        bundle = check(b"".join(data for data, _ in chunks), chunks[-1][1])
        names = {path.name for path in unpack(bundle, tmp_path)}
        assert {"tokenizer.json", "tokenizer_config.json", "config.json"} <= names
        assert not any(name.endswith((".py", ".safetensors", ".bin")) for name in names)
        tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
        ids = tokenizer.encode("The sea was calm.").ids
        assert ids
        assert all(token_id < facts.vocabulary for token_id in ids)
        assert "sea" in tokenizer.decode(ids)
