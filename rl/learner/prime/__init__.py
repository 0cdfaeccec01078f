"""The file contract of prime-rl's trainer: what is written for it and read of it.

Nothing here starts a process, and all but `batches` and `probe` work without torch.
"""
