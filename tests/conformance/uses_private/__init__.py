"""A right kernel in a package that takes from Fuseplug what is private."""

from fuseplug.contract import Site

from ..zoo import kernels


class Kernel(kernels.Norm):
    """It works until the next release."""

    def match(self, site: Site):
        return super().match(site)
