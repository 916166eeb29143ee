"""`python -m envfleet` is the command `envfleet`."""

import sys

from envfleet.cli.main import main

sys.exit(main())
