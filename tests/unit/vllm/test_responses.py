from __future__ import annotations

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from smg_grpc_servicer.serving.deltas import Delta, Finish, Logprobs
from smg_grpc_servicer.vllm import responses
from smg_grpc_servicer.vllm.outputs import PromptLogprobs, VllmExtra

LOGPROBS = Logprobs([5, 6], [-0.5, -0.25], [[(5, -0.5)], [(6, -0.25)]])
PROMPT = PromptLogprobs([1, 2], [None, -1.0], [[], [(9, -0.5)]])


def delta(finish: Finish | None = None, extra: VllmExtra | None = None) -> Delta:
    return Delta(1, [5, 6], 3, 9, 2, LOGPROBS, finish, extra)


def test_a_chunk_counts_its_own_tokens() -> None:
    tops = [
        pb.TopLogProbs(values=[-0.5], token_ids=[5]),
        pb.TopLogProbs(values=[-0.25], token_ids=[6]),
    ]
    assert responses.chunk(delta()) == pb.GenerateResponse(
        chunk=pb.GenerateStreamChunk(
            token_ids=[5, 6],
            prompt_tokens=3,
            completion_tokens=2,
            cached_tokens=2,
            output_logprobs=pb.OutputLogProbs(
                token_logprobs=[-0.5, -0.25], token_ids=[5, 6], top_logprobs=tops
            ),
            index=1,
        )
    )


def test_the_end_of_a_stream_repeats_the_last_chunk() -> None:
    last = delta(Finish("stop", 6), VllmExtra(PROMPT))
    chunk = responses.chunk(last).chunk
    end = responses.complete(last, chunked=True).complete
    assert end.output_ids == chunk.token_ids
    assert end.completion_tokens == chunk.completion_tokens == 2
    assert end.output_logprobs == chunk.output_logprobs
    assert (end.prompt_tokens, end.cached_tokens, end.index) == (3, 2, 1)
    # The prompt's logprobs are said once.
    assert chunk.HasField("input_logprobs")
    assert not end.HasField("input_logprobs")


def test_a_match_is_an_id_or_a_string_or_nothing() -> None:
    for matched, field in ((6, "matched_token_id"), ("end", "matched_stop_str"), (None, None)):
        end = responses.complete(delta(Finish("stop", matched)), chunked=False).complete
        assert end.WhichOneof("matched_stop") == field
        if field is not None:
            assert getattr(end, field) == matched
    # 0 is a token, and not unset.
    end = responses.complete(delta(Finish("stop", 0)), chunked=False).complete
    assert end.WhichOneof("matched_stop") == "matched_token_id"


def test_the_prompts_first_entry_is_empty_and_not_zero() -> None:
    given = responses.complete(
        delta(Finish("length"), VllmExtra(PROMPT)), chunked=False
    ).complete.input_logprobs
    assert [entry.HasField("value") for entry in given.token_logprobs] == [False, True]
    assert list(given.token_ids) == [1, 2]
    assert [list(top.token_ids) for top in given.top_logprobs] == [[], [9]]


def test_no_alternatives_asked_is_no_list_of_them() -> None:
    bare = Delta(0, [5], 1, 1, 0, Logprobs([5], [-0.5], [[]]))
    assert list(responses.chunk(bare).chunk.output_logprobs.top_logprobs) == []
    assert list(responses.chunk(bare).chunk.output_logprobs.token_ids) == [5]


def test_connector_parameters_go_out_in_both_forms_where_they_fit() -> None:
    moved = {"remote_host": "h", "remote_port": 7, "blocks": [1]}
    end = responses.complete(delta(Finish("length"), VllmExtra(None, moved)), chunked=True).complete
    assert end.kv_transfer_params == pb.KvTransferParams(remote_host="h", remote_port=7)
    assert end.kv_transfer_params_json == '{"remote_host": "h", "remote_port": 7, "blocks": [1]}'
    for other in ({"blocks": [1]}, {"remote_host": "h", "remote_port": -1}, {"remote_host": ["h"]}):
        end = responses.complete(
            delta(Finish("length"), VllmExtra(None, other)), chunked=True
        ).complete
        assert not end.HasField("kv_transfer_params")
        assert end.HasField("kv_transfer_params_json")
    end = responses.complete(delta(Finish("length")), chunked=True).complete
    assert not end.HasField("kv_transfer_params_json")


def test_speculation_is_counted_at_the_end() -> None:
    end = responses.complete(
        delta(Finish("length"), VllmExtra(None, None, 5, 12)), chunked=True
    ).complete
    assert (end.spec_accepted_tokens, end.spec_draft_tokens) == (5, 12)


def test_a_vector_says_its_size() -> None:
    assert responses.embedding([0.5, -0.5], 3) == pb.EmbedResponse(
        embedding=[0.5, -0.5], prompt_tokens=3, embedding_dim=2
    )
