"""``python -m romancy``"""

import sys

from .cli import main

sys.exit(main())
