"""Nobody but a Python of its own imports this."""

import signal

signal.signal(signal.SIGTERM, signal.SIG_IGN)
