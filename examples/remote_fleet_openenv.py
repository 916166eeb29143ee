"""A fleet over two servers, one of which is stopped in the middle: its slots move, the run goes on.

python examples/remote_fleet_openenv.py
"""

import envfleet as ef
from envfleet.remote import Server


def main() -> None:
    first = Server("CartPole-v1", port=0, max_sessions=8, num_workers=1).start()
    second = Server("CartPole-v1", port=0, max_sessions=8, num_workers=1).start()
    with ef.make([first.url, second.url], num_envs=6, env_kwargs={"max_steps": 200}) as fleet:
        fleet.reset(seed=0)
        faults = episodes = 0
        for step in range(120):
            if step == 60:
                first.close()
            batch = fleet.step(fleet.action_space.sample())
            faults += int((~batch.scored).sum())
            episodes += int((batch.ended & batch.scored).sum())
        print(f"{episodes} episodes, {faults} interrupted when a server went away, all slots on {second.url}")
    second.close()


if __name__ == "__main__":
    main()
