"""First steps before the first request: code is compiled, and the speed of reading measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smg_grpc_servicer.mlx.config import MlxRequest
from smg_grpc_servicer.mlx.sampling import Sampling
from smg_wire.errors import SmgError, StartError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from smg_grpc_servicer.mlx.batcher import Batcher

_SHORT_PROMPT = 8
# One more than is measured: the last token is read with the first step of generation.
_MEASURED_PROMPT = 65

_PATHS = (
    (Sampling(temperature=0.0), None),
    (Sampling(seed=0), None),
    (Sampling(seed=0, top_k=20, top_p=0.9, min_p=0.05), 1),
    (
        Sampling(
            seed=0,
            top_p=0.9,
            repetition_penalty=1.1,
            frequency_penalty=0.1,
            presence_penalty=0.1,
            logit_bias={0: -1.0},
        ),
        0,
    ),
)


def warm_up(batcher: Batcher, vocab_size: int, should_stop: Callable[[], bool]) -> None:
    """Run greedy and sampled requests through an idle batcher and throw their tokens away.

    Leaves `seconds_per_token` measured. Ends early, with nothing left over, once `should_stop`.

    Raises:
        StartError: a request failed.
    """
    for round_number, requests in enumerate(_rounds(vocab_size)):
        ids = []
        for number, request in enumerate(requests):
            ids.append(f"warm-up-{round_number}-{number}")
            batcher.add(ids[-1], request)
        while batcher.busy:
            for _, result in batcher.admit():
                if isinstance(result, SmgError):
                    raise StartError("the warm-up request failed; the log has the details")
            if should_stop():
                batcher.retire(ids)
                return
            batcher.step()
            batcher.retire()


def _rounds(vocab_size: int) -> Iterator[list[MlxRequest]]:
    # The first round compiles; in the second only the work itself takes time.
    yield [_request(_SHORT_PROMPT, vocab_size, sampling, k) for sampling, k in _PATHS]
    yield [_request(_MEASURED_PROMPT, vocab_size, _PATHS[0][0], None)]


def _request(length: int, vocab_size: int, sampling: Sampling, logprobs: int | None) -> MlxRequest:
    return MlxRequest(
        prompt_ids=[i % max(vocab_size, 1) for i in range(length)],
        sampling=sampling,
        max_tokens=3,
        stop_token_ids=frozenset(),
        logprobs=logprobs,
    )
