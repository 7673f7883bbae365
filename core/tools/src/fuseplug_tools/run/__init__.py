"""``fuseplug run``: fuses the models that a command trains or serves, without a change to its code."""
