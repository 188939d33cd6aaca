"""Engine events, as msgpack gives them, to `KvCacheEvent` messages.

An event is an array headed by its name (SGLang, TokenSpeed, vLLM before its events became maps)
or a map with its name under `type`. A field that a release does not have is absent, at the end of
the array or in the map; fields of releases to come are ignored. Both shapes are read alike::

    BlockStored   block_hashes parent_block_hash token_ids block_size lora_id medium lora_name
                  extra_keys group_idx kv_cache_spec_kind kv_cache_spec_sliding_window locality
                  ownership session_id
    BlockRemoved  block_hashes medium group_idx locality ownership
    AllBlocksCleared
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from smg_grpc_proto.generated import common_pb2 as pb

from smg_grpc_servicer.kv_events.frames import Undecodable

if TYPE_CHECKING:
    from collections.abc import Iterator

_STORED = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "locality",
    "ownership",
    "session_id",
    "cache_salt",
)
_REMOVED = ("block_hashes", "medium", "group_idx", "locality", "ownership")
_CLEARED = ("ownership",)
_FIELDS = {"BlockStored": _STORED, "BlockRemoved": _REMOVED, "AllBlocksCleared": _CLEARED}

_TIERS = {
    "GPU": pb.KV_CACHE_TIER_DEVICE,
    "CPU": pb.KV_CACHE_TIER_HOST,
    "CPU_PINNED": pb.KV_CACHE_TIER_HOST,
    "STORAGE": pb.KV_CACHE_TIER_DISK,
    "DISK": pb.KV_CACHE_TIER_DISK,
    "EXTERNAL": pb.KV_CACHE_TIER_EXTERNAL,
}
# `cache_level` says the same to consumers that predate the tier.
_LEVELS = {
    pb.KV_CACHE_TIER_DEVICE: 0,
    pb.KV_CACHE_TIER_HOST: 1,
    pb.KV_CACHE_TIER_DISK: 2,
    pb.KV_CACHE_TIER_EXTERNAL: 3,
}
_LOCALITIES = {
    "LOCAL": pb.KV_CACHE_LOCALITY_LOCAL,
    "REMOTE": pb.KV_CACHE_LOCALITY_REMOTE,
}
_INT64 = 2**63
_MASK = 2**64 - 1


def fold_hash(value: object) -> int:
    """Return a block hash of any width as the signed 64-bit number of the wire.

    The low 64 bits are kept, which is what vLLM itself keeps of a digest that it publishes as a
    number, so that one block has one number however it was published.

    Raises:
        Undecodable: neither a number, nor bytes, nor text.
    """
    if isinstance(value, int):
        number = value
    elif isinstance(value, bytes):
        number = int.from_bytes(value, "big")
    elif isinstance(value, str):
        try:
            number = int(value, 16)
        except ValueError:
            digest = hashlib.blake2b(value.encode(), digest_size=8).digest()
            number = int.from_bytes(digest, "big")
    else:
        raise Undecodable(f"a block hash is {type(value).__name__}")
    number &= _MASK
    return number - 2 * _INT64 if number >= _INT64 else number


def convert_event(raw: object) -> pb.KvCacheEvent | None:
    """Return the message for one event, without an event id; None for a kind not known here.

    Raises:
        Undecodable: a known kind with contents that it cannot have.
    """
    name, fields = _read(raw)
    try:
        if name == "BlockStored":
            return pb.KvCacheEvent(stored=_stored(fields))
        if name == "BlockRemoved":
            return pb.KvCacheEvent(removed=_removed(fields))
        if name == "AllBlocksCleared":
            return pb.KvCacheEvent(cleared=pb.KvCacheCleared(ownership=fields.get("ownership")))
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise Undecodable(f"{name}: {error!r}") from error
    return None


def _read(raw: object) -> tuple[str, dict[str, Any]]:
    if isinstance(raw, dict):
        return str(raw.get("type")), raw
    if isinstance(raw, list) and raw:
        name = str(raw[0])
        return name, dict(zip(_FIELDS.get(name, ()), raw[1:], strict=False))
    raise Undecodable(f"an event is {type(raw).__name__}")


def _stored(fields: dict[str, Any]) -> pb.KvBlocksStored:
    parent = fields.get("parent_block_hash")
    tier = _tier(fields.get("medium"))
    return pb.KvBlocksStored(
        blocks=_blocks(fields, _LEVELS.get(tier) if tier is not None else None),
        parent_block_hash=None if parent is None else fold_hash(parent),
        tier=tier,
        medium=fields.get("medium"),
        group_idx=fields.get("group_idx"),
        kv_cache_spec_kind=fields.get("kv_cache_spec_kind"),
        kv_cache_spec_sliding_window=fields.get("kv_cache_spec_sliding_window"),
        locality=_locality(fields, tier),
        ownership=fields.get("ownership"),
        session_id=fields.get("session_id"),
        lora_name=fields.get("lora_name"),
        cache_salt=fields.get("cache_salt") or _salt(fields),
    )


def _removed(fields: dict[str, Any]) -> pb.KvBlocksRemoved:
    tier = _tier(fields.get("medium"))
    return pb.KvBlocksRemoved(
        block_hashes=[fold_hash(value) for value in fields["block_hashes"]],
        cache_level=_LEVELS.get(tier) if tier is not None else None,
        tier=tier,
        medium=fields.get("medium"),
        group_idx=fields.get("group_idx"),
        locality=_locality(fields, tier),
        ownership=fields.get("ownership"),
    )


def _blocks(fields: dict[str, Any], level: int | None) -> Iterator[pb.KvBlock]:
    hashes, size = fields["block_hashes"], fields["block_size"]
    tokens = _tokens(fields["token_ids"])
    # An engine that leaves out blocks of a window still sends the tokens of all: which tokens
    # are whose cannot be told then, and none are better than another block's.
    whole = len(tokens) == len(hashes) * size
    extra_keys = fields.get("extra_keys") or ()
    for index, value in enumerate(hashes):
        yield pb.KvBlock(
            block_hash=fold_hash(value),
            token_ids=tokens[index * size : (index + 1) * size] if whole else (),
            block_size=size,
            lora_id=fields.get("lora_id"),
            cache_level=level,
            extra_keys=_extra_keys(extra_keys[index] if index < len(extra_keys) else None),
        )


def _tokens(token_ids: list[Any]) -> list[int]:
    # Under EAGLE, SGLang keys its cache by pairs of neighbours: the first of each is the token.
    if token_ids and isinstance(token_ids[0], list):
        return [pair[0] for pair in token_ids]
    return token_ids


def _extra_keys(keys: list[Any] | None) -> Iterator[pb.KvBlockExtraKey]:
    for key in keys or ():
        if isinstance(key, str):
            yield pb.KvBlockExtraKey(text=key)
        elif isinstance(key, bytes):
            yield pb.KvBlockExtraKey(blob=key)
        elif isinstance(key, int):
            yield pb.KvBlockExtraKey(number=key)
        else:
            identifier, offset = key
            multimodal = pb.KvMultimodalKey(identifier=identifier, offset=offset)
            yield pb.KvBlockExtraKey(multimodal=multimodal)


def _salt(fields: dict[str, Any]) -> str | None:
    """Return the cache salt, which the keys of a prompt's first block hold after the adapter's."""
    if fields.get("parent_block_hash") is not None:
        return None
    keys = list((fields.get("extra_keys") or [None])[0] or ())
    if keys and keys[0] == fields.get("lora_name"):
        del keys[0]
    return next((key for key in keys if isinstance(key, str)), None)


def _tier(medium: str | None) -> pb.KvCacheTier | None:
    return None if medium is None else _TIERS.get(medium.upper())


def _locality(fields: dict[str, Any], tier: pb.KvCacheTier | None) -> pb.KvCacheLocality | None:
    locality = fields.get("locality")
    if locality is not None:
        return _LOCALITIES.get(locality.upper())
    # Left open by the engine, but a device's memory is nobody else's.
    return pb.KV_CACHE_LOCALITY_LOCAL if tier == pb.KV_CACHE_TIER_DEVICE else None
