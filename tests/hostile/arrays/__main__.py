import sys

from tests.hostile.arrays.campaign import main

sys.exit(main())
