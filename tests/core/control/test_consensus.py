"""Ranks agree on who is left through any order of messages, deaths and cuts: a simulation without processes.

The simulated network keeps what TCP keeps: messages of one rank to another arrive in order, and nothing arrives after
an end. Everything else is drawn at random.
"""

import random
from collections import deque
from collections.abc import Callable

from ring_plugins.core.base.facts import Facts
from ring_plugins.core.control.consensus import Consensus, Decision

ORDERS = 1000
#: A process that is to join; it takes no part in an agreement before that.
JOINER = 9


def in_random_orders(test: Callable[[int], None]) -> Callable[[], None]:
    """Run a test with many seeds; its captured output ends with the one that failed."""

    def each() -> None:
        for seed in range(ORDERS):
            print(f"seed {seed}")
            test(seed)

    each.__name__ = test.__name__
    return each


class Job:
    """Ranks whose messages wait until the test delivers them."""

    def __init__(self, size):
        self.queues = {}
        self.dead, self.cut, self.hung_up = set(), set(), set()
        self.ranks, self.facts = {}, {rank: Facts() for rank in (*range(size), JOINER)}
        for rank in range(size):
            self.ranks[rank] = Consensus(rank, range(size), self.facts[rank], self.send_from(rank), self.hanger(rank))
        self.committed = dict.fromkeys(range(size), 7)
        self.leaving = set()  # as the operation says that some have confirmed
        self.prepared = {}  # by rank that is in an admission, whether it is prepared for the joiner

    def send_from(self, rank):
        return lambda to, kind, message: self.sender(rank)(to, message)

    def sender(self, rank):
        def send(to, message):
            if not self.is_cut(rank, to):
                self.queues.setdefault((rank, to), deque()).append(message)

        return send

    def hanger(self, rank):
        def hang_up(other):
            self.hung_up.add((rank, other))
            self.queues.pop((other, rank), None)

        return hang_up

    def is_cut(self, one, other):
        return frozenset((one, other)) in self.cut

    @property
    def living(self):
        return [rank for rank in self.ranks if rank not in self.dead and rank not in self.gone]

    @property
    def gone(self):
        """Ranks that have left."""
        return {
            rank for rank in self.leaving if any(rank in one.leaving for one in self.ranks[rank].decisions.values())
        }

    def kill(self, rank):
        """What it has sent is still under way."""
        if rank not in self.gone:
            self.dead.add(rank)

    def cut_off(self, one, other):
        """Messages under way may be lost, and both notice by themselves."""
        self.cut.add(frozenset((one, other)))

    def deliver(self, sender, to):
        message = self.queues[sender, to].popleft()
        if not self.queues[sender, to]:
            del self.queues[sender, to]
        if to == JOINER and to not in self.ranks:
            self.join(message)
            return
        if to in self.living and (to, sender) not in self.hung_up:
            before = self.gone
            if message["kind"] == "goodbye":
                self.ranks[to].note_left(sender, 8)
            else:
                self.ranks[to].receive(sender, message)
            self.say_goodbye(self.gone - before)

    def say_goodbye(self, ranks):
        """What they have sent arrives before that."""
        for rank in ranks:
            for other in self.living:
                self.sender(rank)(other, {"kind": "goodbye"})

    def join(self, message):
        """What a joiner does that learns of the decision."""
        if message["kind"] == "decided":
            decision = Decision.told(message["body"]["decision"])
            send, hang_up = self.send_from(JOINER), self.hanger(JOINER)
            one = Consensus(JOINER, decision.members, self.facts[JOINER], send, hang_up, message["view"])
            self.ranks[JOINER], self.committed[JOINER] = one, decision.committed
            one.take_over(decision)

    def notices(self):
        """Deaths and cuts of which a rank does not know yet."""
        found = []
        for rank in self.living:
            one = self.facts[rank]
            for other in self.ranks:
                if other in one.left:
                    continue  # its connection has ended with a goodbye
                if self.is_cut(rank, other) and other not in one.silent:
                    found.append((rank, other, "silent"))
                elif other in self.dead and other not in one.dead and not self.is_cut(rank, other):
                    found.append((rank, other, "dead"))
        return found

    def notice(self, rank, other, how):
        one = self.ranks[rank]
        if how == "silent":
            self.queues.pop((other, rank), None)
            self.hung_up.add((rank, other))
            one.note_silent(other)
        else:
            one.note_dead(other)

    def arrivals(self):
        """Ranks that have to arrive in an agreement, and have not."""
        return [
            rank
            for rank in self.living
            if (self.ranks[rank].must_agree() or self.has_to_leave(rank) or self.is_admitting(rank))
            and self.ranks[rank]._committed is None
            and self.is_going_on(rank)
        ]

    def has_to_leave(self, rank):
        """Whether it knows of ranks that leave, and has not agreed on that."""
        return bool(self.leaving) and self.committed[rank] == 8 and not self.ranks[rank].view

    def is_admitting(self, rank):
        """Whether the next agreement is one that ends an admission."""
        return rank in self.prepared and not self.ranks[rank].view

    def arrive(self, rank):
        one, before = self.ranks[rank], self.gone
        joining = {JOINER} if self.is_admitting(rank) and self.prepared[rank] else ()
        one.arrive(one.view + 1, self.committed[rank], self.leaving if self.has_to_leave(rank) else (), joining)
        self.say_goodbye(self.gone - before)

    def is_going_on(self, rank):
        return rank in self.ranks[rank].members and not self.ranks[rank].has_no_quorum

    def end(self, rank):
        """What a rank does, sooner or later, once it is without a quorum or left out."""
        self.kill(rank)

    def moves(self):
        moves = [(self.deliver, pair) for pair in self.queues]
        moves += [(self.notice, notice) for notice in self.notices()]
        moves += [(self.end, (rank,)) for rank in self.living if not self.is_going_on(rank)]
        return moves + [(self.arrive, (rank,)) for rank in self.arrivals()]

    def check(self):
        """No two that live have decided differently, and no two sides go on."""
        views = [self.ranks[rank].decisions for rank in self.living]
        for number in {number for decisions in views for number in decisions}:
            decided = {decisions[number] for decisions in views if number in decisions}
            assert len(decided) == 1, decided
        for rank in self.living:
            for decision in self.ranks[rank].decisions.values():
                assert decision.committed in (7, 8)
                assert not (self.leaving and decision.committed == 8 and self.leaving.intersection(decision.members))

    def run(self, draw, happenings):
        """Draw moves until nothing can happen any more; `happenings` are (after so many moves, function)."""
        happenings, count = sorted(happenings, key=lambda one: one[0]), 0
        while True:
            count += 1
            assert count < 20_000, "the ranks never come to rest"
            while happenings and happenings[0][0] <= count:
                happenings.pop(0)[1]()
            moves = self.moves()
            if not moves:
                if not happenings:
                    return
                happenings.pop(0)[1]()
                continue
            function, arguments = draw.choice(sorted(moves, key=lambda one: (one[0].__name__, one[1])))
            function(*arguments)
            self.check()


