"""Is the installed smg-grpc-proto new enough for the fields that we set?

A package that is too old would fail at the first request that needs the field; a protobuf
runtime that is older than the generated modules fails at their import. Both are found here and
said in one line, before a worker imports its servicer.
"""

from __future__ import annotations

import importlib
import importlib.metadata

# The newest field that each engine's servicer sets: (module, message, field).
NEWEST_FIELDS: dict[str, tuple[str, str, str]] = {
    "mlx": ("mlx_engine_pb2", "GenerateComplete", "matched_stop_token_id"),
    "vllm": ("vllm_engine_pb2", "GetServerInfoResponse", "mm_encoder_budget"),
}

_MEND = "pip install --upgrade smg-grpc-proto"


def problem(engine: str) -> str | None:
    """Return one line that says what is wrong and how to mend it, or None."""
    module, message, field = NEWEST_FIELDS[engine]
    try:
        generated = importlib.import_module(f"smg_grpc_proto.generated.{module}")
        known = getattr(generated, message).DESCRIPTOR.fields_by_name
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return f"smg-grpc-proto cannot be used for {engine} ({reason}): {_MEND}"
    if field not in known:
        version = importlib.metadata.version("smg-grpc-proto")
        return f"smg-grpc-proto {version} does not know {message}.{field} ({engine}): {_MEND}"
    return None
