"""Three of sixteen environments fail, each in its own way; the run goes on and says what happened.

python examples/surviving_faults.py
"""

import envfleet as ef
from envfleet.envs.probe import Counting, Faulty

envs = [Counting] * 16
envs[3] = lambda: Faulty("step", "raise", at=2)
envs[7] = lambda: Faulty("step", "segv", at=3)
envs[11] = lambda: Faulty("step", "hang", at=4)

with ef.make(envs, backend="shm", num_workers=16, on_fault="restart", max_restarts=1, step_timeout_s=1.0) as fleet:
    fleet.reset(seed=0)
    good = 0
    for _ in range(30):
        batch = fleet.step([0] * 16)
        good += int(batch.scored.sum())  # fault rows and quarantined slots are never counted as data
    for fault in fleet.faults:
        print(str(fault).splitlines()[0])
    print(f"{good} transitions; quarantined slots: {fleet.quarantined.tolist()}")
    assert fleet.quarantined.tolist() == [3, 7, 11]
