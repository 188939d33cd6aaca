"""ask: an answer from a worker as a process of its own, and one line for what stands in the way."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest
from tests.support.fake_engine import VOCABULARY
from tests.support.processes import Process, free_port
from tokenizers import Tokenizer, models, pre_tokenizers

from smg_grpc_servicer import ask
from smg_wire.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    directory: Path = tmp_path_factory.mktemp("model")
    words = {f"w{number}": number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    with Process("--tokenizer", str(directory)) as process:
        yield process.until_serving()


def refused(*arguments: str) -> str:
    with pytest.raises(SettingsError) as caught:
        ask.main(["127.0.0.1:1", *arguments])
    return caught.value.message


def test_it_prints_the_answer_and_the_figures_apart(
    worker: Process, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask.main([worker.address, "w1 w2", "--max-tokens", "3"]) == 0
    printed = capsys.readouterr()
    assert len(printed.out.split()) == 3
    assert "2 prompt tokens" in printed.err
    assert "3 tokens" in printed.err


def test_it_repeats_the_workers_refusal(
    worker: Process, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask.main([worker.address, "w1", "--temperature", "inf"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: INVALID_ARGUMENT: sampling_params.temperature is inf")


def test_without_tokenizers_it_says_what_to_install(
    worker: Process, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "tokenizers"]:
        monkeypatch.setitem(sys.modules, name, None)
    assert ask.main([worker.address, "w1"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "pip install tokenizers jinja2" in line


def test_where_nothing_answers_it_names_the_address(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ask, "_CONNECT_SECONDS", 0.5)
    target = f"127.0.0.1:{free_port()}"
    assert ask.main([target, "w1"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: nothing answers at {target} within 0.5 s")


def test_values_that_no_message_can_carry_are_refused() -> None:
    assert refused("w1", "--max-tokens", "2147483648").startswith("--max-tokens is '2147483648'")
    assert refused("\udcff").endswith("must be valid UTF-8")
    assert refused("w1", "--system", "\udcff").endswith("must be valid UTF-8")


def test_a_client_certificate_is_never_left_out_in_silence(tmp_path: Path) -> None:
    file = tmp_path / "some.pem"
    file.touch()
    pair = ("--ssl-certfile", str(file), "--ssl-keyfile", str(file))
    assert "go together" in refused("w1", *pair[:2])
    assert "go together" in refused("w1", *pair[2:])
    assert "need --ssl-ca-certs" in refused("w1", *pair)
