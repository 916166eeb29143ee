# The packages of environments that have names of their own: read by type checkers, and by envfleet.util.lazy_names at run time.

from envfleet.envs import cage2 as cage2
