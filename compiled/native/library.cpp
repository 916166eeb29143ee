// The library of native environments that is built with envfleet: src/envfleet/native/library.py loads it.
#include "envs.h"

ENVFLEET_ENVS(cartpole_table, mountain_car_table, mountain_car_continuous_table, acrobot_table, pendulum_table, gridnavi_table, gridworld_table,
              connect4_table, mujoco_table, cage2_table)
