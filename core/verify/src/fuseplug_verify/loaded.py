"""When this process began to import this library."""

import time

LOADED = time.time()
"""Of a file that is newer, the process may have imported what was there before."""
