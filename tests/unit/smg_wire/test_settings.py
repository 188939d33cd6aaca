from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from pydantic import ValidationError

from smg_grpc_servicer.settings import MlxSettings, ServingSettings
from smg_wire.errors import SettingsError
from smg_wire.settings import build_parser, flag, load, split, variable

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def _no_variables_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if name.startswith(("SMG_", "OTEL_", "MLX_")):
            monkeypatch.delenv(name)


def read(*argv: str, cls: type[Any] = ServingSettings) -> Any:
    return load(cls, argv, prog="worker")


def refusal(*argv: str, cls: type[Any] = ServingSettings) -> str:
    with pytest.raises(SettingsError) as caught:
        read(*argv, cls=cls)
    message = caught.value.message
    assert "\n" not in message
    assert "Traceback" not in message
    assert "pydantic" not in message
    return message


def test_a_flag_beats_a_variable_and_a_variable_beats_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert read().port == 50051
    monkeypatch.setenv("SMG_PORT", "1111")
    assert read().port == 1111
    assert read("--port", "2222").port == 2222
    assert read("--port=3333").port == 3333


def test_the_environment_is_read_at_each_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMG_HOST", "10.0.0.1")
    assert read().host == "10.0.0.1"
    monkeypatch.setenv("SMG_HOST", "10.0.0.2")
    assert read().host == "10.0.0.2"


def test_our_variable_beats_a_foreign_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_PREFILL_STEP", "64")
    assert read("--model", "m", cls=MlxSettings).prefill_step_size == 64
    monkeypatch.setenv("SMG_PREFILL_STEP_SIZE", "128")
    assert read("--model", "m", cls=MlxSettings).prefill_step_size == 128
    arguments = ("--model", "m", "--prefill-step-size", "256")
    assert read(*arguments, cls=MlxSettings).prefill_step_size == 256


def test_the_more_specific_foreign_variable_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://traces:4317")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://all:4317")
    assert read().otlp_traces_endpoint == "http://traces:4317"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--port", "70000"], ["--port", "70000", "65535"]),
        (["--port", "-1"], ["--port", "-1", "0"]),
        (["--port", "http"], ["--port", "http", "integer"]),
        (["--metrics-port", "65536"], ["--metrics-port", "65536", "65535"]),
        (["--max-message-bytes", "1023"], ["--max-message-bytes", "1023", "1024"]),
        (["--max-message-bytes", "2GiB"], ["--max-message-bytes", "2GiB", "2147483647"]),
        (["--max-message-bytes", "many"], ["--max-message-bytes", "many"]),
        (["--max-queued-requests", "-1"], ["--max-queued-requests", "-1", "0"]),
        (["--drain-timeout", "-0.5"], ["--drain-timeout", "-0.5", "0"]),
        (["--drain-timeout", "nan"], ["--drain-timeout", "nan", "finite"]),
        (["--drain-timeout", "inf"], ["--drain-timeout", "inf", "finite"]),
        (["--log-level", "loud"], ["--log-level", "loud", "debug", "error"]),
        (["--log-format", "xml"], ["--log-format", "xml", "text", "json"]),
        (["--ssl-certfile", "/nowhere.pem"], ["--ssl-certfile", "/nowhere.pem", "no such file"]),
    ],
    ids=lambda value: " ".join(value) if value[0].startswith("--") else "",
)
def test_a_value_that_is_not_allowed_is_refused_by_flag_value_and_limit(
    argv: list[str], words: list[str]
) -> None:
    message = refusal(*argv)
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (["--port", "0"], "port", 0),
        (["--port", "65535"], "port", 65535),
        (["--max-message-bytes", "1024"], "max_message_bytes", 1024),
        (["--max-message-bytes", "2147483647"], "max_message_bytes", 2**31 - 1),
        (["--max-message-bytes", "64MiB"], "max_message_bytes", 64 * 1024**2),
        (["--max-queued-requests", "0"], "max_queued_requests", 0),
        (["--drain-timeout", "0"], "drain_timeout", 0.0),
        (["--no-reflection"], "reflection", False),
        (["--reflection"], "reflection", True),
    ],
)
def test_the_lowest_and_the_highest_value_are_taken(
    argv: list[str], name: str, value: object
) -> None:
    assert getattr(read(*argv), name) == value


