"""Every limit of the product, with its reason. No torch, no grpc.

A limit is applied to a resolved value before anything is allocated. The `check_*` functions raise
`InvalidRequest` naming field, limit and value.
"""

from __future__ import annotations

from common.errors import InvalidRequest

# --- tensors on the wire -------------------------------------------------------------------------

# 2 MiB a tensor: 40 KiB a token at 8B scale (5 layers x 4096 x bf16), so 51 rows; a message stays
# far under gRPC's limit below and the receiver's copy short.
TENSOR_BYTES_MAX = 2 * 1024 * 1024
# Nothing we send has more than 2 dimensions; 4 leaves room without letting a shape be a payload.
TENSOR_RANK_MAX = 4
# 2**31 rows of one byte already pass every byte limit; a larger dimension can only be hostile.
TENSOR_DIM_MAX = 2**31 - 1

# gRPC's default is 4 MiB. Twice that holds the largest tensor and 256 sessions' fields with room.
MESSAGE_BYTES_MAX = 8 * 1024 * 1024

# --- requests ------------------------------------------------------------------------------------

REQUEST_ID_CHARS_MAX = 128
# More stop ids than this are a sign of a wrong field, and each is compared with each token.
STOP_TOKEN_IDS_MAX = 64
TEMPERATURE_MAX = 100.0
# Below this a temperature divides logits into infinities; it means greedy, so say 0.
TEMPERATURE_MIN = 1e-3
SEED_MAX = 2**64 - 1

# Waiting requests: at 32 running and a second each, 512 waiting is 16 s of queue. A caller behind
# that is better served by RESOURCE_EXHAUSTED, which a gateway retries elsewhere.
REQUESTS_WAITING_MAX = 512
REQUESTS_RUNNING_MAX = 256
# The core's present step has this long to end when the service stops. It is some 30 ms of decoding or a
# second of prefill; one that takes longer than this hangs.
CORE_STOP_DEADLINE_S = 8.0
# Commands (submit, abort) between the front and the core before the front refuses work.
CORE_INBOX_MAX = 2048
# Calls that one server answers at once: all requests that may wait or run, and room for health, Abort
# and the streams of readers that no longer read.
RPCS_MAX = REQUESTS_WAITING_MAX + REQUESTS_RUNNING_MAX + 256
# Tokens that a slow reader may leave unread; beyond it that stream alone ends.
STREAM_BACKLOG_TOKENS_MAX = 4096

# --- front and core as processes of their own ----------------------------------------------------

# A front streams some 16,000 messages a second; 256 streams at 6 ms a step would be 43,000.
FRONTS_MAX = 8
# One frame of the joint. The largest holds a prompt: 4 bytes a token, so 4 MiB at CONTEXT_LEN_MAX.
JOINT_FRAME_BYTES_MAX = 8 * 1024 * 1024
# Tokens that one frame carries to a front, but for the last request in it (STREAM_BACKLOG_TOKENS_MAX more):
# 256 requests with 64 each are 16,384. What a front left unread for long comes in several frames.
JOINT_FRAME_TOKENS_MAX = 1 << 16
# Bytes that a front may have waiting for its core before it refuses requests; the core reads at once
# unless it is stopped.
JOINT_BACKLOG_BYTES_MAX = 64 * 1024 * 1024
# Ended calls and refusals in one report; there is another report when there are more.
REPORT_ENTRIES_MAX = 1024
# A front reports four times a second. One that says nothing for this long hangs, and is replaced: no load
# that a machine can bear keeps it from a turn for so long.
FRONT_SILENCE_S = 10.0
# Python and gRPC take half a second to load, several on a machine that is busy.
FRONT_START_DEADLINE_S = 60.0
# Before a front that was lost is started again: doubled from the least to the most while it keeps ending
# within FRONT_STABLE_S.
FRONT_BACKOFF_MIN_S = 0.1
FRONT_BACKOFF_MAX_S = 5.0
FRONT_STABLE_S = 30.0
# Lines about a drafter that does not fit, and characters of each: some of it the drafter itself has said.
MISMATCHES_MAX = 64
MISMATCH_CHARS_MAX = 300

# --- model ---------------------------------------------------------------------------------------

# Several times what the largest published models have: anything above is a damaged or hostile file, and
# each of these sizes a tensor.
CONTEXT_LEN_MAX = 1 << 20
HIDDEN_SIZE_MAX = 1 << 16
INTERMEDIATE_SIZE_MAX = 1 << 20
LAYERS_MAX = 512
HEADS_MAX = 1024
HEAD_DIM_MAX = 1024
VOCAB_ROWS_MAX = 1 << 22
# Published drafts capture 5 or 6 layers; each more is a row's width in every message.
CAPTURED_LAYERS_MAX = 32
CAPTURED_WIDTH_MAX = CAPTURED_LAYERS_MAX * HIDDEN_SIZE_MAX
# Acceptance gains nothing beyond 16 rows; the metrics by position have a series for each.
BLOCK_SIZE_MAX = 64
# A safetensors header is JSON that is parsed before anything else is known about the file.
SAFETENSORS_HEADER_BYTES_MAX = 64 * 1024 * 1024

