"""The life of a front that is a process of its own: it serves for as long as its core wants it.

The core says when: a front drains when told, leaves when told, and when the core is gone it says so to each
stream, once, and ends. Knows gRPC and the joint; nothing of how it was started.
"""

from __future__ import annotations

import asyncio
import socket

from common.address import parse_listen_address
from common.errors import ConfigError
from common.lifecycle import watch_event_loop
from common.log import configure_log, get_log
from common.pb.tandem.v1 import core_pb2, target_pb2_grpc
from common.rpc import RpcServer
from services.target.front.core_client import CoreClient
from services.target.front.report import FrontReports
from services.target.front.servicer import SERVICE, TargetServicer
from services.target.joint.messages import decode_model

log = get_log("front")

# For the last messages of streams whose requests have ended.
FLUSH_S = 1.0


async def run_front(joint: socket.socket) -> int:
    """Serve over this end of the joint; the exit status: 0 when the core asked to leave, 1 when it is gone,
    2 when the address cannot be listened on, which the core has been told."""
    _, core = await asyncio.get_running_loop().create_connection(CoreClient, sock=joint)
    welcome = await core.welcome
    configure_log(welcome.log_level, "target")
    reports = FrontReports(core.tell_report)
    rpc = _open_server(core, welcome, reports)
    try:
        address = await rpc.start(parse_listen_address(welcome.listen, "listen"))
    except ConfigError as error:
        core.tell_start_failure(error)
        await core.close()
        return 2
    core.tell_listening(str(address))
    log.info("front_listens", front=welcome.front, listen=str(address))
    watching = asyncio.create_task(watch_event_loop(reports.report))
    while not core.is_over:
        await core.news.wait()
        core.news.clear()
        await rpc.set_serving(core.serving)
    await rpc.set_serving(False)
    await rpc.stop(FLUSH_S)
    watching.cancel()
    log.info("front_ends", front=welcome.front, core_is_gone=core.is_lost)
    return 1 if core.is_lost else 0


def _open_server(core: CoreClient, welcome: core_pb2.Welcome, reports: FrontReports) -> RpcServer:
    rpc = RpcServer([SERVICE.full_name], reports.observe_server_call, share_port=welcome.share_port)
    servicer = TargetServicer(
        core,
        decode_model(welcome.model),
        instance_id=welcome.instance_id,
        drafter_facts=core.drafter_facts,
        observe_rejected=reports.observe_rejected,
        uptime_s=welcome.uptime_s,
    )
    target_pb2_grpc.add_TargetServiceServicer_to_server(servicer, rpc.server)
    return rpc
