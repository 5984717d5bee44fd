"""The bare partition problem: other people's graphs, one cost model, all methods side by side."""

from __future__ import annotations

from partita.partitioner.maxload.methods import METHODS, solve
from partita.partitioner.maxload.problem import DeviceClass, Evaluation, PartitionProblem, evaluate
from partita.partitioner.maxload.result import PartitionResult

__all__ = ["METHODS", "DeviceClass", "Evaluation", "PartitionProblem", "PartitionResult", "evaluate", "solve"]
