"""`python -m smg_grpc_servicer ask TARGET "prompt"`: see whether a worker works.

Finds out which engine's service the worker has, fetches its tokenizer from it, applies the chat
template, streams the answer as text, and says how long the first token took.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pydantic import AfterValidator, SecretStr, model_validator
from pydantic_settings import CliPositionalArg
from smg_grpc_proto.generated import common_pb2

from smg_grpc_servicer.settings import ExistingFile, PositiveSeconds
from smg_wire import tokenizer_bundle
from smg_wire.chat_template import ChatTemplate
from smg_wire.errors import FailedPrecondition, SmgError, Unavailable
from smg_wire.settings import Settings, load, option

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


# The narrowest field that one of the engines' protos has for it.
_MOST_TOKENS = 2**31 - 1


def _encodable(text: str) -> str:
    # Bytes of a command line that are no UTF-8 arrive as surrogates, which no message can carry.
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("must be valid UTF-8") from error
    return text


Text = Annotated[str, AfterValidator(_encodable)]


class AskSettings(Settings):
    """Ask a running worker, whatever its engine, and stream its answer."""

    target: CliPositionalArg[str] = option(help="The worker's address, HOST:PORT.")
    prompt: CliPositionalArg[Text] = option(help="What to ask.")
    system: Text | None = option(None, help="A system message before the prompt.")
    raw: bool = option(False, help="Send the prompt as it is, without the chat template.")
    max_tokens: int = option(256, ge=1, le=_MOST_TOKENS, help="Most tokens to generate.")
    temperature: float = option(0.0, ge=0, help="Sampling temperature; 0 is greedy.")
    api_key: SecretStr | None = option(None, help="The worker's API key.")
    ssl_ca_certs: ExistingFile | None = option(
        None, help="Speak TLS and trust the authorities in this PEM file."
    )
    ssl_certfile: ExistingFile | None = option(None, help="Client certificate, for mutual TLS.")
    ssl_keyfile: ExistingFile | None = option(None, help="Private key of --ssl-certfile.")
    timeout: PositiveSeconds = option(120.0, help="Seconds that the answer may take.")

    @model_validator(mode="after")
    def _tls_is_whole(self) -> AskSettings:
        # Left out in silence, prompt and key would travel in the clear.
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ValueError("--ssl-certfile and --ssl-keyfile go together")
        if self.ssl_certfile is not None and self.ssl_ca_certs is None:
            raise ValueError("--ssl-certfile and --ssl-keyfile need --ssl-ca-certs")
        return self


@dataclass(frozen=True)
class _Engine:
    """How one engine's proto names what all of them have."""

    service: str
    module: str
    stub: str
    max_tokens_field: str


_ENGINES = (
    _Engine("vllm.grpc.engine.VllmEngine", "vllm_engine", "VllmEngineStub", "max_tokens"),
    _Engine(
        "sglang.grpc.scheduler.SglangScheduler",
        "sglang_scheduler",
        "SglangSchedulerStub",
        "max_new_tokens",
    ),
    _Engine(
        "tokenspeed.grpc.scheduler.TokenSpeedScheduler",
        "tokenspeed_scheduler",
        "TokenSpeedSchedulerStub",
        "max_new_tokens",
    ),
    _Engine("mlx.grpc.engine.MlxEngine", "mlx_engine", "MlxEngineStub", "max_tokens"),
)

_CONNECT_SECONDS = 10.0


