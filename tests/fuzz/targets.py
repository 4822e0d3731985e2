"""What is fuzzed. Each target is a parser of bytes from other processes, and what must hold for every input."""

import contextlib
import json
import os
import pickle
import random
import socket
import struct
import time
import zlib
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from ring_plugins.core.base.errors import LaunchError, RingError, SharedMemoryError
from ring_plugins.core.base.facts import Facts
from ring_plugins.core.base.member import Member, Members
from ring_plugins.core.control import mesh as mesh_module
from ring_plugins.core.control import mesh_admission
from ring_plugins.core.control.channel import Channel
from ring_plugins.core.control.consensus import Consensus
from ring_plugins.core.control.failure_detector import FailureDetector
from ring_plugins.core.control.liveness import MOST_MEMBERS, Liveness
from ring_plugins.core.control.mesh import Mesh
from ring_plugins.core.control.mesh_admission import Candidate, NotAdmitted
from ring_plugins.core.control.parent_notifier import ParentNotifier, notify_parent
from ring_plugins.core.gpu import nccl
from ring_plugins.core.linux.shared_memory import Segment
from ring_plugins.core.members import join_descriptors
from ring_plugins.core.net import network_choice
from ring_plugins.core.net.acceptor import Acceptor, Authenticated
from ring_plugins.core.net.auth import Claim, ClientHandshake, Disconnected, Purpose, ServerHandshake
from ring_plugins.core.net.frames import FrameSocket, from_json, to_json
from ring_plugins.core.net.peers import Peers
from ring_plugins.core.observe.stall import StallAggregator, StallWatch
from ring_plugins.core.observe.step_breakdown import StepAggregator
from ring_plugins.core.rendezvous import bootstrap, record, slots
from ring_plugins.core.rendezvous import tcp as rendezvous
from ring_plugins.launcher import calls, preflight
from ring_plugins.launcher.coordinator import Coordinator
from ring_plugins.launcher.growth import GrowthRequests
from ring_plugins.launcher.job_hosts import verdict
from ring_plugins.launcher.outcomes import Outcome
from ring_plugins.launcher.processes import Processes
from tests.fuzz.mutations import mutated, mutated_json

_SECRET = b"of the job"
_SEEDS = Path(__file__).parent / "seeds"
#: Everything that a parser may raise.
OURS = (RingError, Disconnected)


class Target:
    """A parser under test.

    Attributes:
        seeds: valid inputs, and those that found something once.
        raises: the errors of ours that `run` may let out.
    """

    raises: tuple[type[BaseException], ...] = ()

    def __init__(self) -> None:
        self.name = type(self).__name__
        self.seeds = [*self.valid(), *(file.read_bytes() for file in sorted((_SEEDS / self.name).glob("*")))]

    def valid(self) -> list[bytes]:
        """Valid inputs."""
        raise NotImplementedError

    def input(self, rng: random.Random) -> bytes:
        """A mutated seed."""
        return mutated(rng, self.seeds)

    def run(self, data: bytes, rng: random.Random) -> None:
        """Hand an input to the parser; AssertionError or anything but `raises` is a finding."""
        raise NotImplementedError

    def close(self) -> None:
        """Free what the target holds."""


class JsonTarget(Target):
    """A parser of JSON."""

    def input(self, rng: random.Random) -> bytes:
        return mutated_json(rng, self.seeds)


def _pieces(data: bytes, rng: random.Random) -> list[bytes]:
    """The bytes as a network may deliver them."""
    if rng.randrange(2) or len(data) < 2:
        return [data]
    cuts = sorted(rng.randrange(len(data)) for _ in range(3))
    return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]


