"""Campaigns as a dataset that others can load, and the check of a released one."""
