"""Descriptors go to whoever knows the token, once, and to nobody else."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from common import limits
from common.handoff import descriptor_socket
from common.handoff.descriptor_socket import (
    DescriptorsRefused,
    close_all,
    fetch_descriptors,
    giving_descriptors,
)


@pytest.fixture
def parent() -> Iterator[Path]:
    # Not in pytest's folders: a socket's path is short, theirs are not.
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory)


@pytest.fixture
def descriptor() -> Iterator[int]:
    fd = os.memfd_create("shared")
    os.write(fd, b"states")
    yield fd
    os.close(fd)


async def fetch(path: str, token: bytes, count: int = 1, deadline_s: float = 5.0) -> list[int]:
    return await asyncio.to_thread(fetch_descriptors, path, token, count, deadline_s)


async def test_who_says_the_token_gets_the_same_memory(parent: Path, descriptor: int) -> None:
    async with giving_descriptors([descriptor, descriptor], parent) as (path, token):
        fetched = await fetch(path, token, 2)
    assert [os.pread(fd, 6, 0) for fd in fetched] == [b"states"] * 2
    os.pwrite(fetched[0], b"drafts", 0)
    assert os.pread(descriptor, 6, 0) == b"drafts"
    assert not any(os.get_inheritable(fd) for fd in fetched)
    close_all(fetched)


async def test_a_token_is_good_for_one_time(parent: Path, descriptor: int) -> None:
    async with giving_descriptors([descriptor], parent) as (path, token):
        close_all(await fetch(path, token))
        with pytest.raises(DescriptorsRefused):
            await fetch(path, token, deadline_s=0.3)


@pytest.mark.parametrize("wrong", [b"", b"x", b"x" * limits.HANDOFF_TOKEN_BYTES])
async def test_a_wrong_token_gets_nothing_and_spoils_nothing(
    parent: Path, descriptor: int, wrong: bytes
) -> None:
    async with giving_descriptors([descriptor], parent) as (path, token):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.settimeout(5)
            stranger.connect(path)
            stranger.sendall(wrong)
            stranger.shutdown(socket.SHUT_WR)
            said, descriptors, _, _ = await asyncio.to_thread(socket.recv_fds, stranger, 64, 4)
        assert (said, descriptors) == (b"", [])
        close_all(await fetch(path, token))


async def test_one_that_says_nothing_holds_the_next_up_for_a_moment_only(
    parent: Path, descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "DESCRIPTOR_PEER_DEADLINE_S", 0.1)
    async with giving_descriptors([descriptor], parent) as (path, token):
        with socket.socket(socket.AF_UNIX) as silent:
            silent.connect(path)
            close_all(await fetch(path, token))


async def test_tries_are_counted(parent: Path, descriptor: int) -> None:
    async with giving_descriptors([descriptor], parent) as (path, token):
        for _ in range(limits.DESCRIPTOR_TRIES_MAX):
            with pytest.raises(DescriptorsRefused):
                await fetch(path, b"?" * len(token))
        with pytest.raises(DescriptorsRefused):
            await fetch(path, token, deadline_s=0.3)


async def test_another_user_gets_nothing_although_it_knows_the_token(
    parent: Path, descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with giving_descriptors([descriptor], parent) as (path, token):
        uids = iter([os.geteuid(), os.geteuid() + 1])  # the drafter's look, then the target's
        monkeypatch.setattr(descriptor_socket, "_peer_uid", lambda peer: next(uids))
        with pytest.raises(DescriptorsRefused):
            await fetch(path, token)


async def test_the_token_is_not_told_to_another_users_socket(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(parent / "s")
    monkeypatch.setattr(descriptor_socket, "_peer_uid", lambda peer: os.geteuid() + 1)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(1)
        with pytest.raises(DescriptorsRefused, match="another user"):
            await fetch(path, b"t" * 32)
        peer, _ = listener.accept()
        with peer:
            assert peer.recv(64) == b""


async def test_the_directory_is_private_and_gone_afterwards(parent: Path, descriptor: int) -> None:
    async with giving_descriptors([descriptor], parent) as (path, _):
        assert stat.S_IMODE(Path(path).parent.stat().st_mode) == 0o700
        assert len(path.encode()) <= limits.SOCKET_PATH_BYTES_MAX
    assert list(parent.iterdir()) == []


async def test_without_a_socket_there_are_no_descriptors_and_no_path_in_the_text(parent: Path) -> None:
    with pytest.raises(DescriptorsRefused) as error:
        await fetch(str(parent / "nothing"), b"t" * 32)
    assert str(parent) not in str(error.value)


async def test_a_socket_that_never_answers_is_left_at_the_deadline(parent: Path) -> None:
    path = str(parent / "s")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(1)
        started = asyncio.get_running_loop().time()
        with pytest.raises(DescriptorsRefused):
            await fetch(path, b"t" * 32, deadline_s=0.2)
        assert asyncio.get_running_loop().time() - started < 2


async def test_the_deadline_holds_for_all_calls_together(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(parent / "s")

    def look_too_long(peer: socket.socket) -> int:
        time.sleep(0.15)
        return os.geteuid()

    monkeypatch.setattr(descriptor_socket, "_peer_uid", look_too_long)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(1)
        with pytest.raises(DescriptorsRefused, match="TimeoutError"):
            await fetch(path, b"t" * 32, deadline_s=0.1)
        peer, _ = listener.accept()
        with peer:
            assert peer.recv(64) == b"", "the token was said after the deadline"


async def test_one_that_leaves_before_it_is_answered_leaves_the_descriptors_to_the_next(
    parent: Path, descriptor: int
) -> None:
    async with giving_descriptors([descriptor], parent) as (path, token):
        with socket.socket(socket.AF_UNIX) as hasty:
            hasty.connect(path)
            hasty.sendall(token)
        close_all(await fetch(path, token))


async def test_too_few_descriptors_are_none(parent: Path, descriptor: int) -> None:
    before = len(os.listdir("/proc/self/fd"))
    async with giving_descriptors([descriptor], parent) as (path, token):
        with pytest.raises(DescriptorsRefused, match="no descriptors"):
            await fetch(path, token, count=2)
    with contextlib.suppress(FileNotFoundError):
        assert len(os.listdir("/proc/self/fd")) <= before