class Handshakes(Target):
    """Either side of the handshake, without sockets. Nobody gets in who does not know the secret."""

    raises = OURS

    def valid(self) -> list[bytes]:
        client = ClientHandshake(_SECRET, Purpose.DATA, Claim(3, 0, 7))
        server = ServerHandshake(_SECRET, Purpose.DATA, lambda claim: True)
        challenge = server.outgoing
        client.feed(challenge)
        server.feed(client.outgoing)
        return [client.outgoing, challenge + server.outgoing, b"GET / HTTP/1.1\r\n\r\n", b""]

    def run(self, data: bytes, rng: random.Random) -> None:
        server = ServerHandshake(_SECRET, Purpose.DATA, lambda claim: True)
        honest = ClientHandshake(_SECRET, Purpose.DATA, Claim(3, 0, 7))
        honest.feed(server.outgoing)
        if rng.randrange(2):
            sides: tuple[Any, bytes] = server, honest.outgoing
        else:
            challenge = server.outgoing
            server.feed(honest.outgoing)
            sides = honest, server.outgoing
            honest.outgoing = b""
            if rng.randrange(2):
                sides = ClientHandshake(_SECRET, Purpose.DATA, Claim(3)), challenge
        side, right = sides
        # Most inputs are changes of the right answer, since a fresh nonce makes every stored one wrong.
        if rng.randrange(3):
            data = mutated(rng, [right])
        fed = b""
        for piece in _pieces(data, rng):
            left = piece
            while left and side.missing:
                part, left = left[: side.missing], left[side.missing :]
                fed += part
                side.feed(part)
                assert side.missing >= 0
                assert len(side.outgoing) <= 128
                if side.rejection is not None:
                    return
        is_over = not side.missing and side.rejection is None
        assert not is_over or fed == right, "a forged handshake was accepted"


class Acceptors(Target):
    """Connections of strangers, each with its own error, on an `Acceptor` that lives on."""

    def __init__(self) -> None:
        super().__init__()
        self._acceptor = Acceptor(_SECRET, Purpose.DATA, limit=4)
        self._open: deque[socket.socket] = deque()

    def valid(self) -> list[bytes]:
        return [*Handshakes().valid(), os.urandom(75)]

    def run(self, data: bytes, rng: random.Random) -> None:
        ours, theirs = socket.socketpair()
        self._open.append(theirs)
        theirs.setblocking(False)
        self._acceptor._begin(ours, "")
        for piece in _pieces(data, rng):
            with contextlib.suppress(OSError):
                theirs.send(piece)
            assert self._acceptor.poll() == []
        assert self._acceptor.waiting() <= 4
        while len(self._open) > rng.choice((0, 5, 20)):  # some stay, and say nothing more
            self._open.popleft().close()

    def close(self) -> None:
        self._acceptor.close()
        for stranger in self._open:
            stranger.close()


class Frames(Target):
    """Messages on a connection: exactly those that were sent, and no more memory than they need."""

    _ALLOWED = 1 << 16

    def valid(self) -> list[bytes]:
        one = struct.pack("!Q", 5) + b"hello"
        return [
            one,
            one * 3,
            struct.pack("!Q", 0),
            struct.pack("!Q", 1 << 63),
            struct.pack("!Q", 60_000) + b"x" * 60_000,
        ]

    def run(self, data: bytes, rng: random.Random) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            reader = FrameSocket(ours, Purpose.CONTROL, longest=self._ALLOWED)
            theirs.setblocking(False)
            got: list[bytes] = []
            error = None
            for piece in _pieces(data, rng):
                if piece:
                    assert theirs.send(piece) == len(piece)
                try:
                    got += reader.read()
                except Disconnected as rejected:
                    error = rejected
                    break
                assert len(reader._incoming) <= self._ALLOWED + 8 + (1 << 18)
            wanted, is_bad = self._reference(data)
            if error is None and is_bad:  # what came before the bad message was returned first
                with pytest.raises(Disconnected):
                    reader.read()
            assert got == wanted
            assert error is None or is_bad

    def _reference(self, data: bytes) -> tuple[list[bytes], bool]:
        found = []
        while len(data) >= 8:
            length = int.from_bytes(data[:8], "big")
            if length > self._ALLOWED:
                return found, True
            if len(data) < 8 + length:
                break
            found.append(data[8 : 8 + length])
            data = data[8 + length :]
        return found, False


class Json(JsonTarget):
    """Any message in JSON."""

    def valid(self) -> list[bytes]:
        return [b'["kind",{"rank":1,"text":"x"}]', b"1", b'"\\u00e9"', b"[[[[]]]]"]

    def run(self, data: bytes, rng: random.Random) -> None:
        try:
            found = from_json(data)
        except Disconnected:
            return
        json.dumps(found)


