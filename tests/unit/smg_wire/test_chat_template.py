"""Chat templates: found where models keep them, rendered in a sandbox."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from smg_wire.chat_template import ChatTemplate
from smg_wire.errors import FailedPrecondition, SmgError

if TYPE_CHECKING:
    from pathlib import Path

MESSAGES = [{"role": "user", "content": "Hé <b>"}]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}]"
    "{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def model(directory: Path, **config: Any) -> Path:
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def test_the_template_of_tokenizer_config_is_rendered(tmp_path: Path) -> None:
    found = ChatTemplate(model(tmp_path, chat_template=TEMPLATE, bos_token="<s>"))
    assert found.render(MESSAGES) == "<s>[user]Hé <b>[assistant]"
    assert found.render(MESSAGES, add_generation_prompt=False) == "<s>[user]Hé <b>"


def test_a_template_file_comes_before_the_configuration(tmp_path: Path) -> None:
    model(tmp_path, chat_template="old")
    (tmp_path / "chat_template.jinja").write_text("new", encoding="utf-8")
    assert ChatTemplate(tmp_path).render(MESSAGES) == "new"


def test_of_several_named_templates_the_default_is_taken(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    assert ChatTemplate(model(tmp_path, chat_template=named)).render(MESSAGES) == "yes"


def test_special_tokens_may_be_objects(tmp_path: Path) -> None:
    token = {"content": "<s>", "lstrip": False}
    found = ChatTemplate(model(tmp_path, chat_template="{{ bos_token }}", bos_token=token))
    assert found.render(MESSAGES) == "<s>"


def test_blocks_take_their_line_with_them_and_json_is_not_escaped(tmp_path: Path) -> None:
    source = "{% for message in messages %}\n  {{ message | tojson }}\n{% endfor %}\n"
    found = ChatTemplate(model(tmp_path, chat_template=source))
    assert found.render(MESSAGES) == '  {"role": "user", "content": "Hé <b>"}\n'


def test_a_template_may_refuse(tmp_path: Path) -> None:
    source = "{{ raise_exception('system messages are not supported') }}"
    with pytest.raises(SmgError, match="system messages are not supported"):
        ChatTemplate(model(tmp_path, chat_template=source)).render(MESSAGES)


def test_a_template_cannot_leave_its_sandbox(tmp_path: Path) -> None:
    source = "{{ messages.__class__.__mro__[-1].__subclasses__() }}"
    with pytest.raises(SmgError, match="unsafe"):
        ChatTemplate(model(tmp_path, chat_template=source)).render(MESSAGES)


def test_a_model_without_a_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FailedPrecondition, match="no chat template"):
        ChatTemplate(model(tmp_path))
