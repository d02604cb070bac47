import sys

from tests.hostile.campaign import main

sys.exit(main())
