"""From a plan to a running model: placement, execution of schedules, state, and the module that the user holds."""
