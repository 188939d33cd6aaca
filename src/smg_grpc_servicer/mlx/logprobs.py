"""Log probabilities of one generated token, from the row that the model gave."""

from __future__ import annotations

from typing import Any

from smg_grpc_servicer.serving.deltas import Logprobs


def token_logprobs(row: Any, token: int, alternatives: int) -> Logprobs:
    """Return the log probability of a token and the best alternatives at its place.

    Args:
        row: logits or log probabilities, an mlx array [vocabulary] of any float type. It is
            normalised here in 32 bits: sixteen-bit models round their own normalisation.
        token: the chosen id.
        alternatives: how many to list, best first; the chosen one is in no way special there.
    """
    import mlx.core as mx
    import numpy as np

    values = np.array(row.astype(mx.float32))
    # From here on all is in numpy: for one row it is several times faster than a graph.
    best = values.max()
    norm = float(best) + float(np.log(np.exp(values - best).sum(dtype=np.float64)))
    top: list[tuple[int, float]] = []
    count = min(alternatives, values.shape[0])
    if count > 0:
        ids = np.argpartition(values, -count)[-count:]
        ids = ids[np.argsort(-values[ids], kind="stable")]
        top = [(int(i), float(values[i]) - norm) for i in ids]
    return Logprobs(token_ids=[token], values=[float(values[token]) - norm], top=[top])
