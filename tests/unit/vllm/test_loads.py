"""vLLM's statistics to loads, with its objects stood in for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from smg_grpc_servicer.vllm.loads import LoadStatLogger, load_board, loads_response
from smg_wire.errors import InvalidRequest

if TYPE_CHECKING:
    from smg_grpc_servicer.loads import LoadBoard


def config(**cache: Any) -> Any:
    return SimpleNamespace(
        cache_config=SimpleNamespace(**{"num_gpu_blocks": 64, "block_size": 32, **cache}),
        scheduler_config=SimpleNamespace(max_num_seqs=8),
    )


def client(*ranks: int, statistics: bool = True) -> Any:
    return SimpleNamespace(
        engine_core=SimpleNamespace(engine_ranks_managed=list(ranks)),
        logger_manager=SimpleNamespace(stat_loggers=[]) if statistics else None,
    )


def statistics(**fields: Any) -> Any:
    prefix = {"requests": 0, "queries": 0, "hits": 0, "reset": False}
    prefix.update(fields.pop("prefix", {}))
    return SimpleNamespace(
        **{
            "num_running_reqs": 0,
            "num_waiting_reqs": 0,
            "num_skipped_waiting_reqs": 0,
            "kv_cache_usage": 0.0,
            "prefix_cache_stats": SimpleNamespace(**prefix),
            **fields,
        }
    )


def asked(board: LoadBoard, **request: Any) -> pb.GetLoadsResponse:
    return loads_response(pb.GetLoadsRequest(**request), board, "1.2.3")


def test_a_steps_statistics_reach_the_response() -> None:
    engine = client(0)
    board = load_board(engine, config())
    [logger] = engine.logger_manager.stat_loggers
    logger.record(
        statistics(
            num_running_reqs=3,
            num_waiting_reqs=1,
            num_skipped_waiting_reqs=1,
            kv_cache_usage=21 / 63,
            prefix={"requests": 2, "queries": 100, "hits": 25},
        ),
        SimpleNamespace(num_generation_tokens=6),
        mm_cache_stats=None,
        engine_idx=0,
    )
    board.forwarded(40)
    response = asked(board)
    [load] = response.loads
    assert response.version == "1.2.3"
    assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (3, 3, 6)
    assert (load.num_used_tokens, load.max_total_num_tokens) == (21 * 32, 64 * 32)
    assert load.token_usage == load.utilization == 21 / 63
    assert (load.gen_throughput, load.cache_hit_rate) == (6.0, 0.25)
    assert load.max_running_requests == 8
    # A quarter of what waits is taken to be in the cache.
    assert load.num_waiting_uncached_tokens == 30


def test_releases_that_count_otherwise_are_read_as_well() -> None:
    engine = client(0)
    board = load_board(engine, config(kv_cache_size_tokens=1000))
    old = statistics(num_waiting_reqs=4)
    del old.num_skipped_waiting_reqs
    old.prefix_cache_stats = None
    engine.logger_manager.stat_loggers[0].record(old, None)
    [load] = asked(board).loads
    assert load.num_waiting_reqs == 4
    assert load.max_total_num_tokens == 1000


def test_without_statistics_no_rank_is_answered_for() -> None:
    response = asked(load_board(client(0, statistics=False), config()))
    assert (response.dp_rank_count, list(response.loads)) == (0, [])


def test_every_managed_rank_has_its_share_of_the_blocks_and_its_global_number() -> None:
    engine = client(2, 3)
    board = load_board(engine, config(num_gpu_blocks=128))
    engine.logger_manager.stat_loggers[0].record(statistics(num_running_reqs=5), None, engine_idx=3)
    response = asked(board)
    assert [load.dp_rank for load in response.loads] == [2, 3]
    assert [load.num_running_reqs for load in response.loads] == [0, 5]
    assert [load.max_total_num_tokens for load in response.loads] == [2048, 2048]
    assert response.dp_rank_count == 2
    assert [load.dp_rank for load in asked(board, dp_rank=3).loads] == [3]
    for unknown in (0, 1, 4, -1):
        response = asked(board, dp_rank=unknown)
        assert (response.dp_rank_count, list(response.loads)) == (0, [])


def test_a_client_in_one_process_has_rank_0() -> None:
    engine = client()
    assert [load.dp_rank for load in asked(load_board(engine, config())).loads] == [0]


@pytest.mark.parametrize(
    ("include", "core"),
    [([], True), (["core"], True), (["all"], True), (["memory"], False), (["lora", "core"], True)],
)
def test_sections_that_were_not_asked_for_are_left_out(include: list[str], core: bool) -> None:
    [load] = asked(load_board(client(0), config()), include=include).loads
    assert (load.max_total_num_tokens > 0) == core


def test_a_section_that_no_engine_has_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match="include is 'moon': must be one of core"):
        asked(load_board(client(0), config()), include=["core", "moon"])


def test_the_logger_has_all_that_vllm_calls_and_lets_no_exception_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    board = load_board(client(0), config())
    logger = LoadStatLogger(board)
    logger.log_engine_initialized()
    logger.log()
    logger.record_sleep_state(1, 1)
    logger.record_admission_rejection("max_num_queued_reqs")
    logger.record(object(), None)  # type: ignore[arg-type]
    logger.record(object(), None)  # type: ignore[arg-type]
    assert caplog.text.count("statistics cannot be read") == 1


def test_an_output_without_statistics_is_a_sign_of_life() -> None:
    board = load_board(client(0), config())
    board.forwarded(10)
    heard: list[int] = []
    board.heard = heard.append  # type: ignore[method-assign]
    LoadStatLogger(board).record(None, None, engine_idx=0)
    assert heard == [0]
