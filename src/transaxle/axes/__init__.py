"""Computes how tensors are laid out in names, shapes and ranks, and which box copies turn one layout into another.

A *dialect* is one framework's tensor names and layouts for a model family. A dialect is a table of *mapping rules*, one
a line: the left-hand side is a stored name, the right-hand side the axes of the stored tensor. A *logical tensor* is a
weight with named axes, independent of any framework; a *box copy* moves a rectangular region of a logical tensor.

This package needs numpy at most: it imports no torch and reads no files. The package has one concept per module, from
small to large:

    statement: splits the text of a rules file into statements
    section: the text of a dialect, and the mapping rules that it inherits from other dialects
    written: the text of a model family, and the definitions that it inherits or mounts from other families
    expression: the right-hand side of a mapping rule, which names the axes that form each stored dim
    name: the left-hand side of a mapping rule, which names the axes that are numbered in the stored name
    computed: the arithmetic between logical values and stored values
    overlap: checks whether two mapping rules of a dialect match the same stored name
    family: families, dialects, number formats, and formulas for sizes and conditions, as Python objects
    tables: parses the text of families and dialects
    geometry: layouts as boxes with offsets and strides, and the positions of a dim that each rank of a mesh has
    divide: infers how a stored tensor was cut among ranks, from the family's table and the shapes of the shards
    bind: matches the tensor names of a checkpoint with the mapping rules of a dialect
    model_tensors: derives the tensors of a model from its config alone
    relayout: describes target tensors as box copies from stored tensors, and infers sizes from shapes
    holdings: finds where a checkpoint stores each logical tensor, and which duplicates must be equal
    unmatched: handles tensors and mapping rules without a counterpart (missing, added, unplaced, undecided)
    translate: translates a checkpoint into another dialect with all modules above
    grouped: converts between N tensors with numbered names and one stacked tensor
    tile: moves the scales of quantized blocks together with their codes, if no block is split
"""
