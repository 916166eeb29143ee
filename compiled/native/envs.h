// The environments of envfleet's own library, one file each; library.cpp lists them.
#include "envfleet_env.h"

// As numpy.clip: a NaN stays one.
template <typename Real> Real clip(Real value, Real low, Real high) { return value < low ? low : value > high ? high : value; }

const EnvTable *acrobot_table();
const EnvTable *cartpole_table();
const EnvTable *connect4_table();
const EnvTable *gridnavi_table();
const EnvTable *gridworld_table();
const EnvTable *mountain_car_table();
const EnvTable *mountain_car_continuous_table();
const EnvTable *pendulum_table();
const EnvTable *mujoco_table();
const EnvTable *cage2_table();
