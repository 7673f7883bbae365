"""Does this kernel compute what this module computes?"""
