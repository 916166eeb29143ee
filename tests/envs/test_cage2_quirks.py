"""The rules of CAGE 2 that a clean rewrite would miss, on both implementations."""

from __future__ import annotations

import numpy as np
import pytest

from envfleet.envs.cage2 import B_lineAgent, RedMeanderAgent
from envfleet.envs.cage2.network import options_of
from envfleet.envs.cage2.scenario import ENTERPRISE1, EXPLOIT, EXPLOIT_NAMES, HOSTS, OP_SERVER0, OPERATIONAL, USER1, USER3
from envfleet.envs.cage2.scenario import SCAN as SCANS
from tests.support.cage2 import EXPLOIT as EXPLOITED
from tests.support.cage2 import QUIET, SCAN, VERSIONS, Game

pytestmark = pytest.mark.parametrize("version", VERSIONS)
ETERNAL_BLUE, BLUE_KEEP, HTTPS, SSH = (
    EXPLOIT_NAMES.index(name) for name in ("EternalBlue", "BlueKeep", "HTTPSRFI", "SSHBruteForce")
)


def b_line(version: str, steps: int, victim: int = USER1, rule: str = "strict") -> Game:
    """A game against B_line that has gone on undisturbed for so many steps."""
    game = Game(version, "bline", rule=rule)
    for _ in range(steps):
        game.step(target=victim)
    return game


def test_an_undisturbed_b_line_stops_the_ot_service_in_step_14(version):
    game = b_line(version, 14)
    assert game.true["ot_up"] and game.reward == -3.1
    assert not game.step()["ot_up"] and game.reward == -13.1


def test_q1_a_restored_op_server_cannot_be_impacted_any_more(version):
    game = Game(version, "bline")
    game.step("Restore Op_Server0")
    assert game.reward == -1.0
    for _ in range(20):
        state = game.step(target=USER1)
    assert state["red_kind"] == 4 and state["red_success"] == 1
    assert state["ot_up"] and not state["ot_bound"] and game.reward == -3.1


def test_q2_remove_ends_only_shells_that_were_noticed(version):
    game = b_line(version, 5)
    game.step()  # Enterprise1 through HTTPS, noticed
    assert game.access("Enterprise1") == 1 and game.true["removable"][ENTERPRISE1]
    assert game.step("Remove Enterprise1")["red_success"] == 0  # the escalation finds no session
    assert game.access("Enterprise1") == 0 and game.believed("Enterprise1") == "unknown"
    for exploit, noticed in ((HTTPS, 0), (SSH, -1), (BLUE_KEEP, 1)):
        game = b_line(version, 5)
        game.step(exploit=exploit, noticed=noticed)
        had, believed = game.access("Enterprise1"), game.believed("Enterprise1")
        game.step("Remove Enterprise1")
        assert had and game.access("Enterprise1") == 2  # still there, so that red could escalate
        assert game.believed("Enterprise1") == ("no" if believed == "no" else "unknown")


def test_q3_analyse_sees_the_file_of_a_shell_and_not_a_brute_force(version):
    game = b_line(version, 5)
    game.step()
    assert game.believed("Enterprise1") == "user"
    game.step("Remove Enterprise1")
    game.step("Analyse Enterprise1", exploit=ETERNAL_BLUE)
    assert game.believed("Enterprise1") == "privileged" and game.access("Enterprise1") == 0
    game = b_line(version, 2)
    game.step(exploit=SSH)
    assert game.access("User1") == 1 and game.believed("User1") == "user"
    game.step("Analyse User1")  # red escalates in this step, and leaves its file after blue has looked
    assert game.believed("User1") == "user" and game.access("User1") == 2


def test_q4_a_new_exploit_downgrades_what_blue_believes(version):
    game = b_line(version, 5)
    game.step()
    game.step("Remove Enterprise1")
    game.step("Analyse Enterprise1", exploit=ETERNAL_BLUE)
    assert game.believed("Enterprise1") == "privileged"
    while game.seen("Enterprise1") != EXPLOITED:
        game.step()
    assert game.believed("Enterprise1") == "user"


def test_q4_defender_looks_compromised_and_never_is(version):
    env, found = VERSIONS[version](RedMeanderAgent), 0
    for seed in range(20):
        env.reset(seed=seed)
        for _ in range(100):
            bits, *_ = env.step(0)
            state = env.true_state()
            if state["red_kind"] == EXPLOIT and state["red_target"] == 0:
                found += 1
                assert bits[:4].tolist() == [1, 1, 0, 1] and state["access"][0] == 0 and state["red_success"] == 0
    assert found > 10


def test_q5_vsftpd_opens_80_and_keeps_apache_out(version):
    game = Game(version, "sleep")
    assert game.step("DecoyVsftpd Op_Host0")["decoys"][4] == 0x80
    assert game.step("DecoyApache Op_Host0")["decoys"][4] == 0x80
    game.step("DecoyApache Op_Host1")
    assert game.step("DecoyVsftpd Op_Host1")["decoys"][5] == 0x81
    assert game.step("DecoyVsftpd User1")["decoys"][9] == 0  # Windows
    assert game.step("DecoyFemitter Op_Host0")["decoys"][4] == 0x80  # Linux
    assert game.step("DecoyVsftpd User4")["decoys"][12] == 0x80  # although 80 is taken


