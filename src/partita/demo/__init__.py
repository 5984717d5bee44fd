"""The whole way once, on the processes of one machine: capture, plan, look, train, compare with one process.

Read `script` first: it is the training script that a user would write.  `task` says what is trained, `ranks` starts the
processes, `memory` measures them, and `run` tells the story.
"""
