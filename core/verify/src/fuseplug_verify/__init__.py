"""Does this kernel compute what this module computes?"""

from . import loaded  # noqa: F401 - first: it notes when this process began to import
