"""The planner DSSDA: a library that knows neither Flower nor torch.

Modules: ``instance`` and ``answer`` (the problem of one round and its solution, as plain data; ``instance_file`` reads
the former), ``segments``, ``matching``, ``power`` (the parts of the problem, each solved exactly), ``planner`` (a
certified optimum of the whole), ``paper`` (Algorithms 2 to 4), ``convergence`` and ``queues`` (what ties the rounds
together).
"""
