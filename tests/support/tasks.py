"""Tasks that go wrong, in a module that a process imports quickly."""

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
