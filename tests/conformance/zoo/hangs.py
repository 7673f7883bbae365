"""Nobody but a Python of its own imports this."""

import time

time.sleep(60)