class Joins(JsonTarget):
    """The first message of a rank that joins: anyone can send one if the job has no secret."""

    def __init__(self) -> None:
        super().__init__()
        self._server = self._new()

    def _new(self) -> bootstrap._RankZero:
        return bootstrap._RankZero(socket.create_server(("127.0.0.1", 0)), 8, "")

    def valid(self) -> list[bytes]:
        return [to_json(["join", {"size": 8, "host": "host1", "versions": record.own_versions()}]), b'["gather",1]']

    def run(self, data: bytes, rng: random.Random) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            theirs.setblocking(False)
            server, rank = self._server, rng.choice((0, 1, 7, 8, -1, -(1 << 31)))
            server.begin(Authenticated(ours, Claim(rank), "127.0.0.1"))
            if rng.randrange(8):
                data = struct.pack("!Q", len(data)) + data
            for piece in _pieces(data, rng):
                with contextlib.suppress(OSError):
                    theirs.send(piece)
                try:
                    for number, event in server._turn(0.0):
                        server._take(number, event)
                except LaunchError:  # it has told the ranks, and closed
                    self._server = self._new()
                    return
            for number in list(server._joining):
                server._drop(number)
            for number, member in list(server.members.items()):
                assert 0 < member.rank < 8
                server._peers.hang_up(number)
            server.members.clear()
            assert not list(server._peers)

    def close(self) -> None:
        self._server.close()


class Answers(JsonTarget):
    """What rank 0 sends to a rank that joins, and what the ranks say about their hosts."""

    def valid(self) -> list[bytes]:
        own = network_choice.own_interfaces(0)
        whole = bootstrap._pack(["gathered", [own] * 100])
        return [to_json(["gathered", [own, own]]), to_json(["abort", "why"]), to_json(["gathered", []]), whole]

    def run(self, data: bytes, rng: random.Random) -> None:
        if rng.randrange(4) == 0:
            data = b"z" + zlib.compress(data, 1)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.setblocking(False)
            theirs.send(struct.pack("!Q", len(data)) + data)
            theirs.close()
            try:
                found = bootstrap._answer(FrameSocket(ours, Purpose.BOOTSTRAP), "rank 0")
            except OURS:
                return
            assert isinstance(found, list)


class ControlMessages(JsonTarget):
    """Messages between ranks, which reach the services of rank 0's monitor thread."""

    def __init__(self) -> None:
        super().__init__()
        members = Members(0, [Member(r, r, f"host{r}", 100_000_000 + r, f"domain{r}") for r in range(4)])
        self._server = Channel(0, 4)
        detector = FailureDetector(members, None, self._server)
        self._services: list[Any] = [
            StallWatch(self._server, detector, list),
            StallAggregator(self._server, members, 0.001, 0.0, lambda text: None),
            StepAggregator(self._server, members, lambda text: None),
        ]
        self._detector = detector
        self._left = 0

    def valid(self) -> list[bytes]:
        wait = {
            "communicator": "ring", "what": "all_reduce", "number": 3, "part_of": "", "missing": [2], "since": 5.0,
            "blocked_since": 4.0, "clock": "10:00:00", "on_gpu": False, "step": 3, "hindrances": "",
        }  # fmt: skip
        deadlock = {"rank": 1, "number": 2, "communicator": "ring", "text": "x"}
        messages = [
            ["report_wait", {"number": 1, "wait": wait}],
            ["end_wait", {"number": 1}],
            ["request_snapshot", {"inquiry": 1}],
            ["report_snapshot", {"inquiry": 1, "stack": ["x"], "operation": "y"}],
            ["request_process_state", {"inquiry": 1, "rank": 2, "pid": 1}],
            ["report_process_state", {"inquiry": 1, "rank": 2, "state": "R"}],
            ["confirm_wait", {"number": 1, "deadlock": deadlock}],
            ["answer_wait", {"waits": False, "deadlock": deadlock}],
            ["answer_wait", {"waits": True, "deadlock": deadlock}],
            ["failed", {"rank": 1, "text": "x", "of": 1}],
            ["left", {"ranks": [2]}],
            ["declare_deadlock", deadlock],
            ["report_steps", {"steps": [[1, 0.1, 0.2, 0.3]]}],
            ["unknown", {}],
        ]
        return [to_json(message) for message in messages]

    def run(self, data: bytes, rng: random.Random) -> None:
        server = self._server
        server.receive(rng.randrange(1, 4), data)
        server.poll(0.0)
        for service in self._services:
            with contextlib.suppress(Exception):  # the monitor thread drops a service that raises, and goes on
                service.tick(time.monotonic())
        failure = self._detector.failure()
        assert failure is None or b"failed" in data or "it sent an invalid message" in str(failure)
        self._detector._remote_failure = None

    def close(self) -> None:
        self._server.abandon()