def at_random(job, draw, deaths, cuts):
    happenings = [(draw.randrange(60), lambda rank=rank: job.kill(rank)) for rank in deaths]
    return happenings + [(draw.randrange(60), lambda pair=pair: job.cut_off(*pair)) for pair in cuts]


def check_that_survivors_go_on(job):
    assert all(job.ranks[rank].members == tuple(job.living) for rank in job.living)


@in_random_orders
def test_all_survivors_go_on_whoever_dies_and_whenever(seed):
    draw = random.Random(seed)
    size = draw.randrange(2, 7)
    job = Job(size)
    for rank in range(size):  # some have passed a confirmation that all had entered
        job.committed[rank] += draw.randrange(2)
    deaths = draw.sample(range(size), draw.randrange(1, size))
    job.run(draw, at_random(job, draw, deaths, []))
    check_that_survivors_go_on(job)


@in_random_orders
def test_all_that_stay_go_on_when_ranks_leave_while_others_die(seed):
    draw = random.Random(seed)
    size = draw.randrange(2, 7)
    job = Job(size)
    job.leaving = set(draw.sample(range(size), draw.randrange(1, size)))
    job.committed[draw.randrange(size)] = 8
    for rank in range(size):
        job.committed[rank] = max(job.committed[rank], 7 + draw.randrange(2))
    deaths = draw.sample(range(size), draw.randrange(size))
    job.run(draw, at_random(job, draw, deaths, []))
    check_that_survivors_go_on(job)
    if any(job.committed[rank] == 8 for rank in job.living):
        assert not job.leaving.intersection(job.living)


