"""The commands of Fuseplug beyond ``list`` and ``plan``, and what they share."""
