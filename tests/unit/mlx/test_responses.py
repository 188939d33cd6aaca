"""Delta -> GenerateResponse: chunks carry ids, the end of a stream carries none."""

from __future__ import annotations

from smg_grpc_servicer.mlx import responses
from smg_grpc_servicer.serving.deltas import Delta, Finish, Logprobs


def delta(finish: Finish | None = None) -> Delta:
    return Delta(
        index=0,
        token_ids=[7, 8],
        prompt_tokens=5,
        completion_tokens=9,
        cached_tokens=4,
        logprobs=Logprobs([7, 8], [-0.5, -0.25], [[(7, -0.5), (1, -1.5)], []]),
        finish=finish,
    )


def test_a_chunk_carries_new_ids_counts_and_logprobs() -> None:
    chunk = responses.chunk(delta()).chunk
    assert list(chunk.token_ids) == [7, 8]
    assert (chunk.prompt_tokens, chunk.completion_tokens, chunk.cached_tokens) == (5, 9, 4)
    assert list(chunk.output_logprobs.token_logprobs) == [-0.5, -0.25]
    assert list(chunk.output_logprobs.token_ids) == [7, 8]
    assert [list(top.token_ids) for top in chunk.output_logprobs.top_logprobs] == [[7, 1], []]


def test_the_end_of_a_stream_has_counts_and_no_tokens() -> None:
    end = responses.complete(delta(Finish("length")), with_tokens=False).complete
    assert not end.output_ids
    assert not end.HasField("output_logprobs")
    assert (end.finish_reason, end.completion_tokens) == ("length", 9)
    assert not end.HasField("matched_stop_token_id")


def test_a_unary_answer_has_all_of_it() -> None:
    end = responses.complete(delta(Finish("stop", 8)), with_tokens=True).complete
    assert list(end.output_ids) == [7, 8]
    assert len(end.output_logprobs.token_logprobs) == 2
    assert end.matched_stop_token_id == 8


def test_a_stop_token_with_the_id_zero_is_named() -> None:
    end = responses.complete(delta(Finish("stop", 0)), with_tokens=True).complete
    assert end.HasField("matched_stop_token_id")


def test_without_logprobs_the_field_stays_unset() -> None:
    plain = Delta(0, [7], 5, 1)
    assert not responses.chunk(plain).chunk.HasField("output_logprobs")