class MeshMessages(JsonTarget):
    """Messages among ranks of several hosts, which agree on who is left: each changes nothing, or is a message."""

    def __init__(self) -> None:
        super().__init__()
        self._ranks = range(4)

    def valid(self) -> list[bytes]:
        decision, joins = [[0, 1, 2], 7, [3], []], [[0, 1, 2, 3, 9], 7, [], [9]]
        promise = {"ballot": 1 << 20, "committed": 7}
        bodies: list[tuple[str, dict[str, Any]]] = [
            ("call", {}),
            ("prepare", {"ballot": 1 << 20, "dead": [3]}),
            ("promise", {**promise, "silent": [], "leaving": [], "joining": [9], "accepted": None}),
            ("promise", {**promise, "silent": [3], "leaving": [2], "joining": [], "accepted": [1, decision]}),
            ("rejected", {"ballot": 1 << 20, "promised": 2 << 20}),
            ("accept", {"ballot": 1 << 20, "decision": decision}),
            ("accepted", {"ballot": 1 << 20}),
            ("decided", {"decision": decision}),
            ("decided", {"decision": joins}),
        ]
        return [to_json({"view": 1, "kind": kind, "body": body}) for kind, body in bodies]

    def run(self, data: bytes, rng: random.Random) -> None:
        try:
            message = from_json(data)
        except Disconnected:
            return
        rank = rng.choice(self._ranks)
        told: list[Any] = []
        facts = Facts()
        one = Consensus(rank, self._ranks, facts, lambda *what: told.append(json.dumps(what)), lambda other: None)
        if rng.randrange(2):
            one.note_dead(rng.choice([other for other in self._ranks if other != rank]))
        if rng.randrange(2):
            one.arrive(1, rng.randrange(9), (), rng.choice([(), (9,)]))
        sender = rng.choice([other for other in self._ranks if other != rank])
        before = repr(sorted({**vars(one), **vars(facts)}.items(), key=lambda pair: pair[0]))
        try:
            one.receive(sender, message)
        except ValueError:
            assert repr(sorted({**vars(one), **vars(facts)}.items(), key=lambda pair: pair[0])) == before
            return
        one.note_silent(sender)  # what was taken must not break what follows
        one.arrive(one.view + 1, 9)
        one.awaited() if one._reachable() else None
        known = {*self._ranks, *one._joining, *(rank for found in one.decisions.values() for rank in found.joining)}
        assert set(one.members) <= known <= {*self._ranks, 9}
        assert all(set(found.members) <= known for found in one.decisions.values())


class SlotTexts(Target):
    """The variable that names a process's slot: a LaunchError, or a row of the file."""

    raises = OURS

    def valid(self) -> list[bytes]:
        return [b"3:4:1", b"-1:4:1", b"0:0:0", b"3:4", b"999999999999999999999:1:1"]

    def run(self, data: bytes, rng: random.Random) -> None:
        slots.OwnSlot.inherited(data.decode("utf-8", "replace"))


