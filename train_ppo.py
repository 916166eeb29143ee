"""Train a PPO agent on parallel environments: the same program as `envfleet train`.

    python train_ppo.py --n-envs 8 --parallel-start-method spawn --num-episodes 1000 --device cpu \
        --learning-rate 3e-4 --checkpoint-dir checkpoints/parallel_v1
"""

import sys

from envfleet.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