class Asker:
    """One worker, asked over one channel."""

    def __init__(self, settings: AskSettings) -> None:
        self._settings = settings
        self._channel = _channel(settings)
        key = settings.api_key
        self._metadata = (
            (("authorization", f"Bearer {key.get_secret_value()}"),) if key is not None else ()
        )

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()

    def detect(self) -> _Engine:
        """Return the engine whose service the worker has.

        Raises:
            Unavailable: it has one, and does not serve now; or nothing answers there.
            FailedPrecondition: it has none that is known here.
        """
        health: Any = health_pb2_grpc.HealthStub(self._channel)
        for engine in _ENGINES:
            request = health_pb2.HealthCheckRequest(service=engine.service)
            try:
                answer = health.Check(request, timeout=_CONNECT_SECONDS, wait_for_ready=True)
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.NOT_FOUND:
                    continue
                if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                    raise Unavailable(
                        f"nothing answers at {self._settings.target} within "
                        f"{_CONNECT_SECONDS:g} s: is a worker there, with TLS as asked for?"
                    ) from error
                raise
            if answer.status != health_pb2.HealthCheckResponse.SERVING:
                raise Unavailable(f"{engine.service} is there, but not serving now")
            return engine
        raise FailedPrecondition("no engine's service is known to the worker's grpc.health.v1")

    def fetch_tokenizer(self, engine: _Engine, directory: Path) -> None:
        """Unpack the worker's tokenizer bundle into `directory`."""
        data, sha256 = bytearray(), ""
        chunks = self._stub(engine).GetTokenizer(
            common_pb2.GetTokenizerRequest(),
            timeout=self._settings.timeout,
            metadata=self._metadata,
        )
        for chunk in chunks:
            data += chunk.data
            sha256 = chunk.sha256 or sha256
            if len(data) > tokenizer_bundle.MAX_ZIP_BYTES:
                break
        tokenizer_bundle.unpack(tokenizer_bundle.check(bytes(data), sha256), directory)

    def generate(self, engine: _Engine, text: str, ids: list[int]) -> Iterator[list[int]]:
        """Yield new token ids as they come."""
        messages: Any = importlib.import_module(f"smg_grpc_proto.generated.{engine.module}_pb2")
        request = messages.GenerateRequest(
            request_id=f"ask-{uuid.uuid4().hex}",
            tokenized=messages.TokenizedInput(original_text=text, input_ids=ids),
            sampling_params=messages.SamplingParams(
                temperature=self._settings.temperature,
                **{engine.max_tokens_field: self._settings.max_tokens},
            ),
            stream=True,
        )
        responses = self._stub(engine).Generate(
            request, timeout=self._settings.timeout, metadata=self._metadata
        )
        for response in responses:
            if response.HasField("chunk"):
                yield list(response.chunk.token_ids)

    def _stub(self, engine: _Engine) -> Any:
        module = importlib.import_module(f"smg_grpc_proto.generated.{engine.module}_pb2_grpc")
        return getattr(module, engine.stub)(self._channel)


def _channel(settings: AskSettings) -> grpc.Channel:
    options = [("grpc.max_receive_message_length", -1)]
    if settings.ssl_ca_certs is None:
        return grpc.insecure_channel(settings.target, options)
    credentials = grpc.ssl_channel_credentials(
        settings.ssl_ca_certs.read_bytes(),
        settings.ssl_keyfile.read_bytes() if settings.ssl_keyfile else None,
        settings.ssl_certfile.read_bytes() if settings.ssl_certfile else None,
    )
    return grpc.secure_channel(settings.target, credentials, options)


def _load_tokenizer(directory: Path) -> tuple[Any, Any]:
    """Return the tokenizer, and what turns a stream of its ids into text."""
    try:
        from tokenizers import Tokenizer
        from tokenizers.decoders import DecodeStream
    except ImportError as error:
        raise FailedPrecondition("ask needs tokenizers: pip install tokenizers jinja2") from error
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise FailedPrecondition("the worker's tokenizer has no tokenizer.json, which ask reads")
    return Tokenizer.from_file(str(file)), DecodeStream(skip_special_tokens=True)


def _prompt(settings: AskSettings, directory: Path) -> str:
    if settings.raw:
        return settings.prompt
    messages = [{"role": "user", "content": settings.prompt}]
    if settings.system is not None:
        messages.insert(0, {"role": "system", "content": settings.system})
    return ChatTemplate(directory).render(messages)


def ask(settings: AskSettings) -> None:
    """Ask once and print the answer to standard output, the figures to standard error."""
    asker = Asker(settings)
    try:
        engine = asker.detect()
        with tempfile.TemporaryDirectory(prefix="smg-ask-") as name:
            directory = Path(name)
            asker.fetch_tokenizer(engine, directory)
            tokenizer, stream = _load_tokenizer(directory)
            text = _prompt(settings, directory)
        ids = tokenizer.encode(text, add_special_tokens=settings.raw).ids
        began, first, count = time.monotonic(), 0.0, 0
        for new in asker.generate(engine, text, ids):
            first = first or time.monotonic()
            count += len(new)
            for token_id in new:
                sys.stdout.write(stream.step(tokenizer, token_id) or "")
            sys.stdout.flush()
        print()
        _report(engine, len(ids), count, began, first)
    finally:
        asker.close()


def _report(engine: _Engine, prompt: int, count: int, began: float, first: float) -> None:
    if not count:
        print(f"{engine.service}: no token came", file=sys.stderr)
        return
    rest = time.monotonic() - first
    rate = f"{(count - 1) / rest:.1f} tokens/s" if count > 1 and rest > 0 else "one token"
    print(
        f"{engine.service}: {prompt} prompt tokens, first token after {first - began:.3f} s, "
        f"{count} tokens, {rate}",
        file=sys.stderr,
    )


def main(argv: Sequence[str]) -> int:
    """Run `ask`; return 0, 1 where the worker did not answer, 2 for a wrong flag."""
    settings = load(AskSettings, argv, prog="python -m smg_grpc_servicer ask")
    try:
        ask(settings)
    except SmgError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 1
    except grpc.RpcError as error:
        print(f"error: {error.code().name}: {error.details()}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0
