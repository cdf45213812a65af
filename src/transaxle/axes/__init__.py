"""The algebra of layouts: the axes of weights in names, in shapes and on a mesh, and the box copies between layouts.

This package uses numpy at most, no torch, no files. One concept per module, from small to large:

    statement    the lines of a table as text
    section      dialects as text, and what they inherit
    written      families as text, and what they inherit or mount
    expression   the right-hand side of a dialect's line: which axes form which dim
    name         the left-hand side: which axes are in the stored name
    computed     the arithmetic between logical values and stored values
    overlap      whether two lines of a dialect match one stored name
    family       families, dialects, number formats, and formulas of sizes and conditions, as values
    tables       parses the text of families and dialects
    geometry     a layout, whole or cut, as boxes with offsets and strides, two of which overlap in a copy; the
                 positions of a dim on each rank of a mesh, and those of a range of axis indices
    divide       how a stored tensor was cut, inferred from the table and the shapes of the shards
    bind         the names of a checkpoint, matched with the lines of a dialect
    model_tensors the tensors of a model, from its config alone
    relayout     target tensors as box copies from stored tensors; sizes that shapes imply
    holdings     where a bound checkpoint stores each logical tensor, and which copies must be equal
    unmatched    tensors and lines without a counterpart: missing, added, unplaced, undecided
    translate    a checkpoint in another dialect, which uses all of the above
    grouped      N tensors under numbered names, or stacked in one
    tile         block scales, which follow the codes wherever every tile stays whole
"""
