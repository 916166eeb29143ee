"""Every episode gets the task it was promised, also after an automatic reset, and can be replayed alone.

python examples/tasks_and_seeds.py
"""

import envfleet as ef
from envfleet.envs.probe import Tasked  # observes the task it runs; episodes of 1 to 4 steps

RUN, SLOTS = 7, 4


def seed_of(slot: int, episode: int) -> int:
    return ef.episode_seed(RUN, "train", slot, episode)


def task_of(slot: int, episode: int) -> int:
    return (slot + episode) % 3  # a curriculum would answer here


lengths = {}
with ef.make(Tasked, SLOTS, backend="shm", num_workers=2) as fleet:
    slots = list(range(SLOTS))
    fleet.reset(seed=[seed_of(slot, 0) for slot in slots], tasks=[task_of(slot, 0) for slot in slots])
    fleet.assign(slots, tasks=[task_of(slot, 1) for slot in slots], seeds=[seed_of(slot, 1) for slot in slots])
    while len(lengths) < 40:
        batch = fleet.step([0] * SLOTS)
        for row in batch.ended.nonzero()[0].tolist():
            slot, episode = int(batch.slots[row]), int(batch.episode[row])
            assert batch.final_obs[row, 0] == task_of(slot, episode)
            lengths[slot, episode] = int(batch.length[row])
            # The next episode has begun already: what is assigned now is for the one after it.
            fleet.assign([slot], tasks=[task_of(slot, episode + 2)], seeds=[seed_of(slot, episode + 2)])

slot, episode = max(lengths, key=lambda key: key[1])
with ef.make(Tasked, 1, backend="serial") as alone:
    batch = alone.reset(seed=[seed_of(slot, episode)], tasks=task_of(slot, episode))
    while not batch.ended[0]:
        batch = alone.step([0])
assert batch.length[0] == lengths[slot, episode]
print(f"{len(lengths)} episodes with the right task; episode {episode} of slot {slot} replayed alone, {batch.length[0]} steps")
