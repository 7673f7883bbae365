"""A kernel is asked once about all modules that are alike, and told where they are."""

import pytest
from support.kernels import NormKernel, variant_of
from support.models import Toy


@pytest.fixture
def norms(model):
    """The paths of the model's norms, which are all alike."""
    return [path for path, module in model.named_modules() if type(module).__name__ == "Norm"]


def test_a_kernel_is_asked_once_and_told_all_paths(manager, model, norms):
    kernel = variant_of(NormKernel, "all", match=lambda self, site: self.asked.append(site), asked=[])
    manager.register(kernel)
    manager.apply_all(model)
    (site,) = [site for site in kernel.asked if type(site.module).__name__ == "Norm"]
    assert site.paths == tuple(norms)
    assert site.path == norms[0]


def test_a_module_that_is_in_the_model_twice_has_two_paths(manager):
    model = Toy().eval()
    model.again = model.norm
    kernel = variant_of(NormKernel, "all", match=lambda self, site: self.asked.append(site.paths), asked=[])
    manager.register(kernel)
    manager.apply_all(model)
    assert any({"norm", "again"} <= set(paths) for paths in kernel.asked)
