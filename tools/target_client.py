"""A typed client of tandem.v1.TargetService for the tools and tests: token ids in, ids and times out.

Synchronous, and usable from several threads at once. Must not know text, tokenizers, or how services
are started.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.errors import TandemError
from common.pb.tandem.v1 import target_pb2, target_pb2_grpc
from common.rpc import CHANNEL_OPTIONS

# Calls that only read facts; a service that needs longer is stopped or gone.
FACTS_DEADLINE_S = 5.0


class CallFailed(TandemError):
    """A call ended with a status other than OK; `code` is the grpc.StatusCode."""

    def __init__(self, method: str, code: grpc.StatusCode, details: str) -> None:
        self.code, self.details = code, details
        super().__init__(f"{method}: {code.name}: {details}")


@dataclass(frozen=True)
class GenerateOptions:
    """What a request asks for beside its prompt. None leaves a choice to the target."""

    max_new_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    drafting: bool = True
    """False asks for plain decoding: same tokens, no drafts."""


@dataclass(frozen=True)
class ReceivedDelta:
    """Tokens of one message and when it came, in seconds of time.perf_counter."""

    token_ids: list[int]
    from_draft: list[bool]
    at_s: float


@dataclass(frozen=True)
class Answer:
    """A finished request."""

    deltas: list[ReceivedDelta]
    finished: target_pb2.Finished

    @property
    def token_ids(self) -> list[int]:
        """All output tokens, in order."""
        return [token for delta in self.deltas for token in delta.token_ids]

    @property
    def from_draft(self) -> list[bool]:
        """For each output token, whether a draft had proposed it."""
        return [drafted for delta in self.deltas for drafted in delta.from_draft]

    @property
    def num_decoded(self) -> int:
        """Tokens that came after the first message, whose time is prefill's."""
        return sum(len(delta.token_ids) for delta in self.deltas[1:])

    @property
    def decode_s(self) -> float:
        """Seconds from the first message with tokens to the last, on the client's clock."""
        return self.deltas[-1].at_s - self.deltas[0].at_s if self.deltas else 0.0


@dataclass
class AnswerStream:
    """A running request: iterate over its deltas once; afterwards `answer` holds the whole."""

    request_id: str
    _call: grpc.Call = field(repr=False)
    _deltas: list[ReceivedDelta] = field(default_factory=list, repr=False)
    _finished: target_pb2.Finished | None = field(default=None, repr=False)

    def __iter__(self) -> Iterator[ReceivedDelta]:
        try:
            for message in self._call:
                if message.HasField("finished"):
                    self._finished = message.finished
                    continue
                delta = ReceivedDelta(
                    list(message.delta.token_ids), list(message.delta.from_draft), time.perf_counter()
                )
                self._deltas.append(delta)
                yield delta
        except grpc.RpcError as error:
            raise _failed("Generate", error) from error
        if self._finished is None:
            raise CallFailed("Generate", grpc.StatusCode.INTERNAL, "the stream ended without Finished")

    def cancel(self) -> None:
        """Leave: the target frees the request; iteration ends with CallFailed(CANCELLED)."""
        self._call.cancel()

    @property
    def answer(self) -> Answer:
        """The finished request; only after iteration ended by itself."""
        assert self._finished is not None, "iterate to the end first"
        return Answer(self._deltas, self._finished)


class TargetClient:
    """A connection to one target at `unix:/path` or `host:port`."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._target = target_pb2_grpc.TargetServiceStub(self._channel)

    def __enter__(self) -> TargetClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; running calls are cancelled."""
        self._channel.close()

    def start(
        self, prompt: Sequence[int], options: GenerateOptions, *, request_id: str | None = None
    ) -> AnswerStream:
        """Send a request. A refusal shows as CallFailed when the stream is read."""
        request = target_pb2.GenerateRequest(
            request_id=request_id or uuid.uuid4().hex,
            input_ids=prompt,
            sampling=target_pb2.SamplingParams(
                temperature=options.temperature,
                top_k=options.top_k,
                top_p=options.top_p,
                min_p=options.min_p,
                seed=options.seed,
            ),
            max_new_tokens=options.max_new_tokens,
            stop_token_ids=options.stop_token_ids,
            ignore_eos=options.ignore_eos,
            disable_drafting=not options.drafting,
        )
        return AnswerStream(request.request_id, self._target.Generate(request))

    def generate(
        self,
        prompt: Sequence[int],
        options: GenerateOptions,
        on_delta: Callable[[ReceivedDelta], None] = lambda _: None,
    ) -> Answer:
        """Send a request and wait for its end; `on_delta` sees each message as it comes."""
        stream = self.start(prompt, options)
        try:
            for delta in stream:
                on_delta(delta)
        except BaseException:
            # A Ctrl-C between two messages must not leave the target generating for nobody.
            stream.cancel()
            raise
        return stream.answer

    def abort(self, request_id: str) -> bool:
        """End a request early; returns whether it was waiting or running."""
        return self._ask("Abort", target_pb2.AbortRequest(request_id=request_id)).found

    def server_facts(self) -> target_pb2.GetServerInfoResponse:
        """Facts about the service and its load right now."""
        return self._ask("GetServerInfo", target_pb2.GetServerInfoRequest())

    def is_serving(self) -> bool:
        """Whether the service says SERVING; raises CallFailed when it does not answer."""
        stub = health_pb2_grpc.HealthStub(self._channel)
        try:
            reply = stub.Check(health_pb2.HealthCheckRequest(), timeout=FACTS_DEADLINE_S)
        except grpc.RpcError as error:
            raise _failed("Health", error) from error
        return reply.status == health_pb2.HealthCheckResponse.SERVING

    # The return type is the method's response; the generated stubs are untyped.
    def _ask(self, method: str, request: object):  # type: ignore[no-untyped-def]
        try:
            return getattr(self._target, method)(request, timeout=FACTS_DEADLINE_S)
        except grpc.RpcError as error:
            raise _failed(method, error) from error


def _failed(method: str, error: grpc.RpcError) -> CallFailed:
    return CallFailed(method, error.code(), error.details() or "")
