"""The classes of the kernels. Nothing here imports torch."""

from fuseplug import BaseKernel


class Norm(BaseKernel):
    """A norm with two variants."""

    kernel_id = "zoo_norm"
    op = "zoonorm"
    function = "conformance.zoo.right:norm"
    reference = "conformance.zoo.reference:norm"
    specimens = "conformance.zoo.specimens:norms"
    check_sizes = (128, 4096)

    def match(self, site):
        from .sites import match_norm

        return match_norm(site)


class NamedNorm(Norm):
    """A norm whose weight and options are passed by keyword."""

    kernel_id = "zoo_named_norm"
    specimens = "conformance.zoo.specimens:named_norms"

    def match(self, site):
        from .sites import match_named_norm

        return match_named_norm(site)


class Gated(BaseKernel):
    """silu(gate) * up of the halves of a tensor, without parameters."""

    kernel_id = "zoo_gated"
    op = "zoogated"
    function = "conformance.zoo.right:gated"
    reference = "conformance.zoo.reference:gated"
    specimens = "conformance.zoo.specimens:gates"
    check_sizes = (128, 4096)

    def match(self, site):
        from .sites import match_gated

        return match_gated(site)


class Centred(Gated):
    """A layer norm without a weight. Its gradient cancels completely under a constant gradient from above."""

    kernel_id = "zoo_centred"
    op = "zoocentred"
    function = "conformance.zoo.right:centred"
    reference = "conformance.zoo.reference:centred"
    specimens = "conformance.zoo.specimens:centring"


class Rotary(BaseKernel):
    """A rotation by halves: a function that a method looks up."""

    kernel_id = "zoo_rotary"
    op = "zoorotary"
    function = "conformance.zoo.right:rotary"
    reference = "conformance.zoo.reference:rotary"
    specimens = "conformance.zoo.specimens:rotaries"
    check_sizes = (128, 4096)

    def match(self, site):
        from .sites import match_rotary

        return match_rotary(site)


class FirstHalf(Gated):
    """The first half of a tensor, as a tensor of its own."""

    kernel_id = "zoo_first_half"
    op = "zoofirsthalf"
    function = "conformance.zoo.right:first_half"
    reference = "conformance.zoo.reference:first_half"
    specimens = "conformance.zoo.specimens:halves"


class Product(BaseKernel):
    """A product of halves. The first half goes through a child before."""

    kernel_id = "zoo_product"
    op = "zooproduct"
    function = "conformance.zoo.right:product"
    reference = "conformance.zoo.reference:product"
    specimens = "conformance.zoo.specimens:activated"
    check_sizes = (128, 4096)

    def match(self, site):
        from .sites import match_product

        return match_product(site)


class Head(BaseKernel):
    """The loss of a head whose scores are lazy during calls with labels."""

    kernel_id = "zoo_head"
    op = "zoohead"
    function = "conformance.zoo.right:label_loss"
    reference = "conformance.zoo.reference:label_loss"
    specimens = "conformance.zoo.specimens:headed"
    check_sizes = (128, 4096)

    def match(self, site):
        from .heads import match_head

        return match_head(site)


class Pair(Norm):
    """Two norms of a module, which are replaced together."""

    kernel_id = "zoo_pair"
    specimens = "conformance.zoo.specimens:pairs"

    def match(self, site):
        from .heads import match_pair

        return match_pair(site)


class PatchesOnImport(Norm):
    """Right, but loading its function patches torch."""

    function = "conformance.zoo.patches_on_import:norm"


class HasNoGradient(Norm):
    """Right, because it declares that it has no gradient."""

    differentiable = False
    function = "conformance.zoo.wrong:without_gradient"


class CannotBeTraced(Norm):
    """Right, because it declares that it cannot be traced."""

    when_traced = "original"
    function = "conformance.zoo.wrong:breaks_the_graph"


class OnAnotherChip(Norm):
    device_types = ("npu",)
    function = "conformance.zoo.chip:norm"
