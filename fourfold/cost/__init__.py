"""What a model costs, as pure functions of its config: parameters, floating-point operations, bytes."""
