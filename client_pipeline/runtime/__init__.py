"""The micro-batch pipeline: schedules, stages, transport and the Ray actors that run them."""
