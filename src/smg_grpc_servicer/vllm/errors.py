"""vLLM's own exceptions -> this project's."""

from __future__ import annotations

from functools import cache

from smg_wire.errors import EngineDead, EngineRefusal, NotFound, Overloaded, SmgError

# A grammar compiler quotes what it was given, which may be long.
_MOST_CHARACTERS = 400


@cache
def known(*names: str) -> tuple[type[BaseException], ...]:
    """Return those of vLLM's exception classes that this release has."""
    from vllm import exceptions

    return tuple(getattr(exceptions, name) for name in names if hasattr(exceptions, name))


def from_vllm(error: BaseException) -> SmgError | None:
    """Return the error for one that vLLM raised over a request; None if it is a stranger."""
    from vllm.v1.engine.exceptions import EngineDeadError

    if isinstance(error, EngineDeadError):
        return EngineDead("the engine is dead; this worker is about to exit")
    if isinstance(error, known("VLLMNotFoundError")):
        return NotFound(one_line(error))
    # Refused on admission: vLLM's own bounds on its queue (since 0.32).
    if isinstance(error, known("QueueOverflowError", "MaxQueuedTokensError")):
        return Overloaded(one_line(error))
    # 0.32 drew the line between client and server; before, a ValueError was the client's.
    if isinstance(error, (*known("VLLMClientError", "VLLMValidationError"), ValueError)):
        return EngineRefusal(one_line(error))
    return None


def one_line(error: BaseException) -> str:
    """Return what an error of vLLM's says, in one line of bounded length."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}…"
