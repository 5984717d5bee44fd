"""From a torch model to a `Program` that a runtime executes and a `ModelGraph` that everything offline reads.

The engine is *recorded export*: while ``torch.export``'s non-strict trace runs on a weightless copy of the model,
hooks record the real call of every submodule; afterwards the calls whose bodies touch nothing but their own arguments
and parameters are folded back to calls of the user's own modules, and only the containers' own code (the glue) stays
as ATen operators.
"""