class SlotRows(Target):
    """The rows of slots in shared memory: slots and ranks of the job, and addresses at which there is memory or not."""

    def valid(self) -> list[bytes]:
        rows = np.zeros(slots.Slots.nbytes(3), np.uint8)
        places, self._segment = slots.Slots(rows), Segment.create(8)
        places.take(Member(0, 0, liveness=self._segment.address), as_member=True)
        places.take(Member(7, 1, liveness=self._segment.address), as_member=False)
        slots.OwnSlot(rows, 2).note(slots.State.LEFT)
        return [rows[: 3 * 64].tobytes()]

    def run(self, data: bytes, rng: random.Random) -> None:
        rows = np.zeros(slots.Slots.nbytes(3), np.uint8)
        found = np.frombuffer(data[: 3 * 64], np.uint8)
        rows[: found.size] = found
        places = slots.Slots(rows)
        assert places.has_waiting() >= bool(places.waiting())
        for one in [*places.members(), *places.waiting()]:
            assert 0 <= one.slot < 3 and 0 <= one.rank < MOST_MEMBERS
            slots.is_there(one)
            with contextlib.suppress(SharedMemoryError):
                Liveness.open(one.liveness, one.rank)


class Admissions(JsonTarget):
    """What processes tell of what they have made for each other: all map it, or nobody joins."""

    def __init__(self) -> None:
        self._segments = [Segment.create(64), Segment.create(640)]
        everyone = [Member(rank, slot, liveness=(os.getpid(), 5, 4096)) for slot, rank in ((0, 0), (1, 1), (2, 3))]
        self._call = join_descriptors.Invitation(everyone, [3])
        super().__init__()

    def valid(self) -> list[bytes]:
        pages, buffer = (segment.address for segment in self._segments)
        offer = {"name": "ring", "key": 2, "operations": 7, "pages": pages, "buffers": [buffer],
                 "layout": ["same", "same"]}  # fmt: skip
        entry = {"place": "here", "descriptors": {"0": offer}}
        return [json.dumps(one).encode() for one in [{**entry, "view": 1}, entry]]

    def run(self, data: bytes, rng: random.Random) -> None:
        try:
            found = json.loads(data)
        except (ValueError, RecursionError):
            return
        of_member, of_joiner = map(json.loads, self.seeds[:2])
        communicator: Any = Mock()  # can be a key
        own = Segment.create(64)
        for told in ({0: of_member, 1: of_member, 3: found}, {0: of_member, 1: found, 3: of_joiner}):
            with contextlib.suppress(NotAdmitted, SharedMemoryError):
                join_descriptors.map_descriptors(told, self._call, {0: communicator}, {0: own}, 0, [0, 1, 3])


class LauncherMessages(Target):
    """What a rank says to the driver of `run(hosts=...)` and of Spark, except what pickles hold."""

    def valid(self) -> list[bytes]:
        packed = pickle.dumps(Outcome(1, result=pickle.dumps(7)))
        hello = struct.pack("!Q", 5) + b"host1"
        return [hello + struct.pack("!Q", len(packed)) + packed, hello, hello * 2]

    def run(self, data: bytes, rng: random.Random) -> None:
        ours, theirs = socket.socketpair()
        unpickled = []

        def loads(packed: bytes) -> Any:
            unpickled.append(packed)
            raise EOFError  # a pickle may run anything: only the authenticated get here

        with ours, theirs, pytest.MonkeyPatch.context() as patch, calls.Driver(listens=False) as driver:
            patch.setattr(calls, "pickle", SimpleNamespace(loads=loads))
            driver._ranks, driver._connections[1] = 3, calls._Connection("host1")
            driver._peers.add(1, FrameSocket(ours, Purpose.LAUNCHER))
            theirs.setblocking(False)
            found: list[Outcome] = []
            for piece in _pieces(data, rng):
                theirs.send(piece)
                found += driver._poll(0.0, lambda: None, Mock())
                if found:
                    break
            theirs.close()
            for _ in range(2):
                found += driver._poll(0.0, lambda: None, Mock())
            assert len(found) == 1 and found[0].failure is not None
            assert len(unpickled) <= 1


class Claims(Target):
    """Who may connect to a driver: the ranks that it has started, once each."""

    def valid(self) -> list[bytes]:
        return [struct.pack("!iiq", 0, 0, 0), struct.pack("!iiq", 3, 1, 5)]

    def run(self, data: bytes, rng: random.Random) -> None:
        claim = Claim(*struct.unpack("!iiq", data[:16].ljust(16, b"\0")))
        client = ClientHandshake(_SECRET, Purpose.LAUNCHER, claim)
        server = ServerHandshake(_SECRET, Purpose.LAUNCHER, lambda claim: 0 <= claim.rank < 3)
        client.feed(server.outgoing)
        server.feed(client.outgoing)
        assert server.claim == claim
        assert (server.rejection is None) == (0 <= claim.rank < 3)
        client.feed(server.outgoing)
        assert (client.rejection is None) == (server.rejection is None)


