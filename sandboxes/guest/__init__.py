"""What runs inside a local sandbox; bundled into one file and run by the system's Python.

Invariant: these modules import the standard library and each other only, by
`from sandboxes.guest.x import name`, and no two define the same name.
"""
