import sys

from tests.hostile.recipes.campaign import main

sys.exit(main())
