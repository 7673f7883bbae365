import threading
import time

from . import kernels

threading.Thread(target=time.sleep, args=(3,), daemon=True).start()


class Kernel(kernels.Norm):
    pass
