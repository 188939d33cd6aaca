"""A rank's load as the `EngineLoad` message that rides on a stream of KV events."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smg_grpc_proto.generated import common_pb2 as pb

if TYPE_CHECKING:
    from smg_grpc_servicer.loads import RankLoad


def load_record(load: RankLoad, *, sample: int, load_only: bool, telemetry: bool) -> pb.EngineLoad:
    """Return the record; `telemetry` adds what goes out on the heartbeat cadence alone."""
    # None leaves a field absent, which is distinct from 0.
    return pb.EngineLoad(
        running_requests=load.running,
        waiting_requests=load.waiting,
        waiting_uncached_tokens=load.waiting_uncached_tokens,
        token_usage=load.token_usage,
        active_token_usage=load.active_token_usage,
        gen_throughput=load.gen_throughput,
        max_running_requests=load.max_running,
        age_ms=load.age_ms,
        sample=sample,
        load_only=load_only,
        cache_hit_rate=load.cache_hit_rate if telemetry else None,
        num_used_tokens=load.used_tokens if telemetry else None,
        max_total_num_tokens=load.total_tokens if telemetry else None,
        engine_silence_ms=load.engine_silence_ms,
        engine_reports_steps=load.reports_steps or None,
        prefill_pending_tokens=load.prefill_pending_tokens,
    )