class ParentNotes(Target):
    """The launcher's file that ranks of this host write to, and the variable that names it."""

    def __init__(self) -> None:
        super().__init__()
        self._notifier = ParentNotifier()

    def valid(self) -> list[bytes]:
        return [b"rank 1 failed: x\0rank 2 failed\0", b"\0", b"1:2:ring_plugins/0", b"x" * 5000]

    def run(self, data: bytes, rng: random.Random) -> None:
        os.ftruncate(self._notifier._file, 0)
        os.pwrite(self._notifier._file, data, 0)
        text = self._notifier.first_message()
        assert text is None or len(text) <= 4096
        named = data[:200].decode("utf-8", "surrogateescape").replace("\0", "")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RING_PARENT_NOTIFIER", named)
            notify_parent("x")
        assert os.pread(self._notifier._file, len(data) + 1, 0) == data

    def close(self) -> None:
        self._notifier.__exit__(None, None, None)


class StoreValues(JsonTarget):
    """Values in torch's store, which everyone can write who reaches its port."""

    def __init__(self) -> None:
        store = pytest.importorskip("ring_plugins.torch.store", reason="torch is not installed")
        self._sign, self._verify = store.sign, store.verify
        super().__init__()

    def valid(self) -> list[bytes]:
        return [json.dumps([0, "host/boot/pid/0", [4711, 9, 4096], 6]).encode(), b"3", b'"29500 token host1"']

    def run(self, data: bytes, rng: random.Random) -> None:
        text = data.decode("utf-8", "replace")
        signed = self._sign("ranks/1", text, _SECRET).encode()
        forged = mutated(rng, [signed, data, self._sign("ranks/0", text, _SECRET).encode()])
        try:
            self._verify("ranks/1", forged, _SECRET)
        except RingError:
            pass
        except ValueError:  # a rank of the job signs JSON only
            assert forged == signed
        else:
            assert forged == signed, "a forged value was accepted"
        with contextlib.suppress(RingError):
            port, token, host = rendezvous._read_bootstrap(data)
            assert 0 < port < 1 << 16
            assert token.isascii() and host.isascii()


class NcclIds(Target):
    """The identifier by which NCCL connects ranks, as rank 0 hands it over."""

    def valid(self) -> list[bytes]:
        return [bytes(128), os.urandom(128)]

    def run(self, data: bytes, rng: random.Random) -> None:
        handed: Any = rng.choice((data, data.decode("latin-1"), len(data), None, list(data)))
        try:
            unique_id = nccl.UniqueId.received(handed)
        except RingError:
            assert not isinstance(handed, bytes) or len(handed) != 128
        else:
            assert bytes(unique_id) == handed


class ProbeReports(JsonTarget):
    """What a host prints when `ring run` asks it, a message of the day included."""

    def valid(self) -> list[bytes]:
        return [
            json.dumps(
                {
                    "name": "host1", "python": "3.11.7", "cores": 8, "ring_plugins": "0.1.0", "trouble": "",
                    "packages": {"torch": "2.13.0"}, "missing": [], "program": "abc", "reaches": True,
                }
            ).encode()
        ]  # fmt: skip

    def run(self, data: bytes, rng: random.Random) -> None:
        text = data.decode("utf-8", "replace")
        report = preflight.read_report(f"welcome\nring probe: {text}\n")
        if report is not None:
            own = json.loads(self.seeds[0])
            assert all(isinstance(line, str) for line in preflight.differences(own, report))


