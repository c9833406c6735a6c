"""What happens round every gRPC call: errors become status codes, durations are told.

Knows grpc and the product's errors; nothing of addresses, servers or what is called.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from common.errors import InvalidRequest, InvalidTensor, Overloaded, TandemError, Unavailable
from common.log import get_log

log = get_log("rpc")

ObserveCall = Callable[[str, str, float], None]
"""(method, name of the status code, seconds)"""

_STATUS_OF: tuple[tuple[type[TandemError], grpc.StatusCode], ...] = (
    (InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT),
    (InvalidTensor, grpc.StatusCode.INVALID_ARGUMENT),
    (Overloaded, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (Unavailable, grpc.StatusCode.UNAVAILABLE),
)


def status_of(error: TandemError) -> grpc.StatusCode:
    """The status code that says to a caller, and to a gateway that may retry, what `error` says."""
    return next((code for kind, code in _STATUS_OF if isinstance(error, kind)), grpc.StatusCode.INTERNAL)


class ServerCalls(grpc.aio.ServerInterceptor):
    """Wraps each handler: errors become status codes, durations are told.

    Streams run as coroutines that write, so that a cancelled call unwinds the servicer's generator at
    once, and its `finally` with it, instead of when the garbage collector finds it.
    """

    def __init__(self, observe_call: ObserveCall) -> None:
        self._observe_call = observe_call

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        if handler.request_streaming:
            # A stream's messages are read, and so decoded, inside the servicer's code.
            kind, decode, decode_here = "stream", handler.request_deserializer, None
        else:
            # Decoded by the wrapper: gRPC would answer bytes that are no message with UNKNOWN, which
            # gateways retry.
            kind, decode, decode_here = "unary", None, handler.request_deserializer
        if handler.response_streaming:
            kind, wrap = f"{kind}_stream", self._streaming
        else:
            kind, wrap = f"{kind}_unary", self._answering
        wrapped = wrap(method, getattr(handler, kind), decode_here or _as_it_is)
        return getattr(grpc, f"{kind}_rpc_method_handler")(wrapped, decode, handler.response_serializer)

    def _answering(self, method: str, behaviour: Any, decode: Callable[[Any], Any]) -> Any:
        async def answer(request: Any, context: Any) -> Any:
            async with self._call(method, context):
                return await behaviour(decode(request), context)

        return answer

    def _streaming(self, method: str, behaviour: Any, decode: Callable[[Any], Any]) -> Any:
        async def stream(request: Any, context: Any) -> None:
            async with self._call(method, context):
                if not inspect.isasyncgenfunction(behaviour):
                    await behaviour(decode(request), context)
                    return
                async with contextlib.aclosing(behaviour(decode(request), context)) as replies:
                    async for reply in replies:
                        await _write(context, reply)

        return stream

    @contextlib.asynccontextmanager
    async def _call(self, method: str, context: Any) -> AsyncIterator[None]:
        started_at = time.monotonic()
        status = grpc.StatusCode.OK.name
        try:
            yield
        except asyncio.CancelledError:
            status = grpc.StatusCode.CANCELLED.name
            raise
        except grpc.aio.AbortError:
            status = _code_name(context.code())
            raise
        except TandemError as error:
            code = status_of(error)
            status = code.name
            await context.abort(code, str(error))
        except DecodeError:
            status = grpc.StatusCode.INVALID_ARGUMENT.name
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, "message: must be the method's request type"
            )
        except Exception:
            # Its text could hold anything, so it goes to the log only, and the caller learns no more.
            status = grpc.StatusCode.INTERNAL.name
            log.exception("call_failed", method=method)
            await context.abort(grpc.StatusCode.INTERNAL, "internal error")
        finally:
            self._observe_call(method, status, time.monotonic() - started_at)


class ClientCalls(grpc.aio.UnaryUnaryClientInterceptor):
    """Tells how long calls took and how they ended."""

    def __init__(self, observe_call: ObserveCall) -> None:
        self._observe_call = observe_call

    async def intercept_unary_unary(
        self, continuation: Any, client_call_details: grpc.aio.ClientCallDetails, request: Any
    ) -> Any:
        started_at = time.monotonic()
        call = await continuation(client_call_details, request)
        try:
            return await call
        finally:
            status = (await call.code()).name
            self._observe_call(_text(client_call_details.method), status, time.monotonic() - started_at)


def _text(method: str | bytes) -> str:
    return method.decode() if isinstance(method, bytes) else method


async def _write(context: Any, reply: Any) -> None:
    try:
        await context.write(reply)
    except grpc.aio.InternalError:
        # A write that waited for its reader fails when that leaves; the cancellation would come next.
        raise asyncio.CancelledError from None


def _as_it_is(request: Any) -> Any:
    return request


def _code_name(code: Any) -> str:
    """Servicer contexts hold status codes as numbers or as members, by version."""
    if isinstance(code, grpc.StatusCode):
        return code.name
    return next((known.name for known in grpc.StatusCode if known.value[0] == code), "UNKNOWN")
