"""The algebra of layouts: how the axes of a weight lie in names, in shapes and on a mesh, and how boxes move between.

Numpy at most, no torch, no files. One noun a module, from the small to the large:

    statement    the lines of a table as text
    section      dialects as they are written, and what they take over
    written      families as they are written, and what they take over
    expression   the right-hand side of a dialect's line: which axes lie in which dim
    name         the left-hand side: which axes live in the stored name
    computed     the arithmetic between what a tensor means and what a framework stores
    overlap      whether two lines of a dialect claim one stored name
    family       families, dialects, number formats, and formulas of sizes and conditions, as values
    tables       reads them from text
    solve        sizes that shapes imply, and which axes need one: those that a conversion separates
    geometry     a layout, whole or cut, as boxes with their places, of which two meet in a copy; nested loops; which
                 positions of a dim a rank of a mesh holds, and which belong to some indices of its axes
    divide       how a stored tensor was cut, told by the table and the shards' shapes
    bind         the names of a checkpoint read through a dialect
    model_tensors what a model has, by its config alone
    relayout     target tensors as box copies from stored tensors
    holdings     what a bound checkpoint has of each logical tensor, and which copies in it must prove equal
    unmatched    tensors and lines without a counterpart: missing, added, unplaced, undecided
    translate    a checkpoint in another dialect: all of the above
    grouped      N tensors under numbered names, or stacked in one
    tile         block scales, which follow the codes wherever every tile stays whole
"""