class MeshMessagesOfAllKinds(JsonTarget):
    """Messages of other ranks as the mesh's thread takes them: each counts, or ends its sender's connection."""

    def __init__(self) -> None:
        self._peers = [
            Member(rank, rank, f"host{rank}", 100 + rank, f"host{rank}", "", "127.0.0.1", 1) for rank in range(4)
        ]
        super().__init__()

    def valid(self) -> list[bytes]:
        bodies = {
            "dead": {"rank": 3},
            "leaves": {"committed": 7},
            "admission": {"view": 1, "round": 1, "payload": {"from": 1}},
            "failed": {"rank": 1, "text": "x", "of": 1},
            "exits": {"rank": 1, "status": 3},
            "broken": {"key": 1, "rank": 1, "text": "x"},
            "rejected": {"operation": [1, 2, 3], "rank": 1, "text": "x"},
        }
        problem = {"view": 1, "problem": "no memory"}
        agree = [["agree", json.loads(one)] for one in MeshMessages().valid()]
        return [
            to_json(one) for one in [*([kind, body] for kind, body in bodies.items()), ["admission", problem], *agree]
        ]

    def run(self, data: bytes, rng: random.Random) -> None:
        rank, sender = rng.sample(range(4), 2)
        members, channel = Members(rank, self._peers), Channel(rank, 4)
        mesh = Mesh(members, channel, None, 2)
        detector = FailureDetector(members, None, channel)
        detector.go_on_with(mesh)
        ends = {other: socket.socketpair() for other in range(4) if other != rank}
        for other, (ours, theirs) in ends.items():
            channel.add(other, FrameSocket(ours, Purpose.CONTROL))
            theirs.setblocking(False)
        try:
            ends[sender][1].send(struct.pack("!Q", len(data)) + data)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(mesh_module, "ListenProbe", lambda *of: SimpleNamespace(close=list, advance=str))
                channel.turn(0.0)
                channel.poll(0.0)
                if rng.randrange(2):
                    mesh._note_silent(rng.choice([other for other in ends if other != sender]))
            mesh.must_agree()
            mesh.rounds.of(1, 1)
            mesh.trouble(1, None)
            mesh.rounds.forget(1)
            for other in range(4):
                detector.has_ended(other)
            failure = detector.failure()
            assert failure is None or 0 <= failure.rank < MOST_MEMBERS
            assert set(detector.facts.exit_statuses) <= set(range(MOST_MEMBERS))
            assert isinstance(detector.rejection(1, 2, 3, [sender]), str)
            if mesh.consensus.lost():
                str(mesh.members_lost())
        finally:
            channel.abandon()
            for ours, theirs in ends.values():
                ours.close()
                theirs.close()


class CalledCandidates(JsonTarget):
    """What members tell a process that is to join: it takes part, or counts that connection as ended."""

    def valid(self) -> list[bytes]:
        bodies = [{"view": 1, "round": number, "payload": {"from": 1}} for number in range(3)]
        decided = {"view": 1, "kind": "decided", "body": {"decision": [[0, 1, 2, 9], 7, [], [9]]}}
        without = {**decided, "body": {"decision": [[0, 1, 2], 7, [], []]}}
        problem = {"view": 1, "problem": "no memory"}
        messages = [["admission", body] for body in [*bodies, problem]] + [["agree", one] for one in (decided, without)]
        return [to_json(one) for one in [*messages, ["failed", {"rank": 1, "text": "x"}]]]

    def run(self, data: bytes, rng: random.Random) -> None:
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        came = [{1: ours}]
        listener: Any = SimpleNamespace(take_accepted=lambda tag: came.pop() if came else {})
        candidate = Candidate(9, listener, peers := Peers())
        with ours, theirs, pytest.MonkeyPatch.context() as patch:
            patch.setattr(mesh_admission, "mesh_frames", lambda connected: FrameSocket(connected, Purpose.CONTROL))
            for message in (self.seeds[0], *rng.sample(self.seeds[:6], rng.randrange(3)), data):
                theirs.send(struct.pack("!Q", len(message)) + message)
            called = candidate.called()
            view = called[0] if called is not None else 1
            assert 0 < view < 1 << 62
            with contextlib.suppress(NotAdmitted):
                candidate._check(view)
            with contextlib.suppress(NotAdmitted):
                if view in candidate._decisions:
                    found = candidate.decision(view, [0, 1, 2])
                    assert found.members and 9 in found.members
            assert all(rank == 1 for rank in candidate._rounds.of(view, 1))
            candidate.withdraw(view)
            peers.close()


