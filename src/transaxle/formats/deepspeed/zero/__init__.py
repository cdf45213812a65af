"""ZeRO partitions and the files of all ranks, read as whole tensors.

From a file to a tensor: `ranks` describes what each rank's files hold, `flat` says where a parameter lies in the flat
buffers, `trained` reads the parameters of one model rank, `shard` joins what tensor-parallel ranks hold, `stage` puts
one pipeline stage together. `experts` and `numbered` are the other ways in which DeepSpeed stores them.
"""
