"""Reads from the source of a forward what it depends on. Core and kernels use this reader.

>>> from fuseplug_verify.reading.reader import read
>>> reading = read(type(module).forward, module)  # doctest: +SKIP
>>> reading.reads, reading.side_effects, reading.unread  # doctest: +SKIP

No code is run: no function, no property, no ``__getattr__``. What the reader does not know it lists as unread, and it
never guesses: it knows the kinds of statements, expressions and calls of which the forwards of norms, gated MLPs,
experts and rotary functions consist.
"""