# --- KV storage and steps ------------------------------------------------------------------------

# A page is what a request wastes at most; beyond this it is half of a usual context.
PAGE_SIZE_MAX = 1024
# Tokens of a KV pool: at 1 KiB a token, less than any model needs, these are 256 GiB.
KV_TOKENS_MAX = 1 << 28
# Prompt rows of a step. More stall whoever decodes for seconds on any device.
EXTEND_ROWS_MAX = 1 << 16

# --- drafter -------------------------------------------------------------------------------------

SESSIONS_MAX = 1024
INSTANCE_ID_CHARS_MAX = 64
# Messages that wait for the drafter's engine per stream. The target gives up on a step after its
# deadline, so a longer queue holds only work that nobody waits for.
DRAFT_QUEUE_MAX = 8
# A session that no message named for this long belongs to a target that is gone: a live one names
# its sessions each step, and the slowest step is far shorter.
SESSION_LEASE_S = 30.0
# Target lives that a drafter remembers: one per rank, and the ones that a restart left behind.
TARGET_INSTANCES_MAX = 32
# Entries (opens, extends, drafts, closes) of each kind in one message.
DRAFT_ENTRIES_MAX = SESSIONS_MAX

# --- device hand-off -----------------------------------------------------------------------------

# The ring at 8B scale (40 KiB a row) with 256 requests of 16 rows and 65,536 prompt rows is 2.7 GiB.
RING_BYTES_MAX = 8 << 30
# What sockaddr_un holds, less the closing zero.
SOCKET_PATH_BYTES_MAX = 107
# A token is guessed by nobody, and compared in constant time.
HANDOFF_TOKEN_BYTES = 32
# Whoever connects says its token at once; one that does not holds up the next for this long.
DESCRIPTOR_PEER_DEADLINE_S = 1.0
# Connections to one descriptor socket: its peer needs one, and a stranger gets no endless tries.
DESCRIPTOR_TRIES_MAX = 8
# The drafter maps the ring and captures its graphs over it before it answers: some 20 batch sizes, with
# kernels that may have to be compiled first. Meanwhile the target decodes plainly.
DEVICE_HANDSHAKE_DEADLINE_S = 120.0
# What a drafter has launched for a target that is lost is some milliseconds of work once its waits are
# released; a device that has not done it by then hangs, and the service ends.
RUN_OUT_DEADLINE_S = 10.0
# Positions that a step in flight may name: past the longest context by the blocks that were reserved ahead.
POSITION_MAX = CONTEXT_LEN_MAX + 4 * BLOCK_SIZE_MAX

# --- link ----------------------------------------------------------------------------------------

# Consecutive missed deadlines after which the target stops asking and probes.
BREAKER_MISSES_MAX = 3
# A dead drafter is looked for this often.
PROBE_INTERVAL_S = 1.0
# A drafter that was given up is left alone for a probe's interval, then for twice as long each time until it
# is in time again: every try costs a step the deadline, and half a second in 30 is what that may cost.
GIVEN_UP_PAUSE_MAX_S = 30.0
# A handshake moves no tensors; a peer that needs longer is not fit to be asked each step.
HANDSHAKE_DEADLINE_S = 2.0
# Sessions are given back at the end; a drafter that does not answer this soon lets its leases expire.
CLOSE_DEADLINE_S = 0.5
# Messages sent and not answered. One step of 512 rows takes 10 at 8B scale, so three steps fit, and
# all together hold 64 MiB at most. A single step that is larger goes out alone.
MESSAGES_IN_FLIGHT_MAX = 32
# Invalid drafts or non-finite states of one session: once may be chance, twice is its nature.
SESSION_FAULTS_MAX = 2
# Times that one session's context may be captured anew; each costs a forward over the prefix.
RECAPTURES_MAX = 3
# Longest prefix that is recomputed to give a re-opened session its context back: about a second of
# prefill for a 135M model on two cores, and far less on a GPU.
RECAPTURE_TOKENS_MAX = 512
# With fewer tokens to come, a recaptured context could not earn its forward back.
RECAPTURE_ROOM_MIN = 16


def check_range(field: str, value: float, low: float, high: float) -> None:
    """Raise InvalidRequest unless low <= value <= high (NaN never is)."""
    if not low <= value <= high:
        raise InvalidRequest(field, limit=f"{low} to {high}", given=value)
