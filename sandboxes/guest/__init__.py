"""What becomes and runs a local sandbox: the zygote, and process 1 that is forked from it.

Invariant: these modules import the standard library and each other only, and run on
Python 3.10 and later: the owner's, or the system's where the owner's can't be run.
"""
