"""How any worker runs: ports, health, lifecycle and one request's life, whatever the engine."""
