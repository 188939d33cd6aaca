"""Deltas -> GenerateResponse messages, as vLLM's wire counts.

A streamed request gets chunks, whose counts are of their own ids, and then per choice a
`complete` that repeats the last chunk; a unary one gets a `complete` with all ids per choice.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from smg_grpc_servicer.vllm.outputs import VllmExtra

if TYPE_CHECKING:
    from smg_grpc_servicer.serving.deltas import Delta, Logprobs
    from smg_grpc_servicer.vllm.outputs import PromptLogprobs


def chunk(delta: Delta) -> pb.GenerateResponse:
    """Return the message that carries a delta's new tokens, and the prompt's logprobs once."""
    extra = delta.extra
    return pb.GenerateResponse(
        chunk=pb.GenerateStreamChunk(
            token_ids=delta.token_ids,
            prompt_tokens=delta.prompt_tokens,
            completion_tokens=len(delta.token_ids),
            cached_tokens=delta.cached_tokens,
            output_logprobs=_logprobs(delta.logprobs),
            input_logprobs=_input_logprobs(
                extra.prompt_logprobs if isinstance(extra, VllmExtra) else None
            ),
            index=delta.index,
        )
    )


def complete(delta: Delta, *, chunked: bool) -> pb.GenerateResponse:
    """Return the terminal message of a choice; `chunked` if a chunk has carried the delta."""
    assert delta.finish is not None  # noqa: S101  (only a finished delta gets here)
    extra = delta.extra if isinstance(delta.extra, VllmExtra) else VllmExtra()
    matched = delta.finish.matched
    moved = extra.kv_transfer_params
    return pb.GenerateResponse(
        complete=pb.GenerateComplete(
            output_ids=delta.token_ids,
            finish_reason=delta.finish.reason,
            prompt_tokens=delta.prompt_tokens,
            completion_tokens=len(delta.token_ids),
            cached_tokens=delta.cached_tokens,
            output_logprobs=_logprobs(delta.logprobs),
            input_logprobs=None if chunked else _input_logprobs(extra.prompt_logprobs),
            index=delta.index,
            kv_transfer_params=_typed(moved),
            kv_transfer_params_json=json.dumps(moved) if moved else None,
            matched_token_id=matched if isinstance(matched, int) else None,
            matched_stop_str=matched if isinstance(matched, str) else None,
            spec_accepted_tokens=extra.spec_accepted_tokens,
            spec_draft_tokens=extra.spec_draft_tokens,
        )
    )


def embedding(values: list[float], prompt_tokens: int) -> pb.EmbedResponse:
    """Return the answer to an Embed call."""
    return pb.EmbedResponse(
        embedding=values, prompt_tokens=prompt_tokens, embedding_dim=len(values)
    )


def _typed(moved: dict[str, object] | None) -> pb.KvTransferParams | None:
    """Return the legacy form, for the connectors whose parameters fit it."""
    if not moved:
        return None
    host, port = moved.get("remote_host"), moved.get("remote_port")
    if not isinstance(host, str) or not isinstance(port, int) or not 0 <= port < 2**32:
        return None
    return pb.KvTransferParams(remote_host=host, remote_port=port)


def _logprobs(logprobs: Logprobs | None) -> pb.OutputLogProbs | None:
    if logprobs is None or not logprobs.token_ids:
        return None
    return pb.OutputLogProbs(
        token_logprobs=logprobs.values,
        token_ids=logprobs.token_ids,
        # None asked for: no list at all, not a list of nothing for each token.
        top_logprobs=[_top(top) for top in logprobs.top] if any(logprobs.top) else (),
    )


def _input_logprobs(given: PromptLogprobs | None) -> pb.InputLogProbs | None:
    if given is None:
        return None
    return pb.InputLogProbs(
        token_logprobs=[pb.InputTokenLogProb(value=value) for value in given.values],
        token_ids=given.token_ids,
        top_logprobs=[_top(top) for top in given.top] if any(given.top) else (),
    )


def _top(top: list[tuple[int, float]]) -> pb.TopLogProbs:
    return pb.TopLogProbs(
        values=[value for _, value in top], token_ids=[token_id for token_id, _ in top]
    )
