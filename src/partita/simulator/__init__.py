"""Discrete-event simulation of schedules and plans: what every pipeline position would do, and when."""

from partita.simulator.engine import simulate_schedule
from partita.simulator.plans import simulate_plan
from partita.simulator.timeline import Event, MemoryCurve, Timeline

__all__ = ["Event", "MemoryCurve", "Timeline", "simulate_plan", "simulate_schedule"]
