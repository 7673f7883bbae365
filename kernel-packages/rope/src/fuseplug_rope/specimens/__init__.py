"""Small modules as models write them, which the kernels here fuse: one for each form, to test kernels on."""

from __future__ import annotations

from torch import nn

from . import halves, pairs, signatures, tables_of_planes, without_functions

__all__ = ["specimens"]


def specimens() -> list[nn.Module]:
    """One module for each way of calling and each variant."""
    return [
        halves.Half(),
        halves.Half(head_dim=6),
        halves.Partial(),
        halves.Vision(),
        halves.Promoting(),
        halves.WideTwice(),
        halves.WideTables(),
        halves.HalfSize(),
        halves.Negated(),
        pairs.Interleaved(),
        pairs.InterleavedPartial(),
        pairs.InterleavedWide(),
        pairs.InterleavedWideOwn(),
        pairs.InterleavedVision(),
        pairs.InterleavedWideTwice(),
        tables_of_planes.FirstHalf(),
        tables_of_planes.FirstHalfPartial(),
        tables_of_planes.FirstHalfWide(),
        tables_of_planes.SinFirst(),
        tables_of_planes.Trailing(),
        tables_of_planes.HalfSizePairs(),
        tables_of_planes.Matrix(),
        tables_of_planes.Complex(),
        tables_of_planes.Latent(),
        pairs.LatentFullTable(),
        signatures.Single(),
        signatures.Gathering(),
        signatures.Sections(),
        signatures.Patches(),
        signatures.Unpaired(),
        without_functions.OwnMethod(),
        without_functions.PartialMethod(),
        halves.HalfSizeNegated(),
        tables_of_planes.HalfSizePairsWide(),
        tables_of_planes.PairsInOneTable(),
        without_functions.ModuleOfHalves(),
        without_functions.ModuleOfPairs(),
        without_functions.ModuleOfComplexNumbers(),
        without_functions.ModuleOfHeadsFirst(),
    ]
