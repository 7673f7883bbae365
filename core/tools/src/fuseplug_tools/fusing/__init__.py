"""The part of ``fuseplug run`` inside the processes that it starts: when models are fused, and how."""
