"""Inside a process that ``fuseplug run`` started: when its models are fused, and how."""
