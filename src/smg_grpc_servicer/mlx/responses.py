"""Deltas -> GenerateResponse messages.

A streamed request gets chunks with new ids and then one `complete` without ids; a unary one gets
a single `complete` with all of them. Counts are of the whole answer so far.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from smg_grpc_proto.generated import mlx_engine_pb2 as pb

if TYPE_CHECKING:
    from smg_grpc_servicer.serving.deltas import Delta, Logprobs


def chunk(delta: Delta) -> pb.GenerateResponse:
    """Return the message that carries a delta's new tokens."""
    return pb.GenerateResponse(
        chunk=pb.GenerateStreamChunk(
            token_ids=delta.token_ids,
            prompt_tokens=delta.prompt_tokens,
            completion_tokens=delta.completion_tokens,
            cached_tokens=delta.cached_tokens,
            output_logprobs=_logprobs(delta.logprobs),
            index=delta.index,
        )
    )


def complete(delta: Delta, *, with_tokens: bool) -> pb.GenerateResponse:
    """Return the terminal message of a choice; `with_tokens` for a request that did not stream."""
    assert delta.finish is not None  # noqa: S101  (only a finished delta gets here)
    matched = delta.finish.matched
    return pb.GenerateResponse(
        complete=pb.GenerateComplete(
            output_ids=delta.token_ids if with_tokens else (),
            finish_reason=delta.finish.reason,
            prompt_tokens=delta.prompt_tokens,
            completion_tokens=delta.completion_tokens,
            cached_tokens=delta.cached_tokens,
            output_logprobs=_logprobs(delta.logprobs) if with_tokens else None,
            index=delta.index,
            matched_stop_token_id=matched if isinstance(matched, int) else None,
        )
    )


def _logprobs(logprobs: Logprobs | None) -> pb.OutputLogProbs | None:
    if logprobs is None:
        return None
    return pb.OutputLogProbs(
        token_logprobs=logprobs.values,
        token_ids=logprobs.token_ids,
        top_logprobs=[
            pb.TopLogProbs(
                values=[value for _, value in top], token_ids=[token_id for token_id, _ in top]
            )
            for top in logprobs.top
        ],
    )
