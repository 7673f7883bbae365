"""A right kernel in a package that takes from Fuseplug what is private."""

import fuseplug.inductor
from fuseplug import triton
from fuseplug.contract import Site

from ..zoo import kernels


class Kernel(kernels.Norm):
    """It is found, and right, until the next release."""

    def match(self, site: Site):
        return super().match(site)


LOOKED_AT = (triton.kernel.interpreted, triton.vjp, fuseplug.inductor.compiled.SMALL, fuseplug.manager)
