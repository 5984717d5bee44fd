"""When each stage does what.

Makers order the compute, passes add messages and reductions, `validate` checks the rules, and `RankMachine` executes.
"""
