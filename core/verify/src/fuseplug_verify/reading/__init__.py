"""Reads from the source of a forward what the forward depends on. Core and kernels use this reader.

>>> from fuseplug_verify.reading.reader import read
>>> reading = read(type(module).forward, module)  # doctest: +SKIP
>>> reading.reads, reading.side_effects, reading.unread  # doctest: +SKIP

The reader runs no code: no function, no property, no ``__getattr__``. It knows the kinds of statements, expressions and
calls of which the forwards of norms, gated MLPs, experts and rotary functions consist. It lists everything else as
unread, and never guesses.
"""