def test_a_variable_that_is_not_allowed_is_refused_by_its_own_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SMG_PORT", "70000")
    message = refusal()
    assert message.startswith("SMG_PORT is '70000'")
    assert "65535" in message


def test_a_switch_that_is_neither_on_nor_off_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMG_REFLECTION", "perhaps")
    assert refusal().startswith("SMG_REFLECTION is 'perhaps'")


def test_a_foreign_variable_that_is_not_allowed_is_refused_by_its_own_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLX_PREFILL_STEP", "0")
    assert refusal("--model", "m", cls=MlxSettings).startswith("MLX_PREFILL_STEP is '0'")


def test_a_flag_that_overrules_a_bad_variable_is_the_one_that_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SMG_PORT", "70000")
    assert read("--port", "1").port == 1


def test_two_wrong_values_are_both_named_in_the_one_line() -> None:
    message = refusal("--port", "70000", "--log-level", "loud")
    assert "--port" in message
    assert "--log-level" in message


def test_what_is_required_is_named_with_its_flag_and_its_variable() -> None:
    assert refusal(cls=MlxSettings) == "--model is required (or set SMG_MODEL)"


def test_a_required_value_may_come_from_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMG_MODEL", "m")
    assert read(cls=MlxSettings).model == "m"


@pytest.mark.parametrize("argv", [["--no-such-flag", "1"], ["--no-such-flag=1"], ["stray"]])
def test_an_unknown_flag_is_refused_by_name(argv: list[str]) -> None:
    assert argv[0].split("=")[0] in refusal(*argv)


def test_a_flag_without_its_value_is_refused_by_name() -> None:
    assert "--port" in refusal("--port")


def test_an_abbreviated_flag_is_not_guessed() -> None:
    assert "--por" in refusal("--por", "1")


@pytest.mark.parametrize("cls", [ServingSettings, MlxSettings])
def test_help_shows_each_flag_with_its_variable(
    cls: type[ServingSettings], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        read("--help", cls=cls)
    assert stopped.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for name, declared in cls.model_fields.items():
        assert flag(name) in text
        assert f"[env: {variable(name)}]" in text
        assert declared.description, f"{name} has no help"
        assert declared.description.split(" [env:", maxsplit=1)[0][:30] in text


def test_a_variable_is_named_once_where_a_class_inherits_its_field() -> None:
    help_text = build_parser(MlxSettings, prog="worker").format_help()
    assert " ".join(help_text.split()).count("[env: SMG_PORT]") == 1


def test_a_secret_is_not_shown() -> None:
    settings = read("--api-key", "swordfish")
    assert settings.api_key.get_secret_value() == "swordfish"
    assert "swordfish" not in repr(settings)
    assert "swordfish" not in str(settings)
    assert "swordfish" not in settings.model_dump_json()


@pytest.mark.parametrize("key", ["", "sword fish", "swordfish\n", "schwertfisch-ü"])
def test_a_key_that_no_client_could_send_is_refused_and_not_shown(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for argv in ([f"--api-key={key}"], []):
        monkeypatch.setenv("SMG_API_KEY", "fine" if argv else key)
        message = refusal(*argv)
        assert ("--api-key" if argv else "SMG_API_KEY") in message
        assert "sword" not in message
        assert "schwert" not in message


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ("ssl_certfile", "--ssl-keyfile"),
        ("ssl_keyfile", "--ssl-certfile"),
        ("ssl_ca_certs", "--ssl-certfile"),
    ],
)
def test_tls_files_go_together(given: str, missing: str, tmp_path: Path) -> None:
    file = tmp_path / "file.pem"
    file.write_text("x")
    message = refusal(flag(given), str(file))
    assert flag(given) in message
    assert missing in message


def test_settings_do_not_change() -> None:
    settings = read()
    with pytest.raises(ValidationError):
        settings.port = 1


def test_a_command_line_is_parted_into_ours_and_anothers() -> None:
    words = ["m", "--port", "1", "--their-flag", "v", "--host=h", "--no-reflection", "--reflection"]
    ours, rest = split(ServingSettings, words)
    assert ours == ["--port", "1", "--host=h", "--no-reflection", "--reflection"]
    assert rest == ["m", "--their-flag", "v"]


def test_a_flag_of_ours_without_its_value_stays_ours_and_is_refused() -> None:
    ours, rest = split(ServingSettings, ["m", "--port"])
    assert rest == ["m"]
    assert "--port" in refusal(*ours)
