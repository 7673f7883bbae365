"""Work that goes wrong, for processes that start quickly."""

import os
import time


def works():
    def work(task):
        if task == "dies":
            os._exit(3)
        if task == "hangs":
            time.sleep(60)
        return {"status": "done", "task": task}

    return work
