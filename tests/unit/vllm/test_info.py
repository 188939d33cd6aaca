from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict
from tests.unit.vllm.conftest import config

from smg_grpc_servicer.settings import VllmSettings
from smg_grpc_servicer.vllm.info import NO_MEDIA, Activity, MediaFacts, model_info, server_info

IDLE = Activity(0, paused=False, last_receive=0.0, uptime_seconds=0.0)


def model(given: Any, media: MediaFacts = NO_MEDIA) -> Any:
    return model_info(given, media)


def server(given: Any, media: MediaFacts = NO_MEDIA, activity: Activity = IDLE) -> Any:
    return server_info(given, VllmSettings(), media, activity)


def test_an_end_of_turn_that_only_the_generation_config_names_is_reported() -> None:
    given = config()
    given.model_config.try_get_generation_config = lambda: {
        "eos_token_id": [2, 7],
        "pad_token_id": 9,
    }
    found = model(given)
    assert list(found.eos_token_ids) == [2, 7]
    assert found.pad_token_id == 9


def test_a_vision_model_keeps_its_special_ids_with_its_language_part() -> None:
    given = config()
    given.model_config.hf_config = SimpleNamespace(model_type="vl", architectures=["VL"])
    found = model(given, MediaFacts({"image": 3}))
    assert (list(found.eos_token_ids), found.bos_token_id, found.supports_vision) == ([2], 1, True)


def test_a_model_that_only_hears_has_no_vision() -> None:
    assert not model(config(), MediaFacts({"audio": 1})).supports_vision


def test_the_models_own_sampling_defaults_are_json_and_none_are_unset() -> None:
    given = config()
    assert model(given).default_sampling_params_json == ""
    given.model_config.get_diff_sampling_param = lambda: {"top_p": 0.9, "temperature": 0.6}
    assert model(given).default_sampling_params_json == '{"temperature": 0.6, "top_p": 0.9}'


def test_an_embedding_model_does_not_generate() -> None:
    given = config()
    given.model_config.runner_type = "pooling"
    assert not model(given).is_generation


def test_of_several_names_the_first_is_reported() -> None:
    given = config()
    given.model_config.served_model_name = ["one", "two"]
    assert model(given).served_model_name == "one"


@pytest.mark.parametrize(
    ("parser", "inside", "start"),
    [
        ("", False, "first_token"),
        ("qwen3", False, "after_reasoning"),
        ("qwen3", True, "first_token"),
    ],
)
def test_where_a_grammar_starts(parser: str, inside: bool, start: str) -> None:
    given = config()
    given.structured_outputs_config = SimpleNamespace(
        reasoning_parser=parser, enable_in_reasoning=inside
    )
    found = server(given)
    assert (found.engine_reasoning_parser, found.constrained_decoding_start) == (parser, start)


def test_a_config_that_does_not_say_leaves_its_fields_unset() -> None:
    given = config()
    del given.structured_outputs_config
    del given.attention_config
    found = server(given)
    assert found.constrained_decoding_start == ""
    assert found.attention_backend == ""


def test_what_prefill_and_decode_must_agree_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMG_PAIRING_PROTOCOL", "pair-1")
    given = config(
        kv_transfer_config=SimpleNamespace(
            kv_connector="NixlConnector", kv_role="kv_both", engine_id="e-1"
        ),
        attention_config=SimpleNamespace(backend=SimpleNamespace(name="FLASH_ATTN")),
    )
    found = MessageToDict(server(given), preserving_proto_field_name=True)
    assert found["pairing_protocol"] == "pair-1"
    assert found["kv_connector"] == "NixlConnector"
    assert found["kv_role"] == "kv_both"
    assert found["kv_engine_id"] == "e-1"
    assert found["attention_backend"] == "FLASH_ATTN"
    assert found["block_size"] == 16


def test_media_limits_are_sorted_pairs() -> None:
    found = server(config(), MediaFacts({"video": 1, "image": 4}, encoder_budget=64))
    assert (found.mm_item_limits, found.mm_encoder_budget) == ("image=4,video=1", 64)


def test_what_the_worker_is_doing() -> None:
    found = server(config(), activity=Activity(3, True, 1.5, 2.5))
    assert (found.active_requests, found.is_paused) == (3, True)
    assert (found.last_receive_timestamp, found.uptime_seconds) == (1.5, 2.5)
