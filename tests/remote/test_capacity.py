import random

from envfleet.remote.session_queue import CapacityTable


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def table_and_clock():
    clock = Clock()
    return CapacityTable(clock), clock


def enter(table, *urls):
    return table.enter(urls, lambda: None)


def test_a_refusal_teaches_the_limit_and_time_reopens_it():
    table, clock = table_and_clock()
    held = [enter(table, "a") for _ in range(2)]
    for ticket in held:
        assert table.choose(ticket) == "a"
        table.opened(ticket)
    late = enter(table, "a")
    assert table.choose(late) == "a"
    table.refused(late)
    view = table.view()["a"]
    assert (view.active, view.limit, view.retries) == (2, 2, 1)
    wait = table.choose(late)
    assert 0 < wait <= 0.05
    clock.now += wait
    assert table.choose(late) == "a", "one try past the limit, after a while"


def test_a_release_serves_the_first_in_line():
    table, _ = table_and_clock()
    first = enter(table, "a")
    table.choose(first)
    table.opened(first)
    woken = []
    waiting = [table.enter(("a",), lambda i=i: woken.append(i)) for i in range(3)]
    table.choose(waiting[0])
    table.refused(waiting[0])
    assert [isinstance(table.choose(t), float) for t in waiting] == [True] * 3
    table.released("a")
    assert woken[-1] == 0
    assert isinstance(table.choose(waiting[1]), float), "no overtaking"
    assert table.choose(waiting[0]) == "a"


def test_work_spills_over_to_where_there_is_room():
    table, _ = table_and_clock()
    used = []
    for _ in range(6):
        ticket = enter(table, "a", "b")
        while True:
            url = table.choose(ticket)
            if url == "a" and table.view()["a"].active >= 1:
                table.refused(ticket)
                continue
            table.opened(ticket)
            used.append(url)
            break
    assert used.count("a") == 1 and used.count("b") == 5


def test_a_server_that_is_down_is_left_alone_for_longer_and_longer():
    table, clock = table_and_clock()
    ticket = enter(table, "a")
    waits = []
    for _ in range(8):
        assert table.choose(ticket) == "a"
        table.failed(ticket, "no answer")
        assert table.all_down(["a"])
        wait = 0.0
        while isinstance(again := table.choose(ticket), float):
            clock.now += again
            wait += again
        table.leave(ticket)
        ticket = enter(table, "a")
        waits.append(wait)
    assert waits == sorted(waits) and 4.9 < waits[-1] < 6.1


def test_nobody_starves_in_a_long_random_run():
    """Limits 1, 4 and 16 and 64 who want in: in every order all are served, and no count leaks."""
    table, clock = table_and_clock()
    rng = random.Random(0)
    limits, open_now = {"a": 1, "b": 4, "c": 16}, {"a": 0, "b": 0, "c": 0}
    urls = tuple(limits)
    served = [0] * 64
    tickets = {i: enter(table, *urls) for i in range(64)}
    holding = {}
    for _ in range(20_000):
        clock.now += 0.01
        i = rng.randrange(64)
        if i in holding:
            if rng.random() < 0.3:
                url = holding.pop(i)
                open_now[url] -= 1
                table.released(url)
                tickets[i] = enter(table, *urls)
            continue
        url = table.choose(tickets[i])
        if isinstance(url, float):
            continue
        if open_now[url] < limits[url]:
            open_now[url] += 1
            table.opened(tickets.pop(i))
            holding[i] = url
            served[i] += 1
        else:
            table.refused(tickets[i])
    assert min(served) > 0.5 * max(served), served
    assert all(table.view()[url].active == open_now[url] for url in urls)
    assert table.waiting == len(tickets)


def test_an_outage_is_told_once():
    table = CapacityTable(clock=lambda: 0.0)
    urls = ("http://a:1", "http://b:1")
    tickets = [table.enter(urls, lambda: None) for _ in range(2)]
    assert table.is_new_outage(urls) and not table.is_new_outage(urls)
    assert not table.is_new_outage(urls[:1])
    table.choose(tickets[0])
    table.opened(tickets[0])
    assert table.is_new_outage(urls), "one came back in between"