def test_q5_eternal_blue_fails_silently_on_enterprise_servers(version):
    game = b_line(version, 5)
    state = game.step(exploit=ETERNAL_BLUE)
    assert state["red_success"] == 0 and state["exploit"] == ETERNAL_BLUE and game.seen("Enterprise1") == QUIET


def test_q5_only_user4_offers_sql_injection(version):
    offering = [host.name for host in HOSTS if EXPLOIT_NAMES.index("SQLInjection") in options_of(frozenset(host.sockets))]
    assert offering == ["User4"]
    game = b_line(version, 2, victim=12)
    state = game.step(exploit=EXPLOIT_NAMES.index("SQLInjection"))
    assert state["access"][12] == 2 and game.seen("User4") == EXPLOITED


def test_q6_an_unreachable_scan_succeeds_with_nothing_and_b_line_begins_again(version):
    game = b_line(version, 10)
    game.step("Restore Enterprise1")
    state = game.step("Restore Enterprise2")
    assert (state["red_kind"], state["red_target"], state["red_success"]) == (SCANS, OP_SERVER0, 1)
    assert state["scanned_ports"][OP_SERVER0] == 0 and game.seen("Op_Server0") == QUIET
    state = game.step()
    assert (state["red_kind"], state["red_target"]) == (SCANS, USER1)


def test_q6_meander_never_exploits_what_it_scanned_in_vain(version):
    env, in_vain, later = VERSIONS[version](RedMeanderAgent), 0, 0
    for seed in range(40):
        env.reset(seed=seed)
        rng, lost = np.random.default_rng(seed), set()
        for _ in range(100):
            env.step(133 + int(rng.integers(3)))  # restores the Enterprise servers
            state = env.true_state()
            kind, target = int(state["red_kind"]), int(state["red_target"])
            assert not (kind == SCANS and target in lost)
            if kind == SCANS and HOSTS[target].subnet == OPERATIONAL and not state["scanned_ports"][target]:
                in_vain += 1
                lost.add(target)
            if kind == EXPLOIT and target in lost:
                later += 1
                assert state["red_success"] == 0 and state["exploit"] == -1
    assert in_vain > 5 and later > 5


def test_q7_a_decoy_hides_a_scan_in_its_step_under_the_strict_rule_only(version):
    for rule, seen in (("strict", QUIET), ("source", SCAN)):
        game = b_line(version, 4, victim=USER3, rule=rule)
        state = game.step("DecoyTomcat Enterprise0")
        assert (state["red_kind"], state["red_target"]) == (SCANS, 1) and game.seen("Enterprise0") == seen
        game.step("DecoyApache Op_Host0")  # nothing but the decoy
        assert game.seen("Op_Host0") == QUIET


def test_q7_an_unnoticed_shell_on_a_host_with_a_new_decoy(version):
    for rule, seen in (("strict", QUIET), ("source", SCAN)):
        game = b_line(version, 5, rule=rule)
        game.step("DecoyFemitter Enterprise1", exploit=HTTPS, noticed=0)
        assert game.seen("Enterprise1") == seen and game.access("Enterprise1") == 1


def test_a_decoy_that_catches_an_exploit_shows_a_scan(version):
    game = Game(version, "bline")
    game.step("DecoyTomcat User1")
    game.step(target=USER1)  # red sees 443 too
    state = game.step(exploit=HTTPS)
    assert state["red_success"] == 0 and state["access"][USER1] == 0 and game.seen("User1") == SCAN


def test_red_remembers_ports_that_are_gone(version):
    game = Game(version, "bline")
    game.step("DecoyTomcat User1")
    game.step(target=USER1)
    state = game.step("Restore User1", exploit=HTTPS)
    assert state["red_success"] == 0 and game.seen("User1") == QUIET and state["decoys"][USER1] == 0


def test_a_green_scan_hides_an_exploit(version):
    game = Game(version, "bline", green=True)
    for _ in range(5):
        game.step(target=USER1)
    game.step(exploit=HTTPS, green=ENTERPRISE1)
    assert game.seen("Enterprise1") == SCAN and game.believed("Enterprise1") == "no" and game.access("Enterprise1") == 1


def test_red_keeps_user0(version):
    game = Game(version, "sleep")
    game.step("Restore User0")
    assert game.access("User0") == 2 and game.reward == -1.0


def test_b_line_is_the_default(version):
    env = VERSIONS[version]()
    same = VERSIONS[version](B_lineAgent)
    env.reset(seed=3)
    same.reset(seed=3)
    assert all(np.array_equal(env.step(0)[0], same.step(0)[0]) for _ in range(30))
    assert env.true_state()["red_kind"] == 4
