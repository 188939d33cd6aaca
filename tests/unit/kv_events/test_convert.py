"""Events in every shape that the engines' releases give them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from smg_grpc_proto.generated import common_pb2 as pb

from smg_grpc_servicer.kv_events.convert import convert_event, fold_hash
from smg_grpc_servicer.kv_events.frames import Undecodable, read_batch, read_frame


def converted(raw: Any) -> pb.KvCacheEvent:
    # Through msgpack and back: tuples and structs become what a subscriber really gets.
    event = convert_event(msgspec.msgpack.decode(msgspec.msgpack.encode(raw)))
    assert event is not None
    return event


def as_map(*, tag: str = "BlockStored", **fields: Any) -> dict[str, Any]:
    return {"type": tag, **fields}


STORED: dict[str, Any] = {
    "block_hashes": [11, 12],
    "parent_block_hash": 10,
    "token_ids": [1, 2, 3, 4],
    "block_size": 2,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
}


def test_an_event_is_the_same_as_a_map_and_as_an_array() -> None:
    optional = {
        "extra_keys": [["salt"], None],
        "group_idx": 1,
        "kv_cache_spec_kind": "sliding_window",
        "kv_cache_spec_sliding_window": 128,
        "locality": "REMOTE",
        "ownership": "pool",
        "session_id": "s",
    }
    fields = {**STORED, **optional}
    by_map = converted(as_map(**fields))
    assert converted(["BlockStored", *fields.values()]) == by_map
    stored = by_map.stored
    assert [block.block_hash for block in stored.blocks] == [11, 12]
    assert [list(block.token_ids) for block in stored.blocks] == [[1, 2], [3, 4]]
    assert [block.block_size for block in stored.blocks] == [2, 2]
    assert [block.cache_level for block in stored.blocks] == [0, 0]
    assert stored.parent_block_hash == 10
    assert (stored.tier, stored.medium) == (pb.KV_CACHE_TIER_DEVICE, "GPU")
    assert (stored.group_idx, stored.kv_cache_spec_kind) == (1, "sliding_window")
    assert stored.kv_cache_spec_sliding_window == 128
    assert stored.locality == pb.KV_CACHE_LOCALITY_REMOTE
    assert (stored.ownership, stored.session_id) == ("pool", "s")


def test_what_an_older_release_does_not_send_is_absent_and_not_zero() -> None:
    # SGLang's shape, and vLLM's before tiers: five or six fields.
    stored = converted(["BlockStored", [1], None, [7, 8], 2, None]).stored
    absent = [
        "parent_block_hash",
        "tier",
        "medium",
        "group_idx",
        "kv_cache_spec_kind",
        "locality",
        "ownership",
        "session_id",
        "lora_name",
        "cache_salt",
    ]
    assert [name for name in absent if stored.HasField(name)] == []
    assert not stored.blocks[0].HasField("lora_id")
    assert not stored.blocks[0].HasField("cache_level")
    assert converted(["BlockRemoved", [1]]).removed == pb.KvBlocksRemoved(block_hashes=[1])


def test_fields_of_releases_to_come_are_ignored() -> None:
    assert converted(as_map(**STORED, brand_new=1)) == converted(as_map(**STORED))
    assert converted(["AllBlocksCleared"]).WhichOneof("data") == "cleared"
    assert converted(as_map(tag="AllBlocksCleared", ownership="pool")).cleared.ownership == "pool"


@pytest.mark.parametrize(
    ("medium", "tier", "level"),
    [
        ("GPU", pb.KV_CACHE_TIER_DEVICE, 0),
        ("CPU", pb.KV_CACHE_TIER_HOST, 1),
        ("CPU_PINNED", pb.KV_CACHE_TIER_HOST, 1),
        ("STORAGE", pb.KV_CACHE_TIER_DISK, 2),
        ("DISK", pb.KV_CACHE_TIER_DISK, 2),
        ("EXTERNAL", pb.KV_CACHE_TIER_EXTERNAL, 3),
    ],
)
def test_every_medium_has_its_tier(medium: str, tier: int, level: int) -> None:
    stored = converted(as_map(**{**STORED, "medium": medium})).stored
    assert (stored.tier, stored.blocks[0].cache_level, stored.medium) == (tier, level, medium)
    removed = converted(["BlockRemoved", [1], medium]).removed
    assert (removed.tier, removed.cache_level, removed.medium) == (tier, level, medium)


def test_an_unknown_medium_is_passed_on_without_a_tier() -> None:
    stored = converted(as_map(**{**STORED, "medium": "TAPE"})).stored
    assert stored.medium == "TAPE"
    assert not stored.HasField("tier")


def test_device_memory_is_local_unless_the_engine_says_otherwise() -> None:
    assert converted(as_map(**STORED)).stored.locality == pb.KV_CACHE_LOCALITY_LOCAL
    on_disk = converted(as_map(**{**STORED, "medium": "DISK"})).stored
    assert not on_disk.HasField("locality")


def test_extra_keys_keep_their_types_block_by_block() -> None:
    keys = [["adapter", ["image-hash", -3], "salt", b"\x00\xff", 7], None]
    stored = converted(
        as_map(**{**STORED, "parent_block_hash": None, "lora_name": "adapter", "extra_keys": keys})
    ).stored
    first, second = stored.blocks
    assert [key.WhichOneof("key") for key in first.extra_keys] == [
        "text",
        "multimodal",
        "text",
        "blob",
        "number",
    ]
    assert first.extra_keys[1].multimodal == pb.KvMultimodalKey(identifier="image-hash", offset=-3)
    assert first.extra_keys[3].blob == b"\x00\xff"
    assert not second.extra_keys
    assert (stored.lora_name, stored.cache_salt) == ("adapter", "salt")


def test_an_adapter_is_not_taken_for_a_salt() -> None:
    fields = {**STORED, "parent_block_hash": None, "lora_name": "a", "extra_keys": [["a"], ["a"]]}
    assert not converted(as_map(**fields)).stored.HasField("cache_salt")
    fields["extra_keys"] = [["a", "a"], ["a"]]
    assert converted(as_map(**fields)).stored.cache_salt == "a"


def test_tokens_that_cannot_be_told_apart_are_left_out() -> None:
    # A window's blocks left out of the hashes, and not out of the tokens.
    stored = converted(as_map(**{**STORED, "token_ids": [1, 2, 3, 4, 5, 6]})).stored
    assert [list(block.token_ids) for block in stored.blocks] == [[], []]
    assert [block.block_hash for block in stored.blocks] == [11, 12]


def test_pairs_of_tokens_give_their_first() -> None:
    fields = {**STORED, "token_ids": [[1, 2], [2, 3], [3, 4], [4, 5]]}
    stored = converted(as_map(**fields)).stored
    assert [list(block.token_ids) for block in stored.blocks] == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("value", "folded"),
    [
        (0, 0),
        (5, 5),
        (-5, -5),
        (2**63 - 1, 2**63 - 1),
        (2**63, -(2**63)),
        (2**64 - 1, -1),
        (b"", 0),
        (b"\x05", 5),
        (b"\xff" * 8, -1),
        (b"\x01" * 24 + b"\x00" * 7 + b"\x09", 9),
        ("ff", 255),
        ("0" * 48 + "f" * 16, -1),
    ],
)
def test_a_hash_of_any_width_is_folded_to_its_low_64_bits(value: object, folded: int) -> None:
    assert fold_hash(value) == folded


def test_a_digest_has_one_number_as_bytes_as_hex_and_as_the_number_vllm_makes_of_it() -> None:
    digest = bytes(range(100, 132))
    number = int.from_bytes(digest, "big") & (2**64 - 1)
    assert fold_hash(digest) == fold_hash(digest.hex()) == fold_hash(number)


def test_text_that_is_no_number_has_a_hash_of_its_own() -> None:
    assert fold_hash("block-a") == fold_hash("block-a") != fold_hash("block-b")


@pytest.mark.parametrize(
    "raw",
    [
        7,
        [],
        ["BlockStored"],
        ["BlockStored", [1.5], None, [1, 2], 2],
        ["BlockStored", [1], None, [-1, 2], 2],
        ["BlockStored", [1], None, [1, 2], "two"],
        ["BlockStored", [1], None, [1, 2], 2, None, 9],
        ["BlockStored", [1], None, [1, 2], 2, None, None, None, [[["one"]]]],
        ["BlockRemoved", 3],
        {"type": "BlockRemoved"},
    ],
)
def test_an_event_that_is_not_what_its_name_says_is_undecodable(raw: Any) -> None:
    with pytest.raises(Undecodable):
        convert_event(raw)


def test_an_unknown_kind_is_no_event() -> None:
    assert convert_event(["BlockPolished", 1]) is None
    assert convert_event({"type": "BlockPolished"}) is None
    assert convert_event({}) is None


@pytest.mark.parametrize("parts", [[], [b"x"], [b"", b"short", b"payload"]])
def test_frames_without_a_sequence_are_undecodable(parts: list[bytes]) -> None:
    with pytest.raises(Undecodable):
        read_frame(parts)


@pytest.mark.parametrize("batch", [1, [], [1.0], ["x", []], [1.0, None], {"ts": 1.0}, {}])
def test_a_payload_that_is_no_batch_is_undecodable(batch: Any) -> None:
    with pytest.raises(Undecodable):
        read_batch(msgspec.msgpack.encode(batch))


@pytest.mark.parametrize("batch", [[2, ["e"]], [2.0, ["e"], 3], {"ts": 2.0, "events": ["e"]}])
def test_a_batch_is_an_array_or_a_map(batch: Any) -> None:
    assert read_batch(msgspec.msgpack.encode(batch)) == (2.0, ["e"])
