"""Who trains in an elastic job: the decisions, without sockets and processes."""

import json

from hvdtrain.fault_tolerance.elastic.generation import Generation, Place
from hvdtrain.fault_tolerance.elastic.membership import Membership


def formed(minimum: int, maximum: int, size: int) -> Membership:
    membership = Membership(minimum, maximum)
    for _ in range(size):
        membership.join("a")
    membership.form()
    return membership


def hold_all(membership: Membership) -> None:
    for member in membership.training:
        member.holds = True


def ranks(membership: Membership) -> dict[int, int | None]:
    return {number: member.rank for number, member in membership.members.items()}


def test_the_first_members_train_at_once_and_newcomers_when_they_are_ready():
    membership = formed(1, 3, 2)
    newcomer = membership.join("b")
    assert not membership.must_pause
    newcomer.is_ready = True
    assert membership.must_pause
    assert not membership.can_form
    hold_all(membership)
    assert membership.can_form
    membership.form()
    assert ranks(membership) == {0: 0, 1: 1, 2: 2}
    assert (membership.generation, membership.must_pause) == (2, False)


def test_the_oldest_living_member_is_rank_0():
    membership = formed(1, 3, 3)
    assert membership.remove(0)
    assert membership.is_interrupted
    hold_all(membership)
    membership.form()
    assert ranks(membership) == {1: 0, 2: 1}
    assert not membership.is_interrupted


def test_ranks_are_in_the_order_of_hosts_whoever_connects_first():
    membership = Membership(1, 4)
    for host, worker in (("elsewhere", None), ("b", 1), ("a", 0)):
        membership.join(host, worker)
    chosen, _ = membership.form()
    assert [member.host for member in chosen] == ["a", "b", "elsewhere"]
    assert membership.training == chosen
    # They keep their order; a newcomer comes last.
    membership.join("c", 2).is_ready = True
    hold_all(membership)
    chosen, _ = membership.form()
    assert [member.host for member in chosen] == ["a", "b", "elsewhere", "c"]


def test_a_lost_newcomer_interrupts_nobody():
    membership = formed(1, 3, 2)
    membership.join("a").is_ready = True
    assert not membership.remove(2)
    assert not membership.is_interrupted
    assert not membership.must_pause


def test_members_beyond_the_maximum_wait_for_a_place():
    membership = formed(1, 2, 2)
    membership.join("a").is_ready = True
    assert not membership.must_pause
    membership.remove(1)
    hold_all(membership)
    membership.form()
    assert ranks(membership) == {0: 0, 2: 1}


def test_who_leaves_is_not_part_of_the_next_generation():
    membership = formed(1, 3, 2)
    membership.members[0].is_leaving = True
    assert membership.must_pause
    hold_all(membership)
    chosen, leaving = membership.form()
    assert ([each.number for each in chosen], [each.number for each in leaving]) == ([1], [0])
    assert ranks(membership) == {1: 0}


def test_fewer_than_the_minimum_do_not_train():
    membership = formed(2, 3, 2)
    membership.remove(1)
    hold_all(membership)
    assert not membership.can_form
    membership.join("a").is_ready = True
    assert membership.can_form


def test_places_are_those_that_horovod_counts():
    generation = Generation(3, (4, 5, 7, 8, 9), ("a", "b", "a", "b", "a"), "127.0.0.1", 1)
    assert [generation.place(member) for member in generation.members] == [
        Place(0, 5, 0, 3, 0, 2),
        Place(1, 5, 0, 2, 1, 2),
        Place(2, 5, 1, 3, 0, 2),
        Place(3, 5, 1, 2, 1, 2),
        Place(4, 5, 2, 3, 0, 1),
    ]
    assert Generation.from_message(json.loads(json.dumps(generation.message()))) == generation
