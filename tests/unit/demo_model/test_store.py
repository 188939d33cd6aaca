from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from safetensors import safe_open

from smg_grpc_servicer.demo_model import ensure_demo_model, store
from smg_grpc_servicer.demo_model.__main__ import main
from smg_grpc_servicer.demo_model.cache import cache_directory
from smg_grpc_servicer.demo_model.layout import FILES
from smg_wire.errors import StartError


def test_the_whole_model_is_built_in_the_cache(cache: Path, installed: Path) -> None:
    directory = ensure_demo_model("float32")

    assert directory == cache / "models" / "SmolLM2-135M-Instruct-float32"
    assert sorted(entry.name for entry in directory.iterdir()) == sorted(FILES)
    config = json.loads((directory / "config.json").read_text())
    assert config["torch_dtype"] == "float32"
    assert config["num_attention_heads"] == 2
    assert config["rms_norm_eps"] == 1e-5
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)
    with safe_open(directory / "model.safetensors", "numpy") as file:
        assert "model.layers.0.self_attn.k_proj.weight" in file.keys()  # noqa: SIM118
    assert [entry.name for entry in directory.parent.iterdir()] == [directory.name]


def test_a_built_model_is_used_again(
    cache: Path, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = ensure_demo_model("float32")
    # Neither the packages that build it nor the weights are needed any more.
    monkeypatch.setattr(store, "find_spec", lambda _: None)
    monkeypatch.setattr(store, "gguf_file", lambda: pytest.fail("builds again"))

    assert ensure_demo_model("float32") == directory


def test_each_dtype_has_its_own_directory(cache: Path, installed: Path) -> None:
    assert ensure_demo_model("float32") != ensure_demo_model("bfloat16")


def test_a_damaged_model_in_the_cache_is_replaced(cache: Path, installed: Path) -> None:
    directory = ensure_demo_model("float32")
    (directory / "model.safetensors").unlink()

    assert ensure_demo_model("float32") == directory
    assert (directory / "model.safetensors").is_file()
    assert [entry.name for entry in directory.parent.iterdir()] == [directory.name]


def test_builders_at_the_same_time_end_with_one_whole_model(
    cache: Path, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = threading.Barrier(2)
    publish = store._publish

    def publish_together(*arguments: object) -> None:
        together.wait(30)
        publish(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(store, "_publish", publish_together)
    built: list[Path] = []
    threads = [
        threading.Thread(target=lambda: built.append(ensure_demo_model("float32")))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert len(set(built)) == 1
    assert len(built) == 2
    assert sorted(entry.name for entry in built[0].iterdir()) == sorted(FILES)
    assert [entry.name for entry in built[0].parent.iterdir()] == [built[0].name]


def test_a_directory_of_the_users_is_not_overwritten(
    tmp_path: Path, cache: Path, installed: Path
) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "thesis.txt").write_text("years of work")

    with pytest.raises(StartError, match="holds something other"):
        ensure_demo_model("float32", theirs)

    assert (theirs / "thesis.txt").read_text() == "years of work"


def test_missing_packages_are_named_with_the_command(
    cache: Path, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "find_spec", lambda name: None if name == "gguf" else object())

    with pytest.raises(StartError) as caught:
        ensure_demo_model("float32")

    assert caught.value.message == (
        "the demo model needs gguf, not installed here: pip install 'smg-grpc-servicer[demo]'"
    )


def test_the_path_stands_alone_on_stdout(
    tmp_path: Path, cache: Path, installed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "models" / "here"

    assert main(["--dtype", "bfloat16", "--output", str(target)]) == 0

    captured = capsys.readouterr()
    assert captured.out == f"{target}\n"
    assert "building" in captured.err


def test_a_refusal_is_one_line_and_exit_code_3(
    tmp_path: Path, cache: Path, installed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("")

    assert main(["--output", str(occupied)]) == 3

    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1


def test_the_cache_follows_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")

    monkeypatch.setattr("sys.platform", "linux")
    assert cache_directory() == Path("/home/someone/.cache/smg-grpc-servicer")

    monkeypatch.setattr("sys.platform", "darwin")
    assert cache_directory() == Path("/home/someone/Library/Caches/smg-grpc-servicer")
