"""python -m capsnet.cli"""

import sys

from capsnet.cli import main

sys.exit(main())
