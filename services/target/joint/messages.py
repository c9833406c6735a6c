"""Requests, events, errors and facts as messages, and back: the same types on both sides of the joint.

Endings and facts about the model are those of target.proto, so what callers get is made here, too.
Knows nothing of sockets, handles' meaning or who sends what.
"""

from __future__ import annotations

from array import array

from common import limits
from common.errors import InvalidRequest, Overloaded, TandemError, Unavailable
from common.pb.tandem.v1 import core_pb2, target_pb2
from services.target.core.report import CoreStats
from services.target.core.request import (
    Event,
    FinishReason,
    Request,
    RequestFinished,
    SamplingParams,
)
from services.target.facts import DrafterFacts, DrafterState, ServedModel

# 32 bits wherever this runs; the joint's numbers are in the machine's own order.
U32 = "I"
assert array(U32).itemsize == 4

_REASONS = {
    FinishReason.STOP: target_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: target_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: target_pb2.FINISH_REASON_ABORT,
}
_REASON_OF = {number: reason for reason, number in _REASONS.items()}
_DRAFTER_STATES = {
    DrafterState.DISABLED: target_pb2.DRAFTER_STATE_DISABLED,
    DrafterState.UP: target_pb2.DRAFTER_STATE_UP,
    DrafterState.DOWN: target_pb2.DRAFTER_STATE_DOWN,
    DrafterState.MISMATCH: target_pb2.DRAFTER_STATE_MISMATCH,
}
_DRAFTER_STATE_OF = {number: state for state, number in _DRAFTER_STATES.items()}


def encode_request(handle: int, request: Request) -> core_pb2.Submit:
    """A request that was not submitted yet."""
    sampling = request.sampling
    return core_pb2.Submit(
        handle=handle,
        request_id=request.request_id,
        prompt=array(U32, request.prompt).tobytes(),
        # Exact: the front read these numbers from such a message.
        sampling=target_pb2.SamplingParams(
            temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p,
            min_p=sampling.min_p, seed=sampling.seed,
        ),
        max_new_tokens=request.max_new_tokens,
        stop_token_ids=sorted(request.stop_token_ids),
        drafting=request.drafting,
    )  # fmt: skip


def decode_request(message: core_pb2.Submit) -> Request:
    """The request as it was, but submitted now, and with an `emit` that whoever decodes it replaces.
    ValueError when the prompt is no array."""
    sampling = message.sampling
    return Request(
        request_id=message.request_id,
        prompt=array(U32, message.prompt).tolist(),
        sampling=SamplingParams(
            sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.seed
        ),
        max_new_tokens=message.max_new_tokens,
        stop_token_ids=frozenset(message.stop_token_ids),
        drafting=message.drafting,
        emit=_unheard,
    )


def _unheard(event: Event) -> None:
    raise AssertionError("a request is submitted with an emit of its own")


def encode_finished(event: RequestFinished) -> target_pb2.Finished:
    return target_pb2.Finished(
        reason=_REASONS[event.reason],
        matched_token_id=event.matched_token_id,
        num_prompt_tokens=event.num_prompt_tokens,
        num_output_tokens=event.num_output_tokens,
        num_decode_steps=event.num_decode_steps,
        num_draft_tokens=event.num_draft_tokens,
        num_accepted_tokens=event.num_accepted_tokens,
        num_drafts=event.num_drafts,
        seed=event.seed,
        queue_s=event.queue_s,
        prefill_s=event.prefill_s,
        decode_s=event.decode_s,
    )


def decode_finished(message: target_pb2.Finished) -> RequestFinished:
    return RequestFinished(
        reason=_REASON_OF[message.reason],
        matched_token_id=message.matched_token_id if message.HasField("matched_token_id") else None,
        num_prompt_tokens=message.num_prompt_tokens,
        num_output_tokens=message.num_output_tokens,
        num_decode_steps=message.num_decode_steps,
        num_drafts=message.num_drafts,
        num_draft_tokens=message.num_draft_tokens,
        num_accepted_tokens=message.num_accepted_tokens,
        seed=message.seed,
        queue_s=message.queue_s,
        prefill_s=message.prefill_s,
        decode_s=message.decode_s,
    )


def encode_error(error: TandemError) -> core_pb2.Failure:
    """Type and text, as far as a caller sees them: whatever is not one of the three is INTERNAL."""
    if isinstance(error, InvalidRequest):
        parts = core_pb2.InvalidField(field=error.field, limit=str(error.limit), given=str(error.given))
        return core_pb2.Failure(invalid=parts)
    if isinstance(error, Overloaded):
        room = core_pb2.NoRoom(what=error.what, limit=error.limit, given=error.given)
        return core_pb2.Failure(overloaded=room)
    if isinstance(error, Unavailable):
        return core_pb2.Failure(unavailable=str(error))
    return core_pb2.Failure(internal=str(error))


def decode_error(message: core_pb2.Failure) -> TandemError:
    """InvalidRequest, Overloaded, Unavailable, or a plain TandemError for any other."""
    if message.HasField("invalid"):
        parts = message.invalid
        return InvalidRequest(parts.field, limit=parts.limit, given=parts.given)
    if message.HasField("overloaded"):
        room = message.overloaded
        return Overloaded(room.what, limit=room.limit, given=room.given)
    if message.HasField("unavailable"):
        return Unavailable(message.unavailable)
    return TandemError(message.internal)


def drafter_state_number(state: DrafterState) -> target_pb2.DrafterState:
    """DRAFTER_STATE_UP for DrafterState.UP."""
    return _DRAFTER_STATES[state]


def encode_facts(stats: CoreStats, drafter: DrafterFacts) -> core_pb2.CoreFacts:
    """Lines about mismatches are cut to their limits: a drafter has a say in their length."""
    return core_pb2.CoreFacts(
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        num_pages=stats.num_pages,
        num_pages_free=stats.num_pages_free,
        pages_unaccounted=stats.pages_unaccounted,
        drafter_state=_DRAFTER_STATES[drafter.state],
        block_size=drafter.block_size,
        num_drafter_sessions=drafter.num_sessions,
        mismatches=[
            line[: limits.MISMATCH_CHARS_MAX] for line in drafter.mismatches[: limits.MISMATCHES_MAX]
        ],
    )


def decode_facts(message: core_pb2.CoreFacts) -> tuple[CoreStats, DrafterFacts]:
    stats = CoreStats(
        message.num_running, message.num_waiting, message.num_pages, message.num_pages_free,
        message.pages_unaccounted,
    )  # fmt: skip
    drafter = DrafterFacts(
        _DRAFTER_STATE_OF[message.drafter_state], message.block_size, message.num_drafter_sessions,
        tuple(message.mismatches),
    )  # fmt: skip
    return stats, drafter


def encode_model(model: ServedModel) -> target_pb2.GetModelInfoResponse:
    return target_pb2.GetModelInfoResponse(
        served_model_name=model.name,
        architecture=model.architecture,
        vocab_size=model.vocab_size,
        max_len=model.max_len,
        eos_token_ids=model.eos_token_ids,
        dtype=model.dtype,
    )


def decode_model(message: target_pb2.GetModelInfoResponse) -> ServedModel:
    return ServedModel(
        name=message.served_model_name,
        architecture=message.architecture,
        vocab_size=message.vocab_size,
        max_len=message.max_len,
        eos_token_ids=tuple(message.eos_token_ids),
        dtype=message.dtype,
    )
