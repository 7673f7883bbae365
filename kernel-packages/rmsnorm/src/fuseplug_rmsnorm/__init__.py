"""Fused RMSNorm."""