@in_random_orders
def test_a_process_joins_if_all_are_prepared_and_nobody_dies_before_and_all_find_the_same(seed):
    draw = random.Random(seed)
    size = draw.randrange(2, 7)
    job = Job(size)
    unprepared = draw.sample(range(size), draw.choice([0, 0, 1]))
    job.prepared = {rank: rank not in unprepared for rank in range(size)}
    deaths = draw.sample(range(size), draw.choice([0, 1, draw.randrange(size)]))
    job.run(draw, at_random(job, draw, deaths, []))
    decided = [job.ranks[rank].decisions[1] for rank in job.living]
    assert decided and all(one == decided[0] for one in decided)
    has_joined = decided[0].joining == (JOINER,)
    assert decided[0].members == tuple([rank for rank in decided[0].members if rank < size] + [JOINER] * has_joined)
    if has_joined:
        assert not unprepared and set(range(size)) <= set(decided[0].members)
    else:
        assert unprepared or deaths
    assert deaths or all(job.ranks[rank].view == 1 for rank in job.living)
    assert has_joined == (JOINER in job.living)
    check_that_survivors_go_on(job)


@in_random_orders
def test_the_larger_side_of_a_cut_goes_on_or_the_one_with_the_lowest_rank(seed):
    draw = random.Random(seed)
    size = draw.randrange(2, 7)
    job = Job(size)
    side = set(draw.sample(range(size), draw.randrange(1, size)))
    other_side = set(range(size)) - side

    def cut():
        for one in side:
            for other in other_side:
                job.cut_off(one, other)

    job.run(draw, [(draw.randrange(60), cut)])
    goes_on = max(side, other_side, key=lambda ranks: (len(ranks), 0 in ranks))
    assert set(job.living) == goes_on
    check_that_survivors_go_on(job)


