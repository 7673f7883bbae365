"""``fuseplug new``: writes a distribution with a kernel that works, to be changed into one's own. Imports no torch."""
