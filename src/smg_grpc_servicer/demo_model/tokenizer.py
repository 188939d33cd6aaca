"""The tokenizer's files, from the vocabulary and the merges that a GGUF carries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from smg_wire.errors import StartError

if TYPE_CHECKING:
    from collections.abc import Mapping

# gguf.TokenType.CONTROL
_CONTROL = 3

# What a broken pre-tokenizer, decoder or merge table does not give back unchanged.
_SAMPLE = "The capital of France is Paris.\n\n  2024: naïve 東京 🙂 <|im_end|> it's 3.14"


def tokenizer_json(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return tokenizer.json: byte-level BPE with digits split one by one, as SmolLM has it."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    kinds: list[int] = metadata["tokenizer.ggml.token_type"]
    added = [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind == _CONTROL
    ]
    byte_level = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {**byte_level, "add_prefix_space": False},
            ],
        },
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            # Added tokens stand in the vocabulary too, as in the model's own file.
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": metadata["tokenizer.ggml.merges"],
        },
    }


def special_tokens_map(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return special_tokens_map.json."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    return {
        f"{short}_token": tokens[metadata[f"tokenizer.ggml.{long}_token_id"]]
        for short, long in (
            ("bos", "bos"),
            ("eos", "eos"),
            ("unk", "unknown"),
            ("pad", "padding"),
        )
    }


def tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return tokenizer_config.json, chat template included."""
    return {
        "add_prefix_space": False,
        **special_tokens_map(metadata),
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"],
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": metadata["tokenizer.chat_template"],
    }


def check_tokenizer(serialised: str, special: Mapping[str, str]) -> None:
    """Raise StartError unless tokenizer.json loads, keeps text whole and its specials single."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(serialised)
    text = tokenizer.decode(tokenizer.encode(_SAMPLE).ids, skip_special_tokens=False)
    if text != _SAMPLE:
        raise StartError(f"the demo model's tokenizer does not keep text whole: {text!r}")
    for name, token in special.items():
        if tokenizer.encode(token).ids != [tokenizer.token_to_id(token)]:
            raise StartError(f"the demo model's {name} {token!r} is not one token")
