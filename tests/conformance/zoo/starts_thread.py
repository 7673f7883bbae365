import threading
import time

threading.Thread(target=time.sleep, args=(3,), daemon=True).start()

from . import kernels


class Kernel(kernels.Norm):
    pass
