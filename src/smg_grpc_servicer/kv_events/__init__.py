"""An engine's KV cache events, from its ZMQ publishers to any number of gRPC subscribers.

::

    publisher ──> RankSource ──> RankLog ──────> Subscription ──> stream
    (one a rank)  gaps, replay,  history, live   a position in
                  restarts       blocks          each log

No engine is imported here: vLLM, SGLang and TokenSpeed publish in one framing.
"""

from smg_grpc_servicer.kv_events.relay import KvEventRelay, RelayLimits
from smg_grpc_servicer.kv_events.source import Endpoint

__all__ = ["Endpoint", "KvEventRelay", "RelayLimits"]
