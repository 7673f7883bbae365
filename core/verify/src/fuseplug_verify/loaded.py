"""When this process began to import this library."""

import time

LOADED = time.time()
"""If a distribution was installed later, the process may have imported the files that were there before."""
