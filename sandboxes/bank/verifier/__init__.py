"""The verifier that packages of tiers 2 and 3 carry in their tests; it runs in a sandbox.

It is the package `verifier` there, so its modules import each other relatively, and it
uses nothing beyond the standard library of Python 3.11.  A change here changes digests.
"""
