"""What waits for one front: tokens, endings, answers, orders; merged for as long as the front is behind.

A stream's unread tokens are bounded: more end that request, and nobody else's. Knows no socket.
"""

from __future__ import annotations

import threading
from array import array

from common import limits
from common.errors import Overloaded, TandemError
from common.pb.tandem.v1 import core_pb2
from services.target.core.request import (
    Event,
    Request,
    RequestFailed,
    RequestFinished,
    RequestRefused,
    TokensCommitted,
)
from services.target.joint.messages import U32, encode_error, encode_finished


class FrontStream:
    """One request's way to its front, between two frames."""

    __slots__ = ("ended", "from_draft", "handle", "request", "terminal", "token_ids")

    def __init__(self, handle: int, request: Request) -> None:
        self.handle, self.request = handle, request
        self.token_ids: list[int] = []
        self.from_draft: list[bool] = []
        self.terminal: core_pb2.Ending | None = None
        self.ended = False


class FrontOutbox:
    """Filled by the core's thread and the event loop; emptied by one at a time, a frame's worth at once."""

    def __init__(self, backlog_tokens_max: int = limits.STREAM_BACKLOG_TOKENS_MAX) -> None:
        self._backlog_tokens_max = backlog_tokens_max
        self._emitted: list[tuple[FrontStream, Event]] = []
        """Since the last `collect`; the core's thread alone touches it."""
        # For a few operations on lists at a time. Once a step and not once an event, which would be a fifth
        # of an event's cost.
        self._lock = threading.Lock()
        self._waiting: list[FrontStream] = []
        """Streams that have something to say, each once."""
        self._answers: list[core_pb2.AbortAnswer] = []
        self._serving: bool | None = None
        self._leave = False
        self._closed = False

    @property
    def has_waiting(self) -> bool:
        """Whether `take` would give something."""
        return bool(self._waiting or self._answers or self._leave or self._serving is not None)

    def emit(self, stream: FrontStream, event: Event) -> None:
        """Take an event in, on the core's thread; it counts from the next `collect` on."""
        self._emitted.append((stream, event))

    def collect(self) -> tuple[list[FrontStream], list[FrontStream]]:
        """Merge what was emitted into what waits, on the core's thread. Returns the streams that ended by it,
        and those of them that ended since too much waits: their requests should be dropped. After its end
        nothing about a stream changes any more."""
        emitted, self._emitted = self._emitted, []
        ended: list[FrontStream] = []
        overflowed: list[FrontStream] = []
        with self._lock:
            for stream, event in emitted:
                if stream.ended or self._closed:
                    continue
                if not stream.token_ids:
                    self._waiting.append(stream)
                if not isinstance(event, TokensCommitted):
                    self._end(stream, event)
                    ended.append(stream)
                    continue
                stream.token_ids += event.token_ids
                stream.from_draft += event.from_draft
                num_waiting = len(stream.token_ids)
                if num_waiting > self._backlog_tokens_max:
                    stream.token_ids, stream.from_draft = [], []
                    limit = self._backlog_tokens_max
                    error = Overloaded("tokens not yet read", limit=limit, given=num_waiting)
                    self._end(stream, RequestFailed(error))
                    ended.append(stream)
                    overflowed.append(stream)
        return ended, overflowed

    def refuse(self, stream: FrontStream, error: TandemError) -> None:
        """End the stream of a request that was not admitted; from any thread."""
        with self._lock:
            self._waiting.append(stream)
            self._end(stream, RequestRefused(error))

    def answer(self, question: int, found: bool) -> None:
        """Answer an AbortNamed."""
        with self._lock:
            self._answers.append(core_pb2.AbortAnswer(question=question, found=found))

    def say_serving(self, serving: bool) -> None:
        """What health says from now on; an older word that still waits is forgotten."""
        with self._lock:
            self._serving = serving

    def say_leave(self) -> None:
        """After all that waits, the front is to go."""
        with self._lock:
            self._leave = True

    def close(self) -> None:
        """Forget all, now and from now on: the front is gone."""
        with self._lock:
            self._closed = True
            self._waiting, self._answers, self._serving, self._leave = [], [], None, False

    def take(self) -> core_pb2.FromCore:
        """What goes into the next frame: all that waits, or the first part of very much."""
        frame = core_pb2.FromCore()
        with self._lock:
            taken = self._cut()
            handles, counts, token_ids, from_draft, endings = [], [], [], [], []
            for stream in taken:
                if stream.token_ids:
                    handles.append(stream.handle)
                    counts.append(len(stream.token_ids))
                    token_ids += stream.token_ids
                    from_draft += stream.from_draft
                    stream.token_ids, stream.from_draft = [], []
                if stream.terminal is not None:
                    endings.append(stream.terminal)
            answers, self._answers = self._answers, []
            if self._serving is not None:
                frame.serving, self._serving = self._serving, None
            if self._leave and not self._waiting:
                frame.leave, self._leave = True, False
        if handles:
            deltas = frame.deltas
            deltas.handles, deltas.counts = array(U32, handles).tobytes(), array(U32, counts).tobytes()
            deltas.token_ids, deltas.from_draft = array(U32, token_ids).tobytes(), bytes(from_draft)
        frame.endings.extend(endings)
        frame.abort_answers.extend(answers)
        return frame

    def _cut(self) -> list[FrontStream]:
        """The streams of one frame, taken from those that wait."""
        num_tokens = 0
        for count, stream in enumerate(self._waiting, 1):
            num_tokens += len(stream.token_ids)
            if num_tokens >= limits.JOINT_FRAME_TOKENS_MAX:
                taken, self._waiting = self._waiting[:count], self._waiting[count:]
                return taken
        taken, self._waiting = self._waiting, []
        return taken

    def _end(self, stream: FrontStream, event: RequestFinished | RequestFailed | RequestRefused) -> None:
        ending = stream.terminal = core_pb2.Ending(handle=stream.handle)
        stream.ended = True
        if isinstance(event, RequestFinished):
            ending.finished.CopyFrom(encode_finished(event))
        elif isinstance(event, RequestRefused):
            ending.refused.CopyFrom(encode_error(event.error))
        else:
            ending.failed.CopyFrom(encode_error(event.error))
