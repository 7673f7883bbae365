"""The commands of Fuseplug beyond ``list`` and ``plan``, and their shared code."""
