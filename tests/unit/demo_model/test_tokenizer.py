from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from gguf import GGUFReader
from tokenizers import Tokenizer

from smg_grpc_servicer.demo_model.tokenizer import (
    check_tokenizer,
    special_tokens_map,
    tokenizer_config,
    tokenizer_json,
)
from smg_wire.errors import StartError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def metadata(tiny_gguf: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in GGUFReader(tiny_gguf).fields.items()}


def test_text_comes_back_whole(metadata: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_str(json.dumps(tokenizer_json(metadata)))

    text = "in the 東京 of 1999\n\tit's naïve 🙂"

    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_merges_apply_and_digits_stay_single(metadata: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_str(json.dumps(tokenizer_json(metadata)))

    assert tokenizer.encode("in the").tokens == ["i", "n", "Ġth", "e"]
    assert tokenizer.encode("2024").tokens == ["2", "0", "2", "4"]


def test_control_tokens_are_special_and_single(metadata: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_str(json.dumps(tokenizer_json(metadata)))

    encoded = tokenizer.encode("<|im_start|>a<|im_end|>")

    assert encoded.ids[0] == 1
    assert encoded.ids[-1] == 2
    assert tokenizer.decode(encoded.ids) == "a"


def test_configuration_names_special_tokens_and_template(metadata: dict[str, Any]) -> None:
    config = tokenizer_config(metadata)

    assert special_tokens_map(metadata) == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|im_end|>",
    }
    assert config["chat_template"] == metadata["tokenizer.chat_template"]
    assert config["model_max_length"] == 128


def test_a_tokenizer_that_loses_text_is_refused(metadata: dict[str, Any]) -> None:
    document = tokenizer_json(metadata)
    document["decoder"] = None

    with pytest.raises(StartError, match="does not keep text whole"):
        check_tokenizer(json.dumps(document), special_tokens_map(metadata))


def test_a_special_token_in_pieces_is_refused(metadata: dict[str, Any]) -> None:
    document = tokenizer_json(metadata)
    document["added_tokens"] = []

    with pytest.raises(StartError, match="is not one token"):
        check_tokenizer(json.dumps(document), special_tokens_map(metadata))
