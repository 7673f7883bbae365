"""A right kernel in a package that imports a private name of Fuseplug."""

from fuseplug.contract import Site

from ..zoo import kernels


class Kernel(kernels.Norm):
    """Works until the next release."""

    def match(self, site: Site):
        return super().match(site)
