"""Text prompts, as `mlx_lm.generate` tokenizes them."""

from __future__ import annotations

from typing import Any

from smg_grpc_servicer.serving import text


class TextInput(text.TextInput):
    """Encodes prompts with the model's tokenizer.

    The beginning-of-sequence token is added unless the text starts with it.
    """

    def __init__(self, tokenizer: Any, context: int) -> None:
        def encode(prompt: str) -> list[int]:
            bos = tokenizer.bos_token
            special = bos is None or not prompt.startswith(bos)
            return list(tokenizer.encode(prompt, add_special_tokens=special))

        longest = max(map(len, tokenizer.get_vocab()))
        super().__init__(encode, context=context, longest_token=longest)
