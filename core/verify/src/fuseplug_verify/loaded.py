"""When this process began to import this library."""

import time

LOADED = time.time()
"""Of a distribution that was installed later, the process may have imported what was there before."""
