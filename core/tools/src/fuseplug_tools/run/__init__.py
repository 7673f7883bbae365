"""``fuseplug run``: fuses the models that a command trains, without a change to its code."""
