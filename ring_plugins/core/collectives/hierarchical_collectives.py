"""Barrier, broadcast, all-gather, reduce-scatter and all-to-all on several hosts, as recipes for `TwoLevels`.

- barrier: one message from each host to each other;
- broadcast: the rails of the root's host share the data. For more than two hosts each other host receives one part and
  passes it on, so that the root's host too sends the data about once (van de Geijn, see `net_group`);
- all-gather: a host's ranks send what all of them have as one block;
- reduce-scatter: a host sends to each other host the sums of its ranks' numbers;
- all-to-all: the small parts from the ranks of one host to those of another travel as one block. A large part goes
  directly from rank to rank, which saves two copies: no other rank needs it.

Only bytes move here, and hosts know their sizes. So all hosts compare headers once, on the first rail, at the first
piece; an all-reduce's messages have headers of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from ring_plugins.core.arrays.arithmetic import reduce_into
from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.arrays.memory import CACHE_LINE, slices
from ring_plugins.core.base.errors import MismatchError
from ring_plugins.core.base.types import Array, Bytes
from ring_plugins.core.collectives.api import ByteCollectives
from ring_plugins.core.collectives.fingerprint import Fingerprint, size_mismatch
from ring_plugins.core.collectives.hierarchical import Part, Transfer, TwoLevels, average_divisors, nothing
from ring_plugins.core.collectives.net_group import SMALL_BYTES, NetworkGroup
from ring_plugins.core.collectives.shm_group import CHUNK_STAGING_BYTES
from ring_plugins.core.net.transport import Request

#: Up to this size an operation uses the first rail only. Above it, several processes send at once.
_ONE_RAIL_BYTES = 64 * 1024
#: Most bytes of one rank's data, or of one rail's, in a step: large enough that Python's overhead is small.
_PIECE_BYTES = 512 * 1024

#: Most bytes of a part of an all-to-all that travels in a block. Measured crossover, 2 to 4 hosts of 2 to 8 ranks.
_BLOCK_PART_BYTES = 16 * 1024


class HierarchicalCollectives(ByteCollectives):
    """One member's side of the collectives of a communicator that spans hosts; implements `ByteCollectives`.

    Args:
        levels: of the communicator.
        all_members: of the communicator; two connect when they first exchange a large part of an all-to-all.
    """

    def __init__(self, levels: TwoLevels, all_members: NetworkGroup) -> None:
        self._levels, self._all = levels, all_members
        self._node, self._hosts, self._host = levels.node, levels.hosts, levels.host
        self._local_rank, self._rails = levels.local_rank, levels.rails
        self._inputs, self._results = levels.buffers(np.dtype(np.uint8))
        self._members = self._hosts[self._host]
        self._remote = [host for host in range(len(self._hosts)) if host != self._host]

    def _run(
        self,
        fingerprint: Fingerprint,
        steps: int,
        rails: int,
        give: Part,
        transfer: Transfer,
        take_local: Part = nothing,
        take_remote: Part = nothing,
        begin: Callable[[NetworkGroup], Callable[[], None]] | None = None,
    ) -> None:
        """As `TwoLevels.run`, with headers.

        Args:
            begin: on the first rail, sends headers and returns a function that compares those of the other hosts; by
                default they say nothing but which operation this is.
        """

        def headed(rail: NetworkGroup, step: int) -> Iterator[None]:
            moving = transfer(rail, step)
            return moving if step or self._local_rank else with_headers(rail, moving)

        def with_headers(rail: NetworkGroup, moving: Iterator[None]) -> Iterator[None]:
            check = begin(rail) if begin is not None else self._send_headers(rail, fingerprint)
            next(moving, None)
            yield
            check()
            next(moving, None)

        self._levels.run(fingerprint, steps, rails, give, headed, take_local, take_remote)

    def _send_headers(self, rail: NetworkGroup, fingerprint: Fingerprint) -> Callable[[], None]:
        """Tell the other hosts which operation this is; returns a function that compares it with theirs."""
        sizes = [0] * len(self._hosts)
        return partial(rail.check_headers, rail.send_headers(sizes, sizes, fingerprint))

    def _rails_for(self, nbytes: int) -> int:
        return 1 if nbytes <= _ONE_RAIL_BYTES else self._rails

    # Collectives ----------------------------------------------------------------------------------

    def barrier(self, fingerprint: Fingerprint) -> None:
        self._run(fingerprint, 1, 1, nothing, lambda rail, step: iter(()))

    def broadcast(self, data: Bytes, root: int, fingerprint: Fingerprint) -> None:
        rails, is_root = self._rails_for(data.size), self._levels.position == root
        root_host = self._levels.host_of(root)
        length, buffers = rails * _PIECE_BYTES, self._inputs if self._host == root_host else self._results

        def pieces(step: int) -> list[Bytes]:
            """The rails' pieces of the data."""
            chunk = data[step * length : (step + 1) * length]
            return [chunk[cut] for cut in slices(chunk.size, rails, 1)]

        def give(step: int) -> None:
            if is_root:
                for staged, piece in zip(buffers[step & 1], pieces(step), strict=False):
                    staged[: piece.size] = piece

        def take(step: int) -> None:
            for staged, piece in zip(buffers[step & 1], pieces(step), strict=False):
                piece[:] = staged[: piece.size]

        def transfer(rail: NetworkGroup, step: int) -> Iterator[None]:
            nbytes = pieces(step)[self._local_rank].size
            return rail.broadcasting(buffers[step & 1][self._local_rank][:nbytes], root_host, fingerprint)

        steps = max(1, -(-data.size // length))
        if self._host == root_host:
            self._run(fingerprint, steps, rails, give, transfer, take_local=nothing if is_root else take)
        else:
            self._run(fingerprint, steps, rails, nothing, transfer, take_remote=take)

    def all_gather(self, mine: Bytes, parts: Sequence[Bytes], fingerprint: Fingerprint) -> None:
        hosts, rails, own = self._hosts, self._rails_for(sum(part.size for part in parts)), self._host
        share = _share(sum(-(-len(members) // rails) for members in hosts))

        def pieces(step: int, host: int, rail: int) -> list[Bytes]:
            """The pieces that a rail of a host sends, in the order in which they stand in its buffer."""
            return [parts[member][step * share : (step + 1) * share] for member in hosts[host][rail::rails]]

        def give(step: int) -> None:
            rail, place = self._local_rank % rails, self._local_rank // rails
            start = _total(pieces(step, own, rail)[:place])
            piece = mine[step * share : (step + 1) * share]
            self._inputs[step & 1][rail][start : start + piece.size] = piece

        def take_local(step: int) -> None:
            for rail in range(rails):
                _copy(self._inputs[step & 1][rail], 0, pieces(step, own, rail))

        def take_remote(step: int) -> None:
            for rail in range(rails):
                start = 0
                for host in self._remote:
                    start = _copy(self._results[step & 1][rail], start, pieces(step, host, rail))

        def transfer(rail: NetworkGroup, step: int) -> Iterator[None]:
            number = self._local_rank
            block = self._inputs[step & 1][number][: _total(pieces(step, own, number))]
            cuts = _cuts([0 if host == own else _total(pieces(step, host, number)) for host in range(len(hosts))])
            incoming = [self._results[step & 1][number][cut] for cut in cuts]
            return rail.moving([block] * len(hosts), incoming, fingerprint)

        steps = max(1, *(-(-part.size // share) for part in parts))
        self._run(fingerprint, steps, rails, give, transfer, take_local, take_remote)

    def reduce_scatter(self, parts: Sequence[Array], out: Array, op: Op, dtype: str, fingerprint: Fingerprint) -> None:
        if any(np.may_share_memory(part, out) for part in parts):
            target = np.empty_like(out)
            self.reduce_scatter(parts, target, op, dtype, fingerprint)
            np.copyto(out, target)
            return
        hosts, own, size = self._hosts, self._host, len(parts)
        before, after = average_divisors(size, dtype, False) if op is Op.AVERAGE else (1.0, 1.0)
        rails = self._rails_for(sum(part.nbytes for part in parts))
        members_of_rail = -(-max(map(len, hosts)) // rails)
        units = sum(-(-len(members) // rails) for members in hosts) + (len(hosts) + 1) * members_of_rail
        share = _share(max(size, units)) // out.itemsize
        inputs, results = self._levels.buffers(out.dtype)

        def pieces(step: int, host: int, rail: int) -> list[Array]:
            """This rank's numbers for the members of a host whose results a rail computes."""
            return [parts[member][step * share : (step + 1) * share] for member in hosts[host][rail::rails]]

        def blocks(step: int, rail: int) -> list[slice]:
            """By host, where the numbers that a rail combines stand in every member's input buffer."""
            cuts = _cuts([_total(pieces(step, host, i)) for i in range(rails) for host in range(len(hosts))])
            return cuts[rail * len(hosts) : (rail + 1) * len(hosts)]

        def give(step: int) -> None:
            given = [piece for i in range(rails) for host in range(len(hosts)) for piece in pieces(step, host, i)]
            np.concatenate(given, out=inputs[step & 1][self._local_rank][: _total(given)])

        def transfer(rail: NetworkGroup, step: int) -> Iterator[None]:
            staged, buffer = inputs[step & 1], results[step & 1][self._local_rank]
            cuts = blocks(step, self._local_rank)
            counts = [cut.stop - cut.start for cut in cuts]
            # The buffer holds the result, which members of this host read, each host's term of it, and what is sent.
            result, *rest = [buffer[cut] for cut in _cuts([counts[own]] * (1 + len(hosts)) + counts)]
            terms, sums = rest[: len(hosts)], rest[len(hosts) :]
            sums[own] = terms[own]
            requests: list[Request] = []
            for host in (*self._remote, own):
                if counts[host]:
                    reduce_into(sums[host], [numbers[cuts[host]] for numbers in staged], op, dtype, before)
                if host != own:
                    sent, expected = sums[host].view(np.uint8), terms[host].view(np.uint8)
                    requests.append(rail.exchange([(host, sent)], [(host, expected)]))
                    rail.progress()
            yield
            rail.wait(requests, fingerprint, spin=False)
            if result.size:
                reduce_into(result, terms, op, dtype, after)

        def take_remote(step: int) -> None:
            rail, place = self._local_rank % rails, self._local_rank // rails
            start = _total(pieces(step, own, rail)[:place])
            piece = out[step * share : (step + 1) * share]
            piece[:] = results[step & 1][rail][start : start + piece.size]

        steps = max(1, *(-(-part.size // share) for part in parts))
        self._run(fingerprint, steps, rails, give, transfer, take_remote=take_remote)

    # All-to-all -----------------------------------------------------------------------------------

    def all_to_all(self, outgoing: Sequence[Bytes], incoming: Sequence[Bytes], fingerprint: Fingerprint) -> None:
        hosts, me = self._hosts, self._local_rank
        sent, expected = self._sizes(outgoing, incoming, fingerprint)
        limit = self._largest_block_part()
        # By other host, the bytes in blocks from each of its senders to each of its receivers; none of this host.
        out_sizes = [_up_to(limit, sent[:, list(members)]) * (members != self._members) for members in hosts]
        in_sizes = [_up_to(limit, expected[:, list(members)].T) * (members != self._members) for members in hosts]
        out_rails, in_rails = (list(map(self._rails_of_pair, sizes)) for sizes in (out_sizes, in_sizes))
        out_blocks, in_blocks = _blocks(out_sizes, out_rails, self._rails), _blocks(in_sizes, in_rails, self._rails)
        direct: list[Request] = []

        def give(step: int) -> None:
            for host in self._remote:
                rail, sizes = me % out_rails[host], out_sizes[host]
                start = _start(out_blocks[host][rail], sizes, out_rails[host], me, 0)
                for member, nbytes in zip(hosts[host], sizes[me].tolist(), strict=True):
                    if nbytes:
                        self._inputs[0][rail][start : start + nbytes] = outgoing[member]
                    start += nbytes

        def transfer(rail: NetworkGroup, step: int) -> Iterator[None]:
            outgoing_blocks = [self._inputs[0][me][row[me]] for row in out_blocks]
            return rail.moving(outgoing_blocks, [self._results[0][me][row[me]] for row in in_blocks], fingerprint)

        def start_direct(step: int) -> None:
            """Start the transfers of large parts, behind the headers and blocks on the same connections."""
            remote = {member for host in self._remote for member in hosts[host]}
            large = [
                [part if member in remote and part.size > limit else None for member, part in enumerate(parts)]
                for parts in (outgoing, incoming)
            ]
            direct.append(self._all.exchange_parts(*large))
            self._all.progress()

        def take_remote(step: int) -> None:
            for host in self._remote:
                sizes = in_sizes[host]
                for sender, member in enumerate(hosts[host]):
                    rail, nbytes = sender % in_rails[host], int(sizes[sender, me])
                    if nbytes:
                        start = _start(in_blocks[host][rail], sizes, in_rails[host], sender, me)
                        incoming[member][:] = self._results[0][rail][start : start + nbytes]

        begin = partial(self._exchange_sizes, sent, expected, fingerprint)
        self._run(fingerprint, 1, self._rails, give, transfer, start_direct, take_remote, begin)
        columns = list(self._members)
        if self._node is not None:
            largest = int(sent[:, columns].max())
            self._node.exchange([outgoing[i] for i in columns], [incoming[i] for i in columns], largest)
        else:
            incoming[self._levels.position][:] = outgoing[self._levels.position]
        self._all.wait(direct, fingerprint, spin=False)

    def _sizes(
        self, outgoing: Sequence[Bytes], incoming: Sequence[Bytes], fingerprint: Fingerprint
    ) -> tuple[Array, Array]:
        """For each member of this host, the bytes that it sends to every member and expects from every member.

        Raises:
            MismatchError: on all members, if a member of this host sends another number of bytes than its peer on this
                host expects.
        """
        own = np.array([[part.size for part in parts] for parts in (outgoing, incoming)], np.int64)
        sizes = np.array([own] * len(self._members))
        rows = [row.view(np.uint8).reshape(-1) for row in sizes]
        try:
            if self._node is not None:
                self._node.all_gather(own.view(np.uint8).reshape(-1), rows, fingerprint)
            sent, expected = sizes[:, 0], sizes[:, 1]
            columns = list(self._members)
            self._compare(self._members, self._members, sent[:, columns], expected[:, columns].T, fingerprint)
        except MismatchError as error:
            self._levels.report_mismatch(error)
            raise
        return sent, expected

    def _exchange_sizes(
        self, sent: Array, expected: Array, fingerprint: Fingerprint, rail: NetworkGroup
    ) -> Callable[[], None]:
        """Send headers, and tell every other host what this one sends to it and expects from it.

        Returns:
            A function that compares all of it. Where there are more than two hosts, it also waits until all have found
            the sizes right, so that a mismatch between two hosts is raised by all.
        """
        hosts, check_headers = self._hosts, self._send_headers(rail, fingerprint)
        tables: list[Array | None] = [None] * len(hosts)
        for host in self._remote:
            columns = list(hosts[host])
            tables[host] = np.stack([sent[:, columns], expected[:, columns]])
        theirs = [None if table is None else np.empty((2, *table.shape[:0:-1]), np.int64) for table in tables]
        pending = rail.exchange_parts([_bytes(table) for table in tables], [_bytes(table) for table in theirs])

        def check() -> None:
            check_headers()
            rail.wait([pending], fingerprint)
            for host, mine, other in zip(range(len(hosts)), tables, theirs, strict=True):
                if mine is not None and other is not None:
                    self._compare(self._members, hosts[host], mine[0], other[1].T, fingerprint)
                    self._compare(hosts[host], self._members, other[0], mine[1].T, fingerprint)
            if len(hosts) > 2:
                self._send_headers(rail, fingerprint)()

        return check

    def _compare(
        self, senders: Sequence[int], receivers: Sequence[int], sent: Array, expected: Array, fingerprint: Fingerprint
    ) -> None:
        """Compare two tables of bytes by sender and receiver."""
        if not np.array_equal(sent, expected):
            i, j = np.argwhere(sent != expected)[0].tolist()
            sender, receiver = self._all.ranks[senders[i]], self._all.ranks[receivers[j]]
            raise size_mismatch(self._all.name, fingerprint, sender, int(sent[i, j]), receiver, int(expected[i, j]))

    def _rails_of_pair(self, sizes: Array) -> int:
        """How many rails carry the data of a pair of hosts; both know its sizes."""
        return 1 if sizes.sum() <= min(SMALL_BYTES, CHUNK_STAGING_BYTES // 2 // len(self._hosts)) else self._rails

    def _largest_block_part(self) -> int:
        """Most bytes from one rank to another that travel in a block; all blocks of a rail fit into its buffer."""
        rails, hosts = self._rails, self._hosts
        of_rail = [-(-len(members) // rails) for members in hosts]
        size = sum(map(len, hosts))
        # Senders of one host to all ranks, or all senders of a rail to the members of one host. Pairs of hosts that use
        # one rail only may fill the other half.
        units = max(max(own * size, sum(of_rail) * len(members)) for own, members in zip(of_rail, hosts, strict=True))
        return min(CHUNK_STAGING_BYTES // 2 // units, _BLOCK_PART_BYTES)


def _share(units: int) -> int:
    """Most bytes of a piece, if a buffer holds so many of them."""
    return max(1, min(CHUNK_STAGING_BYTES // units, _PIECE_BYTES) // CACHE_LINE) * CACHE_LINE


def _total(pieces: Sequence[Array]) -> int:
    return sum(piece.size for piece in pieces)


def _cuts(lengths: Sequence[int]) -> list[slice]:
    """Consecutive parts of a buffer."""
    ends = [*itertools.accumulate(lengths)]
    return [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]


def _copy(buffer: Bytes, start: int, pieces: Sequence[Bytes]) -> int:
    """Fill pieces from consecutive parts of a buffer; returns where they end."""
    for piece in pieces:
        piece[:] = buffer[start : start + piece.size]
        start += piece.size
    return start


def _bytes(table: Array | None) -> Bytes | None:
    return None if table is None else table.reshape(-1).view(np.uint8)


def _up_to(limit: int, sizes: Array) -> Array:
    """`sizes`, with 0 in place of those above the limit."""
    return np.where(sizes <= limit, sizes, 0)


def _blocks(sizes: Sequence[Array], rails: Sequence[int], number: int) -> list[list[slice]]:
    """By host and rail, where the blocks of an all-to-all stand in the rail's buffer.

    Args:
        sizes: by host, the bytes by sender and receiver.
        rails: by host, how many rails its block uses. Rail i carries the data of senders i, i + rails and so on.
        number: of all rails.
    """
    ends, blocks = [0] * number, []
    for table, used in zip(sizes, rails, strict=True):
        row = []
        for rail in range(number):
            start = ends[rail]
            ends[rail] += int(table[rail::used].sum()) if rail < used else 0
            row.append(slice(start, ends[rail]))
        blocks.append(row)
    return blocks


def _start(block: slice, sizes: Array, rails: int, sender: int, receiver: int) -> int:
    """Where the data of a sender for a receiver begins, in the block that holds it."""
    before: Any = sizes[sender % rails : sender : rails].sum() + sizes[sender, :receiver].sum()
    return int(block.start) + int(before)
