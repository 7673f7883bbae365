"""Settings for all tests."""

import os

os.environ["FUSEPLUG_CACHE"] = "off"  # every run repeats all checks
