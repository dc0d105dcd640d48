"""`python -m piecework` is the `piecework` command."""

import sys

from piecework.cli.main import main

sys.exit(main())
