"""The algebra of layouts: where names, shapes and meshes have the axes of weights, and box copies between layouts.

This package needs numpy at most: no torch, and no files. It has one concept per module, from small to large:

    statement: the lines of a table as text
    section: dialects (one framework's tensor names) as text, and the lines that they inherit
    written: model families as text, and what they inherit or mount
    expression: the right-hand side of a dialect's line, which says which axes form each stored dim
    name: the left-hand side of a dialect's line, which says which axes are numbered in the stored name
    computed: the arithmetic between logical values and stored values
    overlap: checks whether two lines of a dialect match the same stored name
    family: families, dialects, number formats, and formulas for sizes and conditions, as Python objects
    tables: parses the text of families and dialects
    geometry: layouts as boxes with offsets and strides, and the positions of a dim that each rank of a mesh has
    divide: infers how a stored tensor was cut, from the table and the shapes of its shards
    bind: matches the tensor names of a checkpoint with the lines of a dialect
    model_tensors: derives the tensors of a model from its config alone
    relayout: describes target tensors as box copies from stored tensors, and infers sizes from shapes
    holdings: finds where a checkpoint stores each logical tensor, and which copies must be equal
    unmatched: handles tensors and lines without a counterpart (missing, added, unplaced, undecided)
    translate: translates a checkpoint into another dialect with all modules above
    grouped: N tensors under numbered names, or stacked in one tensor
    tile: moves the scales of blocks with their codes, where no tile is split
"""