class SupervisorMessages(JsonTarget):
    """What supervisors of hosts tell the coordinator: it takes it, or counts the host as lost."""

    def valid(self) -> list[bytes]:
        ends = {"ranks": [[0, 0, ""], [1, -9, "lost"]], "why": None, "replaced": [[1, 2]], "added": [4]}
        messages = [
            ["here", {"host": "host1", "port": 1, "report": None}],
            ["joined", [4]],
            ["members", {"members": 1, "joiners": [{"rank": 9, "slot": 4}]}],
            ["join info", {"address": "127.0.0.1", "secret": "x"}],
            ["given back", 4],
            ["failed", ends],
            ["ended", ends],
        ]
        return [to_json(message) for message in messages]

    def __init__(self) -> None:
        super().__init__()
        self._processes = Processes()

    def run(self, data: bytes, rng: random.Random) -> None:
        told: list[str] = []
        hosts = [("host1", [0, 1]), ("host2", [2, 3])]
        ours, theirs = socket.socketpair()
        with Coordinator(hosts, self._processes, told.append, 0, most=6) as coordinator, theirs:
            theirs.setblocking(False)
            coordinator._expects = lambda claim: True  # type: ignore[method-assign]
            host = coordinator._hosts[0]
            if rng.randrange(2):
                coordinator._added_slots.add(rng.choice([1, 2]), {0: "host1", 1: "host2"})
            if rng.randrange(2):
                host.here = {"host": "host1", "port": 1}
                coordinator._started = {}
            coordinator._peers.add(0, FrameSocket(ours, Purpose.LAUNCHER))
            theirs.send(struct.pack("!Q", len(data)) + data)
            coordinator._poll(0.0)
            coordinator._poll(0.0)  # the first one may have woken up for the new connection alone
            if host.here is not None and not host.is_lost:
                assert 0 <= host.here["port"] < 1 << 16
                host.here.get("report")
            status, why = verdict(coordinator._hosts, coordinator._failed, 4)
            assert 0 <= status <= 255
            assert why is None or isinstance(why, str)
            assert all(0 <= rank < MOST_MEMBERS for each in coordinator._hosts for rank in each.added)
            json.dumps(coordinator._added_slots.told())


class Requests(Target):
    """What reaches the socket of `ring run`, and what it answers: a number of ranks and a host's name, or nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._asked: list[tuple[int, str | None]] = []
        self._requests = GrowthRequests(self._add)

    def valid(self) -> list[bytes]:
        return [b"add 2", b"add 999999 me@host-2.example", b"", b"add 2 " + b"h" * 505]

    def _add(self, number: int, host: str | None) -> str:
        self._asked.append((number, host))
        return "ok: they will join"

    def run(self, data: bytes, rng: random.Random) -> None:
        self._asked.clear()
        ours, theirs = socket.socketpair()
        with theirs:
            theirs.setblocking(False)
            self._requests._service._peers.add(0, FrameSocket(ours, Purpose.LAUNCHER, 512))
            for piece in _pieces(struct.pack("!Q", len(data)) + data, rng):
                with contextlib.suppress(OSError):
                    theirs.send(piece)
                self._requests.poll()
            theirs.shutdown(socket.SHUT_WR)
            for _ in range(3):
                self._requests.poll()
            assert not list(self._requests._service)
            answer = b""
            with contextlib.suppress(ConnectionError):
                answer = theirs.recv(5000)
        line = data.decode("latin-1")
        for number, host in self._asked:
            assert line == f"add {number}{f' {host}' if host else ''}" or int(line.split()[1]) == number
            assert len(self._asked) == 1
        assert answer[8:] in (b"", b"ok: they will join")

    def close(self) -> None:
        self._requests.__exit__()


TARGETS: list[Callable[[], Target]] = [
    Handshakes, Acceptors, Frames, Json, Joins, Answers, ControlMessages, MeshMessages,
    SlotTexts, SlotRows, Admissions, LauncherMessages, Claims,
    ParentNotes, StoreValues, NcclIds, ProbeReports,
    MeshMessagesOfAllKinds, CalledCandidates, SupervisorMessages, Requests,
]  # fmt: skip
