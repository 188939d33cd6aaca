from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tests.conformance.fixtures import (  # noqa: F401 - fixtures of the suite
    client,
    connect,
    facts,
    lane,
    worker,
)
from tests.lanes.fake.driver import FakeDriver

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def tokenizer_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of a few words, in more than one chunk."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    directory = tmp_path_factory.mktemp("tokenizer")
    words = {word: number for number, word in enumerate(["?", "The", "sea", "was", "calm", "."])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps({"vocab_size": 1000}))
    # Words that no compression makes small.
    import random

    noise = random.Random(0).randbytes(150_000).hex()
    (directory / "tokenizer_config.json").write_text(json.dumps({"noise": noise}))
    return directory


@pytest.fixture(scope="session")
def driver(tokenizer_files: Path) -> FakeDriver:
    return FakeDriver(tokenizer_files)
