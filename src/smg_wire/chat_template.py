"""Chat templates as transformers renders them, without transformers.

The environment (sandboxed Jinja, trimmed blocks, loop controls, `raise_exception`, `tojson`,
`strftime_now`, the special tokens by name) is that of `transformers.utils.chat_template_utils`.
"""

from __future__ import annotations

import datetime as dt
import json
from typing import TYPE_CHECKING, Any, NoReturn

from smg_wire.errors import FailedPrecondition, SmgError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


class ChatTemplate:
    """The chat template of a model directory."""

    def __init__(self, directory: Path) -> None:
        """Read the template.

        Raises:
            FailedPrecondition: the model has none, or Jinja is not installed.
        """
        try:
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError as error:
            raise FailedPrecondition("chat templates need Jinja: pip install jinja2") from error
        config = _read_json(directory / "tokenizer_config.json")
        source = _find(directory, config)
        if source is None:
            raise FailedPrecondition("the model's tokenizer has no chat template")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _now
        self._template = environment.from_string(source)
        special = {**config, **_read_json(directory / "special_tokens_map.json")}
        self._tokens = {
            name: _content(special[name]) for name in _SPECIAL_TOKENS if special.get(name)
        }

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """Return the prompt that asks for the next assistant message.

        Raises:
            SmgError: the template refused the messages, or failed on them.
        """
        from jinja2 import TemplateError

        values = {"add_generation_prompt": True, **self._tokens, **variables}
        try:
            return self._template.render(messages=messages, **values)
        except TemplateError as error:
            raise SmgError(f"the chat template refused the messages: {error}") from error


def _find(directory: Path, config: dict[str, Any]) -> str | None:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    stored = _read_json(directory / "chat_template.json").get("chat_template")
    source = stored or config.get("chat_template")
    if isinstance(source, list):  # several by name, as Cohere's models have them
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    return source


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def _content(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _refuse(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    # Jinja's own filter escapes HTML, which a prompt must not.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _now(pattern: str) -> str:
    return dt.datetime.now().astimezone().strftime(pattern)
