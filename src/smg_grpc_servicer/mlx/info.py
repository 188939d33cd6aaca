"""What GetModelInfo and GetServerInfo answer."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from smg_grpc_proto.generated import mlx_engine_pb2 as pb

if TYPE_CHECKING:
    from smg_grpc_servicer.mlx.model import ModelFacts

# The name by which the published router knows this kind of worker.
SERVER_TYPE = "mlx-grpc"


def model_info(facts: ModelFacts) -> pb.GetModelInfoResponse:
    """Return the model's facts; ids that the model does not have stay unset (0 on this wire)."""
    return pb.GetModelInfoResponse(
        model_path=facts.model_path,
        is_generation=True,
        max_context_length=facts.max_context_length,
        vocab_size=facts.vocab_size,
        served_model_name=facts.served_name,
        model_type=facts.model_type,
        architectures=facts.architectures,
        eos_token_ids=facts.eos_token_ids,
        pad_token_id=facts.pad_token_id or 0,
        bos_token_id=facts.bos_token_id or 0,
        # One token of the context is left for the answer.
        max_req_input_len=facts.max_context_length - 1,
    )


def server_info(*, active_requests: int, started: float) -> pb.GetServerInfoResponse:
    """Return the server's facts; `started` is a `time.monotonic()`."""
    return pb.GetServerInfoResponse(
        server_type=SERVER_TYPE,
        active_requests=active_requests,
        uptime_seconds=time.monotonic() - started,
    )