@in_random_orders
def test_cuts_between_any_two_ranks_and_deaths_never_make_two_jobs(seed):
    draw = random.Random(seed)
    size = draw.randrange(2, 7)
    job = Job(size)
    pairs = [(one, other) for one in range(size) for other in range(one)]
    cuts = draw.sample(pairs, draw.randrange(1, len(pairs) + 1))
    deaths = draw.sample(range(size), draw.randrange(size // 2 + 1))
    if draw.randrange(2):
        job.leaving = set(draw.sample(range(size), draw.randrange(1, size)))
        job.committed[draw.randrange(size)] = 8
    job.run(draw, at_random(job, draw, deaths, cuts))
    going_on = [rank for rank in job.living if job.ranks[rank].view]
    assert len({job.ranks[rank].members for rank in going_on}) <= 1
    assert not any(job.ranks[rank]._committed is not None for rank in job.living), "a rank waits for ever"


def test_what_one_survivor_has_confirmed_counts_for_all():
    for confirmed in range(4):
        job = Job(4)
        if confirmed < 3:
            job.committed[confirmed] = 8
        job.run(random.Random(0), [(0, lambda job=job: job.kill(3))])
        assert {job.ranks[rank].decisions[1] for rank in range(3)} == {((0, 1, 2), 8 if confirmed < 3 else 7, (), ())}


def test_so_does_what_a_rank_has_confirmed_that_left_since():
    job = Job(3)
    for rank in (0, 2):
        job.ranks[rank].note_left(1, 8)
    del job.ranks[1]
    job.run(random.Random(0), [(0, lambda: job.kill(2))])
    assert job.ranks[0].decisions[1] == ((0, 1), 8, (), ())


def test_nobody_goes_on_before_all_that_can_be_reached_have_stopped():
    job = Job(3)
    job.kill(2)
    for rank in (0, 1):
        job.notice(rank, 2, "dead")
    job.arrive(0)
    while job.queues:
        job.deliver(*next(iter(job.queues)))
    assert job.ranks[0].view == 0 and job.ranks[0].awaited() == [1]
    job.run(random.Random(0), [])
    check_that_survivors_go_on(job)


def test_a_decision_that_only_the_dead_have_made_is_kept_if_a_survivor_may_have_heard_of_it():
    """The leader dies after it has decided, and only one of the others gets its word."""
    job = Job(4)
    job.kill(3)
    for rank in range(3):
        job.notice(rank, 3, "dead")
        job.arrive(rank)
    while not job.ranks[0].view:
        pair = next(pair for pair in job.queues if 3 not in pair)
        job.deliver(*pair)
    job.kill(0)
    for rank in (1, 2):
        for pair in [(0, rank)]:
            while rank == 2 and pair in job.queues:
                job.deliver(*pair)
    assert job.ranks[2].view == 1 and job.ranks[1].view == 0
    job.run(random.Random(0), [])
    assert job.ranks[1].decisions[1] == job.ranks[2].decisions[1] == ((0, 1, 2), 7, (), ())
    check_that_survivors_go_on(job)


def deliver_all(job, kinds=None):
    """Deliver what is under way, or only messages of these kinds."""
    while pairs := [
        pair for pair, queue in job.queues.items() if kinds is None or queue[0]["kind"] in kinds
    ]:  # fmt: skip
        job.deliver(*pairs[0])


def test_a_leader_that_is_cut_off_after_it_has_decided_binds_the_others():
    """They have accepted what it decided, and do not know that it did: they decide the same, and then go on without."""
    job = Job(5)
    job.kill(4)
    for rank in range(4):
        job.notice(rank, 4, "dead")
        job.arrive(rank)
    deliver_all(job, ("call", "prepare", "promise", "accept", "accepted"))
    assert job.ranks[0].decisions == {1: ((0, 1, 2, 3), 7, (), ())} and not job.ranks[1].view
    for rank in (1, 2, 3):
        job.cut_off(0, rank)
        job.notice(rank, 0, "silent")
        job.notice(0, rank, "silent")
    job.run(random.Random(0), [])
    assert job.ranks[1].decisions == {1: ((0, 1, 2, 3), 7, (), ()), 2: ((1, 2, 3), 7, (), ())}
    assert job.living == [1, 2, 3]


def test_ranks_that_go_silent_together_are_left_out_together():
    """Though one of them has promised before, and the other has not."""
    job = Job(4)
    for rank in (0, 1, 2):
        job.arrive(rank)
    deliver_all(job)
    job.ranks[0].note_silent(2, 3)
    deliver_all(job)
    assert job.ranks[0].decisions[1] == job.ranks[1].decisions[1] == ((0, 1), 7, (), ())


def test_the_dead_count_where_somebody_is_silent_since_they_may_have_helped_the_other_side():
    """Ranks 2 to 4 go on together, and two of them die then, of which the other side gets proof."""
    job = Job(5)
    for near in (0, 1):
        for far in (2, 3, 4):
            job.cut_off(near, far)
    for rank in (2, 3, 4):
        for near in (0, 1):
            job.notice(rank, near, "silent")
        job.arrive(rank)
    deliver_all(job)
    assert job.ranks[2].members == (2, 3, 4)
    for rank in (3, 4):
        job.kill(rank)
    for near in (0, 1):
        job.notice(near, 2, "silent")
        job.ranks[near].note_dead(3)
        job.ranks[near].note_dead(4)
        job.arrive(near)
    deliver_all(job)
    assert job.ranks[0].has_no_quorum and not job.ranks[1].view
