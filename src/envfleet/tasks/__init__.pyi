# The public names: read by type checkers, and by envfleet.util.lazy_names at run time.

from envfleet.tasks.alp_gmm import ALPGMM as ALPGMM
from envfleet.tasks.curriculum import Curriculum as Curriculum
from envfleet.tasks.curriculum import TaskResult as TaskResult
from envfleet.tasks.level_replay import PLR as PLR
from envfleet.tasks.list_curricula import SFL as SFL
from envfleet.tasks.list_curricula import DomainRandomisation as DomainRandomisation
from envfleet.tasks.list_curricula import LearningProgress as LearningProgress
from envfleet.tasks.list_curricula import Levels as Levels
from envfleet.tasks.syllabus_curriculum import SyllabusCurriculum as SyllabusCurriculum
from envfleet.tasks.task_source import TaskSource as TaskSource
from envfleet.tasks.task_space import TaskBox as TaskBox
from envfleet.tasks.task_space import TaskList as TaskList
from envfleet.tasks.task_space import TaskSampler as TaskSampler
from envfleet.tasks.task_space import TaskSpace as TaskSpace
