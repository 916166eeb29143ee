from hypothesis import given, settings
from hypothesis import strategies as st

from envfleet.rollout import Ledger
from envfleet.rollout.tickets import TicketOffice, numbers_for

MOVES = st.lists(st.tuples(st.sampled_from(["take", "lose", "return"]), st.integers(0, 5)), max_size=80)


@settings(max_examples=200, deadline=None)
@given(total=st.integers(0, 40), num_slots=st.integers(1, 6), moves=MOVES)
def test_every_ticket_is_handed_out_exactly_once_whatever_slots_are_lost(total, num_slots, moves):
    office = TicketOffice(range(total), num_slots, seed=0)
    alive, holding, handed = set(range(num_slots)), {}, []
    for move, slot in [*moves, *(("take", s) for _ in range(50) for s in range(num_slots))]:
        slot %= num_slots
        if move == "take" and slot in alive:
            if slot in holding:
                handed.append(holding.pop(slot).number)
            ticket = office.take(slot)
            if ticket is not None:
                holding[slot] = ticket
        elif move == "lose" and slot in alive and len(alive) > 1:
            alive.discard(slot)
            office.close_slot(slot)
            if slot in holding:
                office.give_back(holding.pop(slot))
        elif move == "return" and slot in holding:
            office.give_back(holding.pop(slot))
    handed += [ticket.number for ticket in holding.values()]
    assert sorted(handed) == list(range(total))


def test_without_losses_the_slot_follows_from_the_position():
    office = TicketOffice(numbers_for(10, 9, skip={11, 14}), 3, seed=4)
    found = {slot: [office.take(slot).number for _ in range(2)] for slot in range(3)}
    assert found == {0: [10, 15], 1: [12, 16], 2: [13, 17]}


def test_seeds_do_not_repeat_and_depend_on_run_and_ticket_alone():
    seeds = {TicketOffice(range(50), 4, seed=run).take(slot).seed for run in range(20) for slot in range(4)}
    assert len(seeds) == 80
    one, many = TicketOffice(range(9), 1, seed=3), TicketOffice(range(9), 9, seed=3)
    assert [one.take(0).seed for _ in range(9)] == [many.take(slot).seed for slot in range(9)]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(["start", "use", "drop", "fail"]), max_size=60))
def test_the_ledger_balances_after_every_entry(entries):
    ledger = Ledger()
    for entry in entries:
        if entry == "start":
            ledger.start()
        elif ledger.in_flight > 0:
            {"use": ledger.use, "drop": lambda: ledger.drop("why"), "fail": lambda: ledger.fail("why")}[entry]()
        assert ledger.started == ledger.used + ledger.dropped.total() + ledger.failed.total() + ledger.in_flight
        assert ledger.in_flight >= 0
