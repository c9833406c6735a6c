"""From a GenerateRequest of the wire to a Request whose every field is true. No grpc, no torch.

Nothing is repaired: a field out of range is refused, with its name, limit and value. Refused before
anything is allocated for the request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from common import limits
from common.errors import InvalidRequest
from common.pb.tandem.v1 import target_pb2
from services.target.core.request import Event, Request, SamplingParams
from services.target.facts import ServedModel


def parse_generate(
    message: target_pb2.GenerateRequest,
    model: ServedModel,
    *,
    fresh_seed: Callable[[], int],
    emit: Callable[[Event], None],
) -> Request:
    """The Request that `message` asks for, or InvalidRequest.

    fresh_seed makes a seed for a request without one. Whether the id is in use, only the core can say.
    """
    request_id = checked_request_id(message.request_id)
    _check_prompt(message.input_ids, model)
    room = model.max_len - len(message.input_ids)
    return Request(
        request_id=request_id,
        prompt=list(message.input_ids),
        sampling=_checked_sampling(message.sampling, fresh_seed),
        max_new_tokens=_checked_max_new_tokens(message, room),
        stop_token_ids=_checked_stop_ids(message, model),
        drafting=not message.disable_drafting,
        emit=emit,
    )


def checked_request_id(request_id: str) -> str:
    """The id as given; InvalidRequest when no request can have it."""
    # The value itself is not repeated: it may be megabytes, or hold control characters.
    limit = f"1 to {limits.REQUEST_ID_CHARS_MAX} characters"
    if not 1 <= len(request_id) <= limits.REQUEST_ID_CHARS_MAX:
        raise InvalidRequest("request_id", limit=limit, given=f"{len(request_id)} characters")
    if not request_id.isprintable():
        raise InvalidRequest("request_id", limit="printable characters", given="others")
    return request_id


def _check_prompt(input_ids: Sequence[int], model: ServedModel) -> None:
    # One position must be left for the first new token.
    if not 1 <= len(input_ids) <= model.max_len - 1:
        raise InvalidRequest(
            "input_ids", limit=f"1 to {model.max_len - 1} tokens", given=f"{len(input_ids)} tokens"
        )
    _check_ids("input_ids", input_ids, model.vocab_size)


def _check_ids(field: str, ids: Sequence[int], vocab_size: int) -> None:
    """Ids are unsigned on the wire, so only the upper end can be wrong."""
    for i, token_id in enumerate(ids):
        if token_id >= vocab_size:
            raise InvalidRequest(f"{field}[{i}]", limit=f"0 to {vocab_size - 1}", given=token_id)


def _checked_sampling(message: target_pb2.SamplingParams, fresh_seed: Callable[[], int]) -> SamplingParams:
    given = {name: getattr(message, name) for name in ("temperature", "top_k", "top_p", "min_p")
             if message.HasField(name)}  # fmt: skip
    seed = message.seed if message.HasField("seed") else fresh_seed()
    sampling = SamplingParams(**given, seed=seed)
    sampling.check()
    return sampling


def _checked_max_new_tokens(message: target_pb2.GenerateRequest, room: int) -> int:
    if not message.HasField("max_new_tokens"):
        return room
    if not 1 <= message.max_new_tokens <= room:
        raise InvalidRequest("max_new_tokens", limit=f"1 to {room}", given=message.max_new_tokens)
    return message.max_new_tokens


def _checked_stop_ids(message: target_pb2.GenerateRequest, model: ServedModel) -> frozenset[int]:
    """The request's stop ids, and the model's own unless they are ordinary tokens for it."""
    if len(message.stop_token_ids) > limits.STOP_TOKEN_IDS_MAX:
        raise InvalidRequest(
            "stop_token_ids", limit=f"at most {limits.STOP_TOKEN_IDS_MAX} ids",
            given=f"{len(message.stop_token_ids)} ids",
        )  # fmt: skip
    _check_ids("stop_token_ids", message.stop_token_ids, model.vocab_size)
    own = () if message.ignore_eos else model.eos_token_ids
    return frozenset((*message.stop_token_ids, *own))
